"""Host names in the form in which SLURM writes many of them: ``n[1-3,07],gpu01``. Pure.

A job's names, one after the other, outgrow what the kernel takes as one word of a command or of
the environment (128 KiB) at some thousand nodes. So lists are handed on as SLURM wrote them, and
expanded where they are read. `base.text.fold_nodes` writes that form, in an order of its own.
tests/unit/base/test_host_list.py holds the promises.
"""

from __future__ import annotations

import re

MOST_NAMES = 100_000
"""Hosts of one node list: a few damaged digits would ask for all memory."""
_NUMBER = re.compile(r"[0-9]{1,11}")


def expand_nodes(nodelist: str) -> list[str]:
    """Host names of a node list such as ``n[1-3,07],gpu01``, in SLURM's order.

    Raises:
        ValueError: brackets that do not match, ranges that are none, or too many names.
    """
    names: list[str] = []
    for group in _split_groups(nodelist):
        expanded = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", group):
            parts = _expand_ranges(ranges) if ranges else [literal]
            _refuse_many(len(expanded) * len(parts))
            expanded = [head + part for head in expanded for part in parts]
        names += expanded
        _refuse_many(len(names))
    return names


def _refuse_many(count: int) -> None:
    if count > MOST_NAMES:
        raise ValueError(f"a node list of {count} names; there are {MOST_NAMES} at most")


def _split_groups(nodelist: str) -> list[str]:
    """The parts between commas that stand outside of brackets."""
    groups, depth, start = [], 0, 0
    for position, char in enumerate(nodelist):
        depth += (char == "[") - (char == "]")
        if depth not in {0, 1}:
            break
        if char == "," and depth == 0:
            groups.append(nodelist[start:position])
            start = position + 1
    if depth != 0:
        raise ValueError(f"node list {nodelist!r} has brackets that do not match")
    groups.append(nodelist[start:])
    return [group for group in groups if group]


def _expand_ranges(ranges: str) -> list[str]:
    """``1-3,07`` as ``1 2 3 07``; leading zeros are kept."""
    numbers = []
    for part in ranges.split(","):
        low, dash, high = part.partition("-")
        if dash:
            if not (_NUMBER.fullmatch(low) and _NUMBER.fullmatch(high)):
                raise ValueError(f"a node list with the range {part!r}")
            first, last = int(low), int(high)
            _refuse_many(last - first)
            numbers += [f"{n:0{len(low)}d}" for n in range(first, last + 1)]
        else:
            numbers.append(low)
    return numbers

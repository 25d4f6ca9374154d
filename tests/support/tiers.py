"""Which tests each of the three tiers runs, and the line that says what was left out.

- `make test`: needs no root, SLURM, browser, FUSE or container; ten minutes on two cores.
- `make check`: what continuous integration runs.
- `make soak`: all.

A test's tier follows from its folder and its marks. Tests of tests/unit and tests/docs are in
`make test`, the others in `make check`. The marks `quick`, `check`, `soak` and `story` move a test,
and what keeps a real clock (`realtime`) or needs something special (`SPECIAL`) is never in
`make test`. A `story` is a whole run that
`make soak` alone plays; `proved_by` names the tests that prove its promise in `make check`.
tests/unit/test_tiers.py holds the promises.
"""

from __future__ import annotations

from collections import Counter
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import pytest


class Tier(IntEnum):
    """A tier runs its own tests and those of the tiers below it."""

    TEST = 0
    CHECK = 1
    SOAK = 2


TEST_FOLDERS = ("tests/unit/", "tests/docs/")
SPECIAL = {
    "slurm": "SLURM",
    "browser": "a browser",
    "fuse": "FUSE",
    "container": "containers",
    "strace": "strace",
    "two_users": "root",
}
"""Marker of what a test needs to its name in the closing line."""
OTHERS = "long runs"
PROVED_BY = ("realtime", "story")
"""Marks that must name the test that proves the same promise in `make check`, without a clock."""


def tier_of(nodeid: str, marks: Iterable[str]) -> Tier:
    """Return the lowest tier that runs a test with these marks."""
    names = set(marks)
    if names & {"soak", "story"}:
        return Tier.SOAK
    if names & {"check", "realtime", *SPECIAL}:
        return Tier.CHECK
    if "quick" in names or nodeid.startswith(TEST_FOLDERS):
        return Tier.TEST
    return Tier.CHECK


def divide(
    items: Sequence[pytest.Item], tier: Tier
) -> tuple[list[pytest.Item], list[pytest.Item], Counter[str]]:
    """Divide tests into those that a tier runs and those that it leaves out.

    Returns:
        Both, in their order, and how many were left out for `make check` by what they need. Tests
        of `make soak` are counted under "soak".
    """
    chosen: list[pytest.Item] = []
    left: list[pytest.Item] = []
    counts: Counter[str] = Counter()
    for item in items:
        marks = [mark.name for mark in item.iter_markers()]
        its_tier = tier_of(item.nodeid, marks)
        if its_tier <= tier:
            chosen.append(item)
            continue
        left.append(item)
        needs = [SPECIAL[name] for name in SPECIAL if name in marks]
        counts["soak" if its_tier is Tier.SOAK else (needs or [OTHERS])[0]] += 1
    return chosen, left, counts


def closing_line(counts: Counter[str]) -> str:
    """Return the line that says what was not run, and which command runs it; "" where all ran."""
    check = {name: count for name, count in counts.items() if name != "soak" and count}
    parts = []
    if check:
        by_need = ", ".join(f"{count} {name}" for name, count in sorted(check.items()))
        parts.append(f"{sum(check.values())} tests of `make check` ({by_need})")
    if counts["soak"]:
        parts.append(f"{counts['soak']} of `make soak`")
    return f"not run here: {', '.join(parts)}" if parts else ""


def unproved(items: Sequence[pytest.Item]) -> Iterator[str]:
    """Yield a line for each mark whose `proved_by` names no test that is there.

    It takes one name or a tuple of names: files, or node ids of functions.
    """
    for item in items:
        for mark in (mark for name in PROVED_BY for mark in item.iter_markers(name)):
            names = mark.kwargs.get("proved_by", "")
            for name in [names] if isinstance(names, str) else names:
                if not _is_there(item.config.rootpath, name):
                    yield f"{item.nodeid}: {mark.name}(proved_by={name!r}) names no test"


def _is_there(root: Path, name: str) -> bool:
    path, _, function = name.partition("::")
    file = root / path
    return bool(path) and file.is_file() and f"def {function}" in file.read_text()

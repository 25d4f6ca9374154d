"""Files and tensors of a manifest in few bytes, where ranks are many: by rules instead of lists.

A list with an entry for each rank's shard and for each rank's random generators is 5 MB at 16,384
ranks, and every rank takes it. docs/development/checkpoint-format.md describes both forms.

Pure, and of plain values alone.
"""

from __future__ import annotations

import re
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    File = tuple[str, int, str]
    """Name, bytes and digest."""

PACKED_FROM = 65
"""Shards, or ranks with tensors of their own, from which on there are rules instead of lists."""
MOST_RANK = 10**7 - 1
MOST_OWN = 1 << 20
"""Tensors that ranks have for themselves; a foreign rule could stand for any number."""
DIGEST_DIGITS = 16
_SHARD = re.compile(r"shard-([0-9]{5,7})\.safetensors")
_OWN = re.compile(r"rng\.rank-([0-9]{5,7})(\..+)", re.DOTALL)
_STAR = re.compile(r"rng\.rank-\*\..+", re.DOTALL)
_DIGITS = re.compile(r"[0-9a-f]*")


def pack_files(files: Sequence[File], blocks_prefix: str) -> dict[str, Any] | None:
    """Return the files of a checkpoint as an object; None if their list stays as it is.

    `files` are name, bytes and digest, shards first. A shard's digest begins with `blocks_prefix`.
    """
    ranks = []
    for name, _, digest in files:
        rank = _rank(name)
        proved = digest.removeprefix(blocks_prefix)
        if rank is None or len(proved) != DIGEST_DIGITS or len(proved) == len(digest):
            break
        ranks.append(rank)
    shards, others = files[: len(ranks)], files[len(ranks) :]
    if len(ranks) < PACKED_FROM or ranks != sorted(set(ranks)):
        return None
    return {
        "ranks": _progressions(ranks),
        "sizes": [n for size, run in groupby(s[1] for s in shards) for n in (size, len([*run]))],
        "digests": "".join(digest[-DIGEST_DIGITS:] for _, _, digest in shards),
        "others": [{"name": name, "size": size, "digest": digest} for name, size, digest in others],
    }


def unpack_files(packed: Mapping[str, Any], blocks_prefix: str) -> tuple[list[File], list[Any]]:
    """The shards that an object stands for, and its other files as they are written.

    Raises:
        ValueError: it does not hold what it must.
    """
    digests, sizes, others = (packed.get(key) for key in ("digests", "sizes", "others"))
    if type(digests) is not str or len(digests) % DIGEST_DIGITS or not _DIGITS.fullmatch(digests):
        raise ValueError("files have digests that are none")
    count = len(digests) // DIGEST_DIGITS
    ranks = list(_ranks(packed.get("ranks"), count))
    if len(ranks) != count:
        raise ValueError(f"files are of {len(ranks)} ranks, {count} digests are there")
    if type(sizes) is not list or type(others) is not list:
        raise ValueError("files lack sizes or others")
    lengths = sizes[1::2]
    if len(sizes) % 2 or any(type(n) is not int for n in sizes) or min(lengths, default=1) < 1:
        raise ValueError("files have sizes that are none")
    if sum(lengths) != count:
        raise ValueError(f"files have {sum(lengths)} sizes, {count} digests are there")
    each = [size for size, run in zip(sizes[::2], lengths, strict=True) for size in [size] * run]
    starts = range(0, len(digests), DIGEST_DIGITS)
    return [
        (f"shard-{rank:05d}.safetensors", size, blocks_prefix + digests[at : at + DIGEST_DIGITS])
        for rank, size, at in zip(ranks, each, starts, strict=True)
    ], others


def pack_tensors(
    tensors: Sequence[tuple[str, str]],
) -> tuple[Sequence[tuple[str, str]], list[dict[str, Any]]]:
    """Return tensors that are written out, and rules for those that each rank has for itself.

    `tensors` are name and text, in the order of the chunk table. Those with rules come last.
    """
    own: list[tuple[str, str, str]] = []
    for name, text in reversed(tensors):
        match = _OWN.fullmatch(name)
        if match is None:
            break
        own.append((match[1], match[2], text))
    own.reverse()
    by_rank = [
        (int(digits), tuple((f"rng.rank-*{tail}", text) for _, tail, text in group))
        for digits, group in groupby(own, key=itemgetter(0))
    ]
    if len(by_rank) < PACKED_FROM or not all(
        digits == f"{int(digits):05d}" for digits in {digits for digits, _, _ in own}
    ):
        return tensors, []
    rules = []
    for alike, group in groupby(by_rank, key=lambda of: of[1]):
        if len(dict(alike)) != len(alike):
            return tensors, []
        rules.append({"ranks": _progressions([rank for rank, _ in group]), "tensors": dict(alike)})
    return tensors[: len(tensors) - len(own)], rules


def unpack_tensors(rules: Sequence[Any]) -> Iterator[tuple[dict[str, str], list[int]]]:
    """Of each rule its tensors by name, with a `*` for the rank's number, and its ranks.

    The tensors follow each other rank by rank.

    Raises:
        ValueError: it is none, or stands for more than there can be.
    """
    left = MOST_OWN
    for rule in rules:
        tensors = rule.get("tensors") if type(rule) is dict else None
        if type(tensors) is not dict or not tensors or not all(map(_STAR.fullmatch, tensors)):
            raise ValueError("a rule for tensors that ranks have for themselves is none")
        ranks = list(_ranks(rule.get("ranks"), left // len(tensors)))
        left -= len(ranks) * len(tensors)
        yield tensors, ranks


def _rank(name: str) -> int | None:
    """The rank of a shard whose name is as we write it."""
    match = _SHARD.fullmatch(name)
    return int(match[1]) if match and match[1] == f"{int(match[1]):05d}" else None


def _progressions(ranks: Sequence[int]) -> list[int]:
    """Return first, step and count of each equally spaced run: 0, 1, 3, 5 is 0, 1 and 3, 5."""
    runs: list[int] = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        count = 1
        while (
            step > 0 and at + count < len(ranks) and ranks[at + count] == ranks[at] + step * count
        ):
            count += 1
        runs += [ranks[at], max(step, 1), count]
        at += count
    return runs


def _ranks(numbers: Any, most: int) -> Iterator[int]:
    """The ranks that progressions stand for; no more than so many, whatever they say."""
    if type(numbers) is not list or len(numbers) % 3 or any(type(n) is not int for n in numbers):
        raise ValueError("ranks are not first, step and count")
    for first, step, count in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
        most -= count
        if first < 0 or step < 1 or count < 1 or first + step * (count - 1) > MOST_RANK or most < 0:
            raise ValueError(f"ranks are {first}, {step}, {count}, which is too many or none")
        yield from range(first, first + step * count, step)

"""A profile in words, 80 columns wide. Pure.

tests/unit/cli/test_profile.py holds the promises.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from hpctrain.profile.trace import Kind
from hpctrain.profile.verdict import Bound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.profile.trace import RankShares
    from hpctrain.profile.verdict import Profile, ProfileVerdict, RankMemory

WIDTH = 80
MOST_RANKS = 16
"""Rows shown; the rest is in --json."""
_HEADS = {
    Kind.COMPUTE: "compute",
    Kind.COMMUNICATION: "comm.",
    Kind.MEMORY: "memory",
    Kind.DATA: "data",
    Kind.SAVE: "save",
    Kind.HOST: "host",
}


def as_text(profile: Profile) -> str:
    """The verdict, where each rank's time went, memory, what may help, where the files are."""
    window = profile.files.window
    what = f"steps {window.first} to {window.last}"
    if window.first == window.last:
        what = f"step {window.first}"
    lines = [f"attempt {profile.files.attempt}, {what}"]
    if profile.verdict is not None:
        lines += _wrapped(verdict_line(profile.verdict), "  ")
        lines += ["", *_rows(profile.ranks, profile.verdict)]
        hidden = max(r.hidden for r in profile.ranks)
        if hidden >= 0.005:  # noqa: PLR2004 - what would show as 0 %
            lines.append(f"  hidden behind compute: up to {_percent(hidden)} communication")
    for rank, why in profile.problems.items():
        lines += _wrapped(f"rank {rank}: no trace: {why}", "  ", "    ")
    if unwritten := profile.unwritten:
        lines.append(f"  not written yet: rank {', '.join(map(str, unwritten))}")
    lines += _memory_lines(profile.memories)
    for text in profile.advice():
        lines += _wrapped(f"advice: {text}", "  ", "          ")
    lines.append(f"  traces in {profile.files.folder}")
    return "\n".join(lines)


def verdict_line(verdict: ProfileVerdict) -> str:
    """The verdict in a sentence."""
    bound = _bound_words(verdict)
    if verdict.waited_for is None:
        return bound
    rank, waiting = verdict.waited_for, _percent(verdict.waiting)
    return f"the other ranks wait for rank {rank} ({waiting} of the time); rank {rank} is {bound}"


def _bound_words(verdict: ProfileVerdict) -> str:
    if verdict.bound is Bound.NONE:
        largest = sorted(verdict.shares, key=lambda kind: -verdict.shares[kind])[:2]
        parts = " and ".join(f"{_percent(verdict.shares[k])} {k.value}" for k in largest)
        return f"without a clear bound: {parts}"
    share = verdict.shares[Kind(verdict.bound.value)]
    return f"{verdict.bound.value}-bound: {_percent(share)} of the time"


def _rows(ranks: Sequence[RankShares], verdict: ProfileVerdict) -> list[str]:
    heads = "".join(f"{head:>8}" for head in _HEADS.values())
    lines = [f"  rank  s/step{heads}  bound by"]
    for r in ranks[:MOST_RANKS]:
        cells = "".join(f"{_percent(r.shares[kind]):>8}" for kind in _HEADS)
        step_s = r.seconds / len(r.steps)
        bound = verdict.bounds[r.rank]
        word = "-" if bound is Bound.NONE else bound.value
        lines.append(f"  {r.rank:>4}  {_seconds(step_s):>6}{cells}  {word}")
    if len(ranks) > MOST_RANKS:
        lines.append(f"  and {len(ranks) - MOST_RANKS} more ranks: --json shows them all")
    return lines


def _memory_lines(memories: dict[int, RankMemory]) -> list[str]:
    lines = []
    for rank, memory in list(memories.items())[:MOST_RANKS]:
        loose = memory.fragmentation_bytes
        if loose is None:
            continue
        numbers = (
            f"allocated {_gib(memory.allocated_bytes)} (peak {_gib(memory.allocated_peak_bytes)}), "
            f"reserved {_gib(memory.reserved_bytes)}, fragmentation {_gib(loose)} GiB, "
            f"retries {memory.alloc_retries}, out of memory {memory.ooms}"
        )
        lines += _wrapped(f"memory of rank {rank}: {numbers}", "  ", "    ")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 10 else f"{seconds:.1f}"  # noqa: PLR2004 - four figures


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.1f}"


def _wrapped(text: str, first: str, following: str | None = None) -> list[str]:
    after = first if following is None else following
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=after)

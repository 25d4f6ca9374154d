"""What a profile shows: what bounds training, and who is waited for; in words.

A rank is bound by a kind that takes at least `MOST` of its time outside saves, or at least `MUCH`
and `CLEAR` times any other. The others wait for a rank that communicates least by `WAITS`; the run
is then bound by what bounds that rank. Else the run's shares are the mean.

`judge` is pure; `examine` reads a profile's files and lists what cannot be read.
tests/unit/profile/test_verdict.py, tests/unit/cli/test_profile.py and
tests/engines/test_profile_run.py hold the promises.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.files import read_text
from hpctrain.core.base.text import percent
from hpctrain.observe.profile.trace import (
    PROBLEM,
    SNAPSHOT,
    TRACE,
    FoundProfile,
    Kind,
    RankShares,
    TraceUnreadable,
    read_trace,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


MOST = 0.5
MUCH = 0.3
CLEAR = 1.5
WAITS = 0.1
"""Of the step: how much less the rank that is waited for communicates than the one that waits."""


ADVICE = {
    Kind.COMPUTE: "the device is busy: faster kernels (engine.compile, bf16) or more ranks help",
    Kind.COMMUNICATION: "fewer, larger or hidden exchanges help: more accumulation, "
    "engine.dp_replicate across nodes, tp within a node; check NCCL's transport",
    Kind.DATA: "load ahead of training: more DataLoader workers, pinned memory, "
    "data on a faster disk",
    Kind.MEMORY: "copies and allocations cost: pin host memory, copy without blocking, "
    "keep shapes constant",
    Kind.HOST: "the device waits for Python: larger batches, engine.compile, fewer .item()",
}


@dataclass(frozen=True)
class ProfileVerdict:
    """What a profile says.

    Attributes:
        bound: What holds up the run; None where nothing clearly does.
        bounds: Of each rank.
        waited_for: The rank that the others wait for; None where nobody waits noticeably.
        waiting: Largest share of a step that another rank communicates more than it.
        shares: What `bound` was found from: the waited-for rank's, or the mean of all.
    """

    bound: Kind | None
    bounds: dict[int, Kind | None]
    waited_for: int | None
    waiting: float
    shares: dict[Kind, float]


def judge(ranks: Sequence[RankShares]) -> ProfileVerdict:
    """The verdict on the ranks of a profile; at least one."""
    shares = {kind: sum(r.shares[kind] for r in ranks) / len(ranks) for kind in Kind}
    least = min(ranks, key=lambda r: r.shares[Kind.COMMUNICATION])
    most = max(ranks, key=lambda r: r.shares[Kind.COMMUNICATION])
    waiting = most.shares[Kind.COMMUNICATION] - least.shares[Kind.COMMUNICATION]
    bounds = {r.rank: bound_of(r.shares) for r in ranks}
    if waiting < WAITS:
        return ProfileVerdict(bound_of(shares), bounds, None, waiting, shares)
    own = {**least.shares, Kind.COMMUNICATION: 0.0}
    return ProfileVerdict(bound_of(own), bounds, least.rank, waiting, dict(least.shares))


def advice_on(verdict: ProfileVerdict) -> str | None:
    """What may help, in a line; None where nothing clearly holds training up."""
    rank = verdict.waited_for
    if rank is not None and verdict.bound in {Kind.COMPUTE, None}:
        return f"why is rank {rank} slower than the others: more work, or a slower node?"
    return None if verdict.bound is None else ADVICE[verdict.bound]


def bound_of(shares: Mapping[Kind, float]) -> Kind | None:
    """What time of these shares is bound by."""
    outside = {kind: share for kind, share in shares.items() if kind is not Kind.SAVE}
    whole = sum(outside.values())
    if whole <= 0:
        return None
    first, second = sorted(outside, key=lambda kind: -outside[kind])[:2]
    largest = outside[first] / whole
    if largest >= MOST or (largest >= MUCH and outside[first] >= CLEAR * outside[second]):
        return first
    return None


@dataclass(frozen=True)
class Profile:
    """A profile that was read.

    Attributes:
        ranks: Those whose traces could be read.
        verdict: None where none could.
        problems: Rank to why there is no trace of it.
    """

    files: FoundProfile
    ranks: list[RankShares]
    verdict: ProfileVerdict | None
    problems: dict[int, str]

    @property
    def unwritten(self) -> list[int]:
        """Ranks whose traces are still on their way, or never came."""
        written = {r.rank for r in self.ranks} | set(self.problems)
        return [rank for rank in self.files.files if rank not in written]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "attempt": self.files.attempt,
            "first": self.files.window.first,
            "last": self.files.window.last,
            "folder": str(self.files.folder),
            "verdict": None if self.verdict is None else _verdict_as_json(self.verdict),
            "ranks": {
                str(r.rank): {
                    "bound": _word(self.verdict.bounds[r.rank]) if self.verdict else None,
                    "device": r.device,
                    "seconds": r.seconds,
                    "steps": {str(step): seconds for step, seconds in r.steps.items()},
                    "shares": {kind.value: share for kind, share in r.shares.items()},
                    "hidden_communication": r.hidden,
                }
                for r in self.ranks
            },
            "snapshots": [
                str(files[SNAPSHOT]) for files in self.files.files.values() if SNAPSHOT in files
            ],
            "unwritten": self.unwritten,
            "problems": {str(rank): why for rank, why in self.problems.items()},
        }


def examine(profile_files: FoundProfile) -> Profile:
    """Read a profile. A trace of a GPU run takes seconds."""
    ranks: list[RankShares] = []
    problems: dict[int, str] = {}
    for rank, files in profile_files.files.items():
        if PROBLEM in files:
            problems[rank] = _reason_in(files[PROBLEM])
        elif TRACE in files:
            try:
                ranks.append(read_trace(files[TRACE], rank))
            except TraceUnreadable as error:
                problems[rank] = str(error)
    return Profile(profile_files, ranks, judge(ranks) if ranks else None, problems)


def _reason_in(path: Path) -> str:
    """Why a rank has written no trace, in its own words."""
    try:
        return read_text(path).strip()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"


def _word(bound: Kind | None) -> str:
    return "none" if bound is None else bound.value


def _verdict_as_json(verdict: ProfileVerdict) -> dict[str, Any]:
    return {
        "bound": _word(verdict.bound),
        "waited_for": verdict.waited_for,
        "waiting": verdict.waiting,
        "shares": {kind.value: share for kind, share in verdict.shares.items()},
    }


WIDTH = 80
MOST_RANKS = 16
"""Rows shown; the rest is in --json."""


def as_text(profile: Profile) -> str:
    """The verdict, where each rank's time went, what may help, where the files are."""
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
            lines.append(f"  hidden behind compute: up to {percent(hidden)} communication")
    for rank, why in profile.problems.items():
        lines += _wrapped(f"rank {rank}: no trace: {why}", "  ", "    ")
    if unwritten := profile.unwritten:
        lines.append(f"  not written yet: rank {', '.join(map(str, unwritten))}")
    if profile.verdict is not None and (text := advice_on(profile.verdict)):
        lines += _wrapped(f"advice: {text}", "  ", "          ")
    lines.append(f"  traces in {profile.files.folder}")
    return "\n".join(lines)


def verdict_line(verdict: ProfileVerdict) -> str:
    """The verdict in a sentence."""
    bound = _bound_words(verdict)
    if verdict.waited_for is None:
        return bound
    rank, waiting = verdict.waited_for, percent(verdict.waiting)
    return f"the other ranks wait for rank {rank} ({waiting} of the time); rank {rank} is {bound}"


def _bound_words(verdict: ProfileVerdict) -> str:
    if verdict.bound is None:
        largest = sorted(verdict.shares, key=lambda kind: -verdict.shares[kind])[:2]
        parts = " and ".join(f"{percent(verdict.shares[k])} {k.value}" for k in largest)
        return f"without a clear bound: {parts}"
    share = verdict.shares[verdict.bound]
    return f"{verdict.bound.value}-bound: {percent(share)} of the time"


def _rows(ranks: Sequence[RankShares], verdict: ProfileVerdict) -> list[str]:
    heads = "".join(f"{'comm.' if kind is Kind.COMMUNICATION else kind:>8}" for kind in Kind)
    lines = [f"  rank  s/step{heads}  bound by"]
    for r in ranks[:MOST_RANKS]:
        cells = "".join(f"{percent(r.shares[kind]):>8}" for kind in Kind)
        step_s = r.seconds / len(r.steps)
        lines.append(
            f"  {r.rank:>4}  {_seconds(step_s):>6}{cells}  {verdict.bounds[r.rank] or '-'}"
        )
    if len(ranks) > MOST_RANKS:
        lines.append(f"  and {len(ranks) - MOST_RANKS} more ranks: --json shows them all")
    return lines


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 10 else f"{seconds:.1f}"  # noqa: PLR2004 - four figures


def _wrapped(text: str, first: str, following: str | None = None) -> list[str]:
    after = first if following is None else following
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=after)

"""A profile's files read and judged; what cannot be read is told beside the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.base.files import read_text
from hpctrain.profile import memory
from hpctrain.profile.files import MEMORY, PROBLEM, SNAPSHOT, TRACE
from hpctrain.profile.memory import Memory, read_memory
from hpctrain.profile.trace import RankShares, TraceUnreadable, read_trace
from hpctrain.profile.verdict import Verdict, advice_on, judge

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.profile.files import Found


@dataclass(frozen=True)
class Profile:
    """A profile that was read.

    Attributes:
        found: Its files.
        ranks: Those whose traces could be read.
        verdict: None where none could.
        memories: By rank.
        problems: Rank to why there is no trace of it.
    """

    found: Found
    ranks: list[RankShares]
    verdict: Verdict | None
    memories: dict[int, Memory]
    problems: dict[int, str]

    @property
    def unwritten(self) -> list[int]:
        """Ranks whose traces are still on their way, or never came."""
        known = {r.rank for r in self.ranks} | set(self.problems)
        return [rank for rank in self.found.files if rank not in known]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "attempt": self.found.attempt,
            "first": self.found.window.first,
            "last": self.found.window.last,
            "folder": str(self.found.folder),
            "verdict": None if self.verdict is None else _verdict_as_json(self.verdict),
            "ranks": {
                str(r.rank): {
                    "bound": self.verdict.bounds[r.rank].value if self.verdict else None,
                    "device": r.device,
                    "seconds": r.seconds,
                    "steps": {str(step): seconds for step, seconds in r.steps.items()},
                    "shares": {kind.value: share for kind, share in r.shares.items()},
                    "hidden_communication": r.hidden,
                }
                for r in self.ranks
            },
            "memory": {
                str(rank): {**vars(one), "fragmentation_bytes": one.fragmentation_bytes}
                for rank, one in self.memories.items()
            },
            "snapshots": [
                str(files[SNAPSHOT]) for files in self.found.files.values() if SNAPSHOT in files
            ],
            "unwritten": self.unwritten,
            "problems": {str(rank): why for rank, why in self.problems.items()},
        }

    def advice(self) -> list[str]:
        """What may help, a line each."""
        on_time = advice_on(self.verdict) if self.verdict is not None else None
        lines = [on_time] if on_time else []
        told = {rank: memory.advice(one) for rank, one in self.memories.items()}
        return lines + [f"rank {rank}: {text}" for rank, text in told.items() if text]


def examine(found: Found) -> Profile:
    """Read a profile. A trace of a GPU run takes seconds."""
    ranks: list[RankShares] = []
    problems: dict[int, str] = {}
    memories: dict[int, Memory] = {}
    for rank, files in found.files.items():
        if PROBLEM in files:
            problems[rank] = _told(files[PROBLEM])
        elif TRACE in files:
            try:
                ranks.append(read_trace(files[TRACE], rank))
            except TraceUnreadable as error:
                problems[rank] = str(error)
        one = read_memory(files[MEMORY]) if MEMORY in files else None
        if one is not None:
            memories[rank] = one
    return Profile(found, ranks, judge(ranks) if ranks else None, memories, problems)


def _told(path: Path) -> str:
    """Why a rank has written no trace, in its own words."""
    try:
        return read_text(path).strip()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"


def _verdict_as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "bound": verdict.bound.value,
        "waited_for": verdict.waited_for,
        "waiting": verdict.waiting,
        "shares": {kind.value: share for kind, share in verdict.shares.items()},
    }

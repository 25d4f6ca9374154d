"""From the first sign of a hang to its verdict: look after look, what is to be said and done. Pure.

A look is harmless, and is taken as soon as ranks stand for longer than their phase may take. What
it finds is a suspicion. It becomes a hang when nothing has moved for as long again; ten times as
long where nothing proves that it cannot end by itself, or where the rank that holds up the others
computes. A rank whose stack changes, that reads or writes, or that continues, has proved that it
lives: the time begins anew, so that slow work costs looks and never its life.
tests/unit/hangs/test_suspicion.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from hpctrain.node.hangs.evidence import RankEvidence
from hpctrain.node.hangs.standing import in_words, unmoved
from hpctrain.node.hangs.verdict import HangVerdict, own_frame, ranks_in_words, verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.node.hangs.standing import Stand, Unmoved

DOUBTFUL = 10
"""So many times the limit has to pass where a verdict is not certain."""
LOOKS = 4
"""In the time after which a suspicion becomes a hang."""
LONGEST_PAUSE_S = 300.0
COMPUTES = 0.02
"""Of a processor: less is used by threads that look now and then whether there is something, and
a rank that computes gets more, also where a node has far too much to do."""
IO_BYTES = 64 * 1024
"""Between two looks: a rank that reads or writes more works."""


class Used(NamedTuple):
    """What a rank and all that it has started have used so far."""

    cpu_s: float
    io_bytes: int


@dataclass(frozen=True)
class JobLook:
    """What a look at all nodes has found.

    Attributes:
        at_s: When, on the clock of the observer.
        stands: Of the ranks whose nodes have answered.
        evidence: Of the same ranks.
        used: Of those whose process is there.
        silent: Ranks whose nodes have not answered.
    """

    at_s: float
    stands: Sequence[Stand]
    evidence: Sequence[RankEvidence]
    used: Mapping[int, Used] = field(default_factory=dict)
    silent: Sequence[int] = ()


Finding = Literal["calm", "suspected", "waiting", "cleared", "hang"]
"""Nothing is wrong; it was said first now; it still is; it is over; it is certain, said once."""


class Suspicion:
    """What the looks at a job have come to, on node 0.

    Attributes:
        verdict: Of the newest look; None while nothing is suspected.
        stands: The ranks that stand, as they were then.
        limit_s: What their phases may take.
        look_again_s: When to look again, on the same clock; infinite for not by itself.
        stood_s: For how long the ranks had stood, of the last suspicion.
    """

    def __init__(self) -> None:
        """Suspect nobody."""
        self.verdict: HangVerdict | None = None
        self.stands: Sequence[Stand] = ()
        self.limit_s = self.stood_s = 0.0
        self.look_again_s = float("inf")
        self._last: JobLook | None = None
        self._still_since_s = 0.0
        self._is_said = self._has_computed = False

    def hear(self, look: JobLook) -> Finding:
        """Judge a look."""
        returned = {one.rank for one in look.evidence if one.has_returned}
        how, stands = unmoved(look.stands, returned)
        if not how:
            return self._nothing(look, stands)
        before, was_suspected = self._last, self.verdict is not None
        self.stands, self.limit_s = stands, max(stand.limit_s for stand in stands)
        self.stood_s = max(stand.stood_s for stand in stands)
        self.verdict, self._last = judged(how, stands, look), look
        if not was_suspected or before is None or _shows_life(self.verdict, before, look):
            self._still_since_s, self._has_computed = look.at_s, False
        needed_s = self._needed_s(self.verdict, before, look)
        still_s = look.at_s - self._still_since_s
        pause_s = min(needed_s / LOOKS, LONGEST_PAUSE_S, max(needed_s - still_s, 0.1))
        self.look_again_s = look.at_s + pause_s
        if not was_suspected:
            return "suspected"
        if still_s >= needed_s and not self._is_said:
            self._is_said = True
            return "hang"
        return "waiting"

    def _nothing(self, look: JobLook, over: Sequence[Stand]) -> Finding:
        was_suspected = self.verdict is not None
        self.verdict, self._last, self._is_said = None, None, False
        limit_s = max((stand.limit_s for stand in over), default=0.0)
        self.look_again_s = look.at_s + limit_s / 2 if over else float("inf")
        return "cleared" if was_suspected else "calm"

    def _needed_s(self, ruling: HangVerdict, before: JobLook | None, look: JobLook) -> float:
        if before is not None and ruling.kind == "behind" and _computes(ruling, before, look):
            self._has_computed = True
        is_clear = ruling.is_certain and not self._has_computed
        return self.limit_s if is_clear else DOUBTFUL * self.limit_s


def judged(how: Unmoved, stands: Sequence[Stand], look: JobLook) -> HangVerdict:
    """Return the verdict on a look, in which the ranks of `stands` do not move."""
    silent = [_silent(rank) for rank in look.silent]
    ruling = verdict([*look.evidence, *silent])
    if how == "behind" and ruling.kind == "unknown":
        ranks = tuple(sorted(stand.rank for stand in stands))
        others = max(stand.step for stand in look.stands)
        where = _where(ranks[0], look)
        summary = (
            f"{ranks_in_words(ranks)} {'stands' if len(ranks) == 1 else 'stand'} at "
            f"{in_words(stands)}{where}, while others are at step {others}"
        )
        return replace(ruling, kind="behind", ranks=ranks, summary=summary)
    if ruling.kind == "unknown" and len(look.evidence) == 1:
        summary = f"the only rank stands at {in_words(stands)}{_where(stands[0].rank, look)}"
        return replace(ruling, ranks=(stands[0].rank,), summary=summary)
    return ruling


def _silent(rank: int) -> RankEvidence:
    return RankEvidence(rank, "", "?")


def _where(rank: int, look: JobLook) -> str:
    frames = next((one.frames for one in look.evidence if one.rank == rank), None)
    frame = own_frame(frames)
    return "" if frame is None else f" (at {frame.path.rpartition('/')[2]}:{frame.line})"


def _computes(ruling: HangVerdict, before: JobLook, look: JobLook) -> bool:
    seconds = max(look.at_s - before.at_s, 1e-3)
    for rank in ruling.ranks:
        used, used_before = look.used.get(rank), before.used.get(rank)
        if used is None or used_before is None:
            continue
        if used.cpu_s - used_before.cpu_s > COMPUTES * seconds:
            return True
    return False


def _fronts(look: JobLook) -> dict[int, object]:
    return {
        one.rank: dict(one.recorded.fronts) for one in look.evidence if one.recorded is not None
    }


def _shows_life(ruling: HangVerdict, before: JobLook, look: JobLook) -> bool:
    """Whether one of those that hold up the others has done something since the last look."""
    if _fronts(before) != _fronts(look):
        return True
    last = {one.rank: one for one in before.evidence}
    now = {one.rank: one for one in look.evidence}
    for rank in ruling.ranks or now:
        if rank in last and rank in now and last[rank].frames != now[rank].frames:
            return True
        used, used_before = look.used.get(rank), before.used.get(rank)
        if ruling.kind not in {"behind", "unknown"} or used is None or used_before is None:
            continue
        if abs(used.io_bytes - used_before.io_bytes) > IO_BYTES:
            return True
    return False

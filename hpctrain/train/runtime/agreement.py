"""The agreement of all ranks on stops and saves: at the same step on every rank.

tests/engines/test_agreement.py and tests/unit/runtime/test_leased_agreement.py hold the promises.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from hpctrain.core.base import clock
from hpctrain.core.base.records import StopCause
from hpctrain.node.control.client import TreeExchange
from hpctrain.node.hangs.witness import collectives_called
from hpctrain.train.joining_ranks import GlooExchange

if TYPE_CHECKING:
    from hpctrain.core.world import World
    from hpctrain.node.control.client import RankLease
    from hpctrain.node.control.lease import Decision

    Agreement: TypeAlias = "GlooAgreement | LeasedAgreement"

LATENCY_S = 0.25
"""How late a request to stop may be noticed because of batching; small against any KillWait."""
SYNC_ABOVE_S = 0.1
"""From this step time on the exchange is done at once: its cost no longer shows."""

CODES = (
    None,
    StopCause.WARNING,  # "warned": rank 0 must find out what it means; not a stop in itself
    StopCause.WARNING,
    StopCause.TERM,
    StopCause.CLOCK,
    StopCause.USER,
    StopCause.INTERRUPT,
)
WARNED, STOP_WARNED, STOP_TERM, STOP_CLOCK, STOP_USER, STOP_INTERRUPT = range(1, 7)


@dataclass(frozen=True)
class StopRequest:
    """What one rank knows, or all ranks together.

    Attributes:
        stop: One of the codes above; 0 for none.
        save: A periodic save is due (rank 0's clock decides).
        tell: Rank 0 wants to know what all ranks' time went to.
        profile: The number of a request to profile that rank 0 has seen; 0 for none.
        memory: One more copy into the nodes' memory is wished, or due; ranks without an agent never
            agree on one.
    """

    stop: int = 0
    save: bool = False
    tell: bool = False
    profile: int = 0
    memory: bool = False

    @property
    def cause(self) -> StopCause | None:
        """What asks for a stop; None for nothing, or for a warning not yet understood by rank 0."""
        return CODES[self.stop] if self.stop > WARNED else None


NOTHING = StopRequest()
"""Told from others by identity: it is the one of nearly every step."""


def agreement_of(world: World) -> Agreement:
    """By what these ranks agree: how requests of one rank become what all ranks do."""
    control = world.control
    if isinstance(control, TreeExchange):
        control.client.lease.collectives_called = collectives_called
        return LeasedAgreement(control.client.lease)
    return GlooAgreement(world)


class GlooAgreement:
    """By a MAX over all ranks. While steps are short it runs behind them and is used ticks later.

    Every rank reads the same result at the same tick, so the decision is the same everywhere, and a
    20 ms step pays next to nothing for it.
    """

    steps_ahead = 0
    """A wish that is first said in the next tick holds at most so many ticks after it."""
    stop_ahead = 0
    """The code of a stop that is agreed on for a later tick; 0 where none is known here."""

    def __init__(self, world: World) -> None:
        control = world.control
        self._group = control.group if isinstance(control, GlooExchange) else None
        self._is_first = world.rank == 0
        self._flight: tuple[dist.Work, torch.Tensor] | None = None
        self._ticks_left = 0
        self._gap = 1
        self._last_tick = clock.monotonic()
        self._tick_s = 1.0

    def tick(self, request: StopRequest) -> StopRequest:
        """Contribute this rank's request, and learn what all ranks agreed on by now. Collective."""
        now = clock.monotonic()
        self._tick_s += 0.3 * (now - self._last_tick - self._tick_s)
        self._last_tick = now
        if self._group is None:
            return request
        self._ticks_left -= 1
        if self._ticks_left > 0:
            return StopRequest()
        agreed = self._land()
        # What is agreed is done now; asked for once more, it would be done twice.
        self._launch(_without(request, agreed))
        if self._gap == 1:
            agreed = StopRequest(*map(max, astuple(agreed), astuple(self._land())))
        self._ticks_left = self._gap
        return agreed

    def wish(self, stop: int) -> None:
        """Say at once what `tick` would say at the next step; here the next tick says it."""

    def _launch(self, request: StopRequest) -> None:
        gap = self._wanted_gap() if self._is_first else 0
        codes = [request.stop, int(request.save), int(request.tell), request.profile, gap]
        values = torch.tensor(codes, dtype=torch.int32)
        work = dist.all_reduce(values, dist.ReduceOp.MAX, self._group, async_op=True)
        self._flight = (work, values)

    def _land(self) -> StopRequest:
        if self._flight is None:
            return StopRequest()
        work, values = self._flight
        self._flight = None
        work.wait()
        stop, save, tell, profile, gap = values.tolist()
        self._gap = max(1, gap)
        return StopRequest(stop, bool(save), bool(tell), profile)

    def _wanted_gap(self) -> int:
        if self._tick_s >= SYNC_ABOVE_S:
            return 1
        return max(2, min(1000, int(LATENCY_S / max(self._tick_s, 1e-6))))


class LeasedAgreement:
    """By the lease of this rank's node (`control.rank_lease`): in the loop nobody waits for others.

    What a rank wishes on and on until it is done is wished once, by its number: the first save that
    nobody has seen done. So a rank that wishes it too, meanwhile, wishes the same one. Copies in
    memory are wished by rank 0 alone, and each time it is one more: else none could be agreed on
    before the one ahead of it is made, and of long steps every other one would be the most.
    """

    def __init__(self, lease: RankLease) -> None:
        """Resume with the numbers that this rank has come to."""
        self._lease = lease
        self._warned, self._copies = lease.wished.warned, lease.wished.memory
        self._is_warning = False

    @property
    def steps_ahead(self) -> int:
        """See `GlooAgreement`; so below."""
        return self._lease.ticks_ahead

    @property
    def stop_ahead(self) -> int:  # noqa: D102
        return self._lease.stop_ahead

    def tick(self, request: StopRequest) -> StopRequest:
        """Every rank calls it equally often.

        Raises:
            ControlLost: nobody can say any more what all ranks do.
        """
        if request is not NOTHING:
            self._say(request)
        decisions = self._lease.tick()
        return self._agreed(decisions) if decisions else NOTHING

    def wish(self, stop: int) -> None:
        """From any thread; not collective."""
        if stop > WARNED:
            self._lease.wish(stop=stop)

    def _say(self, request: StopRequest) -> None:
        self.wish(request.stop)
        wishes: dict[str, int] = {}
        if request.stop == WARNED and not self._is_warning:
            self._is_warning = True
            self._warned += 1
            wishes["warned"] = self._warned
        done = self._lease.done
        for kind in ("save", "tell", "profile"):
            if getattr(request, kind):
                wishes[kind] = getattr(done, kind) + 1
        if request.memory:
            self._copies += 1
            wishes["memory"] = self._copies
        self._lease.wish(**wishes)

    def _agreed(self, decisions: tuple[Decision, ...]) -> StopRequest:
        values = {decision.kind: decision.value for decision in decisions}
        stop = 0
        if "warned" in values:
            # Perhaps another rank's alone: a warning from now on is sent once more.
            self._is_warning = False
            stop = WARNED
        if "stop" in values:
            # No tick is granted behind it: what nobody here knows must stop this rank, too.
            is_known = WARNED < values["stop"] < len(CODES)
            stop = values["stop"] if is_known else STOP_TERM
        return StopRequest(
            stop,
            "save" in values,
            "tell" in values,
            values.get("profile", 0),
            memory="memory" in values,
        )


def _without(request: StopRequest, done: StopRequest) -> StopRequest:
    """A request less what is done at this tick; a stop stays, since it ends the loop."""
    return replace(
        request,
        save=request.save and not done.save,
        tell=request.tell and not done.tell,
        profile=0 if request.profile == done.profile else request.profile,
    )

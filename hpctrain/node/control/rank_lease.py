"""A rank's side of a lease: it says where it is and what it wishes, and goes as far as it may.

Where the lease covers the next tick, that is three words of shared memory written and nothing read:
a lease that covers a tick holds all decisions of that tick. At the end of what it knows it reads a
word, and the lease, which is text, only where something is to be done: behind a step that has used
the caches for itself, reading it takes 50 us. tests/unit/control/test_rank_lease.py holds the
promises.
"""

from __future__ import annotations

import threading
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Protocol

from hpctrain.core.base import clock
from hpctrain.errors import ControlLost
from hpctrain.node.control.board import (
    ARRIVED,
    BEAT,
    FIRST_WISH,
    FREE_TICKS,
    STEP,
    TICK,
    WAITS,
    put_count,
    ticks_apart,
)
from hpctrain.node.control.lease import Lease, Wishes, most_ahead

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.node.control.board import Board
    from hpctrain.node.control.lease import Decision

PATIENCE_S = 60.0
"""So long may the node's process give no sign of life while a rank waits for it."""
LOOK_S = 1.0
_WISHES = tuple(field.name for field in fields(Wishes))
_NONE = Lease(0, -1)


class Waker(Protocol):
    """How a rank and its node's process wake each other; from any thread of the rank."""

    def ask(self) -> None:
        """Have the node's process look at the board now.

        Raises:
            ControlLost: it is gone.
        """

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process reports a changed lease, or has since the last wait; else False.

        Raises:
            ControlLost: it is gone.
        """


class RankLease:
    """What a rank may do and has to do, tick by tick.

    Attributes:
        done: Up to which numbers wishes were decided at the ticks that this rank has begun; to
            begin with, what it had asked for.
        collectives_called: How many collectives of all ranks this one has called; None for nobody
            is to know.
    """

    def __init__(self, board: Board, local_rank: int, waker: Waker) -> None:
        """Stand before the first tick, as rank `local_rank` of this node's board."""
        self._board, self._local_rank, self._waker = board, local_rank, waker
        # Where a program comes twice in one round (a script that starts it again), it goes on: with
        # numbers that its first time has used up, nothing that it wishes would be decided.
        self.done = self.wished
        self._words, at = board.words, board.at(local_rank)
        self._at_tick, self._at_arrived, self._at_step = at + TICK, at + ARRIVED, at + STEP
        self._at_waits, self._at_beat, self._at_wish = at + WAITS, at + BEAT, at + FIRST_WISH
        self._tick = self._words[at + TICK] - 1
        self.collectives_called: Callable[[], int] | None = None
        self._uncounted = 0
        self._began_ns = 0
        self._step_ns = 0
        self._lease, self._stamp = _NONE, 0
        self._horizon = -1
        self._wishing = threading.RLock()

    def wish(self, **wishes: int) -> None:
        """Ask for something, by fields of `Wishes`; a value not above the last changes nothing.

        From any thread, but not from a handler of signals. The node's process hears of it at once,
        also while another thread of this rank is in the middle of a long step.

        Raises:
            ControlLost: the node's process is gone.
        """
        grown = False
        with self._wishing:
            for name, value in wishes.items():
                at = self._at_wish + _WISHES.index(name)
                if value > self._words[at]:
                    self._words[at] = value
                    grown = True
        if grown:
            self._waker.ask()

    def beat(self) -> None:
        """This rank is alive. From any thread."""
        self._words[self._at_beat] = clock.monotonic_ns()

    def tick(self) -> tuple[Decision, ...]:
        """Begin the next tick as soon as that is granted, and learn what is to be done at it.

        Every rank calls it equally often, from one thread. Behind a stop it returns that stop, and
        waits for nobody.

        Raises:
            ControlLost: the node's process is gone, or silent for `PATIENCE_S`, and this tick was
                not granted.
        """
        now_ns, words = clock.monotonic_ns(), self._words
        tick = self._tick = self._tick + 1
        if self._began_ns:
            step_ns = now_ns - self._began_ns
            self._step_ns += (3 * (step_ns - self._step_ns)) // 10 if self._step_ns else step_ns
            words[self._at_step] = self._step_ns
        words[self._at_arrived] = self._began_ns = now_ns
        if not tick & self._uncounted:
            self._count(tick)
        words[self._at_tick] = tick + 1
        if tick > self._horizon and not self._is_covered(tick):
            self._wait(tick)
        decisions = self._lease.at(tick) if self._lease.decisions else ()
        if decisions:
            self.done = replace(self.done, **{one.kind: one.value for one in decisions})
        return decisions

    @property
    def wished(self) -> Wishes:
        """What this rank has asked for so far."""
        return self._board.wishes(self._local_rank)

    @property
    def ticks_ahead(self) -> int:
        """What is first wished in the next tick is done at most so many ticks after that one.

        Where all ranks are in step: one that is further on was granted more.
        """
        return 1 + (most_ahead(self._step_ns / 1e9) if self._step_ns else 0)

    @property
    def stop_ahead(self) -> int:
        """The code of the stop that all ranks come to, as far as this node knows; 0 for none."""
        newest = self._board.newer_lease(0)
        decisions = newest[1].decisions if newest is not None else ()
        return max((one.value for one in decisions if one.kind == "stop"), default=0)

    def _count(self, tick: int) -> None:
        """Show how many collectives this rank has called."""
        if self.collectives_called is not None:
            power = ticks_apart(self._step_ns)
            self._uncounted = (1 << power) - 1
            at = self._at_tick - TICK
            put_count(self._words, at, tick, self.collectives_called(), power)

    def _is_covered(self, tick: int) -> bool:
        if tick < (free := self._words[FREE_TICKS]):
            self._lease, self._stamp, self._horizon = _NONE, 0, free - 1
            return True
        newer = self._board.newer_lease(self._stamp)
        if newer is not None:
            self._stamp, self._lease = newer
            self._horizon = self._lease.horizon
        return self._lease.covers(tick)

    def _wait(self, tick: int) -> None:
        """Until the lease covers a tick. A step begins when this ends: it is none of its time."""
        words = self._words
        words[self._at_waits] = tick + 1
        self._waker.ask()
        beat, silent_s = self._board.server_beat, 0.0
        while not self._is_covered(tick):
            if self._waker.wait(LOOK_S):
                silent_s = 0.0
                continue
            # Only what this process has seen pass counts: the whole node may have been stopped.
            silent_s = silent_s + LOOK_S if beat == self._board.server_beat else 0.0
            beat = self._board.server_beat
            if silent_s >= PATIENCE_S:
                raise ControlLost(
                    f"the node's control process was silent for {silent_s:.0f} s, and this rank "
                    f"may not begin tick {tick} by itself: is the node stopped or overloaded?"
                )
            self._waker.ask()
        words[self._at_waits] = 0
        words[self._at_arrived] = self._began_ns = clock.monotonic_ns()

"""How a program hears of a stop that asks nobody: a file on its node, and SIGTERM if it catches it.

The agent of node 0 decides that the ranks should leave (`StopNotice`) and tells all agents; each
makes its file and then sends SIGTERM to its ranks, but where the scheduler has sent that to every
process itself. Only to those that catch it: a program that does not would die of it, instead of
training on for as long as it can. tests/unit/agent/test_stop_notice.py and
tests/engines/test_stop_file.py hold the promises.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_STOP_FILE
from hpctrain.core.base.files import replace_text
from hpctrain.core.base.locks import NodeFolder
from hpctrain.core.base.process import signal_masks
from hpctrain.core.base.records import StopCause
from hpctrain.ledger.plan.decide import is_ending
from hpctrain.ledger.run.fence import stop_is_asked
from hpctrain.node.agent.rounds import RoundPart
from hpctrain.node.agent.signals import arrivals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.core.base.records import JobContext
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.node.agent.rounds import AgentRound
    from hpctrain.node.agent.stop_deadline import StopDeadline

log = logging.getLogger("hpctrain.agent")

STOP = "stop"
"""News that the ranks should leave, with the cause."""
LOOK_S = 1.0
"""How often a request of `cancel --save` is looked for."""
SHARE = 8
"""A stop by the clock comes in the last eighth of the job's time at the earliest."""


class StopFile:
    """The file of one agent, in a folder that nobody else can write into."""

    def __init__(self) -> None:
        """Make the folder; the file is not there yet."""
        self._folder = NodeFolder("stop", Path(tempfile.gettempdir()))
        self.path = self._folder.path / "stop"
        self.cause: StopCause | None = None

    def write(self, cause: StopCause) -> None:
        """Make the file, with the cause in it; nothing where it is there."""
        if self.cause is not None:
            return
        self.cause = cause
        try:
            replace_text(self.path, f"{cause}\n")
        except OSError as error:
            log.warning("the ranks are not told of the stop by %s: %s", self.path, error)

    def renew(self) -> None:
        """Take the file away: other ranks start."""
        self.cause = None
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Take the folder away. Harmless when repeated."""
        self._folder.remove()


class RankStop(RoundPart):
    """Tells the ranks of this node of a stop, round after round: by the file, and by SIGTERM."""

    def __init__(self) -> None:
        self._file = StopFile()
        self._to_signal: set[int] = set()
        self._processes: Callable[[], Sequence[Any]] = tuple

    def prepare(self, round_: AgentRound) -> None:
        """Before ranks are forked: no stop is reported so far, unless its SIGTERM has come."""
        self._processes = lambda: round_.ranks.processes
        self._file.renew()
        self._to_signal = set()
        os.environ[HPCTRAIN_STOP_FILE] = str(self._file.path)
        self._hear_term()

    def __enter__(self) -> Self:
        if self._file.cause is not None:  # of a SIGTERM that came before there were ranks
            self._to_signal = {process.pid for process in self._processes()}
        return self

    def tick(self) -> None:
        """Send SIGTERM to ranks that catch it by now; an ended one's number may be another's."""
        self._hear_term()
        if self._to_signal:
            self._to_signal &= {rank.pid for rank in self._processes() if rank.exitcode is None}
            send_term(self._to_signal)

    def hear(self, news: Mapping[str, Any]) -> None:
        """Tell the ranks of a stop."""
        if STOP not in news:
            return
        cause = StopCause(news[STOP])
        if self._file.cause is None and cause is not StopCause.TERM:
            self._to_signal = {process.pid for process in self._processes()}
        self._file.write(cause)

    def _hear_term(self) -> None:
        """The scheduler's SIGTERM: it has reached the ranks too."""
        if any(arrival.signum == signal.SIGTERM for arrival in arrivals()):
            self._file.write(StopCause.TERM)

    def remove(self) -> None:
        """Take the file away for good. Harmless when repeated."""
        self._file.remove()


class StopNotice:
    """Node 0's: whether ranks that ask nobody should leave, and why."""

    def __init__(
        self,
        run: RunDir,
        context: JobContext,
        deadline: StopDeadline,
        *,
        lead_s: float,
    ) -> None:
        """Watch for requests, and the clock.

        A program that does not know hpctrain is notified `lead_s` seconds before the job's end.
        """
        self._request = run.stop_request
        self._job_id = context.job_id
        self._deadline = deadline
        self._lead_s = lead_s
        self._started = clock.now()
        self._looked_at = float("-inf")
        self._failed = False

    def look(self, listens: Callable[[], bool]) -> StopCause | None:
        """What asks the ranks to leave; None while nothing does.

        Args:
            listens: Whether the program hears of stops by itself: then the clock is its own affair,
                and so is the word of why it left.
        """
        cause = self._cause(listens)
        deadline = self._deadline
        if cause is not None and deadline.cause in {None, StopCause.WARNING} and not listens():
            deadline.cause = cause
        return cause

    def _cause(self, listens: Callable[[], bool]) -> StopCause | None:
        deadline = self._deadline
        if deadline.cause is StopCause.TERM:
            return StopCause.TERM
        if deadline.cause is StopCause.WARNING and self._is_no_time_limit():
            return StopCause.WARNING
        if self._is_asked():
            return StopCause.USER
        return StopCause.CLOCK if self._is_late() and not listens() else None

    def _is_no_time_limit(self) -> bool:
        """Whether SIGUSR2 means more than that the time limit is near, or may."""
        facts = self._deadline.facts
        if facts is None or self._deadline.end_time is None:
            return True
        return facts.preempt_time is not None or is_ending(facts)

    def _is_late(self) -> bool:
        end = self._deadline.end_time
        if end is None:
            return False
        lead_s = min(self._lead_s, (end - self._started) / SHARE)
        return clock.now() >= end - lead_s

    def _is_asked(self) -> bool:
        now = clock.monotonic()
        if now < self._looked_at + LOOK_S:
            return False
        self._looked_at = now
        try:
            return stop_is_asked(self._request, self._job_id)
        except OSError as error:
            if not self._failed:
                log.warning("cannot look at %s (%s); looks again", self._request, error)
            self._failed = True
            return False


def catches_term(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM that would run."""
    blocked, caught = signal_masks(pid)
    return signal.SIGTERM in caught and signal.SIGTERM not in blocked


def listens(pid: int) -> bool:
    """Whether a process waits for SIGTERM in a thread, as `hpctrain.init()` does.

    As a rank is born SIGTERM is blocked too, but with SIGUSR1 (`agent.signals.kept`).
    """
    blocked, caught = signal_masks(pid)
    return signal.SIGTERM in blocked & caught and signal.SIGUSR1 not in blocked


def send_term(pids: set[int]) -> None:
    """Send SIGTERM to those that catch it by now, and take them out of the set."""
    for pid in [pid for pid in pids if catches_term(pid)]:
        pids.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)

"""What the ranks go on from is looked for in a thread, so that a stop is heard meanwhile.

Node 0's agent may have terabytes to read before it starts a rank. Told to leave it has KillWait for
it: killed in the middle of reading, it would not have asked for the job's next start.
tests/unit/agent/test_resume_choice.py and tests/engines/test_node_agent.py hold the promises.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("hpctrain.agent")

POLL_S = 0.1
LEAVE_S = 1.0
"""So long the reading may take to end; a disk that does not answer is left behind."""
T = TypeVar("T")


class StopHeard(Exception):
    """The job is to end, and no rank of this round has started."""


class _NotAwaited(Exception):
    """Nobody waits any more for what is being read."""


def choose(look: Callable[[Callable[[int], None]], T], why_not: Callable[[], str]) -> T:
    """Return what `look` returns, unless a stop comes first.

    `look` calls what it is given for every part that it reads, and lets that raise. `why_not` gives
    a reason to leave, or ""; it is called from this thread. No thread is left at return: ranks can
    be forked then.

    Raises:
        StopHeard: there was a reason. What was begun is as after a kill.
        Exception: whatever the look raises.
    """
    future: Future[T] = Future()
    over = threading.Event()

    def on_bytes(_: int) -> None:
        if over.is_set():
            raise _NotAwaited

    def run() -> None:
        try:
            future.set_result(look(on_bytes))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            future.set_exception(error)

    thread = threading.Thread(target=run, name="resume", daemon=True)
    thread.start()
    while not wait([future], POLL_S).done:
        if why := why_not():
            log.warning("what the ranks would go on from is not looked for any more: %s", why)
            over.set()
            thread.join(LEAVE_S)
            raise StopHeard(why)
    thread.join()
    return future.result()

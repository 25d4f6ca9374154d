"""What the ranks of a start resume from, and the arguments that a program gets only then.

Node 0's agent decides before each start, for all ranks alike. It may have terabytes to read before
it starts a rank, so it reads in a thread and hears a stop meanwhile: killed in the middle of
reading, it would not have asked for the job's next start. tests/unit/agent/test_resume_args.py,
tests/unit/agent/test_resume_choice.py and tests/engines/test_resume_args.py hold the promises.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import shlex
import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from hpctrain.core.base.process import join_before_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.core.settings.schema import RunSettings

CHECKPOINT = "{checkpoint}"
"""In run.resume_args: the path that HPCTRAIN_RESUME has."""
STEP = "{step}"
"""In run.resume_args: the number that the name of that path ends with, without leading zeros."""
_NUMBER = re.compile(r"(?<!\d)(\d+)(?:\.[A-Za-z]\w*)?$")


@dataclass(frozen=True)
class ResumeArgs:
    """What is added to a program's arguments at one start.

    Attributes:
        why: Why they are added, or not; "" where run.resume_args is empty.
    """

    words: tuple[str, ...] = ()
    why: str = ""


def resume_args(
    run: RunSettings, *, start: int, resume: str | None, cwd: str, sealed: Sequence[str] = ()
) -> ResumeArgs:
    """Return whether run.resume_args are added at a start; `start` is 1 for the run's first.

    `resume` is the newest complete sealed checkpoint, None without one. run.resume_if is relative
    to `cwd`, where the ranks start. With `sealed` (checkpoint.sealed), a start that was stopped
    before its first save leaves nothing to resume from: the program would fail.
    """
    if not run.resume_args:
        return ResumeArgs()
    words = shlex.split(run.resume_args)
    named = any(CHECKPOINT in word or STEP in word for word in words)
    missing = resume is None and named
    missing = missing or bool(sealed and not run.resume_if)
    pattern = os.path.expanduser(os.path.expandvars(run.resume_if))  # noqa: PTH111 - a pattern
    number = _NUMBER.search(resume or "")
    if resume is not None and number is None and any(STEP in word for word in words):
        return ResumeArgs(why=f"the name of {resume} ends with no number, which {STEP} is for")
    if resume is not None:
        why = f"there is {resume}"
    elif missing:
        return ResumeArgs(why="there is no registered checkpoint so far")
    elif pattern:
        if not (matches := sorted(glob.glob(pattern, root_dir=cwd, recursive=True))):  # noqa: PTH207
            return ResumeArgs(why=f"nothing matches {pattern}")
        why = f"there is {matches[-1]}"
    elif start == 1:
        return ResumeArgs(why="this is the run's first start")
    else:
        why = f"this is start {start} of the run"
    step = (number[1].lstrip("0") or "0") if number else ""
    return ResumeArgs(
        tuple(word.replace(STEP, step).replace(CHECKPOINT, resume or "") for word in words), why
    )


def line(more: ResumeArgs) -> str:
    """What is said of it at each start."""
    if more.words:
        return f"arguments added, since {more.why}: {shlex.join(more.words)}"
    return f"no arguments added: {more.why}"


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
            join_before_fork(thread, LEAVE_S)
            raise StopHeard(why)
    join_before_fork(thread)
    return future.result()

"""A rank's program that is no Python of ours: a shell script, a binary, another interpreter.

The program is born with SIGTERM's default action, and with the others (SIGUSR1, SIGUSR2, SIGHUP)
ignored: those are warnings, of which nothing that has not asked for them may die. The scheduler's
SIGTERM reaches every process of the job by itself, so the rank passes none of those on; of a stop
of which it sends none (`agent/stop_notice.py`) the rank tells a program that catches SIGTERM, once.
tests/engines/test_foreign.py holds the promises.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_STOP_FILE
from hpctrain.core.base.files import read_end
from hpctrain.core.base.process import die_with_parent
from hpctrain.core.base.records import StopCause
from hpctrain.node.agent.signals import PR_SET_CHILD_SUBREAPER, arrivals, note_term
from hpctrain.node.agent.stop_notice import send_term

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.core.base.records import RankTask

log = logging.getLogger("hpctrain.agent")

CANNOT_START = 127
OWN_TERM_S = 1.0
"""So long after a program that SIGTERM killed its rank may get the same signal."""
POLL_S = 0.02
LOOK_S = 0.25
"""How often the agent's word of a stop is looked for."""
LINES, LINES_BYTES = 20, 4096
"""What of a log is shown with a failure."""


@dataclass(frozen=True)
class ProgramEnd:
    """How a program ended.

    Attributes:
        code: Its exit code, or minus the signal that killed it; 0 also where it left at a stop.
        why: What to say in the place of the code; "" for that.
    """

    code: int
    why: str = ""


def run(task: RankTask) -> ProgramEnd:
    """Run a rank's program as a child, and wait for it."""
    note_term()
    # What a shell that SIGTERM has killed leaves behind may be at its save.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getpid()

    def before_exec() -> None:
        die_with_parent(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    stop = Path(os.environ[HPCTRAIN_STOP_FILE])
    is_late = stop.exists()  # the signal came when there was no program yet
    try:
        child = subprocess.Popen(
            [task.program, *task.args],
            cwd=task.cwd or None,
            env=environment(os.environ, task.python_path),
            stdin=subprocess.DEVNULL,
            preexec_fn=before_exec,  # noqa: PLW1509 - nothing else runs in a rank yet
        )
    except OSError as error:
        return ProgramEnd(CANNOT_START, f"cannot be started: {error.strerror} ({error.filename})")
    code = _wait(child, stop, is_late=is_late)
    if code == -signal.SIGTERM:
        _await_children()
    if code != 0 and _is_stop(code, stop):
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        log.info("%s ended %s at the stop", Path(task.program).name, how)
        return ProgramEnd(0)
    return ProgramEnd(code)


def environment(environ: Mapping[str, str], python_path: Sequence[str]) -> dict[str, str]:
    """What the program inherits: this rank's, with the copy of the code in front."""
    if not python_path:
        return dict(environ)
    paths = [*python_path, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def last_lines(path: Path) -> str:
    """The end of a rank's log, where a program has most likely said why it failed."""
    try:
        text = read_end(path, LINES_BYTES)
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-LINES:])


def _wait(child: subprocess.Popen[bytes], stop: Path, *, is_late: bool) -> int:
    """Return the program's exit code; pass on a stop that the scheduler does not send.

    `is_late`: the scheduler sent the stop before there was a program.
    """
    waiting = threading.Thread(target=child.wait, name="hpctrain-program", daemon=True)
    waiting.start()
    to_signal = {child.pid}
    while waiting.is_alive():
        waiting.join(LOOK_S)
        if to_signal and (is_late or _cause(stop) not in {"", StopCause.TERM}):
            send_term(to_signal)
    return child.wait()


def _cause(stop: Path) -> str:
    try:
        return stop.read_text().strip()
    except OSError:
        return ""


def _await_children() -> None:
    """Until all that the program had started is gone; the agent ends it where that is too late."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def _is_stop(code: int, stop: Path) -> bool:
    """Whether the program ended because the job is asked to stop, of which its rank hears too."""
    deadline = clock.monotonic() + (OWN_TERM_S if code in {-signal.SIGTERM, 143} else 0.0)
    while not (stop.exists() or any(one.signum == signal.SIGTERM for one in arrivals())):
        if clock.monotonic() > deadline:
            return False
        clock.sleep(POLL_S)
    return True

"""A rank's program that is no Python of ours: a shell script, a binary, another interpreter.

The rank starts it with torchrun's environment and stays as its parent: torch's elastic agent awaits
a value from the rank, and its log, its CPUs, its share in the agent's death and its report of a
failure are the rank's own.

**Signals.** A rank ignores SLURM's, and what is ignored stays so over exec: a shell could not trap
it any more. So the program is born with SIGTERM's default action, and with the others (SIGUSR1,
SIGUSR2, SIGHUP) ignored: those are warnings, of which nothing that has not asked for them may die.
The scheduler's SIGTERM reaches every process of the job by itself, so the rank passes nothing on.
A program that ends by it, or after it, has left as it was asked to; were that told as a failure,
the agent would end the other ranks in the midst of their saves. tests/engines/test_foreign.py holds
the promises.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.agent.signals import PR_SET_CHILD_SUBREAPER, arrivals, note_term
from hpctrain.base.process import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.base.records import RankTask

log = logging.getLogger("hpctrain.agent")

CANNOT_START = 127
OWN_TERM_S = 1.0
"""So long after a program that SIGTERM killed its rank may get the same signal."""
POLL_S = 0.02
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
    code = child.wait()
    if code == -signal.SIGTERM:
        _await_children()
    if code != 0 and _is_stop(code):
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
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LINES_BYTES))
            text = file.read(LINES_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-LINES:])


def _await_children() -> None:
    """Until all that the program had started is gone; the agent ends it where that is too late."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def _is_stop(code: int) -> bool:
    """Whether the program ended because the job is asked to stop, of which its rank hears too."""
    deadline = time.monotonic() + (OWN_TERM_S if code in {-signal.SIGTERM, 143} else 0.0)
    while not any(arrival.signum == signal.SIGTERM for arrival in arrivals()):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True

"""The batch script's last act, after its srun: `agent/batch_side.py` with SLURM's facts."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.cluster.scheduler.slurm.command import (
    KILL_WAIT_S,
    own_end,
    own_job_id,
    own_restarts,
    own_start,
    script_environment,
)
from hpctrain.cluster.scheduler.slurm.control import SlurmControl
from hpctrain.cluster.scheduler.slurm.parse import read_nodes
from hpctrain.core.base.env import HPCTRAIN_KILL_WAIT_S, HPCTRAIN_RELAY
from hpctrain.core.base.files import read_end
from hpctrain.core.base.locks import remove_left_over
from hpctrain.entry.evaluations import at_the_end_of
from hpctrain.errors import HpctrainError
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.ownership import job_spec
from hpctrain.node.agent.batch_side import JobStartFacts, finish

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpctrain.ledger.shapes.queue import JobShape

log = logging.getLogger("hpctrain.entry")

PATIENCE_S = 300.0
"""How long a silent slurmctld is waited for. After a SIGTERM it is KillWait: SIGKILL comes then."""
LAST_BYTES = 4096
_OF_SRUN = ("srun: ", "slurmstepd: ", "pyxis: ")
_BESIDE = re.compile(r"(slurmstepd|srun): error: (\*\*\* STEP|\S+: tasks? \d)|usage: |Try ")
"""That a step was ended, and how a program wants to be called: an older Python, for one."""


def after(
    root: str, token: str, *, rc: int, term: bool, env: Mapping[str, str], why: str = ""
) -> int:
    """Finish what the agents began; return the job's exit code.

    `rc` is srun's exit code, or the script's if it ended before its srun; then `why` says what
    ended it. `term`: SIGTERM came to the batch shell.
    """
    start = JobStartFacts(
        job_id=own_job_id(env),
        restarts=own_restarts(env),
        token=token,
        nodes=read_nodes(env.get("SLURM_JOB_NODELIST", "")),
        rc=rc,
        term=term,
        ended_early=why,
        start_time=own_start(env),
        end_time=own_end(env),
        last_words=_last_words(env),
    )
    kill_wait_s = float(env.get(HPCTRAIN_KILL_WAIT_S) or KILL_WAIT_S)
    control = SlurmControl(
        start.job_id,
        restarts=start.restarts,
        nodes=start.nodes,
        timeout_s=kill_wait_s if term else PATIENCE_S,
    )
    run = RunDir(Path(root))
    code = finish(run, start, control)
    reshape_next(run, start.job_id, start.restarts, control.reshape)
    remove_left_over()  # of agents that were killed on this node
    at_the_end_of(run, script_environment(os.getppid(), env))
    return code


def reshape_next(run: RunDir, job_id: str, restarts: int, give: Callable[[JobShape], None]) -> None:
    """Choose the shape of the job's next start, if the run's settings leave it to hpctrain.

    Errors leave the job as it is, and never change its exit code. `restarts` is that of the start
    that ends; `give` changes the requeued job.
    """
    try:
        spec = job_spec(run)
        if spec.settings.shape.choose == "no":
            return
        from hpctrain.launch.shape import choose_again

        choose_again(run, spec, job_id, restarts, give)
    except (HpctrainError, OSError) as error:
        log.warning("the job keeps its nodes and its time limit: %s", error)


def _last_words(env: Mapping[str, str]) -> Callable[[], str] | None:
    """Where tasks begin in a container, what asks for their last words."""
    port = env.get(HPCTRAIN_RELAY)
    if not port:
        return None
    return partial(last_words, Path(port.removesuffix(".port")), since=own_start(env))


def last_words(logs: Path, *, since: float | None) -> str:
    """Return the last line of a start's tasks, except for SLURM's lines on their end.

    If there is none, return what srun or its plugin wrote into the batch script's output. Names of
    logs begin with `logs`; those older than `since`, the start's beginning, are of others.
    """
    tasks = sorted(logs.parent.glob(f"{glob.escape(logs.name)}-*.out"))
    said = [lines[-1] for path in tasks if (lines := _lines(path, since))]
    if not said:
        batch = _lines(logs.with_name(f"{logs.name}.out"), since)
        said = [line for line in reversed(batch) if line.startswith(_OF_SRUN)]
    return said[0] if said else f"its tasks left no word in {logs}-*.out"


def _lines(path: Path, since: float | None) -> list[str]:
    """The last lines of a log of this start that tell something."""
    with contextlib.suppress(OSError):
        if path.stat().st_mtime >= (since or 0.0):
            lines = (line.strip() for line in read_end(path, LAST_BYTES).splitlines())
            return [line for line in lines if line and not _BESIDE.match(line)]
    return []

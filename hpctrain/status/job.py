"""A run's newest job as its scheduler sees it, for `status`, `logs` and `cancel`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base.records import JobInfo
from hpctrain.errors import AccountingSilent, ClusterError, UsageError
from hpctrain.status.status import Answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.base.records import Cluster, JobStart
    from hpctrain.run.events import Event
    from hpctrain.run.layout import RunDir

TERMINAL_JOB = "pid-"
"""Beginning of the job id of a run that `hpctrain train` started in a terminal."""


def ask(
    run: RunDir, cluster: str, events: Sequence[Event], scheduler: Cluster | None = None
) -> Answer:
    """What the scheduler knows of the run's newest job; an answer that did not come is no error.

    Args:
        run: The run. A job that is not its own, but that of a run which it is a copy of, is none.
        cluster: "slurm" or "local", from the run's spec.json.
        events: The run's ledger.
        scheduler: Asked in the place of that cluster's own: a `survey` of it.
    """
    from hpctrain.scheduler.base import get_cluster
    from hpctrain.submit.launch import newest_submission
    from hpctrain.submit.own_job import copied_from, elsewhere, not_own

    token, job_id = newest_submission(list(events))
    if token is None and job_id is None:
        return Answer()
    if job_id is not None and job_id.startswith(TERMINAL_JOB):
        answer = _ask_machine(job_id, events)
    else:
        try:
            scheduler = scheduler or get_cluster(cluster)
            if copied_from(run, events) is None and (why := elsewhere(events, scheduler)):
                return Answer(None, asked=False, problem=why, note=why)
            found = scheduler.job(job_id) if job_id else scheduler.find_job(token or "")
        except AccountingSilent as error:
            return Answer(None, unaccounted=str(error))
        except (ClusterError, UsageError) as error:
            return Answer(None, asked=False, problem=str(error))
        answer = Answer(found)
    why = not_own(run, events, token, answer.job) if answer.job is not None else ""
    return Answer(note=why) if why else answer


def job_starts(
    cluster: str, events: Sequence[Event], scheduler: Cluster | None = None
) -> tuple[list[JobStart], str]:
    """Every start of the run's jobs that accounting remembers, and why it told nothing, or "".

    The jobs that it had on other clusters are left out: the ledger's own times do without.

    Args:
        cluster: "slurm" or "local", from the run's spec.json.
        events: The run's ledger.
        scheduler: See `ask`.
    """
    from hpctrain.scheduler.base import get_cluster

    try:
        scheduler = scheduler or get_cluster(cluster)
        ids = job_ids(events, scheduler)
        return (scheduler.starts(ids) if ids else []), ""
    except (ClusterError, UsageError) as error:  # the ledger's own times do without
        return [], str(error)


def job_ids(events: Sequence[Event], scheduler: Cluster) -> list[str]:
    """Every job that a run had here, as far as its ledger names them."""
    from hpctrain.submit.own_job import jobs_here

    return [one for one in jobs_here(events, scheduler) if not one.startswith(TERMINAL_JOB)]


def _ask_machine(job_id: str, events: Sequence[Event]) -> Answer:
    """Whether the process of `hpctrain train` is still there, as far as this machine can tell."""
    started = [e for e in events if e.kind == "attempt_started"][-1]
    nodes = [str(node) for node in started.data.get("nodes") or ()]
    if nodes != [os.uname().nodename]:
        return Answer(
            None, asked=False, problem=f"{job_id} ran in a terminal of {', '.join(nodes)}"
        )
    begun = _process_start(job_id.removeprefix(TERMINAL_JOB))
    # Another process may have the number by now; ours began before its attempt did.
    if begun is None or begun > started.t + 1:
        return Answer()
    return Answer(JobInfo(job_id, "RUNNING", alive=True, nodes=nodes[0], start_time=begun))


def _process_start(pid: str) -> float | None:
    """When a process began, seconds since the epoch; None when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        boot = Path("/proc/stat").read_text().split("btime ", 1)[1].split(None, 1)[0]
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return None
    if fields[0] == "Z":
        return None
    return int(boot) + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def listens(events: Sequence[Event]) -> bool:
    """Whether the newest attempt's program is known to use hpctrain, and so sees requests."""
    newest = max((e.attempt for e in events if e.attempt is not None), default=0)
    told = [e for e in events if e.attempt == newest]
    return any(
        e.kind == "restored" or e.data.get("name") in {"initialised", "first_step"} for e in told
    )

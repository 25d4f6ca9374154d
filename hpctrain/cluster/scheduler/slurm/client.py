"""SLURM from the login node: submit, find again, query, cancel, query many jobs, preflight jobs.

`hpctrain status` shows every run. Two queries for each would overload slurmctld, and sites block
users for it; a `BulkQuery` queries slurmctld and accounting once each.
tests/unit/scheduler/test_status_questions.py, tests/unit/cli/test_preflight.py and
tests/slurm/test_preflight.py hold the promises.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.preflight.report import FAIL, OK, UNKNOWN, Result
from hpctrain.cluster.scheduler.base import Accounting, Cluster, PreflightJob, StartEstimate
from hpctrain.cluster.scheduler.slurm import limits
from hpctrain.cluster.scheduler.slurm.command import (
    QUERY_TIMEOUT_S,
    SHELL_DEFAULTS,
    CommandMissing,
    clean,
    cluster_name,
    kept_settings,
    name_here,
    run,
)
from hpctrain.cluster.scheduler.slurm.jobs import (
    accounted_job,
    job_info,
    job_starts,
    queued_job,
)
from hpctrain.cluster.scheduler.slurm.parse import (
    BULK_FORMAT,
    SACCT_COMMAND,
    AccountRow,
    parse_bulk,
    parse_jobs,
    parse_sacct,
)
from hpctrain.cluster.scheduler.slurm.script import (
    SUBMIT_TIMEOUT_S,
    body_path,
    dependency,
    module_lines,
    notes_of,
    render_script,
    sbatch,
)
from hpctrain.core.base.files import data_dir
from hpctrain.core.base.records import JobInfo, JobRequest, JobStart, JobState
from hpctrain.errors import AccountingSilent, ClusterError, ClusterUnreachable
from hpctrain.ledger.run.event_fields import is_job_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.cluster.site.detect import ClusterFacts
    from hpctrain.cluster.site.schema import Site
    from hpctrain.core.settings.schema import Settings
    from hpctrain.core.settings.spec import Spec
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.ledger.shapes.queue import JobShape, QueueView


STEP_TIMEOUT_S = 120.0
"""A step waits for slurmctld, for each node's slurmd and for a program that starts from a shared
disk."""
BESIDE = "hpctrain-beside"
"""What accounting calls such a step."""
FORGOTTEN = "invalid job id"
NO_ACCOUNTING = "accounting storage is disabled"


class SlurmCluster(Cluster):
    """Implements `Cluster` with sbatch, squeue, scontrol, sacct and scancel."""

    name = "slurm"
    has_dependencies = True
    shell_layer = staticmethod(limits.shell_layer)
    notice = staticmethod(limits.notice)
    check = staticmethod(limits.check_site)
    longest_s = staticmethod(limits.longest_s)
    submit_timeout_s = SUBMIT_TIMEOUT_S
    query_timeout_s = QUERY_TIMEOUT_S

    def missing(self, environ: Mapping[str, str]) -> str:
        """Where there is an sbatch, there is SLURM."""
        there = shutil.which("sbatch", path=environ.get("PATH", ""))
        return "" if there else "there is no sbatch on PATH; go to a login node of the cluster"

    def here(self, environ: Mapping[str, str] | None = None) -> str:
        """ClusterName; of this process's own environment it is asked once."""
        if environ is None:
            return name_here()
        there = shutil.which("scontrol", path=environ.get("PATH", ""))
        return (cluster_name() or "") if there else ""

    def submit(self, request: JobRequest) -> str:
        """Submit the script that is written already, and return the job's id."""
        if shutil.which("sbatch") is None:
            raise CommandMissing(
                "sbatch is not on PATH here: submit from a login node, or use --cluster local"
            )
        # submitit: 0.1 s that only a submit pays
        from hpctrain.cluster.scheduler.slurm.executor import AgentTask, HpctrainExecutor

        path = request.script_path
        executor = HpctrainExecutor(
            path.with_suffix(""), path, self.submit_timeout_s, request.after
        )
        try:
            return str(executor.submit(AgentTask(request.run_dir)).job_id)
        except ClusterUnreachable:
            raise
        except ClusterError as error:
            raise self._with_choices(error) from None

    def find_job(self, token: str) -> JobInfo | None:
        """The job whose script has this token's name; one that is alive before one that is not."""
        jobs = [one for one in self._queued() if PurePath(one.script).name == f"{token}.sh"]
        return max(jobs, key=lambda job: job.alive, default=None)

    def job(self, job_id: str) -> JobInfo | None:
        """What slurmctld knows of the job, or accounting where slurmctld has forgotten it."""
        _refuse_no_id(job_id)
        try:
            records = parse_jobs(self._run("scontrol", "show", "job", job_id))
        except ClusterUnreachable:
            raise
        except ClusterError as error:
            if FORGOTTEN not in str(error).lower():
                raise
            records = []
        return job_info(records[0]) if records else self._accounted(job_id)

    def starts(self, job_ids: Sequence[str]) -> list[JobStart]:
        """Every start of these jobs that accounting knows, by one question for all of them."""
        ids = [job_id for job_id in job_ids if is_job_id(job_id)]
        return job_starts(self._rows_of(ids)) if ids else []

    def bulk_query(self, job_ids: Sequence[str]) -> SlurmCluster:
        """Answers from two questions in all, for a look at many jobs of this user."""
        return BulkQuery([job_id for job_id in job_ids if is_job_id(job_id)])

    def cancel(self, job_id: str) -> None:
        """Cancel the job; one that has ended already is left as it is."""
        _refuse_no_id(job_id)
        self._run("scancel", "--", job_id)

    def follow(self, job_id: str, after: Sequence[str]) -> None:
        """Give the job another --dependency."""
        _refuse_no_id(job_id)
        self._run("scontrol", "update", f"JobId={job_id}", f"Dependency={dependency(after)}")

    def rehearse(self, job_id: str, *, time_limit: bool) -> None:
        """Send the signal to the job's steps, as SLURM does."""
        _refuse_no_id(job_id)
        self._run("scancel", f"--signal={'USR2' if time_limit else 'TERM'}", "--", job_id)

    def on_nodes(self, job_id: str, nodes: Sequence[str], command: Sequence[str]) -> str:
        """A step of its own beside the agents', with one task on each node."""
        _refuse_no_id(job_id)
        return run([*step_words(job_id, nodes), *command], timeout_s=STEP_TIMEOUT_S, query=False)

    def render(self, spec: Spec, run: RunDir, token: str) -> str:
        """The batch script."""
        if spec.settings.container.image:
            from hpctrain.cluster.scheduler.slurm.container_checks import check_mount_points
            from hpctrain.cluster.site.schema import site_of

            check_mount_points(spec, run, site_of(spec))
        return render_script(spec, run, token)

    def facts(self) -> ClusterFacts:
        """By scontrol."""
        from hpctrain.cluster.scheduler.slurm.facts import ask_cluster

        return ask_cluster()

    def dropped(self, environ: Mapping[str, str], site: Site | None) -> list[str]:
        """What neither SLURM's commands nor the settings take."""
        keep = SHELL_DEFAULTS if site is None else site.slurm.sbatch_env
        return clean(environ, kept_settings(environ, keep).values()).dropped

    def setup_lines(self, site: Site | None) -> list[str]:
        """The modules that the preset loads."""
        return module_lines(site)

    def accounting(self) -> Accounting:
        """By sacctmgr and scontrol, each question when it is needed."""
        from hpctrain.cluster.scheduler.slurm import facts

        return Accounting(
            lambda: facts.of_user("Account"),
            lambda: facts.of_user("QOS"),
            *(facts.cpus_per_gpu, facts.machines, facts.srun_help, facts.partitions),
        )

    def notes(
        self,
        settings: Settings,
        origins: Mapping[str, str],
        site: Site | None,
        accounting: Accounting | None,
    ) -> list[str]:
        """What SLURM gives a job that asks for no GPUs or CPUs, and what its nodes start from."""
        notes = limits.partition_notes(settings, origins, site, accounting)
        notes += limits.cpu_notes(settings, site, accounting)
        if settings.environment.stage != "no":
            notes += notes_of(settings, site)
        return notes

    def check_container(
        self,
        settings: Settings,
        origins: Mapping[str, str],
        site: Site | None,
        *,
        folder: Path,
        environ: Mapping[str, str],
        accounting: Accounting | None,
    ) -> tuple[Settings, list[str]]:
        """Refused are images for other machines, and runtimes that are not here.

        Elsewhere than on a login node nothing is known of the cluster's images and runtimes.
        """
        if not settings.container.image or self.missing(environ):
            return settings, []
        from hpctrain.cluster.scheduler.slurm.container_checks import check_container

        return check_container(
            settings, origins, site, folder=folder, environ=environ, accounting=accounting
        )

    def preflight_script(self, spec: Spec, run: RunDir, token: str) -> str:
        """The batch script."""
        return render_preflight(spec, run, token)

    def check_script(self, script: Path) -> list[Result]:
        """What `sbatch --test-only` says of it."""
        try:
            run(["sbatch", "--test-only", str(script)], query=False)
        except ClusterUnreachable as error:
            return [Result("sbatch", UNKNOWN, str(error))]
        except ClusterError as error:
            return [Result("sbatch", FAIL, str(error), [], "change what is asked for")]
        return [Result("sbatch", OK, "accepts the job")]

    def queue_view(self, partition: str) -> QueueView | None:
        """By sinfo and squeue, at once."""
        from hpctrain.cluster.scheduler.slurm.facts import ask_queue

        return ask_queue(partition)

    def start_estimates(self, scripts: Mapping[JobShape, str]) -> dict[JobShape, StartEstimate]:
        """By `sbatch --test-only`, all at once."""
        from hpctrain.cluster.scheduler.slurm.facts import ask_starts

        return ask_starts(scripts)

    def start_preflight(
        self, spec: Spec, run: RunDir, token: str, environ: Mapping[str, str]
    ) -> PreflightJob:
        """Submit its script."""
        return SlurmPreflight(self, run.script(token))

    def _queued(self) -> list[JobInfo]:
        """What slurmctld knows of this user's jobs."""
        squeue = ("squeue", "--noheader", "--states=all", f"--user={os.getuid()}")
        return [
            queued_job(row) for row in parse_bulk(self._run(*squeue, f"--format={BULK_FORMAT}"))
        ]

    def _accounted(self, job_id: str) -> JobInfo | None:
        """A job that slurmctld has forgotten; None without an entry, and without accounting."""
        try:
            return accounted_job(self._rows_of([job_id]))
        except ClusterError as error:
            raise AccountingSilent(str(error)) from error

    def _rows_of(self, job_ids: Sequence[str]) -> list[AccountRow]:
        """Accounting's rows; none on the many sites that have no accounting."""
        try:
            return parse_sacct(self._run(*SACCT_COMMAND, "--jobs", ",".join(job_ids)))
        except CommandMissing:
            return []
        except ClusterError as error:
            if NO_ACCOUNTING in str(error).lower():
                return []
            raise

    def _with_choices(self, error: ClusterError) -> ClusterError:
        """The refusal of a partition, with those that there are."""
        if "partition" not in str(error).lower():
            return error
        try:
            names = sorted(set(self._run("sinfo", "--noheader", "--format=%R").split()))
        except ClusterError:  # the refusal itself is what the user needs to see
            return error
        return ClusterError(f"{error}; partitions here: {', '.join(names)}")

    def _run(self, *args: str) -> str:
        return run(args, timeout_s=self.query_timeout_s)


def step_words(job_id: str, nodes: Sequence[str]) -> list[str]:
    """The srun that starts a step beside those that run, with one task on each of these nodes."""
    count = len(nodes)
    return [
        *("srun", f"--jobid={job_id}", "--overlap", f"--nodes={count}", f"--ntasks={count}"),
        *("--ntasks-per-node=1", f"--nodelist={','.join(nodes)}"),
        *("--cpu-bind=none", "--mpi=none", "--quiet", f"--job-name={BESIDE}"),
    ]


def _refuse_no_id(job_id: str) -> None:
    """A ledger may be of anybody's making: `--user=ME` must not reach scancel."""
    if not is_job_id(job_id):
        raise ClusterError(f"the run's ledger names the job {job_id!r}, which is no job's id")


class BulkQuery(SlurmCluster):
    """Answers about this user's jobs from what it has asked once; safe for several threads."""

    def __init__(self, job_ids: Sequence[str]) -> None:
        """Query nothing yet."""
        self._job_ids = job_ids
        self._lock = threading.Lock()
        self._answers: dict[str, Any] = {}

    def job(self, job_id: str) -> JobInfo | None:
        """As `SlurmCluster.job`."""
        queued = next((one for one in self._queued() if one.job_id == job_id), None)
        return queued or self._accounted(job_id)

    def _queued(self) -> list[JobInfo]:
        jobs: list[JobInfo] = self._once("queue", super()._queued)
        return jobs

    def _rows_of(self, job_ids: Sequence[str]) -> list[AccountRow]:
        ask = partial(super()._rows_of, self._job_ids)
        rows: list[AccountRow] = self._once("rows", ask) if self._job_ids else []
        return [row for row in rows if row.job_id in set(job_ids)]

    def _once(self, what: str, ask: Callable[[], Any]) -> Any:
        """The first answer, also where it was an error."""
        with self._lock:
            if what not in self._answers:
                try:
                    self._answers[what] = ask()
                except ClusterError as error:
                    self._answers[what] = error
        if isinstance(self._answers[what], ClusterError):
            raise self._answers[what]
        return self._answers[what]


BODY = "preflight.sh"


def render_preflight(spec: Spec, run: RunDir, token: str) -> str:
    """A run's batch script with another body; the job is started once."""
    once = replace(spec.settings.slurm, signal_lead_s=0)
    once = replace(once, extra=[*once.extra, "--no-requeue"])
    own = replace(spec, settings=replace(spec.settings, slurm=once))
    of_run, body = (
        path.read_text().rstrip("\n") for path in (body_path(), data_dir("sbatch") / BODY)
    )
    return render_script(own, run, token).replace(of_run, body, 1)


class SlurmPreflight:
    """The job of a preflight."""

    def __init__(self, cluster: Cluster, script: Path) -> None:
        self._job_id = sbatch(script)
        self._cluster = cluster
        self.name = f"job {self._job_id}"

    def waits_for(self) -> str:
        """SLURM's reason while it pends."""
        with contextlib.suppress(ClusterUnreachable):  # asked again soon
            job = self._cluster.job(self._job_id)
            if job is not None and job.state in {JobState.PENDING, JobState.CONFIGURING}:
                return job.reason or job.shown.lower()
        return ""

    def is_over(self) -> bool:
        """Whether SLURM says so."""
        try:
            job = self._cluster.job(self._job_id)
        except AccountingSilent:  # slurmctld itself has forgotten it
            return True
        except ClusterUnreachable:
            return False
        return job is None or not job.alive

    def cancel(self) -> None:
        """Cancel it."""
        self._cluster.cancel(self._job_id)

    def release(self) -> None:
        """Nothing: a job whose report is there ends by itself."""

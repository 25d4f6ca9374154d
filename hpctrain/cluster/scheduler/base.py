"""What a run needs of a scheduler: `Cluster` on the login node, `JobControl` inside the job.

To write a third scheduler, read this file, the records that it names (`base/records.py`) and,
as an example, `tests/support/third_scheduler.py`. A scheduler

- is a line in `SCHEDULERS`, which names a class of each kind, imported only when asked for,
- starts one agent on each node: `hpctrain.node.agent.main.run_agent(run, context, control)`, with a
  `JobContext` that says where in its job the node stands,
- translates its own words into `JobState`, and its refusals into `ClusterError`, silence into
  `ClusterUnreachable`.

Nothing outside `scheduler` and `entry` knows which ones there are; .importlinter and
tests/docs/test_seam.py hold that.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from hpctrain.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from hpctrain.cluster.preflight.report import Result
    from hpctrain.cluster.site.detect import ClusterFacts
    from hpctrain.cluster.site.schema import Site
    from hpctrain.core.base.records import EndReason, JobFacts, JobInfo, JobRequest, JobStart
    from hpctrain.core.settings.layers import Chosen, Layer
    from hpctrain.core.settings.schema import Settings
    from hpctrain.core.settings.spec import Spec
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.ledger.shapes.queue import JobShape, QueueView


@dataclass(frozen=True)
class Scheduler:
    """Where a scheduler's classes stand, as "module:Class", and what sentences call it."""

    cluster: str
    control: str
    """Made with a job id and `restarts`, the restart count with which this process was started."""
    title: str = "the cluster"


SCHEDULERS: dict[str, Scheduler] = {
    "slurm": Scheduler(
        "hpctrain.cluster.scheduler.slurm.client:SlurmCluster",
        "hpctrain.cluster.scheduler.slurm.control:control_here",
        "SLURM",
    ),
    "local": Scheduler(
        "hpctrain.cluster.scheduler.local:LocalCluster",
        "hpctrain.cluster.scheduler.local:LocalControl",
    ),
}
"""By the names that users give, in the order in which they are tried where none is named."""


def get_cluster(name: str) -> Cluster:
    """The login node's side of a scheduler.

    Raises:
        UsageError: no such scheduler.
    """
    cluster: Cluster = _load(_known(name).cluster)()
    return cluster


def get_control(name: str, job_id: str, restarts: int) -> JobControl:
    """Return a job's own view of its scheduler, from inside the job.

    `restarts` is the restart count with which this process was started.

    Raises:
        UsageError: no such scheduler.
    """
    control: JobControl = _load(_known(name).control)(job_id, restarts=restarts)
    return control


def default_cluster(environ: Mapping[str, str]) -> str:
    """The first that can be used from here."""
    return next(name for name in SCHEDULERS if not get_cluster(name).missing(environ))


def name_here(environ: Mapping[str, str]) -> str | None:
    """The name of this very cluster, by the first scheduler that has one; None without any."""
    names = (get_cluster(name).here(environ) for name in SCHEDULERS)
    return next((name for name in names if name), None)


def title_of(name: str) -> str:
    """What a sentence calls the scheduler; of an unknown one too."""
    return SCHEDULERS[name].title if name in SCHEDULERS else Scheduler.title


def _known(name: str) -> Scheduler:
    if name not in SCHEDULERS:
        raise UsageError(f"cluster {name!r} is not known; use one of {', '.join(SCHEDULERS)}")
    return SCHEDULERS[name]


def _run_here(command: Sequence[str]) -> str:
    import subprocess

    # A session of its own: Ctrl-C is for who asked, and the command has something to finish.
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    with child:
        out, err = child.communicate()
    if child.returncode != 0:
        last = err.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        raise ClusterError(f"{command[0]}: {last[0]}")
    return out


def _load(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class PartitionNodes:
    """What a partition has, whether it is free or not.

    Attributes:
        is_default: Jobs that name none go there.
        nodes: All of its nodes, those that are down too.
        cpus: Of the node that has most.
        gpus: Of the node that has most.
        gpu_types: As SLURM calls them.
        max_time: The longest job, as SLURM writes it; "" without a limit.
    """

    is_default: bool
    nodes: int
    cpus: int
    gpus: int
    gpu_types: tuple[str, ...]
    max_time: str


@dataclass(frozen=True)
class StartEstimate:
    """What a scheduler says of the start of a job that it is not given yet.

    Attributes:
        wait_s: Seconds until then; None where it said nothing.
        refused: Why it would not take the job; "" where it would.
        unknown: Why nothing is known; "" where something is.
    """

    wait_s: float | None = None
    refused: str = ""
    unknown: str = ""


@dataclass(frozen=True)
class Accounting:
    """Questions; each answers None where it cannot be asked, or knows nothing of the user.

    Attributes:
        accounts: The user's.
        qos: The user's.
        cpus_per_gpu: CPUs for each GPU of a job that asks for none, by the partition's name, or ""
            for the default one.
        machines: What the nodes of a partition are, as `uname -m` says it, by the same names.
        srun_help: What starts a job's tasks says of its own options.
        partitions: What its partitions have, by name.
    """

    accounts: Callable[[], Collection[str] | None]
    qos: Callable[[], Collection[str] | None]
    cpus_per_gpu: Callable[[str], int | None] = lambda _: None
    machines: Callable[[str], Collection[str] | None] = lambda _: None
    srun_help: Callable[[], str | None] = lambda: None
    partitions: Callable[[], Mapping[str, PartitionNodes] | None] = lambda: None


class Cluster(Protocol):
    """The login node's side of a scheduler. What has a body here may stay as it is.

    Attributes:
        name: By which users name it.
        on_this_machine: Its nodes are processes of this machine: nobody else's limits hold for
            them, and none of them is bad by itself.
        site: The preset where none is named; "" where it is detected.
        without_effect: Keys of [slurm] that it cannot honour.
        has_dependencies: A job can wait for others: `JobRequest.after` and `follow`.
    """

    name: str
    on_this_machine: bool = False
    site: str = ""
    without_effect: frozenset[str] = frozenset()
    has_dependencies: bool = False

    def missing(self, environ: Mapping[str, str]) -> str:
        """Why it cannot be used from a shell with these variables; "" where it can."""

    def here(self, environ: Mapping[str, str] | None = None) -> str:
        """Name of this very cluster, which has job ids of its own; "" where nobody can say.

        Nobody is asked where a shell with the variables `environ` could not.
        """

    def submit(self, request: JobRequest) -> str:
        """Start the job and return its id.

        Raises:
            ClusterError: refused; nothing was started.
            ClusterUnreachable: no answer in time; the job may or may not have been accepted.
        """

    def find_job(self, token: str) -> JobInfo | None:
        """The job that was submitted with this token, if the scheduler knows one.

        Raises:
            ClusterUnreachable: the scheduler gave no answer.
        """

    def job(self, job_id: str) -> JobInfo | None:
        """What is known of a job; None when the scheduler has forgotten it.

        Raises:
            AccountingSilent: it has, and its accounting gave no answer.
            ClusterUnreachable: the scheduler gave no answer.
        """

    def starts(self, job_ids: Sequence[str]) -> list[JobStart]:
        """Every start of these jobs that accounting remembers; none where there is no accounting.

        Raises:
            ClusterUnreachable: accounting gave no answer in time.
        """

    def bulk_query(self, job_ids: Sequence[str]) -> Cluster:
        """The same, for a look at many of this user's jobs at once, with few questions in all.

        It asks once at most and answers from that, so it is for one look only.

        `job_ids` are all that accounting may be asked about.
        """

    def cancel(self, job_id: str) -> None:
        """Cancel a pending or running job.

        Raises:
            ClusterError: refused, or no answer.
        """

    def follow(self, job_id: str, after: Sequence[str]) -> None:
        """Have a pending job wait for these, and for no others.

        It starts when each of them has ended well. One that is run again has not ended; where one
        has ended badly, the job waits for the next order.

        Raises:
            ClusterError: refused, or no answer.
        """

    def rehearse(self, job_id: str, *, time_limit: bool) -> None:
        """Have a running job hear what it would hear of a preemption or of its time limit.

        `time_limit` is the warning before the limit instead.

        Raises:
            ClusterError: refused, or no answer.
            UsageError: it cannot be rehearsed here.
        """
        raise UsageError(f"{self.name} has no signals to rehearse with")

    def on_nodes(self, job_id: str, nodes: Sequence[str], command: Sequence[str]) -> str:
        """Run a command once on each of these nodes of a running job; all that they have printed.

        It is not ended with the process that asks: what it has begun, it may finish.

        `nodes` are of those that the job has now; `command` is there on every node.

        Raises:
            ClusterError: refused, no answer, or it failed.
            UsageError: this scheduler starts nothing beside a job's ranks.
        """
        if not self.on_this_machine:
            raise UsageError(f"{self.name} starts no program on the nodes of a running job")
        return _run_here(command)

    def render(self, spec: Spec, run: RunDir, token: str) -> str:
        """The script of one submission, which is kept as ``run.script(token)``.

        Raises:
            UsageError: a setting that no script can hold.
        """

    def preview(self, spec: Spec, run: RunDir, env: Callable[[], Mapping[str, str]]) -> str:
        """What `submit --dry-run` shows.

        `run` is where it would lie; `env` gives what the ranks will find in their environment, as
        far as it is known.
        """
        return self.render(spec, run, "dry-run")

    def facts(self) -> ClusterFacts:
        """What the scheduler tells of this cluster, for a draft of its preset.

        Raises:
            ClusterUnreachable: it gave no answer.
        """
        raise UsageError(f"{self.name} tells nothing that a preset could be drafted from")

    def dropped(self, environ: Mapping[str, str], site: Site | None) -> list[str]:
        """Variables of the user's shell that are not passed on, since they would change the job."""
        return []

    def shell_layer(self, environ: Mapping[str, str], site: Site | None) -> Layer | None:
        """What the user's shell decides: a layer above the site's and below hpctrain.toml."""
        return None

    def setup_lines(self, site: Site | None) -> list[str]:
        """Lines of the preset's that a job runs before its ranks; they may bring another torch."""
        return []

    def accounting(self) -> Accounting | None:
        """Who knows the user's accounts; None where there are none."""
        return None

    def check(
        self,
        settings: Settings,
        origins: Mapping[str, str],
        site: Site,
        *,
        is_script: bool,
        accounting: Accounting | None,
    ) -> Chosen:
        """Hold the settings against the site's limits.

        `origins` has each setting's place. `is_script`: the ranks run a script of the user's, not
        hpctrain's own loop. `accounting` None asks nobody.

        Returns:
            What is to be where nobody has given it, and what the user should know.

        Raises:
            UsageError: the scheduler would refuse the job.
        """
        from hpctrain.core.settings.layers import Chosen

        return Chosen()

    def notes(
        self,
        settings: Settings,
        origins: Mapping[str, str],
        site: Site | None,
        accounting: Accounting | None,
    ) -> list[str]:
        """What the user should know of the job, with a site and without."""
        return []

    def notice(self, settings: Settings, site: Site | None) -> tuple[int, str] | None:
        """Seconds from the notice of a preemption to the kill, and where that stands.

        None where jobs are not preempted, or nobody says how long it is.
        """
        return None

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
        """Look at the image and at what is to start it.

        Paths are relative to `folder`; `environ` is of the shell on the login node. `accounting`
        None asks nobody.

        Returns:
            The settings with the image's whole path, and what the user should know.

        Raises:
            HpctrainError: it can start on no node.
        """
        return settings, []

    def preflight_script(self, spec: Spec, run: RunDir, token: str) -> str:
        """The script of a job that looks at its nodes; "" where none is needed.

        `run` is the preflight's folder, `token` the job's name.

        Raises:
            UsageError: a setting that no script can hold.
        """
        return ""

    def check_script(self, script: Path) -> list[Result]:
        """Whether the scheduler would take the script. Nothing is submitted."""
        return []

    def queue_view(self, partition: str) -> QueueView | None:
        """What this user sees of the queue, in seconds; None where nobody says.

        `partition` is a name, or several with commas between them; "" for the default one.
        """
        return None

    def longest_s(self, settings: Settings, site: Site) -> int | None:
        """The longest time limit that a preset allows a job; None where it names none.

        The nodes and the partition of the settings count.

        Returns:
            Seconds; 0 where no job of that size is allowed.
        """
        return None

    def start_estimates(self, scripts: Mapping[JobShape, str]) -> dict[JobShape, StartEstimate]:
        """When a job with each of these scripts would start, in seconds for all of them.

        `scripts` has what `render` made for each shape.
        """
        return {shape: StartEstimate(unknown=f"{self.name} has no queue") for shape in scripts}

    def start_preflight(
        self, spec: Spec, run: RunDir, token: str, environ: Mapping[str, str]
    ) -> PreflightJob:
        """Start `hpctrain.cluster.preflight.node` on every node.

        The script of `preflight_script` lies in ``run.script(token)``.

        Raises:
            ClusterError: refused.
            ClusterUnreachable: no answer.
        """
        raise UsageError(f"{self.name} cannot look at its nodes")


class PreflightJob(Protocol):
    """A job that looks at its nodes."""

    name: str

    def waits_for(self) -> str:
        """Why it does not run yet, "" where it runs."""

    def is_over(self) -> bool:
        """Whether nothing of it is left."""

    def cancel(self) -> None:
        """End it."""

    def release(self) -> None:
        """Let go of what is left, once it has reported or was cancelled."""


class JobControl(Protocol):
    """A job's view of its own scheduler, from inside the allocation."""

    def facts(self) -> JobFacts:
        """Ask about our own job.

        Raises:
            ClusterUnreachable: the command is not here, or gave no answer in time.
        """

    def previous_end(self) -> EndReason:
        """Why this job's previous start ended; UNKNOWN where the scheduler does not remember."""

    def previous_stop(self) -> float | None:
        """When this job's previous start ended, seconds since the epoch; None where unknown."""

    def exclude(self, nodes: Sequence[str]) -> None:
        """Keep nodes out of the job's next start, after a requeue; without effect elsewhere.

        Raises:
            ClusterError: refused, or no answer.
        """

    def requeue(self) -> None:
        """Ask for this job to be run again; being requeued already counts as success.

        Raises:
            ClusterError: refused.
            ClusterUnreachable: the command is not here, or gave no answer in time.
        """

    def end(self) -> None:
        """End our own job, this process included, where nobody else will.

        Raises:
            ClusterError: refused, or no answer.
        """

    def forbid_requeue(self) -> None:
        """Keep the scheduler from running this job again, whatever it meant to do.

        For the end of a run. Without effect where the job is being run again already.

        Raises:
            ClusterError: refused.
            ClusterUnreachable: the command is not here, or gave no answer in time.
        """

"""submitit's executors, whose jobs are runs of hpctrain.

Parameters, their names, their checks and the pickling are submitit's own. Only how a job is started
is ours: `hpctrain.submit`. What no run can do is refused in a line.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import sys
import uuid
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import submitit
from submitit.auto.auto import flexible_init
from submitit.core import core, utils
from submitit.local import local
from submitit.slurm import slurm

from hpctrain.cluster.scheduler.base import default_cluster, get_cluster
from hpctrain.core.base import clock
from hpctrain.core.base.files import make_runs_folder
from hpctrain.core.base.text import hms
from hpctrain.core.settings.check import node_range, time_s
from hpctrain.core.settings.spec import load_spec
from hpctrain.errors import RunExists, UsageError
from hpctrain.ledger.run.layout import RunDir
from hpctrain.submitit.job import Job, JobFiles, cancel_all, dump

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from submitit.core.utils import DelayedSubmission

    from hpctrain.cli.api import StartedJob

log = logging.getLogger("hpctrain.submitit")

RUNS = "hpctrain-runs"
"""Folder of the runs, in the executor's."""
DEFAULT_MINUTES = 5.0
"""submitit's own."""
NAME_TRIES = 20
_SETTINGS = {
    "nodes": "nodes",
    "ntasks_per_node": "ranks_per_node",
    "gpus_per_node": "gpus_per_node",
    "cpus_per_task": "cpus_per_rank",
    "mem": "mem",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "exclude": "exclude",
    "setup": "setup",
    "srun_args": "srun_args",
}
"""submitit's parameter to the key of [slurm] that means the same."""
_OPTIONS = (
    "cpus_per_gpu",
    "gres",
    "mem_per_cpu",
    "mem_per_gpu",
    "nodelist",
    "dependency",
    "comment",
    "mail_type",
    "mail_user",
    "wckey",
)
"""Parameters that are options of sbatch as they stand."""


class _RunExecutor(core.PicklingExecutor):
    """What both executors have in common.

    Attributes:
        settings: More of hpctrain's settings for the jobs, by "section.key".
    """

    job_class: type[core.Job[Any]] = Job
    cluster: ClassVar[str]
    has_dependencies: ClassVar[bool] = False
    """Whether a job can wait for another one."""

    def __init__(
        self,
        folder: Path | str,
        max_num_timeout: int | None = None,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
    ) -> None:
        """Make an executor.

        Args:
            folder: Where the jobs' files lie, visible from all nodes.
            max_num_timeout: A job may meet its time limit so often and is run again; None for no
                limit, as hpctrain's rules have it.
            max_pickle_size_gb: Larger calls are refused.
            python: This interpreter; there can be no other.

        Raises:
            UsageError: another interpreter.
        """
        core.PicklingExecutor.__init__(
            self,
            folder,
            max_num_timeout=max_num_timeout,  # type: ignore[arg-type]
            max_pickle_size_gb=max_pickle_size_gb,
        )
        if python is not None and shlex.split(python) != [sys.executable]:
            raise UsageError(
                f"python is {python!r}; a run's ranks use the interpreter that submits "
                f"({sys.executable}): start this program with the other one"
            )
        self.settings: Mapping[str, Any] = {}

    @property
    def runs(self) -> Path:
        """The folder of the jobs' runs, for hpctrain's commands and functions."""
        return utils.JobPaths.get_first_id_independent_folder(self.folder) / RUNS

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[core.Job[Any]]:
        """Start a run for each; all of them or none."""
        flags = self._flags()
        jobs: list[core.Job[Any]] = []
        make_runs_folder(self.runs)
        pickles = self._pickle(delayed_submissions)
        try:
            for path in pickles:
                self._throttle()
                self._last_job_submitted = clock.now()
                jobs.append(self._start(path, flags, [job.job_id for job in jobs]))
        except BaseException:
            cancel_all(jobs)
            raise
        finally:
            for path in pickles:
                path.unlink(missing_ok=True)
        return jobs

    def _pickle(self, calls: Sequence[DelayedSubmission]) -> list[Path]:
        """Write all calls before the first job starts, unless they are too large together."""
        written: list[Path] = []
        minutes = self._limit_s() / 60
        for call in calls:
            call.set_timeout(minutes, self.max_num_timeout)  # type: ignore[arg-type]
            path = self.runs / f".{uuid.uuid4().hex}.pkl"
            dump(call, path)
            written.append(path)
            size_gb = path.stat().st_size / 1024**3
            if len(written) == 1 and len(calls) * size_gb > self.max_pickle_size_gb:
                path.unlink()
                raise RuntimeError(
                    f"{len(calls)} calls of {size_gb:.2f} GB are more than max_pickle_size_gb, "
                    f"which is {self.max_pickle_size_gb}: pass paths instead of data, or raise it"
                )
        return written

    def _start(self, written: Path, flags: Mapping[str, Any], before: Sequence[str]) -> Job[Any]:
        """Start the run of one call."""
        parallel = int(self.parameters.get("array_parallelism", 256))
        if self.has_dependencies and len(before) >= parallel:
            waits = f"--dependency=afterany:{before[-parallel]}"
            extra = _with_dependency(flags["settings"].get("slurm.extra", []), waits)
            flags = {**flags, "settings": {**flags["settings"], "slurm.extra": extra}}
        started = self._submit_run(flags)
        if started.job_id is None:
            raise AssertionError("a run that was to be started has no job")
        run, files = RunDir(started.dir), JobFiles.of(RunDir(started.dir))
        files.folder.mkdir(mode=0o700, exist_ok=True)
        written.replace(files.pickle())  # the ranks wait for it
        slurm = load_spec(run.spec).settings.slurm  # presets and hpctrain.toml have a say, too
        ranks = node_range(slurm.nodes)[1] * slurm.ranks()
        [script] = run.jobs.glob("*.sh")
        job: Job[Any] = Job(self.folder, started.job_id, tasks=list(range(ranks)))
        files.link(job.paths, run, script, ranks)
        for note in started.notes:
            log.info("%s: %s", started.run, note)
        return job

    def _submit_run(self, flags: Mapping[str, Any]) -> StartedJob:
        from hpctrain.cli.api import submit
        from hpctrain.launch.prepare import free_name

        given = self.parameters.get("job_name") or self.parameters.get("name", "submitit")
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", str(given))
        for _ in range(NAME_TRIES):
            name = free_name(self.runs, stem.strip("-.")[:80] or "submitit")
            try:
                return submit(name=name, cluster=self.cluster, runs=self.runs, **flags)
            except RunExists:  # another program submits into the same folder
                continue
        raise RunExists(f"{NAME_TRIES} names in {self.runs} were taken while trying; try again")

    def _flags(self) -> dict[str, Any]:
        """The arguments of `hpctrain.submit`, but for what is a job's own."""
        limit_s = self._limit_s()
        lead_s = min(float(self.parameters.get("signal_delay_s", 90)), limit_s / 3)
        task = {
            "folder": str(self.folder),
            "lead_s": lead_s,
            "limit_s": limit_s,
            "max_num_timeout": self.max_num_timeout,
            "stderr_to_stdout": bool(self.parameters.get("stderr_to_stdout", False)),
        }
        return {
            "command": ["-m", "hpctrain.submitit.task", json.dumps(task)],
            "time": hms(max(1, round(limit_s))),
            "settings": {
                **self._job_settings(),
                "slurm.signal_lead_s": int(lead_s),
                **self.settings,
            },
            "snapshot": False,
        }

    def _limit_s(self) -> float:
        raise NotImplementedError

    def _job_settings(self) -> dict[str, Any]:
        raise NotImplementedError

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        super()._internal_update_parameters(**kwargs)
        self._job_settings()


class SlurmExecutor(_RunExecutor, slurm.SlurmExecutor):
    """submitit's executor for SLURM; its jobs are runs."""

    job_class = Job  # type: ignore[assignment] # not submitit's own job, which asks sacct
    cluster = "slurm"
    has_dependencies = True

    @classmethod
    def affinity(cls) -> int:
        """Usable where there is an sbatch: a login node may have no srun."""
        return -1 if get_cluster(cls.cluster).missing(os.environ) else 2

    def _limit_s(self) -> float:
        given = self.parameters.get("time", DEFAULT_MINUTES)
        return time_s(given, where="time") if isinstance(given, str) else float(given) * 60

    def _job_settings(self) -> dict[str, Any]:
        given = dict(self.parameters)
        forced = given.get("additional_parameters") or {}
        more = {str(name).replace("-", "_"): value for name, value in forced.items()}
        given |= {name: value for name, value in more.items() if name in _SETTINGS}
        _refuse(given)
        tasks = max(1, given.get("ntasks_per_node") or 1)
        given["ntasks_per_node"] = tasks
        if given.get("num_gpus") is not None:
            warnings.warn('"num_gpus" is deprecated, please use "gpus_per_node" instead')  # noqa: B028
            given["gpus_per_node"] = given["num_gpus"]
        if given.get("gpus_per_task") and not given.get("gpus_per_node"):
            given["gpus_per_node"] = _value("gpus_per_task", given["gpus_per_task"]) * tasks
        exclusive = given.get("exclusive")
        values = {
            f"slurm.{key}": _value(name, given[name])
            for name, key in _SETTINGS.items()
            if given.get(name) is not None
        }
        values["slurm.exclusive"] = "yes" if exclusive is True else "no"
        options = {name: given[name] for name in _OPTIONS if given.get(name) is not None}
        options |= {name: value for name, value in more.items() if name not in _SETTINGS}
        if isinstance(exclusive, str):
            options["exclusive"] = exclusive
        if options:
            values["slurm.extra"] = [_option(name, value) for name, value in options.items()]
        return values


class LocalExecutor(_RunExecutor, local.LocalExecutor):
    """Jobs as processes of this machine, under the same rules as on a cluster."""

    job_class = Job  # type: ignore[assignment] # not submitit's own job, which has a process
    cluster = "local"

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {"setup", "signal_delay_s"}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        core.PicklingExecutor._internal_update_parameters(self, **kwargs)  # noqa: SLF001 - all nodes
        self._job_settings()

    def _limit_s(self) -> float:
        return float(self.parameters.get("timeout_min", DEFAULT_MINUTES)) * 60

    def _job_settings(self) -> dict[str, Any]:
        if self.parameters.get("setup"):
            raise UsageError(
                "setup is for a batch script, and a local job has none: set what it needs before "
                "this program starts"
            )
        if self.parameters.get("gpus_per_node"):
            log.info("gpus_per_node: a local job sees all GPUs of this machine")
        return {
            "slurm.nodes": str(self.parameters.get("nodes", 1)),
            "slurm.ranks_per_node": self.parameters.get("tasks_per_node", 1),
        }


EXECUTORS: dict[str, type[core.Executor]] = {
    SlurmExecutor.name(): SlurmExecutor,
    LocalExecutor.name(): LocalExecutor,
    submitit.DebugExecutor.name(): submitit.DebugExecutor,
}
"""In the place of submitit's; `debug` runs a call in this process, and is submitit's own."""


class AutoExecutor(submitit.AutoExecutor):
    """submitit's AutoExecutor, whose jobs are runs of hpctrain.

    Args:
        folder: Where the jobs' files lie, visible from all nodes; `%j` stands for the job's id.
        cluster: "slurm", "local" or "debug"; slurm if there is an sbatch, else local.
        settings: More of hpctrain's settings for the jobs, by "section.key".
        kwargs: The executors' own arguments, as `slurm_max_num_timeout`.

    Raises:
        ValueError: there is no such cluster.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        cluster: str | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.cluster = cluster or self.which()
        if self.cluster not in EXECUTORS:
            raise ValueError(f"AutoExecutor doesn't know any executor named {self.cluster}")
        for old, new in self._ctor_deprecated_args.items():
            if old in kwargs:
                warnings.warn(f"Setting '{old}' is deprecated. Use '{new}' instead.", stacklevel=2)
                kwargs[new] = kwargs.pop(old)
        for name in kwargs:
            prefix = name.partition("_")[0]
            if "_" not in name or prefix not in EXECUTORS:
                raise UsageError(
                    f"{name} is no argument: those of an executor begin with its name, e.g. "
                    f"slurm_max_num_timeout; there are {', '.join(EXECUTORS)}"
                )
        self._executor = flexible_init(EXECUTORS[self.cluster], Path(folder), **kwargs)
        if isinstance(self._executor, _RunExecutor):
            self._executor.settings = dict(settings or {})
        valid = self._valid_parameters()
        self._deprecated_args = {
            argument: f"{name}_{argument}"
            for name, executor in EXECUTORS.items()
            for argument in executor._valid_parameters()  # noqa: SLF001 - a plugin's own
            if argument not in valid
        }
        core.Executor.__init__(self, self._executor.folder, self._executor.parameters)

    @property
    def runs(self) -> Path:
        """The folder of the jobs' runs, for `hpctrain status --runs`."""
        if not isinstance(self._executor, _RunExecutor):
            raise UsageError(f"with cluster={self.cluster!r} no job is a run")
        return self._executor.runs

    @staticmethod
    def which() -> str:
        """The cluster that is detected."""
        return default_cluster(os.environ)


def _refuse(given: Mapping[str, Any]) -> None:
    """Refuse what no run can do."""
    if not str(given.get("nodes", 1)).isdigit():
        raise UsageError(
            f"nodes is {given['nodes']!r}; a job has a result for each task, so their number must "
            "be fixed: give one number of nodes, or use hpctrain.submit"
        )
    parallel = given.get("array_parallelism", 1)
    if not str(parallel).isdigit() or int(parallel) < 1:
        raise UsageError(
            f"array_parallelism is {parallel!r}; it takes how many jobs may run at once: 1 or more"
        )
    if given.get("use_srun") is False:
        raise UsageError("use_srun=False: the tasks of a run are started by srun; leave it out")
    if given.get("teardown"):
        raise UsageError(
            "teardown: nothing runs behind the tasks, since the job may come back; do it in the "
            "call itself, or once job.result() is there"
        )


def _value(name: str, value: Any) -> Any:
    """As the setting takes it."""
    if name in {"setup", "srun_args"}:
        return list(value)
    if name in {"nodes", "mem", "partition", "account", "qos", "constraint", "exclude"}:
        return str(value)
    try:
        return int(value)
    except ValueError:
        raise UsageError(
            f"{name} is {value!r}; it takes a number; slurm_gres asks for GPUs of a type"
        ) from None


def _option(name: str, value: Any) -> str:
    """An option of sbatch as one word."""
    option = f"--{name.replace('_', '-')}"
    return option if value is True else f"{option}={value}"


def _with_dependency(extra: Sequence[str], waits: str) -> list[str]:
    """The options with one more job to wait for."""
    own = [option for option in extra if option.startswith("--dependency=")]
    if not own:
        return [*extra, waits]
    joined = f"{own[-1]},{waits.partition('=')[2]}"
    return [*(option for option in extra if option not in own), joined]

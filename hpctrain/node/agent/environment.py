"""The environment of this node's ranks: what the site, the run and the job give, and who won.

The job's own environment (what sbatch handed on, what the site's modules and the setup lines have
set) wins over `hpctrain.toml` and `--env`, and these over the site's preset.

tests/unit/agent/test_environment.py, test_compile_cache.py and test_task_variables.py hold the
promises.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.cluster.site.environment import (
    Environment,
    Versions,
    derive,
    is_shown,
    locked_names,
    overridden,
    with_settings,
)
from hpctrain.core.base.env import (
    HPCTRAIN_AFTER,
    HPCTRAIN_CHECKPOINT,
    HPCTRAIN_CLUSTER,
    HPCTRAIN_JOB_END,
    HPCTRAIN_JOB_ID,
    HPCTRAIN_KILL_WAIT_S,
    HPCTRAIN_NET_PLUGIN_VERSION,
    HPCTRAIN_OUTPUT_DIR,
    HPCTRAIN_RESTARTS,
    HPCTRAIN_RESULTS,
    HPCTRAIN_RUN_DIR,
)
from hpctrain.core.base.files import replace_text
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import EnvironmentSet
from hpctrain.ledger.run.fence import look_anew

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.core.base.records import JobContext
    from hpctrain.core.settings.spec import Spec
    from hpctrain.ledger.run.layout import RunDir

log = logging.getLogger("hpctrain.agent")

COMPILE_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
COMPILE_CACHE_NAME = "hpctrain-compiled-{uid}"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


THE_JOB = "the job's own environment"


class RankEnvironment:
    """Puts into this process's environment what its ranks will inherit."""

    def __init__(self, run: RunDir, spec: Spec, context: JobContext) -> None:
        """Remember the job's environment; UsageError for another version's preset in spec.json."""
        self._run = run
        self._spec = spec
        self._context = context
        self._site = None
        if spec.preset is not None:
            from hpctrain.cluster.site.schema import Site

            self._site = Site.from_plain(spec.preset)
        self._job = dict(os.environ)
        self._touched: set[str] = set()

    def before_imports(self) -> None:
        """Set what can be known before torch is imported, since some libraries read it then."""
        _export_place(self._run, self._spec, self._context)
        self._apply(self._derive(Versions(), run_dir="")[1])

    def for_attempt(self, number: int) -> None:
        """Set everything for the attempt that begins; node 0 writes down what and who won.

        Called on every node, after torch was imported and before the attempt's ranks start.
        """
        look_anew(self._run.root, self._run.checkpoints, self._run.output)  # for this node's ranks
        directory = self._run.attempt(number)
        versions = versions_here()
        derived, final = self._derive(versions, run_dir=str(directory))
        self._apply(final)
        if self._context.node_rank == 0:
            self._record(number, versions, derived, final)

    def _derive(self, versions: Versions, *, run_dir: str) -> tuple[Environment, Environment]:
        """What the preset gives, and what is left of it once the run and the job have had a say."""
        spec, site = self._spec, self._site
        nodes = len(self._context.nodes)
        derived = derive(site, nodes=nodes, versions=versions, run_dir=run_dir)
        locked = locked_names(site, spec.unlocked) if site else set()
        own = with_settings(derived, spec.env, spec.env_origins)
        return derived, overridden(own, self._job, THE_JOB, locked=locked)

    def _apply(self, environment: Environment) -> None:
        for name in self._touched - environment.values.keys():
            if name in self._job:
                os.environ[name] = self._job[name]
            else:
                os.environ.pop(name, None)
        for name in environment.unset:
            os.environ.pop(name, None)
        for name, value in environment.values.items():
            os.environ[name] = value.value
        self._touched = {*environment.values, *environment.unset}

    def _record(
        self, number: int, versions: Versions, derived: Environment, final: Environment
    ) -> None:
        fact = EnvironmentSet(
            site=self._spec.site,
            nodes=len(self._context.nodes),
            versions=asdict(versions),
            overridden=tuple(_who_won(derived, final)),
            unset=tuple(name for name in final.unset if name in self._job),
            notes=tuple(final.notes),
        )
        ledger.append(self._run, fact, attempt=number)
        shown = {
            name: _shown(name, value.value) | {"origin": value.origin}
            for name, value in sorted(final.values.items())
        }
        path = self._run.environment(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(fact.fields_set() | {"values": shown}, indent=1) + "\n")


def versions_here() -> Versions:
    """Versions on this node. CUDA is not initialised: a forked rank could not use it any more."""
    import torch

    nccl = ""
    # A torch without NCCL has no such function; one with it may be without its library.
    with contextlib.suppress(AttributeError, ImportError, RuntimeError):
        numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        nccl = ".".join(str(number) for number in numbers[:3])
    return Versions(
        nccl=nccl,
        torch=str(torch.__version__),
        plugin=os.environ.get(HPCTRAIN_NET_PLUGIN_VERSION, ""),
        gpu=gpu_name(),
    )


def gpu_name(proc: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """Name of this node's first NVIDIA GPU as its driver tells it; "" where none does."""
    for path in sorted(proc.glob("*/information")):
        with contextlib.suppress(OSError):
            for line in path.read_text(errors="replace").splitlines():
                key, _, value = line.partition(":")
                if key.strip() == "Model":
                    return value.strip()
    return ""


def _export_place(run: RunDir, spec: Spec, context: JobContext) -> None:
    """Where the ranks stand in their job, and what torch's agent is to leave alone."""
    os.environ.setdefault(
        "OMP_NUM_THREADS", spec.env.get("OMP_NUM_THREADS", "1")
    )  # as torchrun does; more fight for the node's cores
    if COMPILE_CACHE_VARIABLE not in os.environ and COMPILE_CACHE_VARIABLE not in spec.env:
        os.environ[COMPILE_CACHE_VARIABLE] = str(compile_cache(run))
    os.environ[HPCTRAIN_RUN_DIR] = str(run.root)
    os.environ[HPCTRAIN_OUTPUT_DIR] = str(run.output)
    if spec.evaluates is not None:
        os.environ[HPCTRAIN_CHECKPOINT] = spec.evaluates.checkpoint
        os.environ[HPCTRAIN_RESULTS] = str(run.results)
    os.environ[HPCTRAIN_JOB_ID] = context.job_id
    os.environ.pop(HPCTRAIN_AFTER, None)  # a submit from inside a follower has its own
    if spec.after:
        os.environ[HPCTRAIN_AFTER] = os.pathsep.join(spec.after)
    os.environ[HPCTRAIN_RESTARTS] = str(context.restarts)
    os.environ[HPCTRAIN_CLUSTER] = spec.cluster
    os.environ[HPCTRAIN_KILL_WAIT_S] = f"{context.kill_wait_s:g}"
    if context.end_time is not None:
        os.environ[HPCTRAIN_JOB_END] = str(context.end_time)
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = (
        "1"  # no stale rank assignments in a second round
    )


def _who_won(derived: Environment, final: Environment) -> list[dict[str, str]]:
    """What the preset (or the flight recorder) gave and somebody else has set otherwise."""
    won = []
    for name, before in derived.values.items():
        now = final.values.get(name)
        if now is not None and now.origin != before.origin and now.value != before.value:
            won.append(
                {"name": name, "by": now.origin, "instead_of": before.origin}
                | _shown(name, now.value)
            )
    return won


def _shown(name: str, value: str) -> dict[str, str]:
    return {"value": value} if is_shown(name) else {}


def compile_cache(run: RunDir) -> Path:
    """The user's cache on this node, made if need be; where that is not his alone, the run's.

    torch itself takes a name in the temporary folder that everybody can guess, and runs what lies
    there. It makes the run's folder when it compiles something.
    """
    try:
        folder = Path(tempfile.gettempdir(), COMPILE_CACHE_NAME.format(uid=os.geteuid()))
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:  # also where a file or a dangling link has the name
        why = str(error)
    else:
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if is_own and not status.st_mode & _OTHERS_WRITE:
            return folder
        why = f"{folder} is not this user's alone"
    other = run.root / "compiled"
    log.warning("what torch compiles is kept in %s: %s", other, why)
    return other


def as_task(environ: Mapping[str, str]) -> dict[str, str]:
    """Return SLURM's task variables set to what a rank is; none if SLURM has not started it.

    SLURM starts one task on each node, the agent. A program that reads SLURM_PROCID, such as
    Lightning's SLURMEnvironment, would take itself for that task: of one rank per node. Variables
    of the job and the node (SLURM_JOB_ID, SLURM_NNODES, GPUs, CPUs) are true as they are. `environ`
    is the rank's, with torchrun's variables.
    """
    if "SLURM_PROCID" not in environ:
        return {}
    rank, local_rank = environ["RANK"], environ["LOCAL_RANK"]
    ranks, ranks_here = environ["WORLD_SIZE"], environ["LOCAL_WORLD_SIZE"]
    nodes = int(ranks) // int(ranks_here)
    per_node = ranks_here if nodes == 1 else f"{ranks_here}(x{nodes})"
    first = int(rank) - int(local_rank)
    ours = {
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": local_rank,
        "SLURM_NODEID": environ["GROUP_RANK"],
        "SLURM_NTASKS": ranks,
        "SLURM_NPROCS": ranks,
        "SLURM_NTASKS_PER_NODE": ranks_here,
        "SLURM_TASKS_PER_NODE": per_node,
    }
    of_step = {
        "SLURM_STEP_NUM_TASKS": ranks,
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_GTIDS": ",".join(str(first + number) for number in range(int(ranks_here))),
    }
    return ours | {name: value for name, value in of_step.items() if name in environ}

"""The embedded cluster: its login side, its job's control, its preflight nodes, and their files.

There is no daemon. Each job has a controller process (`entry/local_controller.py`), the only writer
of the job's record; everybody else writes request files and reads the record. Standard library
only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.scheduler.base import Accounting, Cluster, PreflightJob
from hpctrain.cluster.scheduler.slurm.command import clean
from hpctrain.core.base import clock
from hpctrain.core.base.env import (
    HPCTRAIN_LOCAL_DIR,
    HPCTRAIN_MASTER_ADDR,
    HPCTRAIN_NODES,
    HPCTRAIN_PORT,
    HPCTRAIN_PREFLIGHT_KEY,
)
from hpctrain.core.base.files import whole_file
from hpctrain.core.base.process import free_port, own_program
from hpctrain.core.base.records import EndReason, JobFacts, JobInfo, JobRequest, JobStart, JobState
from hpctrain.core.settings.check import node_range, time_s
from hpctrain.core.settings.spec import Spec, load_spec
from hpctrain.errors import ClusterError, ClusterUnreachable, UsageError
from hpctrain.ledger.run.event_fields import is_job_id
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.cluster.site.schema import Site
    from hpctrain.core.settings.schema import Settings


PREFIX = "local-"
REHEARSED_GRACE_S = 60.0
OVER = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMED_OUT})


def root() -> Path:
    """Where local jobs live: HPCTRAIN_LOCAL_DIR, or the user's state folder."""
    given = os.environ.get(HPCTRAIN_LOCAL_DIR)
    if given:
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "hpctrain" / "local"


@dataclass
class LocalJobRecord:
    """What is known of one local job."""

    job_id: str
    token: str
    run_dir: str
    min_nodes: int
    max_nodes: int
    time_s: float
    signal_lead_s: float
    state: str = JobState.PENDING
    reason: str | None = None
    restarts: int = 0
    nodes: list[str] = field(default_factory=list)
    controller_pid: int = 0
    controller_started: float = 0.0
    """Start time of the controller, from /proc: a reused pid is not mistaken for it."""
    start_time: float | None = None
    end_time: float | None = None
    preempt_time: float | None = None
    previous_end: str = "unknown"
    previous_stop: float | None = None
    """When the start before this one ended, seconds since the epoch."""
    starts: list[tuple[int, float, float | None, int]] = field(default_factory=list)
    """Restarts, beginning, end and nodes of every start so far."""
    after: list[str] = field(default_factory=list)
    """Jobs that must have ended well before the first start."""


def job_dir(job_id: str) -> Path:
    """Directory of a local job."""
    return root() / job_id


def create(record: LocalJobRecord) -> LocalJobRecord:
    """Give the job an id and a directory."""
    root().mkdir(parents=True, exist_ok=True)
    number = 1 + max((_number(path) for path in root().iterdir()), default=0)
    while True:
        record.job_id = f"{PREFIX}{number}"
        try:
            job_dir(record.job_id).mkdir()
        except FileExistsError:  # another terminal was faster
            number += 1
            continue
        write(record)
        return record


def write(record: LocalJobRecord) -> None:
    """Replace the record. The controller alone calls it once it runs."""
    with whole_file(job_dir(record.job_id) / "job.json") as staged:
        staged.write_text(json.dumps(asdict(record)))


def read(job_id: str) -> LocalJobRecord | None:
    """The record of a job; None when there is no such job."""
    try:
        return LocalJobRecord(**json.loads((job_dir(job_id) / "job.json").read_text()))
    except FileNotFoundError:
        return None


def all_jobs() -> list[LocalJobRecord]:
    """Every local job on this machine, oldest first."""
    if not root().is_dir():
        return []
    jobs = [read(path.name) for path in sorted(root().iterdir(), key=_number)]
    return [record for record in jobs if record is not None]


def request(job_id: str, operation: str, **fields: Any) -> None:
    """Drop a request for the job's controller.

    Raises:
        ClusterError: there is no such job, or it is over.
        ClusterUnreachable: its controller is gone.
    """
    record = read(job_id)
    if record is None:
        raise ClusterError(f"there is no local job {job_id}; `hpctrain local list` shows them")
    if record.state in OVER:
        raise ClusterError(f"local job {job_id} is over ({record.state.lower()})")
    if not is_controlled(record):
        raise ClusterUnreachable(
            f"the controller of local job {job_id} (pid {record.controller_pid}) is gone"
        )
    name = f"request-{clock.now_ns()}-{os.getpid()}"
    staged = job_dir(job_id) / f"{name}.new"
    staged.write_text(json.dumps({"operation": operation, **fields}))
    staged.rename(job_dir(job_id) / f"{name}.json")


def take_requests(job_id: str) -> list[dict[str, Any]]:
    """The requests dropped since the last call, oldest first. The controller alone calls it."""
    taken = []
    for path in sorted(job_dir(job_id).glob("request-*.json")):
        taken.append(json.loads(path.read_text()))
        path.unlink()
    return taken


def is_controlled(record: LocalJobRecord) -> bool:
    """Whether the job's controller process is alive; one that has yet to start counts as alive."""
    if record.controller_pid == 0:
        return True
    return process_start(record.controller_pid) == record.controller_started


def process_start(pid: int) -> float:
    """Start time of a process in clock ticks since boot; 0 when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    fields = stat.rsplit(")", 1)[1].split()
    return 0.0 if fields[0] == "Z" else float(fields[19])


def _number(path: Path) -> int:
    digits = path.name.removeprefix(PREFIX)
    return int(digits) if digits.isdigit() else 0


class LocalCluster(Cluster):
    """Implements `Cluster`."""

    name = "local"
    on_this_machine = True
    site = "local"
    has_dependencies = True
    without_effect = frozenset(
        {"partition", "account", "qos", "constraint", "reservation", "exclude", "mem", "network"}
        | {"extra", "srun_args"}
    )

    def missing(self, environ: Mapping[str, str]) -> str:
        """Nothing: there is always this machine."""
        return ""

    def here(self, environ: Mapping[str, str] | None = None) -> str:
        """No name: its jobs are known by their files alone."""
        return ""

    def notes(
        self,
        settings: Settings,
        origins: Mapping[str, str],
        site: Site | None,
        accounting: Accounting | None,
    ) -> list[str]:
        """Nothing starts in a container, or from a copy: it is a rehearsal, with this python.

        A job ends with its first lost node, so no spare takes a place, and nothing shrinks.
        """
        image, stage = settings.container.image, settings.environment.stage
        idle = [f"container.image {image}"] if image else []
        idle += [f"environment.stage {stage}"] if stage != "no" else []
        alive = settings.alive
        idle += [f"alive.spares {alive.spares}"] if alive.spares else []
        idle += [f"alive.shrink {alive.shrink}"] if alive.shrink != "no" else []
        return [f"{setting} has no effect with --cluster local" for setting in idle]

    def submit(self, request: JobRequest) -> str:
        """Start the job's controller, detached from this terminal."""
        import subprocess  # not for a dry run

        spec = load_spec(RunDir(request.run_dir).spec)
        low, high = node_range(spec.settings.slurm.nodes)
        record = create(
            LocalJobRecord(
                job_id="",
                token=request.token,
                run_dir=str(request.run_dir),
                min_nodes=low,
                max_nodes=high,
                time_s=time_s(spec.settings.slurm.time),
                signal_lead_s=spec.settings.slurm.signal_lead_s,
                reason="Dependency" if request.after else None,
                after=list(request.after),
            )
        )
        output = (request.run_dir / "jobs" / f"{request.token}.out").open("ab")
        with output:
            controller = subprocess.Popen(
                own_program("hpctrain.entry.local_controller", record.job_id, python=spec.python),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Ranks that saw the variables of a job around them would take its nodes for theirs.
                env=clean(os.environ).env,
            )
        # A notebook lives on: without a wait its ended controllers would stay as zombies.
        threading.Thread(target=controller.wait, name="hpctrain-local", daemon=True).start()
        return record.job_id

    def find_job(self, token: str) -> JobInfo | None:
        """The job of this submission."""
        for record in reversed(all_jobs()):
            if record.token == token:
                return _info(record)
        return None

    def job(self, job_id: str) -> JobInfo | None:
        """What is known of a job."""
        record = _read(job_id)
        return None if record is None else _info(record)

    def starts(self, job_ids: Sequence[str]) -> list[JobStart]:
        """Every start of these jobs, as their controllers wrote them down."""
        records = (_read(job_id) for job_id in job_ids)
        return [one for record in records if record is not None for one in _starts(record)]

    def bulk_query(self, job_ids: Sequence[str]) -> LocalCluster:
        """Itself: it reads files, and asks nobody."""
        return self

    def cancel(self, job_id: str) -> None:
        """Ask the controller to end the job."""
        if not is_job_id(job_id):
            raise ClusterError(f"the run's ledger names the job {job_id!r}, which is no job's id")
        request(job_id, "cancel")

    def follow(self, job_id: str, after: Sequence[str]) -> None:
        """Tell the controller whom to wait for."""
        request(job_id, "follow", after=list(after))

    def rehearse(self, job_id: str, *, time_limit: bool) -> None:
        """Preempt the job with a grace time; all its nodes are left for its next start."""
        record = _read(job_id)
        if time_limit or record is None:
            raise UsageError(f"{job_id}: a local job can be preempted; give it a short time limit")
        request(job_id, "preempt", leave=record.max_nodes, grace_s=REHEARSED_GRACE_S)

    def dropped(self, environ: Mapping[str, str], site: Site | None) -> list[str]:
        """A shell inside a job has variables of it, which would tell the ranks of another run."""
        return clean(environ).dropped

    def render(self, spec: Spec, run: RunDir, token: str) -> str:
        """A note for who looks for the script; a job's name is known by it."""
        start = f"{spec.python} -P -m hpctrain.entry.local_controller JOB_ID"
        return f"#!/bin/sh\n# local cluster: {start}\n"

    def preview(self, spec: Spec, run: RunDir, env: Callable[[], Mapping[str, str]]) -> str:
        """What each rank executes, as one would type it."""
        words = [f"{name}={value}" for name, value in env().items()]
        command = shlex.join(["env", *words, *spec.command()])
        return (
            f"# {spec.settings.slurm.nodes} node(s) as processes of this machine; each rank runs, "
            "with torchrun's environment:\n"
            f"cd {shlex.quote(spec.entry.cwd)} && {command}\n"
        )

    def start_preflight(
        self, spec: Spec, run: RunDir, token: str, environ: Mapping[str, str]
    ) -> PreflightJob:
        """Start the nodes as processes."""
        count = node_range(spec.settings.slurm.nodes)[1]
        return LocalNodes(run, token, count, spec.python, environ)


def _read(job_id: str) -> LocalJobRecord | None:
    """The job's record; none for what is no id, which might be a path to anywhere."""
    return read(job_id) if is_job_id(job_id) else None


def _starts(record: LocalJobRecord) -> list[JobStart]:
    """A start whose controller died has no end: the ledger knows when it was last heard of."""
    return [
        JobStart(
            record.job_id,
            index,
            JobState(record.state) if position == len(record.starts) - 1 else JobState.REQUEUED,
            start,
            end,
            ",".join(f"local{node}" for node in range(nodes)),
        )
        for position, (index, start, end, nodes) in enumerate(record.starts)
        if end is not None or is_controlled(record)
    ]


def _info(record: LocalJobRecord) -> JobInfo:
    alive = record.state not in OVER and is_controlled(record)
    lost = record.state not in OVER and not alive
    return JobInfo(
        job_id=record.job_id,
        state=JobState.NODE_FAILED if lost else JobState(record.state),
        alive=alive,
        reason=record.reason,
        nodes=",".join(record.nodes),
        restarts=record.restarts,
        start_time=record.start_time,
        end_time=record.end_time,
        script=f"{record.run_dir}/jobs/{record.token}.sh" if record.run_dir else "",
    )


class LocalControl:
    """Implements `JobControl`."""

    def __init__(self, job_id: str, *, restarts: int | None = None) -> None:
        """Speak of this job; its record counts the restarts."""
        self._job_id = job_id

    def facts(self) -> JobFacts:
        """What the controller has written of the job."""
        record = self._record()
        return JobFacts(
            state=JobState(record.state),
            restarts=record.restarts,
            reason=record.reason,
            preempt_time=record.preempt_time,
            end_time=record.end_time,
        )

    def previous_end(self) -> EndReason:
        """Why the previous start ended."""
        return EndReason(self._record().previous_end)

    def previous_stop(self) -> float | None:
        """When the previous start ended."""
        return self._record().previous_stop

    def exclude(self, nodes: Sequence[str]) -> None:
        """Without effect: all nodes are this machine."""

    def requeue(self) -> None:
        """Ask the controller to start the job again."""
        request(self._job_id, "requeue")

    def end(self) -> None:
        """Without effect: the controller ends it with its last agent."""

    def forbid_requeue(self) -> None:
        """Without effect: a job that ends by itself is not started again here."""

    def _record(self) -> LocalJobRecord:
        record = read(self._job_id)
        if record is None:
            raise ClusterUnreachable(f"the record of local job {self._job_id} is gone")
        return record


END_S = 5.0


class LocalNodes:
    """Nodes of `hpctrain preflight` as processes of this machine."""

    def __init__(
        self, run: RunDir, token: str, count: int, python: str, environ: Mapping[str, str]
    ) -> None:
        """Start `count` nodes with the interpreter `python`.

        Raises:
            ClusterError: no port is free.
        """
        import subprocess

        env = {
            **clean(environ).env,
            HPCTRAIN_NODES: ",".join(f"local{rank}" for rank in range(count)),
            HPCTRAIN_PORT: str(free_port(token, 0)),
            HPCTRAIN_MASTER_ADDR: "127.0.0.1",
            HPCTRAIN_PREFLIGHT_KEY: (run.root / "@key").read_text(),
        }
        self.name = f"{count} processes of this machine"
        with (run.jobs / f"{token}.out").open("ab") as output:
            self._nodes = [
                subprocess.Popen(
                    own_program(
                        "hpctrain.cluster.preflight.node",
                        *(str(run.root), str(rank)),
                        python=python,
                        unbuffered=True,
                    ),
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                for rank in range(count)
            ]

    def waits_for(self) -> str:
        """Nothing."""
        return ""

    def is_over(self) -> bool:
        """Whether all processes have ended."""
        return all(node.poll() is not None for node in self._nodes)

    def cancel(self) -> None:
        """Kill them, with what they have started."""
        import subprocess

        for node in self._nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(END_S)

    def release(self) -> None:
        """End what a node has left behind."""
        self.cancel()

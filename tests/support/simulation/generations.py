"""Jobs whose agents write real records: the whole life of an agent, and of those that go on after.

`hpctrain.node.agent.main` itself runs here, with the real fence, ledger and claims of a run on a
disk in memory; what it would import, fork or measure is stood in. Where the first node is lost the
others see to the job: one leads the next generation, or has the job requeued.
"""

from __future__ import annotations

import contextlib
import json
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.sealed import start as sealed_start
from hpctrain.core.base.env import HPCTRAIN_GENERATION
from hpctrain.core.base.records import JobContext, JobFacts
from hpctrain.core.settings.schema import AliveSettings, RunSettings, Settings, SlurmSettings
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.errors import HpctrainError
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run import fence
from hpctrain.ledger.run.layout import RunDir
from hpctrain.node.agent import ending as ending_module
from hpctrain.node.agent import (
    loss_ending,
    main,
    notify,
    rendezvous,
    sealing,
    signals,
)
from hpctrain.node.agent import node as agent_node
from hpctrain.node.agent.liveness import LIVENESS_PORT, LivenessPlace
from hpctrain.node.agent.loss_ending import Succeeds
from hpctrain.node.agent.rounds import RoundPart
from tests.support.simulation import agents
from tests.support.simulation.job import KILL_WAIT_S, PORT, SECRET, Job, Node, Setup
from tests.support.simulation.liveness import LivenessChannel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hpctrain.core.base.records import EndReason
    from hpctrain.ledger.run.events import Event
    from hpctrain.node.agent.loss_ending import Generation
    from tests.support.simulation.ranks import Program

JOB_ID = "7"
EXEC_S = 2.0
"""A process that takes itself over has imported all again within so long."""
KILLS_S = 1.0
"""So long after a requeue the scheduler has killed all that is left."""
PORTS_EACH = 1000
"""Of a generation."""


class Scheduler:
    """A job's own view of its scheduler: `hpctrain.cluster.scheduler.base.JobControl`."""

    def __init__(self, job: RecordedJob) -> None:
        self._job = job

    def facts(self) -> JobFacts:
        """See the protocol; so below."""
        return self._job.ask_scheduler()

    def requeue(self) -> None:
        job = self._job
        job.note("requeues the job")
        job.requeued.append(job.here().number)
        if job.scheduler.restarts == 0:
            job.scheduler = JobFacts("COMPLETING", restarts=1)
            job.simulation.after(KILLS_S, partial(job.fault, "over", 0))
        job.simulation.may_switch(1.0)

    def end(self) -> None:
        job = self._job
        job.note("ends the job")
        job.ended_by.append(job.here().number)
        job.simulation.after(KILLS_S, partial(job.fault, "over", 0))

    def exclude(self, nodes: Sequence[str]) -> None:
        del nodes

    def previous_end(self) -> EndReason:
        raise AssertionError("nobody starts again here")

    previous_stop = forbid_requeue = previous_end


class RecordedJob(Job):
    """A job with a run directory.

    Attributes:
        generations: Who went on in which generation, as each node has heard it.
        requeued: Nodes whose agents have asked for the job's next start.
        ended_by: Nodes whose agents have ended the job.
        codes: What each agent's task ended with.
    """

    def __init__(
        self, seed: int | str, setup: Setup, folder: Path, program: Program | None = None
    ) -> None:
        super().__init__(seed, setup, program)
        assert setup.size is not None
        self.run_dir = RunDir(folder)
        self.spec = _spec(setup, folder)
        self.generations: list[tuple[int, Generation]] = []
        self.requeued: list[int] = []
        self.ended_by: list[int] = []
        self.codes: dict[int, int] = {}
        self.control = Scheduler(self)

    def events(self) -> list[Event]:
        """The run's ledger."""
        return list(ledger.read(self.run_dir))

    def run(self, bound_s: float) -> Job:
        """See `Job.run`."""
        with _recorded(self):
            return super().run(bound_s)

    def _agent(self, node: Node) -> None:
        names = [one.name for one in self.nodes]
        context = JobContext(JOB_ID, 0, node.number, names, "n0", PORT, "", None, KILL_WAIT_S)
        generation: Generation | None = None
        while True:
            own = context if generation is None else generation.context(context)
            try:
                self.codes[node.number] = main._run_generation(
                    self.run_dir,
                    own,
                    self.control,
                    generation=generation,
                    replica_server="",
                )
            except Succeeds as succeeds:
                generation = succeeds.generation
                self._take_over(node, generation)
            except (HpctrainError, RuntimeError, TimeoutError, OSError) as error:
                self.note(f"raises {type(error).__name__}: {error}")
                node.error = error
                break
            else:
                break
        if node.number == 0:
            self.simulation.after(60.0, self._batch_script_ends)

    def _batch_script_ends(self) -> None:
        """The first node's task has ended: its batch script ends the job, if none goes on in it."""
        if not self.generations:
            self.fault("over", 0)

    def _take_over(self, node: Node, generation: Generation) -> None:
        self.note(f"goes on in generation {generation.number}, led by {generation.leader}")
        self.generations.append((node.number, generation))
        for end in node.children:
            end()
        node.children, node.connections, node.arrivals = [], [], []
        for rank in node.live_ranks():
            rank.end(-9)
        node.environ = {HPCTRAIN_GENERATION: json.dumps({**vars(generation)})}
        self.simulation.sleep(self.simulation.random.uniform(0.2, EXEC_S))

    def liveness_of(self, _spec: Any, context: JobContext, _secret: str) -> LivenessChannel:
        """See `hpctrain.node.agent.liveness.liveness_of`."""
        place = LivenessPlace(
            context.node_rank,
            len(context.nodes),
            context.master_addr,
            context.port + LIVENESS_PORT,
            self.setup.lease_s,
        )
        return LivenessChannel(self, place)

    def highest_step(self) -> int | None:
        """That of this node's ranks."""
        return max((rank.step for rank in self.here().round_ranks()), default=None)

    def free_port(self) -> int:
        """Of a new generation."""
        return PORT + PORTS_EACH * (1 + len(self.generations) + len(self.ports))


def _spec(setup: Setup, folder: Path) -> Spec:
    assert setup.size is not None
    least, most = setup.size.least, setup.size.most
    settings = Settings(
        slurm=SlurmSettings(nodes=f"{least}-{most}", ranks_per_node=setup.ranks),
        alive=AliveSettings(
            lease_s=setup.lease_s, shrink="auto", spares=setup.nodes - most, hang="off",
            desync="off", stragglers="off",
        ),
        run=RunSettings(restarts_in_job=setup.restarts, restart_pause_s=0.0, end_wait_s=0.0),
    )  # fmt: skip
    entry = Entry(kind="script", path=str(folder / "train.py"), cwd=str(folder))
    return Spec(folder.name, "id", 0.0, "slurm", "", entry, settings)


class _Environment:
    def for_attempt(self, number: int) -> None:
        """Nothing is set."""


class _NodeCheck:
    def begin(self) -> None:
        """Nothing is looked at."""

    def against(self) -> None:
        """All nodes are fit."""


def _agent_class(job: RecordedJob) -> type[agents.StayingAgent]:
    class OwnAgent(agents.StayingAgent):
        """Knows its job and its node."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self.job, self.place = job, job.here()
            super().__init__(*args, **options)
            self.place.agent = self

    return OwnAgent


def _stand_ins(job: RecordedJob) -> list[tuple[Any, str, Any]]:
    own_os = agents._Os(job)
    quiet: Any = lambda *_args, **_options: None  # noqa: E731
    return [
        (main, "job_spec", lambda _run: job.spec),
        (main, "start_secret", lambda *_: SECRET),
        (main, "liveness_of", job.liveness_of),
        (main, "NodeCheck", lambda *_: _NodeCheck()),
        (main, "NodeControl", lambda *_args, **_options: agents.Control(job)),
        (main, "_environment", lambda *_: _Environment()),
        (main, "_preload", lambda _: job.simulation.sleep(job.simulation.random.uniform(0, 1))),
        (main, "cpus_of_ranks", lambda *_args, **_options: []),
        (main, "hear_elastic", quiet),
        (main, "os", own_os),
        (main, "heartbeat", SimpleNamespace(highest_step=lambda _folder: job.highest_step())),
        (agent_node, "InPlaceAgent", _agent_class(job)),
        (sealed_start, "resume_at_start", lambda *_args, **_options: None),
        (sealing, "SealWatch", lambda *_args, **_options: RoundPart()),
        (signals, "arrivals", lambda: tuple(job.here().arrivals)),
        (signals, "ignore_all", quiet),
        (loss_ending, "os", own_os),
        (loss_ending, "free_port", lambda *_: job.free_port()),
        (loss_ending, "addresses", lambda _address, _number: ("", job.here().name)),
        (loss_ending, "notify", quiet),
        (ending_module, "notify", quiet),
        (notify, "notify", quiet),
        (fence, "look_anew", lambda *_: job.simulation.may_switch()),
        (rendezvous, "fold_nodes", ", ".join),
    ]


@contextlib.contextmanager
def _recorded(job: RecordedJob) -> Iterator[None]:
    before = []
    try:
        for module, name, value in _stand_ins(job):
            before.append((module, name, getattr(module, name)))
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in reversed(before):
            setattr(module, name, value)

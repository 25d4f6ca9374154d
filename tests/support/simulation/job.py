"""A simulated job: its machines, agents and ranks, its scheduler, and what is done to them."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.process import PORTS
from hpctrain.core.base.records import JobContext, JobFacts
from hpctrain.errors import ClusterError, ClusterUnreachable
from hpctrain.ledger.run.fence import Attempt as Fence
from hpctrain.node.agent.in_place import InPlaceRendezvous
from hpctrain.node.agent.liveness import EARLY_END_S, LivenessPlace
from hpctrain.node.agent.rendezvous import Rendezvous
from hpctrain.node.agent.rounds import NothingToResume, RoundHooks, RoundPart
from hpctrain.node.agent.signals import Arrival
from hpctrain.node.agent.stop_deadline import StopDeadline
from hpctrain.node.agent.stop_notice import StopNotice
from hpctrain.node.hangs.verdict import Used
from tests.support.agent_parts import NO_LOOKS
from tests.support.simulation import agents
from tests.support.simulation.kernel import EPOCH_S, Bell, Machine, MachineClock, Simulation, Task
from tests.support.simulation.network import Network
from tests.support.simulation.ranks import Attempt, Program, Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from hpctrain.node.agent.in_place import RoundSize
    from hpctrain.node.agent.rounds import RoundEnd
    from hpctrain.node.hangs.standing import HangLimits
    from tests.support.simulation.liveness import First, LivenessChannel
    from tests.support.simulation.stores import Store, StoreServer

SECRET = "of the simulation"  # noqa: S105 - of a test
PORT = 20_000
KILL_WAIT_S = 30.0


@dataclass
class Setup:
    """What a job is made of.

    Attributes:
        nodes: How many it has.
        ranks: Of each node.
        size: How many nodes a round may have; None where all have to come, and one lost is the end.
        lease_s: See the setting.
        restarts: So often may ranks start again after a crash.
        limits: For hangs.
        end_wait_s: See the setting.
        listens: The program hears of stops by itself.
        come_s: Agents come up within so long.
        end_s: The job's time limit; None for none.
        margin_s: `run.stop_margin_s`.
    """

    nodes: int = 3
    ranks: int = 1
    size: RoundSize | None = None
    lease_s: float = 2.0
    restarts: int = 3
    limits: HangLimits = NO_LOOKS
    end_wait_s: float = 0.0
    listens: bool = True
    come_s: float = 1.0
    end_s: float | None = None
    margin_s: float = 10.0


class Node:
    """A machine of the job, and what runs on it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.environ: dict[str, str] = {}
        self.arrivals: list[Arrival] = []
        self.children: list[Callable[[], None]] = []
        self.connections: list[Store] = []
        self.ranks: list[Rank] = []
        self.lacks_control = self.lacks_board = False
        self.control_died_s: float | None = None
        self.lines: list[Any] = []
        self.boards = self.stop_files = 0
        self.ended_s: float | None = None
        self.liveness: LivenessChannel | None = None
        self.task: Task | None = None
        self.agent: Any = None
        self.is_killed = False
        self.error: Exception | None = None
        self.left_out: Any = None

    @property
    def name(self) -> str:
        """Its name."""
        return self.machine.name

    @property
    def number(self) -> int:
        """Its number in the job."""
        return self.machine.number

    def live_ranks(self) -> list[Rank]:
        """Whose processes are there."""
        return [rank for rank in self.ranks if rank.is_alive]

    def round_ranks(self) -> list[Rank]:
        """Those of the newest attempt that began here."""
        newest = self.ranks[-1].attempt if self.ranks else None
        return [rank for rank in self.ranks if rank.attempt is newest]


@dataclass
class Verdict:
    """What an agent has heard of a round's end."""

    at_s: float
    node: int
    round: int
    members: tuple[int, ...]
    end: RoundEnd
    job_id: str = ""


@dataclass
class Fault:
    """Something that is done to a node, so that a verdict may name it."""

    at_s: float
    kind: str
    node: int
    until_s: float = float("inf")


class Job:
    """All of it.

    Attributes:
        facts: What node 0 has written down: when, about which attempt, what.
        attempts: The ranks of each attempt, by number.
        verdicts: What agents have heard.
        faults: What was done.
    """

    def __init__(self, seed: int | str, setup: Setup, program: Program | None = None) -> None:
        self.simulation = Simulation(seed)
        self.setup, self.program = setup, program or Program()
        rng = self.simulation.random
        self.network = Network(self.simulation)
        self.nodes = [Node(Machine(number, f"n{number}", rng)) for number in range(setup.nodes)]
        self.ports: dict[int, StoreServer] = {}
        self.served = Bell()
        self.channels: dict[int, First] = {}
        self.facts: list[tuple[float, int, Any]] = []
        self.attempts: dict[int, Attempt] = {}
        self.begun: list[tuple[int, tuple[str, ...], tuple[str, ...], int]] = []
        self.begun_at_s: list[float] = []
        self.verdicts: list[Verdict] = []
        self.faults: list[Fault] = []
        self.losses: list[tuple[str, bool, tuple[int, ...] | None]] = []
        self.documents: list[str] = []
        self.bad: dict[str, str] = {}
        self.crashes: list[Any] = []
        self.went_on: list[str] = []
        self.may_go_on = True
        self.is_stop_asked = False
        self.asked_stacks = ""
        self.scheduler = JobFacts("RUNNING", restarts=0, end_time=self._wall(setup.end_s))
        self.is_scheduler_silent = False
        self.listens = setup.listens
        self.hears = rng.choice(["file", "term"])
        self.sealed: list[tuple[int, Any]] = []
        self.switch_share = rng.choice([0.02, 0.1, 0.4])
        self.poll_stretch = rng.choice([1.0, 2.0, 4.0, 6.0])
        self.reads_s = 0.0
        self.odd_counts: dict[int, int] = {}
        self.end: RoundEnd | None = None
        self.stood: list[tuple[int, int, str, float]] = []
        self.asked: dict[str, float] = {}
        self.answered: dict[str, float] = {}
        self.signalled: list[tuple[float, str]] = []
        self.orphans: list[int] = []
        self.stop_how = ""
        self.copied: list[tuple[int, int, tuple[int, ...], str]] = []
        self.looks_at_s: list[float] = []
        self.warned: list[tuple[int, str]] = []
        self.saves_copies = False
        self.misnamed: list[str] = []
        self.first_ended_s: float | None = None
        self.lost_at_s: dict[str, float] = {}
        self.bad_at_s: dict[str, float] = {}
        self.has_full_disk = False
        self.was_killed_at_s: float | None = None
        self.has_no_room = False
        self.watchers: list[Callable[[], None]] = []

    # ---- the run

    def run(self, bound_s: float) -> Job:
        """Have all agents come, and go on until they have ended.

        Raises:
            Stuck: they do not end within the bound.
        """
        with agents.installed(self):
            rng = self.simulation.random
            for node in self.nodes:
                self.simulation.after(
                    rng.uniform(0, self.setup.come_s), lambda node=node: self.begin(node)
                )
            try:
                self.simulation.run(bound_s, self._is_over)
            finally:
                self.simulation.close()
        return self

    def begin(self, node: Node, body: Callable[[Node], None] | None = None) -> None:
        """A node's agent comes up."""
        if node.machine.has_power and not node.is_killed:
            what = body or self._agent
            node.task = self.simulation.start(
                f"agent of {node.name}", lambda: what(node), node.machine
            )

    def _is_over(self) -> bool:
        return all(self._has_ended(node) for node in self.nodes)

    def _has_ended(self, node: Node) -> bool:
        if not node.machine.has_power or node.is_killed:
            return True
        return node.task is not None and node.task.is_over

    def here(self) -> Node:
        """The node whose code runs."""
        task = self.simulation.current
        assert task is not None
        assert task.machine is not None
        return self.nodes[task.machine.number]

    def note(self, words: str) -> None:
        """Write down what happens."""
        self.simulation.note(words)

    def _wall(self, at_s: float | None) -> float | None:
        return None if at_s is None else EPOCH_S + at_s

    # ---- an agent's life

    def _agent(self, node: Node) -> None:
        setup = self.setup
        names = [one.name for one in self.nodes[: setup.nodes]]
        context = JobContext(
            "1", 0, node.number, names, "n0", PORT, "", self._wall(setup.end_s), KILL_WAIT_S
        )
        time = MachineClock(self.simulation)
        liveness = None
        rendezvous: Any
        if setup.size is None:
            rendezvous = Rendezvous("n0", PORT, node.number, names, run_id="1", timeout_s=600)
        else:
            from tests.support.simulation.liveness import LivenessChannel

            place = LivenessPlace(node.number, len(names), "n0", PORT + PORTS - 3, setup.lease_s)
            liveness = LivenessChannel(self, place)
            rendezvous = InPlaceRendezvous(
                liveness, names, port=PORT, run_id="1", timeout_s=600, size=setup.size, fits=bool
            )
        agent = self.make_agent(node, rendezvous, context, time)
        try:
            agent.run()
        except (ClusterError, RuntimeError, TimeoutError, OSError, NothingToResume) as error:
            self.note(f"raises {error}")
            node.error = error
        finally:
            rendezvous.close()
        if node.number == 0:
            self.end = agent.end
        node.left_out = getattr(agent, "left_out", None)
        if node.left_out is not None and node.left_out.first_is_gone:
            self.orphaned(node)
        if node.number == 0:
            self.first_ended_s = self.simulation.now_s
        if liveness is not None:
            if node.number == 0:
                liveness.end("done", EARLY_END_S)
            liveness.stop()
        node.ended_s = self.simulation.now_s

    def orphaned(self, node: Node) -> None:
        """A node has not heard of the first one for too long: others see to the job."""
        self.note("the first node is gone")
        self.orphans.append(node.number)

    def make_agent(self, node: Node, rendezvous: Any, context: JobContext, time: Any) -> Any:
        """The agent of a node."""
        from torch.distributed.elastic.agent.server.api import WorkerSpec

        setup = self.setup
        spec = WorkerSpec(
            role="rank",
            local_world_size=setup.ranks,
            entrypoint=print,
            rdzv_handler=rendezvous,
            max_restarts=1_000_000,
            monitor_interval=0.1,
            master_addr="n0",
            master_port=PORT if setup.size is None else None,
        )
        hooks = self._hooks(rendezvous, context, time) if node.number == 0 else None
        kind = agents.Agent if setup.size is None else agents.StayingAgent
        node.agent = agent = kind(
            spec,
            node=node.name,
            attempt_dir=lambda _number: agents.NO_PATH,
            hooks=hooks,
            start_method="fork",
            before_ranks=lambda _number: None,
            secret=SECRET,
            end_wait_s=setup.end_wait_s,
            control=agents.Control(self),
            hang_limits=setup.limits,
        )
        agent.job, agent.place = self, node
        if self.saves_copies and isinstance(agent, agents.StayingAgent):
            agent.run_of_copies = agents.NO_PATH
        return agent

    def _hooks(self, rendezvous: Any, context: JobContext, time: Any) -> RoundHooks:
        deadline = StopDeadline(
            context,
            arrivals=lambda: tuple(self.nodes[0].arrivals),
            ask=self.ask_scheduler,
            stop_margin_s=self.setup.margin_s,
        )
        self.deadline = deadline
        run: Any = type("Run", (), {"stop_request": None})()

        def begin(world_size: int) -> Fence:
            if self.begun and self.has_no_room:
                raise OSError("no space for another attempt")
            number = len(self.begun) + 1
            self.begun_at_s.append(self.simulation.now_s)
            self.begun.append((number, rendezvous.names(), rendezvous.spares, world_size))
            self.note(f"attempt {number} of {rendezvous.names()}")
            self.simulation.may_switch()
            return Fence(number, "token", "1", 0, time.time())

        def lost(loss: Any, members: tuple[int, ...] | None) -> None:
            self.note(f"lost: {loss}, goes on with {members}")
            if loss.name in rendezvous.names() and not loss.was_member:
                self.misnamed.append(loss.name)
            self.lost_at_s[loss.name] = self.simulation.now_s
            self.losses.append((loss.name, loss.was_member, members))

        return RoundHooks(
            begin,
            deadline,
            self._may_restart,
            StopNotice(run, context, deadline, lead_s=10.0).look,
            resume=lambda _attempt, _on_bytes: None,
            sealing=self._sealing,
            may_go_on=self._may_go_on,
            lost=lost,
            record=self.record,
            asked_stacks=lambda: self.asked_stacks,
        )

    def _sealing(self, attempt: Fence) -> RoundPart:
        return _Sealing(self, attempt.number)

    def _may_restart(self, failure: Any) -> bool:
        self.crashes.append(failure)
        self.note(f"failed: {failure and failure.summary}")
        if self.is_stop_asked:  # the ledger has it, and no attempt follows a cancelled one
            return False
        if self.bad and not self.nodes[0].agent.leave_out(self.bad):
            return False
        return len(self.crashes) <= self.setup.restarts

    def _may_go_on(self, why: str) -> bool:
        self.went_on.append(why)
        return self.may_go_on and not self.is_left_behind()

    def is_left_behind(self) -> bool:
        """Whether others may have gone on without the first node, as the run's records say."""
        hurting = {"power", "dies", "freezes", "cut", "liveness"}
        was_hurt = any(fault.node == 0 and fault.kind in hurting for fault in self.faults)
        return bool(self.orphans) and was_hurt

    def name_bad(self, name: str) -> None:
        """Guards name a node."""
        self.bad[name] = "guards named it"
        self.bad_at_s[name] = self.simulation.now_s

    def record(self, fact: Any) -> None:
        """Node 0 writes something down."""
        self.note(f"{fact}")
        self.facts.append((self.simulation.now_s, len(self.begun), fact))

    def verdict(self, node: Node, rendezvous: Any, end: RoundEnd) -> None:
        """An agent has heard how a round ended."""
        self.note(f"hears {end.ending}, restart {end.restart}: {end.why}")
        self.verdicts.append(
            Verdict(
                self.simulation.now_s,
                node.number,
                rendezvous.round,
                rendezvous.members,
                end,
                rendezvous._job if hasattr(rendezvous, "_job") else "",
            )
        )

    # ---- what agents ask for

    def start_ranks(
        self, node: Node, number: int, numbers: Sequence[int], world_size: int
    ) -> list[Rank]:
        """Ranks of an attempt begin on a node."""
        if number not in self.attempts:
            self.attempts[number] = Attempt(self, number, world_size)
        node.control_died_s = None
        begun = self.attempts[number].start(node, numbers)
        for watch in self.watchers:
            watch()
        return begun

    def ask_scheduler(self) -> JobFacts:
        """What the scheduler says of the job."""
        self.simulation.sleep(self.simulation.random.uniform(0.0, 0.1))
        if self.is_scheduler_silent:
            raise ClusterUnreachable("silent")
        return self.scheduler

    def counts(self, node: Node) -> list[dict[int, int]]:
        """How many collectives each rank has called at which tick."""
        return [
            {
                tick: 2 * tick + 2 - self._fewer(rank, tick)
                for tick in range(max(0, rank.step - 4), rank.step)
            }
            for rank in node.round_ranks()
        ]

    def _fewer(self, rank: Rank, tick: int) -> int:
        since = self.odd_counts.get(rank.number)
        return 1 if since is not None and tick >= since else 0

    def _by_pid(self, pids: Collection[int]) -> list[Rank]:
        return [rank for node in self.nodes for rank in node.ranks if rank.pid in pids]

    def used(self, pids: Collection[int]) -> dict[int, Any]:
        """What ranks have used."""
        return {rank.pid: self._use(rank) for rank in self._by_pid(pids) if rank.is_alive}

    uses = used

    def _use(self, rank: Rank) -> Used:
        lives = rank.state in {"runs", "computes", "starts", "works"}
        return Used(self.simulation.now_s if lives else 0.0, 0)

    def stop_ranks(self, node: Node, cause: str) -> None:
        """The node's ranks see that they should leave."""
        del cause
        for rank in node.live_ranks():
            self.simulation.after(
                self.simulation.random.uniform(0, 0.2),
                lambda rank=rank: rank.attempt.told(rank),
                node.machine,
            )

    def send_term(self, node: Node, pids: set[int]) -> None:
        """SIGTERM to ranks that catch it."""
        for rank in self._by_pid(pids):
            if rank.state != "starts" and self.hears == "term":
                pids.discard(rank.pid)
                rank.attempt.told(rank)

    def began_s(self, number: int) -> float:
        """When an attempt's first ranks began; at once where it had none."""
        attempt = self.attempts.get(number)
        return float("-inf") if attempt is None else attempt.began_s

    @property
    def size_most(self) -> int:
        """So many nodes at most has a round."""
        return self.setup.nodes if self.setup.size is None else self.setup.size.most

    def round_end_s(self, number: int) -> float:
        """When the agents heard how an attempt had ended."""
        heard = [one.at_s for one in self.verdicts if one.round == number - 1]
        return min(heard, default=self.was_killed_at_s or self.simulation.now_s)

    # ---- what is done to it

    def ask_for_stacks(self, token: str) -> None:
        """A user wants to know where the ranks are."""
        self.asked_stacks = token
        self.asked[token] = self.simulation.now_s

    def wrote(self, text: str) -> None:
        """Node 0 writes a document."""
        if self.has_full_disk:
            raise OSError("no room")
        token = json.loads(text)["token"]
        if token:
            self.answered[token] = self.simulation.now_s
        self.documents.append(text)

    def signal(self, signum: signal.Signals) -> None:
        """The scheduler signals every process of the job, a node after the other."""
        self.note(f"{signum.name} comes")
        self.signalled.append((self.simulation.now_s, signum.name))
        for node in self.nodes:
            delay_s = self.simulation.random.uniform(0, 0.5)
            self.simulation.after(delay_s, lambda node=node: self._arrive(node, signum))

    def _arrive(self, node: Node, signum: signal.Signals) -> None:
        def heard() -> None:
            at_s = self.simulation.now_s + node.machine.booted_s
            node.arrivals.append(Arrival(signum, at_s))
            if self.listens or (signum == signal.SIGTERM and self.hears == "term"):
                self.stop_ranks(node, signum.name)

        self.simulation.after(0.0, heard, node.machine)

    def fault(self, kind: str, node: int, *, for_s: float = float("inf")) -> None:
        """Something happens to a node now.

        Args:
            kind: "power" (nothing answers any more), "dies" (its processes are killed), "freezes",
                "cut" (from node 0), "agent" (its agent is killed), "rank" (one is killed),
                "raises" (one does), "hangs" (one does).
            node: Which.
            for_s: So long.
        """
        until_s = self.simulation.now_s + for_s
        self.faults.append(Fault(self.simulation.now_s, kind, node, until_s))
        self.note(f"{kind} n{node}")
        getattr(self, f"_fault_{kind}")(self.nodes[node], for_s)

    def _fault_power(self, node: Node, _: float) -> None:
        node.machine.has_power = False
        self.simulation.ring(self.network.changed)
        if self.program.peers_raise:  # at last their connections time out
            delay_s = self.simulation.random.uniform(5.0, 20.0)
            self.simulation.after(delay_s, self._time_out)

    def _time_out(self) -> None:
        for attempt in self.attempts.values():
            attempt.look()

    def _fault_dies(self, node: Node, _: float) -> None:
        self.kill_agent(node, "dies")

    def _fault_over(self, node: Node, _: float) -> None:
        """The scheduler kills all that is left of the job."""
        del node
        for one in self.nodes:
            if not self._has_ended(one):
                self.was_killed_at_s = self.simulation.now_s
                self.kill_agent(one, "is killed by the scheduler")

    def _fault_liveness(self, node: Node, _: float) -> None:
        if node.liveness is not None:
            node.liveness.die()

    def _fault_control(self, node: Node, _: float) -> None:
        """There is no port for its ranks' agreement at the next start."""
        node.lacks_control = True

    def _fault_controls_end(self, node: Node, _: float) -> None:
        """The process of its ranks' agreement ends: they leave by that."""
        if node.live_ranks() and node.control_died_s is None:
            node.control_died_s = self.simulation.now_s
            for rank in node.live_ranks():
                rank.fail(1, "ControlLost: the node's process has ended")

    def _fault_store(self, node: Node, _: float) -> None:
        """The process that serves the agents' store is killed; not while the agents meet."""
        if not any(one.live_ranks() for one in self.nodes):
            return
        for server in self.ports.values():
            if server.node is node and server.is_up:
                server.end(self)

    def _fault_store_stops(self, node: Node, _: float) -> None:
        """SIGSTOP to the process that serves the agents' store: it answers nothing."""
        for server in self.ports.values():
            server.is_stopped = server.node is node

    def _fault_agent_stops(self, node: Node, _: float) -> None:
        """SIGSTOP to the agent alone: its ranks go on."""
        assert node.task is not None
        node.task.is_stopped = True

    def _fault_agent(self, node: Node, _: float) -> None:
        self.kill_agent(node, "is killed")

    def _fault_freezes(self, node: Node, for_s: float) -> None:
        self.simulation.freeze(node.machine)
        if for_s != float("inf"):
            self.simulation.after(for_s, lambda: self._thaw(node))

    def _thaw(self, node: Node) -> None:
        self.simulation.thaw(node.machine)
        self.simulation.ring(self.network.changed)

    def _fault_cut(self, node: Node, for_s: float) -> None:
        for other in self.nodes:
            if other is not node:
                self.network.cut(node.machine, other.machine)
        if for_s != float("inf"):
            self.simulation.after(for_s, self.network.heal)

    def _fault_rank(self, node: Node, _: float) -> None:
        for rank in node.live_ranks()[:1]:
            rank.fail(-9, "", kind="signal")

    def _fault_raises(self, node: Node, _: float) -> None:
        for rank in node.live_ranks()[:1]:
            rank.fail(1, "ValueError: the cause")

    def _fault_hangs(self, node: Node, for_s: float) -> None:
        self._stand(node, "hangs", for_s)

    def _fault_computes(self, node: Node, for_s: float) -> None:
        self._stand(node, "computes", for_s)

    def _fault_stopped(self, node: Node, for_s: float) -> None:
        self._stand(node, "stopped", for_s)

    def _stand(self, node: Node, how: str, for_s: float) -> None:
        for rank in node.live_ranks()[:1]:
            if rank.state == "runs":
                rank.state = how
                self.stood.append((rank.attempt.number, rank.number, how, rank.since_s))
                if for_s != float("inf"):
                    self.simulation.after(for_s, lambda rank=rank: self._wake(rank), node.machine)

    def _wake(self, rank: Rank) -> None:
        if rank.state in {"hangs", "computes", "stopped"}:
            rank.state = "runs"
            rank.frame += 1
            rank.attempt.begin_steps()

    def kill_agent(self, node: Node, why: str) -> None:
        """SIGKILL to an agent: its ranks and children die with it."""
        self.note(f"agent of {node.name} {why}")
        node.is_killed = True
        if node.task is not None and not node.task.is_over:
            self.simulation.kill(node.task) if node.task is not self.simulation.current else None
        for rank in node.live_ranks():
            rank.end(-9)
        for end in node.children:
            end()


class _Sealing(RoundPart):
    """What would register the program's files beside the ranks of an attempt."""

    def __init__(self, job: Job, attempt: int) -> None:
        self._job, self._attempt = job, attempt
        self.returned = False

    def verdict(self, end: RoundEnd) -> None:
        """See `hpctrain.node.agent.sealing.SealWatch`."""
        self.returned = end.ending == "left"

    def __exit__(self, *_: object) -> None:
        self._job.sealed.append((self._attempt, self))

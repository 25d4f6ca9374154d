"""Rounds of ranks whose tree is disturbed: agents, node processes and ranks as processes, for real.

A round is drawn from a seed: how many nodes and ranks, what ranks wish and when, and one fault. The
test's process is the hand that kills and stops; each rank writes what it does to a file of its own,
so that also what a killed one did is known. `found_wrong` says what may not be.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import socket
import time
import traceback
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from hpctrain.core.base.process import die_with_parent
from hpctrain.errors import ControlLost
from hpctrain.node.control.board import BOARD, Board
from hpctrain.node.control.client import ControlClient
from hpctrain.node.control.collectives import parent_of
from hpctrain.node.control.node_process import NodeProcess
from hpctrain.node.control.node_server import TreePlace
from tests.support.bad_network import BadNetwork, Disturbance

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = "127.0.0.1"
SECRET = "a secret of this campaign"  # noqa: S105 - of nobody
PROCESS_FAULTS = ("kill node", "kill agent", "kill rank", "stop node", "stop rank", "stop all")
FRAME_FAULTS = (
    *("delay", "duplicate", "cut", "reset", "tear", "flip", "flip_length", "swap", "swallow"),
    *("two cuts", "greet twice"),
)
LASTING = ("stop node for long", "stop all for long")
HARMLESS = {"none", "delay", "duplicate", "stop node", "stop rank", "stop all"}
"""What has to end in a stop of all ranks."""
SHORT_PATIENCE_S = 0.7
BOUND_S = 40.0
"""No round may take longer, on however busy a machine."""


@dataclass(frozen=True)
class Plan:
    """A round.

    Attributes:
        seed: All that is drawn while it runs comes from it.
        fault: What will happen.
        nodes: How many.
        per_node: Ranks of each.
        fanout: Children of a node.
        step_s: A step takes up to so long.
        ticks: Each rank wishes a stop at this tick, so that a round ends whoever died.
        gather_every: Ticks between gathers; 0 for none.
        wishes: By rank and tick: what it wishes.
        target: Node or rank that is hit.
        trigger: A rank and a tick at which the process fault comes; with no rank, a frame.
        stopped_s: How long something is stopped.
        disturbances: Of the network.
        tells_agent: Whether an agent notices that a rank of its died.
        is_early: Ranks start before the nodes have met.
        patience_s: Of nodes and ranks.
    """

    seed: int
    fault: str
    nodes: int
    per_node: int
    fanout: int
    step_s: float
    ticks: int
    gather_every: int
    wishes: dict[tuple[int, int], dict[str, int]]
    target: int
    trigger: tuple[int, int] | None
    stopped_s: float
    disturbances: tuple[Disturbance, ...]
    tells_agent: bool
    is_early: bool
    patience_s: float

    @property
    def ranks(self) -> int:
        """In all."""
        return self.nodes * self.per_node

    @property
    def gather_s(self) -> float:
        """So long a gather waits: for one that is dead not longer than a test may take."""
        return 10.0 + self.stopped_s if self.fault in HARMLESS else 1.5

    @property
    def hits_process(self) -> bool:
        """Whether the test's hand has something to do."""
        return self.fault.startswith(("kill", "stop"))


def drawn(
    seed: int, fault: str, *, most: tuple[int, int] = (5, 3), stopped_s: float | None = None
) -> Plan:
    """A round.

    Args:
        seed: For all that is drawn.
        fault: What will happen in it.
        most: Nodes, and ranks of each.
        stopped_s: How long something is stopped, where that is not drawn.
    """
    draw = random.Random(seed)
    needs_link = fault in FRAME_FAULTS
    nodes, per_node = draw.randint(2 if needs_link else 1, most[0]), draw.randint(1, most[1])
    ranks, ticks = nodes * per_node, draw.randint(30, 150)
    is_lasting = fault in LASTING or fault in {"swallow", "flip_length"}
    wishes: dict[tuple[int, int], dict[str, int]] = {}
    for wish in ({"stop": draw.randint(1, 5)}, {"save": 1}, {"save": 2}, {"warned": 1}):
        first = ticks * 2 // 3 if "stop" in wish else 0  # a round that is over has no fault
        if draw.random() < 0.8:
            at = (draw.randrange(ranks), draw.randrange(first, ticks))
            wishes.setdefault(at, {}).update(wish)
    trigger = (draw.randrange(ranks), draw.randrange(ticks * 2 // 3))
    by_frame = nodes > 1 and draw.random() < 0.3
    if draw.random() < 0.2:  # soon: in the greeting, or shortly behind it
        trigger = (trigger[0], 0)
    other = {"two cuts": ["cut", "cut"], "greet twice": ["duplicate"]}
    kinds = other.get(fault, [fault] if needs_link else [])
    if not kinds and by_frame:
        kinds = ["tell"]
    first = 3 if fault == "duplicate" else 0  # a greeting that comes twice is no greeting
    frames = 1 if fault == "greet twice" else draw.choice((4, 10, 20))
    links = draw.sample(range(1, nodes), min(len(kinds), nodes - 1))
    frame = first + draw.randrange(frames)
    disturbances = tuple(
        Disturbance(
            child,
            draw.choice(("up", "down")),
            frame,
            kind,  # type: ignore[arg-type]
            draw.random(),
            draw.choice((0.01, 0.1, 0.6)),
        )
        for child, kind in zip(links, kinds, strict=False)
    )
    long_s = 2.5 * SHORT_PATIENCE_S if is_lasting else draw.choice((0.05, 0.2, 0.5, 2.0))
    return Plan(
        seed=seed,
        fault=fault,
        nodes=nodes,
        per_node=per_node,
        fanout=draw.choice((1, 2, 2, 4)),
        step_s=draw.choice((0.0, 0.002, 0.01)),
        ticks=ticks,
        gather_every=draw.choice((0, 5, 20)),
        wishes=wishes,
        target=draw.randrange(ranks if "rank" in fault else nodes),
        trigger=None if by_frame and not needs_link else trigger,
        stopped_s=long_s if stopped_s is None else stopped_s,
        disturbances=disturbances,
        tells_agent=draw.random() < 0.5,
        is_early=draw.random() < 0.3,
        patience_s=SHORT_PATIENCE_S if is_lasting else 60.0,
    )


@dataclass
class Lived:
    """What a rank did.

    Attributes:
        ticks: Those that it began, in order, with what it was told to do at each.
        end: "stopped", "lost", "broken"; "" for one that was killed.
        why: Of its end.
    """

    ticks: list[list[list[Any]]] = field(default_factory=list)
    end: str = ""
    why: str = ""


@dataclass
class Outcome:
    """Of a round.

    Attributes:
        ranks: What each did.
        horizon: The last tick that the root has granted to anybody.
        happened: Whether the fault came, before the round was over.
        unended: Ranks that were still there after `BOUND_S`.
        refused: Why a node could not join.
        printed: What processes of the nodes have printed: nothing is right.
    """

    ranks: list[Lived]
    horizon: int
    happened: bool
    unended: list[int]
    refused: list[str]
    printed: str

    @property
    def word(self) -> str:
        """For counts."""
        ends = {lived.end for lived in self.ranks} - {""}
        return {
            frozenset({"stopped"}): "agreed stop",
            frozenset({"lost"}): "clear failure",
            frozenset({"stopped", "lost"}): "failure behind the agreed stop",
            frozenset(): "nobody was left",
        }.get(frozenset(ends), f"wrong: {sorted(ends)}")

    def found_wrong(self, plan: Plan) -> list[str]:
        """What may not be."""
        wrong = [f"rank {rank} is still there" for rank in self.unended]
        if self.printed:
            wrong.append(f"a node has printed: {self.printed}")
        for number, lived in enumerate(self.ranks):
            if lived.end == "broken":
                wrong.append(f"rank {number}: {lived.why}")
            if lived.end == "lost" and (not lived.why.strip() or "\n" in lived.why):
                wrong.append(f"rank {number} has heard no clear line: {lived.why!r}")
            if len(lived.ticks) - 1 > self.horizon:
                wrong.append(f"rank {number} began {len(lived.ticks) - 1}, granted {self.horizon}")
        wrong += self._differing()
        if plan.fault in HARMLESS and not self.refused:
            ends = [lived.end for lived in self.ranks]
            if ends != ["stopped"] * plan.ranks:
                wrong.append(f"{plan.fault} ended the round: {[x.why for x in self.ranks]}")
        if self.refused and plan.fault in HARMLESS - {"delay"}:
            wrong.append(f"{plan.fault}: a node could not join: {self.refused}")
        return wrong

    def _differing(self) -> Iterator[str]:
        """Each tick is the same for all that began it; behind a stop nobody begins one."""
        longest = max(self.ranks, key=lambda lived: len(lived.ticks)).ticks
        for number, lived in enumerate(self.ranks):
            for tick, decisions in enumerate(lived.ticks):
                if decisions != longest[tick]:
                    yield f"rank {number} at {tick}: {decisions}, another one {longest[tick]}"
                if tick < len(longest) - 1 and any(kind == "stop" for kind, _ in decisions):
                    yield f"rank {number} stopped at {tick}, another one began {len(longest) - 1}"
        for kind in ("save", "warned"):
            values = [value for told in longest for of, value in told if of == kind]
            if values != sorted(set(values)):
                yield f"{kind} was decided twice: {values}"


def run_round(plan: Plan, folder: Path) -> Outcome:
    """Live through it.

    Args:
        plan: Which.
        folder: For the files of the ranks; it is there and empty.
    """
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr("hpctrain.node.control.collectives.FANOUT", plan.fanout)
        patch.setattr("hpctrain.node.control.node_server.PATIENCE_S", plan.patience_s)
        patch.setattr("hpctrain.node.control.client.PATIENCE_S", plan.patience_s)
        patch.setattr("hpctrain.node.control.node_server.JOIN_S", 0.6)
        greet_s = 10.0 if plan.fault in HARMLESS else 1.0
        patch.setattr("hpctrain.node.control.endpoint.GREET_S", greet_s)
        patch.setattr("hpctrain.node.control.node_server.SAY_S", 0.2)
        patch.setattr("hpctrain.node.control.client.LOOK_S", 0.1)
        return _Round(plan, folder, stack).lived()


class _Round:
    def __init__(self, plan: Plan, folder: Path, stack: ExitStack) -> None:
        self.plan, self.folder = plan, folder
        self.heard, self.tell = os.pipe()
        stack.callback(os.close, self.heard)
        stack.callback(os.close, self.tell)
        self.agents = [stack.enter_context(Agent(node, self)) for node in range(plan.nodes)]
        self.network = stack.enter_context(BadNetwork(plan.disturbances, self.tell))
        self.ranks: dict[int, int] = {}
        self.happened = False
        self.refused: list[str] = []

    def lived(self) -> Outcome:
        plan = self.plan
        ports = [agent.ask("begin") for agent in self.agents]
        if any(isinstance(port, str) for port in ports):
            raise AssertionError(ports)
        board = Board.open(Path(self.agents[0].ask("folder")) / BOARD)
        if plan.is_early:
            self._start()
        for node in range(1, plan.nodes):
            port = self.network.link(node, ports[parent_of(node)])
            self.agents[node].say("join", port)
        for node in range(1, plan.nodes):
            answer = self.agents[node].hear()
            if isinstance(answer, str):
                self.refused.append(answer)
        if self.refused:  # as agents do: the attempt has failed
            for agent in self.agents:
                agent.ask("fail", self.refused[0])
        if not plan.is_early:
            self._start()
        unended = self._watch()
        happened = self.happened or len(self.network.happened()) > 0
        lived = [self._read(rank) for rank in range(plan.ranks)]
        newest = board.newer_lease(0)
        horizon = newest[1].horizon if newest is not None else -1
        board.close()
        printed = (self.folder / "nodes").read_text() if (self.folder / "nodes").exists() else ""
        return Outcome(lived, horizon, happened, unended, self.refused, printed)

    def _start(self) -> None:
        for agent in self.agents:
            self.ranks |= {int(rank): pid for rank, pid in agent.ask("ranks").items()}

    def _watch(self) -> list[int]:
        """Until no rank is left; with the fault at its moment."""
        deadline_s = time.monotonic() + BOUND_S
        left = {os.pidfd_open(pid): rank for rank, pid in self.ranks.items()}
        continued_s, stopped = float("inf"), list[int]()
        waiter = select.poll()
        for descriptor in (self.heard, *left):
            waiter.register(descriptor, select.POLLIN)
        while left and time.monotonic() < deadline_s:
            until_s = min(deadline_s, continued_s) - time.monotonic()
            for descriptor, _ in waiter.poll(max(0.0, until_s) * 1000 + 1):
                if descriptor != self.heard:
                    waiter.unregister(descriptor)
                    rank = left.pop(descriptor)
                    os.close(descriptor)
                    if not self._read(rank).end and self.plan.tells_agent:
                        self._agent_notices(rank)
                elif os.read(self.heard, 100) and self.plan.hits_process and not self.happened:
                    self.happened = True
                    stopped = self._hit()
                    continued_s = time.monotonic() + self.plan.stopped_s
            if time.monotonic() >= continued_s:
                continued_s = float("inf")
                self._signal(stopped, signal.SIGCONT)
        self._signal(stopped, signal.SIGCONT)
        unended = sorted(left.values())
        for descriptor in left:
            os.close(descriptor)
        return unended

    def _hit(self) -> list[int]:
        """Do it; whom to continue later."""
        plan = self.plan
        deed, whom = plan.fault.split()[:2]
        if whom == "rank":
            pids = [self.ranks[plan.target]]
        else:
            agent = self.agents[plan.target]
            pids = [agent.pid] if whom == "agent" else [agent.node_pid]
            if whom == "all":
                of_node = range(plan.target * plan.per_node, (plan.target + 1) * plan.per_node)
                pids = [agent.pid, agent.node_pid, *(self.ranks[rank] for rank in of_node)]
        self._signal(pids, signal.SIGKILL if deed == "kill" else signal.SIGSTOP)
        return pids if deed == "stop" else []

    def _signal(self, pids: list[int], signum: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def _agent_notices(self, rank: int) -> None:
        with suppress(OSError):  # it died with its rank
            self.agents[rank // self.plan.per_node].ask("fail", f"rank {rank} is gone")

    def _read(self, rank: int) -> Lived:
        lived, path = Lived(), self.folder / f"rank {rank}"
        for line in path.read_text().splitlines() if path.exists() else ():
            said = json.loads(line)
            if isinstance(said, list):
                lived.ticks.append(said)
            else:
                lived.end, lived.why = said["end"], said["why"]
        return lived


class Agent:
    """A node's agent: a process that has forked the node's process and its ranks."""

    def __init__(self, node: int, tree: _Round) -> None:
        self.node, self.tree = node, tree
        self._line, theirs = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                die_with_parent(parent)
                _print_to(tree.folder / "nodes")
                _AgentSide(self, theirs).serve()
            except BaseException:  # noqa: BLE001 - said where the test looks, in a forked process
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        self._answers = self._line.makefile("rb")
        self.node_pid = int(self.hear())

    def say(self, order: str, argument: Any = None) -> None:
        self._line.sendall(json.dumps([order, argument]).encode() + b"\n")

    def hear(self) -> Any:
        self._line.settimeout(BOUND_S)
        answer = self._answers.readline()
        if not answer:
            raise ConnectionResetError("the agent is gone")
        return json.loads(answer)

    def ask(self, order: str, argument: Any = None) -> Any:
        self.say(order, argument)
        return self.hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)  # with it go its ranks and the node's process
        os.waitpid(self.pid, 0)
        self._answers.close()
        self._line.close()
        named = self.tree.folder / f"folder {self.node}"
        if named.exists():
            shutil.rmtree(named.read_text(), ignore_errors=True)


class _AgentSide:
    """In the agent's process."""

    def __init__(self, agent: Agent, line: socket.socket) -> None:
        self.number, self.tree, self.line = agent.node, agent.tree, line
        self.node = NodeProcess()
        self.answer(self.node.pid)

    def answer(self, said: Any) -> None:
        self.line.sendall(json.dumps(said).encode() + b"\n")

    def serve(self) -> None:
        for line in self.line.makefile("rb"):
            order, argument = json.loads(line)
            try:
                self.answer(getattr(self, f"do_{order}")(argument))
            except ControlLost as error:
                self.answer(str(error))

    def do_begin(self, _argument: None) -> int:
        plan = self.tree.plan
        first = self.number * plan.per_node
        place = TreePlace(
            self.number, plan.nodes, first, plan.per_node, plan.ranks, f"n{self.number}"
        )
        port = self.node.begin(place, secret=SECRET, about=str(plan.seed), address=HERE)
        (self.tree.folder / f"folder {self.number}").write_text(str(self.node.folder))
        return port

    def do_folder(self, _argument: None) -> str:
        return str(self.node.folder)

    def do_join(self, port: int) -> int:
        self.node.join(HERE, port)
        return 0

    def do_fail(self, why: str) -> int:
        self.node.ask({"fail": why})
        return 0

    def do_ranks(self, _argument: None) -> dict[int, int]:
        plan, pids = self.tree.plan, {}
        agent = os.getpid()
        for rank in range(self.number * plan.per_node, (self.number + 1) * plan.per_node):
            pids[rank] = os.fork()
            if pids[rank] == 0:
                die_with_parent(agent)
                _live(rank, plan, self.node.folder, self.tree)
        return pids


def _live(rank: int, plan: Plan, control: Path, tree: _Round) -> None:
    """A rank's process: does not return."""
    path = tree.folder / f"rank {rank}"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(said: object) -> None:
        os.write(log, json.dumps(said).encode() + b"\n")

    try:
        end, why = _trained(rank, plan, control, tree.tell, write)
    except ControlLost as error:
        end, why = "lost", str(error)
    except BaseException:  # noqa: BLE001 - the test shows it
        end, why = "broken", traceback.format_exc()
    write({"end": end, "why": why})
    os._exit(0)


def _trained(rank: int, plan: Plan, control: Path, tell: int, write: Any) -> tuple[str, str]:
    draw = random.Random(f"{plan.seed} {rank}")
    client = ControlClient(control, rank)
    exchange = client.exchange(plan.gather_s)
    for tick in range(10_000):
        if plan.trigger == (rank, tick):
            os.write(tell, b"!")
        decisions = client.lease.tick()
        write([[decision.kind, decision.value] for decision in decisions])
        if any(decision.kind == "stop" for decision in decisions):
            return "stopped", ""
        if tick >= plan.ticks:
            client.lease.wish(stop=1)
        time.sleep(draw.random() * plan.step_s)
        wishes = plan.wishes.get((rank, tick))
        if wishes:
            client.lease.wish(**wishes)
        if plan.gather_every and tick % plan.gather_every == 0:
            told = exchange.broadcast(tick)
            gathered = exchange.gather((rank, tick))
            if told != tick or gathered != [(other, tick) for other in range(plan.ranks)]:
                return "broken", f"at {tick}: {told} {gathered}"
    return "broken", "no stop in 10,000 ticks"


def _print_to(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)

"""Run one node's part of a preflight: of `hpctrain preflight`, and at the start of an attempt.

    python -m hpctrain.cluster.preflight.node FOLDER RANK

The environment that the job's script exports gives its place (`entry.slurm_batch before`). Every
node takes part once; the first one judges and gets the report. Before an attempt, `begin` probes
while the agents import torch; without an answer the attempt starts. Nodes that share no directory
are refused: nothing could ever be saved.
tests/slurm/test_preflight.py and test_node_check.py hold the promises.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.preflight import checks_between as between
from hpctrain.cluster.preflight.bounded import (
    START_S,
    Child,
    CollectiveProcess,
    HeldLock,
    Unanswered,
    bounded,
    leave_file,
    start,
    try_lock,
    unseen_files,
)
from hpctrain.cluster.preflight.checks import Order, check_facts
from hpctrain.cluster.preflight.facts import NodeFacts, changed, probe, resolves, seconds
from hpctrain.cluster.preflight.rendezvous import Alone, Coordinator, Peer, Skew
from hpctrain.cluster.preflight.report import UNKNOWN, PreflightReport, Result, lines
from hpctrain.cluster.preflight.slow_nodes import SlowNodeSearch, Tests
from hpctrain.core.base import clock
from hpctrain.core.base.env import (
    HPCTRAIN_MASTER_ADDR,
    HPCTRAIN_NODE_FAULTS,
    HPCTRAIN_NODES,
    HPCTRAIN_PORT,
    HPCTRAIN_PREFLIGHT_KEY,
)
from hpctrain.core.base.files import read_plain
from hpctrain.core.base.host_list import expand_nodes
from hpctrain.core.testing.faults import NodeFault, of_node
from hpctrain.errors import ChecksFailed, ClusterError, HpctrainError
from hpctrain.ledger.run.ownership import distrust

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Say = Callable[[str], None]
    Faults = dict[str, NodeFault]


ORDER, REPORT, PROGRESS = "order.json", "report.json", "progress.txt"


def main(argv: Sequence[str]) -> int:
    """Take part; the first node leaves the report in the folder. Returns the exit code."""
    folder, rank = Path(argv[0]), int(argv[1])
    if why := distrust(folder) or distrust(folder / ORDER):
        print(f"hpctrain: error: {folder} {why}: it says what this job starts", file=sys.stderr)
        return ChecksFailed.exit_code
    try:
        place = place_of(folder, rank, os.environ)
    except HpctrainError as error:
        print(f"hpctrain: error: {error}", file=sys.stderr)
        return error.exit_code
    try:
        order = Order.from_plain(json.loads((folder / ORDER).read_text())) if rank == 0 else None
        report, _ = run_checks(place, order, lambda text: _write_line(folder, text))
    except Alone as error:
        print(f"hpctrain: {place.node}: {error}", file=sys.stderr)
        return 0  # the first node names us, or is itself what the report will be missing
    except (HpctrainError, OSError) as error:
        print(f"hpctrain: error: {place.node}: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, HpctrainError) else 1
    if report is not None:
        print("\n".join(lines(report.results)), flush=True)
        report.dump(folder / REPORT)
    return 0


def place_of(folder: Path, rank: int, environ: Mapping[str, str]) -> NodePlace:
    """This node's place in the job, as the job's script has exported it.

    Raises:
        ClusterError: the nodes' list cannot be read, or has no node of that rank.
    """
    listed = environ[HPCTRAIN_NODES]
    try:
        nodes = expand_nodes(listed)
    except ValueError as error:
        raise ClusterError(f"{error}: nobody can say which nodes the job has") from None
    if rank >= len(nodes):
        raise ClusterError(f"{HPCTRAIN_NODES} names {len(nodes)} nodes, and this is number {rank}")
    return NodePlace(
        nodes=nodes,
        rank=rank,
        address=environ.get(HPCTRAIN_MASTER_ADDR) or nodes[0],
        port=int(environ[HPCTRAIN_PORT]),
        key=environ[HPCTRAIN_PREFLIGHT_KEY],
        folder=folder,
        env=_environment(folder),
    )


def _environment(folder: Path) -> dict[str, str]:
    """What ranks will have; nothing on a node that does not see the folder, which fails for it."""
    try:
        return Order.from_plain(json.loads((folder / ORDER).read_text())).expected.env
    except OSError:
        return {}


def _write_line(folder: Path, text: str) -> None:
    with (folder / PROGRESS).open("a") as file:
        file.write(text + "\n")


# At an attempt's start.


def begin(place: NodePlace, order: Order | None) -> Child:
    """Start looking, in a child: an agent must not hang with what it looks at.

    Called on every node. The first one, which has the order, leaves the report in the folder.
    """
    return start(lambda: _look(place, order))


def _look(place: NodePlace, order: Order | None) -> dict[str, Any]:
    if order is not None:
        place.folder.mkdir(parents=True, exist_ok=True)
    report, verdict = run_checks(place, order, _ignore)
    if report is not None:
        report.dump(place.folder / REPORT)
    return asdict(verdict)


def _ignore(text: str) -> None:
    """The ledger tells what came of it."""
    del text


def outcome(child: Child, timeout_s: float) -> tuple[NodesVerdict, str]:
    """The verdict, and why there is none, "" where there is one."""
    try:
        return NodesVerdict(**child.answer(timeout_s)), ""
    except Unanswered as error:
        return NodesVerdict(), str(error)


def collective(folder: Path) -> str:
    """How the collective of this look went, "" where it was not tried or there is no report."""
    try:
        results = json.loads(read_plain(folder / REPORT))["results"]
    except (OSError, ValueError, KeyError):
        return ""
    return next((str(one["status"]) for one in results if one["check"] == "bandwidth"), "")


def to_leave(bad: Mapping[str, str], nodes: Sequence[str]) -> bool:
    """Whether the attempt must not start on these nodes. The same on every node.

    Where half of the nodes or more seem bad it is the expectation that is wrong, and keeping them
    all out would leave the job waiting for ever.
    """
    return 0 < 2 * len(bad) < len(nodes)


FACTS_S = 60.0
LOOK_S = 60.0
NAMES_S = 20.0
STORE_PORT = 1
"""The store of the tries stands on the port beside the meeting's."""


@dataclass(frozen=True)
class NodePlace:
    """Where this node stands.

    Attributes:
        nodes: Names of all nodes, in rank order.
        rank: This node's.
        address: Of the first node, as the others reach it.
        port: Where the nodes meet, and the next one for the store.
        key: The secret by which the nodes know each other.
        folder: The shared directory; written into.
        env: What ranks will have in their environment, beside what this process has. Each node
            finds it by itself: nothing of it comes over the network.
    """

    nodes: list[str]
    rank: int
    address: str
    port: int
    key: str
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def node(self) -> str:
        """This node's name."""
        return self.nodes[self.rank]


@dataclass(frozen=True)
class NodesVerdict:
    """What follows from a look, the same on every node.

    `bad` has each node that must not take part, with the reason; `apart` why they cannot train
    together at all.
    """

    bad: dict[str, str] = field(default_factory=dict)
    apart: str = ""


def run_checks(
    place: NodePlace, order: Order | None, say: Say
) -> tuple[PreflightReport | None, NodesVerdict]:
    """Run one preflight. Called on every node of the job, once each.

    Only the first node has an order, and gives it to the others; `say` hears there how far it is.

    Returns:
        The report on the first node, None on the others; and on every node the verdict.

    Raises:
        Alone: on another node: the first one cannot be reached, or has gone.
        OSError: on the first node: the port is taken.
        UsageError: a fault that was put in is misspelt.
        ChecksFailed: what a node said has no sense here.
    """
    text = os.environ.get(HPCTRAIN_NODE_FAULTS, "")
    faults = of_node(text, place.node)
    try:
        if order is not None:
            return _first(place, order, faults, say)
        return None, NodesVerdict() if "silent" in faults else _other(place, faults)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ChecksFailed(
            "the nodes do not understand each other; is the same hpctrain installed on all of "
            f"them? ({type(error).__name__}: {error})"
        ) from error


def _first(
    place: NodePlace, order: Order, faults: Faults, say: Say
) -> tuple[PreflightReport, NodesVerdict]:
    began = clock.monotonic()
    say(f"waiting for {len(place.nodes)} nodes")
    with Coordinator(
        len(place.nodes), place.port, place.key, order.meet_s, address=place.address
    ) as coordinator:
        coordinator.agree(None, lambda _: order.to_others(), LOOK_S)
        skews = coordinator.skews(lambda: clock.now() + seconds(faults, "skew"))
        with _Judge(place, order, skews) as judge, _Node(place, order, faults) as node:
            say("looking at each node")
            task = coordinator.agree_each(node.facts(), judge.facts, FACTS_S)
            say("looking at the shared directory")
            part = coordinator.agree_each(node.look(task), judge.look, _looking_s(order))
            while part is not None:
                say(f"all-reduce of {order.ranks} x {judge.sizes}")
                part = coordinator.agree_each(node.reduce(part), judge.reduced, _reducing_s(order))
            report = judge.report(coordinator.missing, clock.monotonic() - began)
            verdict = NodesVerdict(report.bad, judge.apart)
            coordinator.agree(None, lambda _: asdict(verdict), LOOK_S)
            return report, verdict


def _other(place: NodePlace, faults: Faults) -> NodesVerdict:
    """The same stations, without the judging."""
    with Peer(place.rank, place.address, place.port, place.key, LOOK_S) as peer:
        order = Order.from_plain(peer.agree(None, LOOK_S))
        peer.serve_time(lambda: clock.now() + seconds(faults, "skew"))
        with _Node(place, order, faults) as node:
            task = peer.agree(node.facts(), FACTS_S)
            part = peer.agree(node.look(task), _looking_s(order))
            while part is not None:
                part = peer.agree(node.reduce(part), _reducing_s(order))
            return NodesVerdict(**peer.agree(None, LOOK_S))


def _looking_s(order: Order) -> float:
    return LOOK_S + (START_S if order.bandwidth else 0.0)


def _reducing_s(order: Order) -> float:
    return LOOK_S + order.timeout_s


class _Node(AbstractContextManager["_Node"]):
    """What a node does at each station."""

    def __init__(self, place: NodePlace, order: Order, faults: Faults) -> None:
        self._place = place
        self._order = order
        self._faults = faults
        self._collective = CollectiveProcess(place.env) if order.bandwidth else None
        self._folder = place.folder
        if "no-shared" in faults:
            self._folder = place.folder / "not-mounted"

    def __exit__(self, *_: object) -> None:
        if self._collective is not None:
            self._collective.close()

    def facts(self) -> dict[str, Any]:
        """This node's facts, and what it left in the shared directory."""
        node = self._place.node
        facts = changed(probe(node, local=self._order.expected.local), self._faults)
        nonce = secrets.token_hex(8)
        error = leave_file(self._folder, node, nonce)
        return {"facts": facts.plain(), "nonce": nonce, "error": error}

    def look(self, task: dict[str, Any]) -> dict[str, Any]:
        """What is seen from here of the others that this node is to look for."""
        hosts = [str(host) for host in task["hosts"]]
        try:
            lost = bounded(lambda: [host for host in hosts if not resolves(host)], NAMES_S)
        except Unanswered:
            lost = hosts
        unseen = unseen_files(self._folder, task["nonces"], listed=bool(task["list"]))
        first = self._place.rank == 0
        lock = "" if first or unseen else try_lock(self._folder)
        error = ""
        if self._collective is not None:
            where = self._place.address, self._place.port + STORE_PORT
            error = self._collective.ready(host=first, address=where[0], port=where[1])
        return {"unresolved": lost, "unseen": unseen, "lock": lock, "collective": error}

    def reduce(self, part: dict[str, Any]) -> dict[str, Any]:
        """Take part in the group that this node is in, if it is in one."""
        place, ranks = self._place, self._order.ranks
        if not part or self._collective is None:
            return {}
        order = {
            "name": part["name"],
            "address": "localhost" if place.rank == 0 else place.address,
            "port": place.port + STORE_PORT,
            "ranks": ranks,
            "first": ranks * part["place"],
            "world": ranks * part["size"],
            "size_mib": self._order.expected.size_mib,
            "timeout_s": self._order.timeout_s,
            "slow_s": seconds(self._faults, "slow"),
            "wrong": "gemm" in self._faults,
        }
        return self._collective.attempt(order)


class _Judge(AbstractContextManager["_Judge"]):
    """What the first node makes of everybody's answers."""

    def __init__(self, place: NodePlace, order: Order, skews: dict[int, Skew]) -> None:
        self._place = place
        self._order = order
        self._results = between.check_clocks(
            place.node, {place.nodes[rank]: skew for rank, skew in skews.items()}
        )
        self._facts: list[NodeFacts] = []
        self._errors: dict[str, str] = {}
        self._looked: dict[str, list[str]] = {}
        self.apart = ""
        self.sizes: list[int] = []
        self._lock: HeldLock | None = None
        self._search: SlowNodeSearch | None = None

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def facts(self, values: dict[int, Any]) -> dict[int, Any]:
        """Judge the nodes one by one; whom each is to look for."""
        by_node = self._named(values)
        self._facts = [NodeFacts.from_plain(value["facts"]) for value in by_node.values()]
        self._results += check_facts(self._facts, self._order.expected)
        self._errors = {node: str(value["error"]) for node, value in by_node.items()}
        if len(by_node) > 1 and not self._errors[self._place.node]:
            self._lock = HeldLock(self._place.folder)  # before anybody tries to take it
        ranks = sorted(values)
        hosts = {rank: one.host for rank, one in zip(ranks, self._facts, strict=True)}
        nonces = {rank: str(values[rank]["nonce"]) for rank in ranks if not values[rank]["error"]}
        return {rank: self._task(number, ranks, nonces, hosts) for number, rank in enumerate(ranks)}

    def _task(
        self, number: int, ranks: list[int], nonces: dict[int, str], hosts: dict[int, str]
    ) -> dict[str, Any]:
        """Whom one of the nodes that answered looks for: files with what is in them, and names."""
        rank, nodes = ranks[number], self._place.nodes
        sought = [rank, *(ranks[other] for other in between.looked_for(number, len(ranks)))]
        files = {nodes[other]: nonces[other] for other in sought if other in nonces}
        self._looked[nodes[rank]] = list(files)
        if self._order.nonce:
            files[between.LOGIN] = self._order.nonce
        near = [rank, *(ranks[other] for other in between.neighbours(number, len(ranks)))]
        listed = number == 0 or len(ranks) <= between.ALL_UP_TO
        named = sorted({hosts[other] for other in near})
        return {"nonces": files, "hosts": named, "list": listed}

    def look(self, values: dict[int, Any]) -> dict[int, Any]:
        """Judge what lies between the nodes; each one's part in the first groups to try."""
        by_node = self._named(values)
        self._results += between.check_names({n: v["unresolved"] for n, v in by_node.items()})
        unseen = {node: value["unseen"] for node, value in by_node.items()}
        seen = str(self._place.folder), self._errors, unseen, self._looked
        self._results += between.check_shared(*seen)
        self.apart = between.apart(*seen)
        kinds = {node: value["lock"] for node, value in by_node.items() if value["lock"]}
        held = self._lock is not None and self._lock.held
        self._results += between.check_locks(kinds, held=held)
        return self._parts(values, self._begin(by_node) if self._order.bandwidth else [])

    def _begin(self, by_node: dict[str, Any]) -> Tests:
        """Without the first node there is no store, and no search."""
        for node, value in by_node.items():
            if value["collective"]:
                self._results.append(Result("bandwidth", UNKNOWN, value["collective"], [node]))
        able = [node for node, value in by_node.items() if not value["collective"]]
        if self._place.node not in able:
            return []
        self._search = SlowNodeSearch(able, self._order.expected.limits())
        return self._search.begin()

    def reduced(self, values: dict[int, Any]) -> dict[int, Any]:
        """Take a round's measurements; each node's part in the next groups to try."""
        tests = [] if self._search is None else self._search.go_on(self._named(values))
        return self._parts(values, tests)

    def _parts(self, values: dict[int, Any], tests: Tests) -> dict[int, Any]:
        """Rank to its place in its group, {} for none, and None for all where all is known."""
        self.sizes = [len(test["nodes"]) for test in tests]
        if not tests:
            return dict.fromkeys(values)
        parts = {
            node: {"name": test["name"], "place": place, "size": len(test["nodes"])}
            for test in tests
            for place, node in enumerate(test["nodes"])
        }
        return {rank: parts.get(self._place.nodes[rank], {}) for rank in values}

    def report(self, missing: dict[int, str], took_s: float) -> PreflightReport:
        """Everything, the nodes that did not answer first."""
        nodes = self._place.nodes
        silent = {nodes[rank]: why for rank, why in missing.items()}
        results = [*between.check_present(nodes, silent), *self._results]
        measured: dict[str, Any] = {"seconds": round(took_s, 2)}
        if self._search is not None:
            results += self._search.results()
            measured |= self._search.measured()
        measured["facts"] = {one.node: one.plain() for one in self._facts}
        return PreflightReport(list(nodes), results, measured)

    def _named(self, values: dict[int, Any]) -> dict[str, Any]:
        return {self._place.nodes[rank]: value for rank, value in sorted(values.items())}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

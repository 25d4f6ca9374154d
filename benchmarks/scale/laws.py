"""Laws of the control plane, saves, resumes and meetings, each held against what was run.

A law has the form that the code gives it, and constants that were measured alone or taken from its
smallest points. `ANCHORS` says how far the points that were run lie off: within a factor where the
machine carried them, and above the law alone where two cores carried hundreds of processes.
tests/unit/support/test_scale_laws.py holds the factors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.scale.model import FAN_OUT, depth, nodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.scale.model import Constants

STEP_S = 0.02
BUSY_LOAD = 40.0
"""Processes that wanted to run, of a minute's average, on two cores."""


def trip_s(levels: int, given: Constants) -> float:
    """A report up and the lease down: levels x (2 x hop + wait for other children)."""
    from hpctrain.node.control.node_server import FORWARD_S

    return levels * (2 * (given.control_hop_s + given.network_s) + FORWARD_S)


def notice_s(levels: int, given: Constants) -> float:
    """A wish until the last rank does it: a step, and the lead of max(50 ms, 3 x trip)."""
    from hpctrain.node.control.lease import LEAST_LEAD_S, MOST_LEAD_S, TRIPS

    return STEP_S + min(MOST_LEAD_S, max(LEAST_LEAD_S, TRIPS * trip_s(levels, given)))


def root_cpu(children: int, given: Constants) -> float:
    """CPU of node 0's process in each second, with steps of 20 ms: a + b x children."""
    return given.look_cpu + given.child_cpu * children


def gather_s(ranks: int, levels: int, given: Constants) -> float:
    """Values to rank 0: levels x hop, and each passes through node 0: + ranks x value."""
    hops = levels * (given.control_hop_s + given.network_s)
    return given.gather_s + hops + ranks * given.value_s


def table_s(ranks: int, given: Constants) -> float:
    """Read what ranks said, put it together, write: a + b x ranks."""
    return given.table_s + ranks * given.table_rank_s


def publish_s(ranks: int, given: Constants) -> float:
    """One listing, the manifest, flushes, a rename: a + b x ranks."""
    return given.publish_s + ranks * given.publish_rank_s


def commit_s(ranks: int, given: Constants) -> float:
    """From the last byte to the committed name: gather + table + publish."""
    levels = depth(nodes(ranks))
    return gather_s(ranks, levels, given) + table_s(ranks, given) + publish_s(ranks, given)


def choose_s(ranks: int, given: Constants) -> float:
    """The newest is whole: a + b x ranks (manifest and looks)."""
    return given.choose_s + ranks * given.choose_rank_s


def choose_torn_s(ranks: int, given: Constants) -> float:
    """19 lack a file and the 20th is whole: 20 x b x ranks."""
    return given.choose_torn_s + ranks * given.choose_torn_rank_s


def read_s(ranks: int, given: Constants) -> float:
    """A rank reads manifest and table: a + b x ranks."""
    return given.read_s + ranks * given.read_rank_s


def tell_s(ranks: int, given: Constants) -> float:
    """The choice to all ranks: (levels + 1) x (hop + fan-out x message)."""
    each = given.control_hop_s + given.network_s + FAN_OUT * given.message_s
    return (depth(nodes(ranks)) + 1) * each


def restore_s(ranks: int, given: Constants) -> float:
    """Before tensors are read: choose, tell, read the table."""
    return choose_s(ranks, given) + tell_s(ranks, given) + read_s(ranks, given)


def meet_s(agents: int, given: Constants) -> float:
    """Agents at the store, one after another: a + agents x (connection + look-up of a name)."""
    return given.meet_s + agents * (given.meet_agent_s + given.name_s)


def ranks_s(agents: int, given: Constants) -> float:
    """They learn their ranks: agents x call."""
    return agents * given.ranks_agent_s


def store_cpu(agents: int, given: Constants) -> float:
    """CPU of the store's process in a second of training: agents' looks, each agents x 1 ms apart.

    At least 0.1 s and at most 2 s: `hpctrain/node/agent/node.py`.
    """
    apart_s = max(0.1, min(agents * 0.001, 2.0))
    return agents / apart_s * given.ask_cpu_s


def join_s(agents: int, given: Constants) -> float:
    """The tree stands: each level after the one above it, a parent's children one by one."""
    return (depth(agents) + 1) * given.begin_node_s + FAN_OUT * given.message_s * depth(agents)


def start_s(ranks: int, given: Constants) -> float:
    """Meeting, ranks' numbers, tree, choice. Imports and torch's own meeting come on top."""
    agents = nodes(ranks)
    meeting = meet_s(agents, given) + ranks_s(agents, given)
    return meeting + join_s(agents, given) + choose_s(ranks, given)


@dataclass(frozen=True)
class Anchor:
    """How a law is held against points.

    Attributes:
        of: Name of the points in constants.toml.
        field: What was measured.
        form: The law, in short.
        law: Of a point and the constants.
        within: The factor by which the points lie off at most.
        busy_above: Points of more processes than that are upper bounds: the law lies below them.
            So are those of a machine that others kept busy.
    """

    of: str
    field: str
    form: str
    law: Callable[[dict[str, float], Constants], float]
    within: float
    busy_above: float = float("inf")

    def is_bound(self, point: dict[str, float]) -> bool:
        """Whether the machine had too much to do for more than an upper bound."""
        return processes(point) > self.busy_above or point["load"] > BUSY_LOAD


def _of_checkpoint(measured: str, law: Callable[[int, Constants], float]) -> Anchor:
    return Anchor(
        "checkpoint",
        measured,
        "a + b x ranks",
        lambda point, given: law(int(point["ranks"]), given),
        2.5,
    )


ANCHORS = (
    Anchor(
        "agreement", "notice_s", "step + max(50 ms, 3 x levels x (2 x hop + 10 ms))",
        lambda point, given: notice_s(int(point["levels"]), given), 2.0, 128,
    ),
    Anchor(
        "agreement", "root_cpu", "a + b x children, steps of 20 ms",
        lambda point, given: root_cpu(_children(point), given), 2.0, 128,
    ),
    Anchor(
        "agreement", "gather_s", "a + levels x hop + b x ranks",
        lambda point, given: gather_s(int(point["ranks"]), int(point["levels"]), given), 2.0, 128,
    ),
    _of_checkpoint("table_s", table_s),
    _of_checkpoint("publish_s", publish_s),
    _of_checkpoint("choose_s", choose_s),
    _of_checkpoint("choose_torn_s", choose_torn_s),
    _of_checkpoint("read_s", read_s),
    Anchor(
        "meeting", "meet_s", "a + agents x connection, where names are known",
        lambda point, given: meet_s(int(point["agents"]), replace(given, name_s=0.0)), 2.0,
    ),
    Anchor(
        "meeting", "ask_cpu_s", "each look the same",
        lambda _, given: given.ask_cpu_s, 1.5,
    ),
    Anchor(
        "nodes", "begin_node_s", "each node the same",
        lambda _, given: given.begin_node_s, 2.0, 250,
    ),
)  # fmt: skip


def _children(point: dict[str, float]) -> int:
    """Of node 0."""
    most = int(point["fan_out"])
    return min(most, int(point["nodes"]) - 1)


def processes(point: dict[str, float]) -> float:
    """How many the two cores carried at that point: ranks, or node processes, or clients."""
    return point.get("ranks", point.get("nodes", point.get("agents", 0)))

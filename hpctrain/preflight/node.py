"""One node's part in a look at the nodes: of `hpctrain preflight`, and at the start of an attempt.

`python -m hpctrain.preflight.node FOLDER RANK` is the former's program. Its place comes from the
environment that the job's script exports (`entry.slurm_batch before`).

Before an attempt's ranks start, while its agents import torch, `begin` looks at each node, at what
lies between them, and where the order says so at the collective. Without an answer the attempt goes
on. Nodes that share no directory are refused: nothing could ever be saved.
tests/slurm/test_preflight.py and test_node_check.py hold the promises.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.base.env import (
    HPCTRAIN_MASTER_ADDR,
    HPCTRAIN_NODES,
    HPCTRAIN_PORT,
    HPCTRAIN_PREFLIGHT_KEY,
)
from hpctrain.base.files import read_plain
from hpctrain.base.host_list import expand_nodes
from hpctrain.errors import ChecksFailed, ClusterError, HpctrainError
from hpctrain.preflight.bounded import Unanswered, start
from hpctrain.preflight.checks import Order
from hpctrain.preflight.rendezvous import Alone
from hpctrain.preflight.report import lines
from hpctrain.preflight.run import NodePlace, NodesVerdict, run_checks
from hpctrain.run.ownership import distrust

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.preflight.bounded import Child

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
        report, _ = run_checks(place, order, lambda text: _say(folder, text))
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


def _say(folder: Path, text: str) -> None:
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
    report, verdict = run_checks(place, order, _say_nothing)
    if report is not None:
        report.dump(place.folder / REPORT)
    return asdict(verdict)


def _say_nothing(text: str) -> None:
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The look at a job's nodes before an attempt's ranks start, while its agents import torch.

Each node, what lies between them, and where the order says so the collective. Without an answer the
attempt goes on. Nodes that share no directory are refused: nothing could ever be saved.
tests/slurm/test_node_check.py holds the promises.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpctrain.base.files import read_plain
from hpctrain.preflight.bounded import Unanswered, start
from hpctrain.preflight.node import REPORT
from hpctrain.preflight.run import NodesVerdict, run_checks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hpctrain.preflight.bounded import Child
    from hpctrain.preflight.checks import Order
    from hpctrain.preflight.run import NodePlace


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

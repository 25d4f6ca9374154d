"""Does every number of nodes that a run may start on have a mesh? Asked before it is submitted.

Pure. tests/unit/test_mesh.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.base.text import count, in_nodes
from hpctrain.errors import UsageError
from hpctrain.plan.mesh import Planner
from hpctrain.plan.shape import shape_of
from hpctrain.settings.check import node_range

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.base.mesh import Mesh
    from hpctrain.settings.schema import Settings

FITTING_SHOWN = 6
"""Ranges of nodes that a refusal names; a list of all would not fit its line."""


def meshes(
    settings: Settings, origins: Mapping[str, str], *, is_recipe: bool, alone: bool = False
) -> dict[int, Mesh]:
    """The mesh at the fewest and at the most nodes, by their number.

    Args:
        settings: Checked by themselves.
        origins: Where each came from.
        is_recipe: The model is the shipped recipe's, so that its shape is known.
        alone: There will be one process, whatever `slurm.nodes` says.

    Raises:
        UsageError: some number of nodes in the range has no mesh, or the model cannot be cut so.
    """
    if settings.engine.exact and is_recipe and settings.train.micro_batch == 0:
        raise UsageError(
            f"{origins.get('engine.exact', 'default')}: engine.exact is true, which needs "
            f"train.micro_batch; it is 0 ({origins.get('train.micro_batch', 'default')}): set how "
            "many sequences each pass takes, at any number of ranks"
        )
    shape = shape_of(settings.train) if is_recipe else None
    ranks = 1 if alone else settings.slurm.ranks()
    planner = Planner(settings.engine, ranks, shape, origins)
    if alone:
        return {1: _of_one_process(planner)}
    planner.check()
    low, high = node_range(settings.slurm.nodes)
    _require_all(planner, low, high)
    return {nodes: mesh for nodes in (low, high) if (mesh := planner.at(nodes)) is not None}


def _of_one_process(planner: Planner) -> Mesh:
    mesh = planner.find(1)
    if mesh is None:
        raise UsageError(
            f"{planner.names()} cannot be had in one process; set it to 1, or start several with "
            "`hpctrain submit`"
        )
    return mesh


def _require_all(planner: Planner, low: int, high: int) -> None:
    """Refuse where the scheduler could choose a number of nodes that has no mesh."""
    fitting = [nodes for nodes in range(low, high + 1) if planner.at(nodes) is not None]
    if len(fitting) == high - low + 1:
        return
    first = next(nodes for nodes in range(low, high + 1) if nodes not in set(fitting))
    if low == high or not fitting:
        raise UsageError(planner.refusal(first * planner.ranks_per_node))
    nodes = f"{in_nodes([first])} x {count(planner.ranks_per_node, 'rank')}"
    why = planner.why_not(first * planner.ranks_per_node, nodes)
    raise UsageError(
        f"{why}, and slurm.nodes {low}-{high} allows that: {_ranges(fitting)} would do; use "
        f"{_offer(fitting)}, or give an axis a range, e.g. {planner.wider()}"
    )


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Numbers as ranges of adjoining ones."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def _ranges(numbers: list[int]) -> str:
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in _runs(numbers)]
    left = len(runs) - FITTING_SHOWN
    if left > 0:
        return f"{', '.join(runs[:FITTING_SHOWN])} and {left} more"
    return " and ".join([*([", ".join(runs[:-1])] if runs[:-1] else []), runs[-1]])


def _offer(fitting: list[int]) -> str:
    """What one could ask for instead: the longest range that fits, with the most nodes."""
    first, last = max(_runs(fitting), key=lambda run: (run[1] - run[0], run[1]))
    return f"--nodes {first}" if first == last else f"--nodes {first}-{last}"

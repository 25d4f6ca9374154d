"""Which ranks are on which node, and their place on each axis of the mesh. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.base.mesh import AXES
from hpctrain.base.text import Column, count, fit, fold_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.base.mesh import Mesh

NODES_SHOWN = 8
"""More nodes than these are shown together where one row can tell their places."""
ROWS_SHOWN = 12


def rank_map(
    mesh: Mesh, nodes: Sequence[str], ranks_per_node: int, *, width: int = 80
) -> list[str]:
    """A table of the axes that are in use: a row for each node, or for several where they are many.

    Args:
        mesh: Of all ranks.
        nodes: Host names in the order of their ranks.
        ranks_per_node: Ranks on each.
        width: Columns of the screen.
    """
    rows = list(_rows(mesh, nodes, ranks_per_node))
    left_out = max(0, len(rows) - ROWS_SHOWN)
    shown = rows[: ROWS_SHOWN - 1] + rows[-1:] if left_out else rows
    used = [axis for axis in (*AXES, "ep") if getattr(mesh, axis) > 1] or ["dp_shard"]
    columns = [
        Column("node", [where for where, _ in shown], shrink=True),
        Column("ranks", [_folded(set(ranks)) for _, ranks in shown]),
        *(Column(a, [_folded(_places(mesh, r, a)) for _, r in shown]) for a in used),
    ]
    lines = fit(columns, width)
    if left_out:
        lines.insert(-1, f"... {count(left_out, 'row')} more (--json has all)")
    return lines


def placed(mesh: Mesh, nodes: Sequence[str], ranks_per_node: int) -> list[dict[str, str | int]]:
    """Every rank with its node and its place on each axis, for programs."""
    return [
        {"rank": rank, "node": nodes[rank // ranks_per_node], **mesh.place(rank)}
        for rank in range(min(mesh.world_size, len(nodes) * ranks_per_node))
    ]


def _rows(mesh: Mesh, nodes: Sequence[str], ranks_per_node: int) -> Iterator[tuple[str, range]]:
    """Nodes and ranks. Where there are many, adjoining nodes of one stage and copy are one row."""
    each = [range(n * ranks_per_node, (n + 1) * ranks_per_node) for n in range(len(nodes))]
    parts = [[_places(mesh, ranks, axis) for axis in AXES[:2]] for ranks in each]
    first = 0
    for n in range(1, len(nodes) + 1):
        alike = n < len(nodes) and parts[n] == parts[first] and all(len(p) == 1 for p in parts[n])
        if alike and len(nodes) > NODES_SHOWN:
            continue
        for block in _blocks(mesh, range(each[first].start, each[n - 1].stop), AXES):
            yield fold_nodes(nodes[first:n]), block
        first = n


def _blocks(mesh: Mesh, ranks: range, axes: Sequence[str]) -> Iterator[range]:
    """Adjoining ranks cut where it needs be, so that each part takes every place of its rows."""
    if _is_block(mesh, ranks) or not axes:
        yield ranks
        return
    first = ranks.start
    for rank in range(ranks.start + 1, ranks.stop + 1):
        if rank == ranks.stop or mesh.place(rank)[axes[0]] != mesh.place(first)[axes[0]]:
            yield from _blocks(mesh, range(first, rank), axes[1:])
            first = rank


def _is_block(mesh: Mesh, ranks: range) -> bool:
    """Whether the ranks are all combinations of the places that they have on each axis."""
    size = 1
    for axis in AXES:
        size *= len(_places(mesh, ranks, axis))
    return size == len(ranks)


def _places(mesh: Mesh, ranks: range, axis: str) -> set[int]:
    return {mesh.place(rank)[axis] for rank in ranks}


def _folded(numbers: set[int]) -> str:
    """Numbers as ranges: 0-3,7."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)

"""What a resume would do, as data: which checkpoint, which mesh, which batch arithmetic.

The promises are held by tests/unit/plan/test_mesh.py and tests/slurm/test_elastic.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.mesh import axes_text
from hpctrain.core.base.text import count, in_nodes, placed
from hpctrain.ledger.plan.mesh import passes_of
from hpctrain.train.data.batches import plan_micro_batches

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.core.base.mesh import Mesh
    from hpctrain.core.base.records import Skipped
    from hpctrain.core.settings.schema import Settings


NONE_YET = "none yet: starts from the beginning"


@dataclass(frozen=True)
class Batching:
    """How the fixed global batch is cut at one world size."""

    nodes: int
    world_size: int
    data_ranks: int
    """Ranks that take samples of their own; those of a tp or pp group take the same."""
    global_batch: int
    micro_batches: int
    """Passes per step of each rank."""
    largest_micro_batch: int
    is_even: bool
    """False where some ranks take one sample more than others; the loss is weighted by samples."""


@dataclass(frozen=True)
class NodeMesh:
    """The mesh at one number of nodes."""

    nodes: int
    ranks_per_node: int
    mesh: Mesh

    @property
    def names(self) -> list[str]:
        """Names of nodes that are not known yet."""
        return [f"node{number}" for number in range(1, self.nodes + 1)]


@dataclass(frozen=True)
class ResumePlan:
    """What `hpctrain resume` is about to do."""

    run: str
    step: int | None
    """None where the program goes on by itself, and nobody knows from where."""
    checkpoint: str | None
    saved_world_size: int | None
    saved_engine: str | None
    saved_mesh: dict[str, Any] | None
    """Axes and sizes; empty for what was imported."""
    engine: str
    looked_at: list[dict[str, Any]]
    """Every checkpoint that was looked at: step, name, taken, why."""
    meshes: list[NodeMesh]
    """At the fewest and at the most nodes."""
    batching: list[Batching]
    """The same; empty for a script of the user's own."""
    not_known: str = ""
    """Why it is not known where the run goes on and how its ranks stand."""
    has_mesh: bool = True
    """Its program is known to use an engine of hpctrain's, so that its ranks form a mesh."""

    def as_json(self) -> dict[str, Any]:
        """For ``--json``; every rank of a mesh has its node and its place on each axis."""
        value = asdict(self)
        for row, mesh in zip(value["meshes"], self.meshes, strict=True):
            row["ranks"] = placed(mesh.mesh, mesh.names, mesh.ranks_per_node)
        return value


def by_nodes(meshes: Mapping[int, Mesh], ranks_per_node: int) -> list[NodeMesh]:
    """Meshes by their number of nodes, the fewest first."""
    return [NodeMesh(nodes, ranks_per_node, meshes[nodes]) for nodes in sorted(meshes)]


def batching(settings: Settings, meshes: Sequence[NodeMesh]) -> list[Batching]:
    """The batch arithmetic on each mesh."""
    cuts = []
    batch = settings.train.global_batch
    for node_mesh in meshes:
        ranks = node_mesh.mesh.data_ranks
        passes = passes_of(settings.engine, node_mesh.mesh)
        plan = plan_micro_batches(batch, ranks, settings.train.micro_batch, passes)
        cuts.append(
            Batching(
                nodes=node_mesh.nodes,
                world_size=node_mesh.mesh.world_size,
                data_ranks=ranks,
                global_batch=batch,
                micro_batches=plan.micro_batches,
                largest_micro_batch=plan.largest_piece,
                is_even=batch % (ranks * plan.micro_batches) == 0,
            )
        )
    return cuts


def looked_at(taken: tuple[int, str] | None, skipped: Sequence[Skipped]) -> list[dict[str, Any]]:
    """Every checkpoint that was looked at, newest first, with what became of it."""
    rows: list[dict[str, Any]] = [
        {"step": s.step, "name": s.name, "taken": False, "why": s.reason} for s in skipped
    ]
    if taken is not None:
        step, name = taken
        rows.append({"step": step, "name": name, "taken": True, "why": "newest complete one"})
    return sorted(rows, key=lambda row: -int(row["step"]))


def as_text(plan: ResumePlan, *, width: int = 80) -> str:
    """The plan as people read it."""
    lines = [f"run          {plan.run}"]
    lines.extend(
        f"checkpoint   {'takes' if row['taken'] else 'skips'} {row['name']}: {row['why']}"
        for row in plan.looked_at
    )
    if not plan.looked_at:
        none = f"not known ({plan.not_known}): the program decides where it resumes"
        lines.append(f"checkpoint   {none if plan.not_known else NONE_YET}")
    if plan.saved_world_size is not None:
        lines.append(f"saved by     {count(plan.saved_world_size, 'rank')}, {plan.saved_engine}")
    cuts = {item.nodes: item for item in plan.batching}
    for node_mesh in plan.meshes:
        ranks = f"{in_nodes([node_mesh.nodes])} x {count(node_mesh.ranks_per_node, 'rank')}"
        if plan.not_known or not plan.has_mesh:
            lines.append(f"ranks        {ranks}")
            continue
        lines.append(
            f"mesh         {ranks}: {plan.engine}, {node_mesh.mesh.text}"
            f"{_was(plan, node_mesh.mesh)}"
        )
        if node_mesh.nodes in cuts:
            lines.append(f"batch        {_batch_text(cuts[node_mesh.nodes])}")
        lines += [f"{'':13}{row}" for row in _map_of(node_mesh, width - 13)]
    return "\n".join(lines)


def _was(plan: ResumePlan, mesh: Mesh) -> str:
    """The checkpoint's mesh, where this is another."""
    if not plan.saved_mesh or (plan.saved_engine, plan.saved_mesh) == (plan.engine, mesh.as_dict()):
        return ""
    return f"; was {plan.saved_engine}, {axes_text(plan.saved_mesh)}"


def _batch_text(cut: Batching) -> str:
    even = "" if cut.is_even else ", shares differ by one sample (the loss is weighted)"
    return (
        f"{cut.global_batch} = {count(cut.data_ranks, 'data rank')} x "
        f"{count(cut.micro_batches, 'pass')} of up to {cut.largest_micro_batch}{even}"
    )


def _map_of(mesh: NodeMesh, width: int) -> list[str]:
    """Who stands where, unless ranks simply follow each other along one axis."""
    if not mesh.mesh.has_axes:
        return []
    from hpctrain.core.drawing import drawn, rank_map

    table = rank_map(mesh.mesh, mesh.names, mesh.ranks_per_node, width=width)
    return drawn(table, width).splitlines()

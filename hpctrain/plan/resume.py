"""What a resume would do, as data: which checkpoint, which mesh, which batch arithmetic."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.data.batches import plan_micro_batches
from hpctrain.settings.check import node_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.records import Skipped
    from hpctrain.settings.schema import Settings


@dataclass(frozen=True)
class Batching:
    """How the fixed global batch is cut at one world size."""

    nodes: int
    world_size: int
    global_batch: int
    micro_batches: int
    largest_micro_batch: int
    is_even: bool
    """False where some ranks take one sample more than others; the loss is weighted by samples."""


@dataclass(frozen=True)
class ResumePlan:
    """What `hpctrain resume` is about to do."""

    run: str
    step: int
    checkpoint: str | None
    saved_world_size: int | None
    saved_engine: str | None
    engine: str
    looked_at: list[dict[str, Any]]
    """Every checkpoint that was looked at: step, name, taken, why."""
    batching: list[Batching]
    """At the fewest and at the most nodes; empty for a script of the user's own."""

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


def batching(settings: Settings, ranks_per_node: int) -> list[Batching]:
    """The batch arithmetic at both ends of the node range."""
    low, high = node_range(settings.slurm.nodes)
    found = []
    for nodes in sorted({low, high}):
        world_size = nodes * ranks_per_node
        batch = settings.train.global_batch
        plan = plan_micro_batches(batch, world_size, settings.train.micro_batch)
        found.append(
            Batching(
                nodes=nodes,
                world_size=world_size,
                global_batch=batch,
                micro_batches=plan.micro_batches,
                largest_micro_batch=plan.largest_piece,
                is_even=batch % (world_size * plan.micro_batches) == 0,
            )
        )
    return found


def looked_at(taken: tuple[int, str] | None, skipped: Sequence[Skipped]) -> list[dict[str, Any]]:
    """Every checkpoint that was looked at, newest first, with what became of it."""
    rows: list[dict[str, Any]] = [
        {"step": s.step, "name": s.name, "taken": False, "why": s.reason} for s in skipped
    ]
    if taken is not None:
        step, name = taken
        rows.append({"step": step, "name": name, "taken": True, "why": "newest that is whole"})
    return sorted(rows, key=lambda row: -int(row["step"]))


def as_text(plan: ResumePlan) -> str:
    """The plan as people read it."""
    lines = [f"run          {plan.run}"]
    lines.extend(
        f"checkpoint   {'takes' if row['taken'] else 'skips'} {row['name']}: {row['why']}"
        for row in plan.looked_at
    )
    if not plan.looked_at:
        lines.append("checkpoint   none yet: starts from the beginning")
    if plan.saved_world_size is not None:
        lines.append(f"saved by     {plan.saved_world_size} ranks, {plan.saved_engine}")
    for item in plan.batching:
        even = "" if item.is_even else ", shares differ by one sample (the loss is weighted)"
        lines.append(
            f"mesh         {item.nodes} nodes, dp={item.world_size} ({plan.engine}); global batch "
            f"{item.global_batch} = {item.micro_batches} x up to {item.largest_micro_batch} "
            f"per rank{even}"
        )
    return "\n".join(lines)

"""Small states spread over real gloo ranks as DDP and FSDP2 spread them, for tests of checkpoints.

Every element is a function of its tensor's name, its place and the step: so a rank can tell whether
what it has read is right without seeing what was written.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.checkpoint.format.manifest import Manifest

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "model.embed.weight": ("float32", (257, 12)),
    "model.block.weight": ("bfloat16", (10, 3, 5)),
    "model.block.bias": ("float32", (7,)),
    "model.norm.scale": ("float64", ()),
    "model.mask": ("bool", (9,)),
    "model.none": ("float32", (0, 4)),
    "optim.embed.weight.exp_avg": ("float32", (257, 12)),
    "optim.embed.weight.step": ("float32", ()),
    "optim.block.weight.exp_avg": ("float32", (10, 3, 5)),
    "tracked.counts": ("int64", (33,)),
}
PLAIN = (
    "optim.embed.weight.step",
    "model.norm.scale",
    "model.mask",
    "model.none",
    "tracked.counts",
)
"""Never sharded, whatever the engine."""


def content(name: str, step: int) -> Any:
    """What the whole tensor holds at a step."""
    import torch

    dtype, shape = SHAPES[name]
    start = int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:3], "big")
    count = 1
    for size in shape:
        count *= size
    values = torch.arange(start, start + count, dtype=torch.int64) % 251
    return values.to(getattr(torch, dtype)).reshape(shape)


def spread(world: Any, engine: str, step: int | None, mesh: Any = None) -> dict[str, Any]:
    """All tensors as this rank holds them; filled with -1 (or True) where there is no step."""
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    state: dict[str, Any] = {}
    for name in SHAPES:
        whole = content(name, step or 0)
        if step is None:
            whole = torch.full_like(whole, 1 if whole.dtype is torch.bool else -1)
        if engine == "fsdp2" and name not in PLAIN and world.is_distributed:
            state[name] = distribute_tensor(whole, mesh, [Shard(0)])
        elif engine.startswith("hsdp") and name not in PLAIN:
            state[name] = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
        else:
            state[name] = whole
    return state


def mesh_of(world: Any, engine: str) -> Any:
    """The device mesh of an engine; collective. None where it needs none."""
    import torch.distributed as dist

    if engine == "fsdp2" and world.is_distributed:
        return dist.init_device_mesh("cpu", (world.world_size,))
    if engine == "hsdp":
        return dist.init_device_mesh("cpu", (2, world.world_size // 2))
    if engine == "hsdp 4x1":  # every rank has all of it, as one shard
        return dist.init_device_mesh("cpu", (4, 1))
    return None


def own(world: Any, step: int | None) -> dict[str, Any]:
    """What only this rank has."""
    import torch

    value = 255 if step is None else (step + 16 * world.rank) % 251
    return {f"rng.rank-{world.rank:05d}.torch": torch.full((5,), value, dtype=torch.uint8)}


def wrong(state: dict[str, Any], step: int) -> list[str]:
    """Names of tensors that are not what they are at a step."""
    import torch

    bad = []
    for name, tensor in state.items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if not torch.equal(whole, content(name, step)):
            bad.append(name)
    return bad


def place(world: Any, root: Path, **settings: Any) -> Any:
    """Where a run under `root` saves to, with the next attempt's right. Collective."""
    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.settings.schema import CheckpointSettings
    from hpctrain.core.world import on_rank_0
    from hpctrain.ledger.run.fence import take_attempt
    from hpctrain.ledger.run.layout import RunDir

    run = RunDir(root)
    run.root.mkdir(parents=True, exist_ok=True)
    attempt = on_rank_0(world, lambda: take_attempt(run, job_id="test", restarts=0))
    return SavePlace(run, attempt, CheckpointSettings(**settings))


def manifest(world: Any, step: int) -> Any:
    """A manifest for a step."""
    from hpctrain.checkpoint.format.manifest import Manifest

    return Manifest(
        run_id="id",
        name="run",
        step=step,
        world_size=world.world_size,
        mesh={"dp": world.world_size},
        engine="test",
        rng={"ranks": world.world_size},
        block_bytes=1024,
    )


def restore_into(engine: Any, where: Any) -> int:
    """Fill an engine from the newest checkpoint, asking for what that holds, as a run does.

    Collective. `where` is what `place` gives; each call of that takes the run over.

    Returns:
        Its step; 0 where there is none.
    """
    from hpctrain.checkpoint.tensors.restore import Wanted, restore

    states = []

    def wanted(found: Manifest) -> Wanted:
        state = engine.state(saved={entry.name: entry for entry in found.tensors})
        states.append(state)
        return Wanted(state, frozenset(name for name in state.shared if name.startswith("optim.")))

    step = restore(where, engine.world, wanted).step
    if states:
        engine.apply(dict(states[-1].shared))
    return step

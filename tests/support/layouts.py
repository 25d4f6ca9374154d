"""One tiny training under any engine and mesh, and its whole state told by the engine's makers.

Nothing here goes through our checkpoints: whole tensors come from DTensor's `full_tensor` and from
DeepSpeed's `safe_get_full_*`, so that what we write and read can be held against them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.gloo import launch

if TYPE_CHECKING:
    from pathlib import Path

GLOBAL_BATCH = 24
MICRO_BATCH = 8
SEQ_LEN = 16
SEED = 7

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "DDP@2": (2, {"kind": "ddp"}),
    "FSDP2@4": (4, {"kind": "fsdp2"}),
    "FSDP2@3": (3, {"kind": "fsdp2"}),
    "HSDP@4": (4, {"kind": "fsdp2", "dp_replicate": "2"}),
    "FSDP2xTP@4": (4, {"kind": "fsdp2", "tp": "2"}),
    "PPxFSDP2@4": (4, {"kind": "fsdp2", "pp": "2"}),
    "EPxFSDP2@4": (4, {"kind": "fsdp2", "ep": "2"}),
    "CPxFSDP2@4": (4, {"kind": "fsdp2", "cp": "2"}),
    "ZeRO-1@2": (2, {"kind": "zero1"}),
    "ZeRO-2@3": (3, {"kind": "zero2"}),
    "ZeRO-3@4": (4, {"kind": "zero3"}),
}


def runs_here(layout: str) -> bool:
    """Whether the installed torch can run a layout: `make torch-versions` comes with older ones."""
    from importlib import metadata

    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.ledger.plan.mesh import refusal

    options = EngineSettings(**LAYOUTS[layout][1])
    return refusal({"torch": metadata.version("torch")}, options) is None


def build(layout: str, *, experts: int = 0, layers: int = 4, **settings: Any) -> Any:
    """The tiny model under a layout. In a rank; collective, once for each engine."""
    import torch

    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.core.world import World
    from hpctrain.recipes.lm.model import LM, LMConfig
    from hpctrain.train.engines.parallelize import parallelize
    from hpctrain.train.joining_ranks import join_world

    config = LMConfig(layers=layers, dim=16, heads=4, seq_len=SEQ_LEN, **_of_experts(experts))
    model = LM(config, seed=SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    size, chosen = LAYOUTS[layout]
    world = join_world() if size > 1 else World(0, 0, 1, torch.device("cpu"))
    torch.manual_seed(SEED)
    options = EngineSettings(**{"clip_norm": 0.5, **chosen, **settings})
    return parallelize(model, optimizer, options, world)


def _of_experts(count: int) -> dict[str, int]:
    return {"experts": count, "experts_per_token": 2} if count else {}


def steps(engine: Any, first: int, last: int) -> list[tuple[float, float]]:
    """Train the steps [first, last); loss and gradient norm of each. Collective."""
    found = []
    for step in range(first, last):
        engine.at_step(step)
        loss = engine.forward_backward(microbatches(engine, step), share)
        found.append((loss, engine.step()))
    return found


def microbatches(engine: Any, step: int) -> list[Any]:
    """A step's samples, which are a function of the step, cut for this rank."""
    import torch

    from hpctrain.train.data.batches import cut_step
    from hpctrain.train.engines.engine import Microbatch

    positions = range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
    batch = cut_step(
        positions,
        engine.data_rank,
        engine.data_ranks,
        MICRO_BATCH,
        index=lambda position: position,
        passes=engine.passes,
    )
    found = []
    for piece in batch.pieces:
        rows = [sample(index) for index in piece.indices]
        tokens = torch.stack(rows)
        weights = torch.tensor(piece.weights)
        found.append(Microbatch(tokens[:, :-1], (tokens[:, 1:], weights), piece.leaf))
    return found


def sample(index: int) -> Any:
    """Sequence number `index`: something that can be learnt."""
    import torch

    generator = torch.Generator().manual_seed(index)
    start = int(torch.randint(0, 200, (1,), generator=generator))
    return (start + 3 * torch.arange(SEQ_LEN + 1)) % 257


def share(logits: Any, targets: Any) -> Any:
    """A microbatch's share of the mean loss."""
    from hpctrain.recipes.lm.model import token_loss

    following, weights = targets
    return (token_loss(logits, following) * weights).sum() / (GLOBAL_BATCH * SEQ_LEN)


def whole(engine: Any) -> dict[str, Any]:
    """Every weight and moment of the model, whole, on every rank; by torch and DeepSpeed alone."""
    import torch.distributed as dist

    mine = _of_zero(engine) if engine.kind.startswith("zero") else _of_tensors(engine)
    if engine.mesh.pp == 1:
        return mine
    stages: list[Any] = [None] * engine.world.world_size
    dist.all_gather_object(stages, mine)
    return {name: value for stage in stages for name, value in stage.items()}


def _of_tensors(engine: Any) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {}
    for name, parameter in engine.model.named_parameters():
        plain = name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")
        held = {"weight": parameter.detach(), **engine.optimizer.state.get(parameter, {})}
        for key, value in held.items():
            tensor = torch.as_tensor(value)
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found[f"{plain}.{key}"] = full.clone()
    return found


def _of_zero(engine: Any) -> dict[str, Any]:
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, Any] = {}
    state = engine.state()
    for name, parameter in engine.model.named_parameters():
        plain = name.removeprefix("module.")
        found[f"{plain}.weight"] = safe_get_full_fp32_param(parameter).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{plain}.{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
        found[f"{plain}.step"] = torch.as_tensor(state.shared[f"optim.{plain}.step"]).clone()
    return found


def save(engine: Any, root: Path, step: int) -> None:
    """Commit a checkpoint of the engine's state. Collective."""
    from hpctrain.checkpoint.tensors.save import save as commit
    from tests.support.sharded import manifest, place

    commit(place(engine.world, root), engine.world, engine.state(), manifest(engine.world, step))


def load(engine: Any, root: Path) -> int:
    """Fill the engine from the newest checkpoint; its step. Collective."""
    from tests.support.sharded import place, restore_into

    return restore_into(engine, place(engine.world, root))


def run(layout: str, fn: Any, **kwargs: Any) -> Any:
    """What `fn(layout, **kwargs)` gives on rank 0 of a layout's ranks."""
    return launch(_rank, LAYOUTS[layout][0], act=fn, layout=layout, options=kwargs)[0]


def _rank(act: Any, layout: str, options: dict[str, Any]) -> Any:
    return act(layout, **options)

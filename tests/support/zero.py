"""What the tests of DeepSpeed's engine share: an awkward model, and its whole state told elsewhere.

Whole tensors come from DeepSpeed's `safe_get_full_*` and from DTensor's `full_tensor`, not from our
checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.support import gloo

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

VOCABULARY = 33
BATCH = 12
RATES = (1e-2, 3e-3)
DECAYS = (0.1, 0.0)
SUB_GROUPS = {"sub_group_size": 90, "stage3_param_persistence_threshold": 10}
"""Rows of few parameters at stage 3; parameters of up to ten elements stay whole on each rank."""


def preload() -> None:
    """Import DeepSpeed once in the parent: seconds for each rank otherwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401


def launch(fn: Any, world_size: int, **kwargs: Any) -> list[Any]:
    """As `gloo.launch`, with DeepSpeed imported beforehand."""
    preload()
    return gloo.launch(fn, world_size, **kwargs)


def allow_fp16() -> None:
    """Have DeepSpeed run fp16 on a CPU that does it slowly. In a rank."""
    from deepspeed import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda _: True


def net() -> Any:
    """Sizes that no number of ranks divides, tied weights, a part not trained, buffers."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(7, 5), nn.Linear(5, 7)

        def forward(self, hidden: Any) -> Any:
            return hidden + self.outer(torch.tanh(self.inner(hidden)))

    class Net(nn.Module):
        uses_gain = blocks_count = True

        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(VOCABULARY, 7)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.norm = nn.LayerNorm(7)
            self.frozen = nn.Linear(7, 7, bias=False)
            self.head = nn.Linear(7, VOCABULARY, bias=False)
            self.head.weight = self.emb.weight
            self.gain = nn.Parameter(torch.ones(1))
            self.frozen.weight.requires_grad_(requires_grad=False)
            self.register_buffer("seen", torch.zeros(3))
            self.register_buffer("scratch", torch.zeros(5), persistent=False)

        def forward(self, tokens: Any) -> Any:
            if self.training:
                self.seen += 1.0
            hidden = self.emb(tokens)
            for block in self.blocks if self.blocks_count else ():
                hidden = block(hidden)
            hidden = self.norm(self.frozen(hidden))
            return self.head(hidden * self.gain if self.uses_gain else hidden)

    torch.manual_seed(3)
    return Net()


@contextlib.contextmanager
def _sub_groups() -> Iterator[None]:
    """Have engines cut the model into small sub-groups, as DeepSpeed does with large ones."""
    from hpctrain.train.engines.zero import engine

    real = engine.engine_config

    def with_groups(*args: Any, **kwargs: Any) -> dict[str, Any]:
        config = real(*args, **kwargs)
        return config | {"zero_optimization": config["zero_optimization"] | SUB_GROUPS}

    with mock.patch.object(engine, "engine_config", with_groups):
        yield


def build(kind: str, *, frozen: float = 1.0, sub_groups: bool = False, **settings: Any) -> Any:
    """The awkward model under an engine, with two groups in its optimizer. Collective.

    What is not trained is scaled by `frozen`, so that a load that leaves it out shows. With
    `sub_groups` see `SUB_GROUPS`.
    """
    import torch

    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.core.world import World
    from hpctrain.train.engines.parallelize import parallelize
    from hpctrain.train.joining_ranks import join_world

    model = net()
    model.frozen.weight.data.mul_(frozen)
    trained = [(n, p) for n, p in model.named_parameters() if n != "frozen.weight"]
    halves = [[p for n, p in trained if ("norm" in n) == second] for second in (False, True)]
    halves[0].append(model.frozen.weight)  # frozen ones may be in a group
    groups = [
        {"params": half, "lr": rate, "weight_decay": decay}
        for half, rate, decay in zip(halves, RATES, DECAYS, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups)
    alone = kind == "plain"
    world = World(0, 0, 1, torch.device("cpu")) if alone else join_world()
    chosen = {} if alone else {"kind": kind}
    options = EngineSettings(**{"clip_norm": 0.5, **chosen, **settings})
    with _sub_groups() if sub_groups else contextlib.nullcontext():
        engine = parallelize(model, optimizer, options, world)
    engine.made_by_program = optimizer
    return engine


def steps(engine: Any, first: int, last: int) -> list[tuple[float, float]]:
    """Train the steps [first, last), with rates that the program sets; loss and norm of each."""
    found = []
    for step in range(first, last):
        for group, rate in zip(engine.made_by_program.param_groups, RATES, strict=True):
            group["lr"] = rate / (1 + step)
        loss = engine.forward_backward(microbatches(engine, step), share)
        found.append((loss, engine.step()))
    return found


def microbatches(engine: Any, step: int) -> list[Any]:
    """A step's samples, which are a function of the step, cut for this rank."""
    import torch

    from hpctrain.train.data.batches import cut_step
    from hpctrain.train.engines.engine import Microbatch

    positions = range(step * BATCH, (step + 1) * BATCH)
    batch = cut_step(positions, engine.data_rank, engine.data_ranks, 2, index=lambda i: i)
    found = []
    for piece in batch.pieces:
        rows = [
            torch.randint(0, VOCABULARY, (6,), generator=torch.Generator().manual_seed(index))
            for index in piece.indices
        ]
        tokens = torch.stack(rows)
        found.append(Microbatch(tokens[:, :-1], (tokens[:, 1:], torch.tensor(piece.weights))))
    return found


def share(logits: Any, targets: Any) -> Any:
    """A microbatch's share of the mean loss."""
    from hpctrain.recipes.lm.model import token_loss

    following, weights = targets
    return (token_loss(logits, following) * weights).sum() / (BATCH * 5)


def whole(engine: Any) -> dict[str, Any]:
    """Every weight, moment, count and buffer, whole, on every rank, by checkpoint names."""
    import torch

    def full(tensor: Any) -> Any:
        tensor = torch.as_tensor(tensor).detach()
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()

    found = {}
    for name, parameter in engine.model.named_parameters(remove_duplicate=False):
        plain = name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")
        if engine.kind in {"zero1", "zero2", "zero3"}:
            found.update(_of_zero(engine, plain, parameter))
            continue
        found[f"model.{plain}"] = full(parameter)
        held = {} if plain == "head.weight" else engine.optimizer.state.get(parameter, {})
        for key, value in held.items():
            found[f"optim.{plain}.{key}"] = full(value)
    for name, buffer in engine.model.named_buffers():
        if "scratch" not in name:
            found[f"model.{name.removeprefix('module.')}"] = buffer.clone()
    return found


def _of_zero(engine: Any, name: str, parameter: Any) -> dict[str, Any]:
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if not parameter.requires_grad:
        if engine.kind != "zero3":
            return {f"model.{name}": parameter.detach().clone()}
        with deepspeed.zero.GatheredParameters([parameter]):
            return {f"model.{name}": parameter.detach().clone()}
    if engine.kind != "zero3":
        # 0.19.8 links moments when the first group has stepped, and all later groups to nothing.
        engine.model.optimizer._hp_optimizer_states_linked = False
        engine.model.optimizer._lazy_init_hp_params_optimizer_state()
    found = {f"model.{name}": safe_get_full_fp32_param(parameter).clone()}
    if name == "head.weight":  # moments go by a tied parameter's first name
        return found
    counts = {float(state["step"]) for state in engine.optimizer.state.values()}
    assert len(counts) == 1
    found[f"optim.{name}.step"] = torch.tensor(counts.pop())
    for key in ("exp_avg", "exp_avg_sq"):
        found[f"optim.{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return found


def by_state(engine: Any) -> dict[str, Any]:
    """The same out of what the engine would save, put together from all ranks. Collective."""
    import torch
    import torch.distributed as dist

    from hpctrain.checkpoint.tensors.boxes import Flat

    ranges: list[Any] = [None] * engine.world.world_size
    state = engine.state()
    mine = {
        name: (value.local.clone(), value.first, value.shape)
        for name, value in state.shared.items()
        if isinstance(value, Flat)
    }
    dist.all_gather_object(ranges, mine)
    found = {name: v.clone() for name, v in state.shared.items() if isinstance(v, torch.Tensor)}
    for name in sorted({name for held in ranges for name in held}):
        parts = sorted((held[name] for held in ranges if name in held), key=lambda part: part[1])
        rows = [row for row, _, _ in parts]
        assert [part[1] for part in parts] == [sum(map(len, rows[:n])) for n in range(len(rows))]
        found[name] = torch.cat(rows).view(parts[0][2])
    return found


def save(engine: Any, root: Path, step: int) -> None:
    """Commit a checkpoint of the engine's state. Collective."""
    from tests.support import layouts

    layouts.save(engine, root, step)


def load(engine: Any, root: Path) -> int:
    """Fill the engine from the newest checkpoint; its step. Collective."""
    from tests.support import layouts

    return layouts.load(engine, root)

"""What a mesh must know of a model: the numbers that its axes have to divide. Pure, without torch.

tests/unit/test_mesh.py compares `shape_of` with the recipe's model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.base.text import one_of

if TYPE_CHECKING:
    from hpctrain.settings.schema import EngineSettings, TrainSettings


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes.

    Attributes:
        layers: Blocks, which a pipeline shares out.
        dim: Width.
        heads: Attention heads.
        hidden: Width of the MLP, or of each expert.
        seq_len: Positions of a sequence.
        experts: In each block; 0 for a dense model.
    """

    layers: int
    dim: int
    heads: int
    hidden: int
    seq_len: int
    experts: int = 0


def shape_of(train: TrainSettings) -> ModelShape:
    """The shape of the shipped recipe's model."""
    hidden = 32 * -(-8 * train.dim // 96)
    return ModelShape(train.layers, train.dim, train.heads, hidden, train.seq_len, train.experts)


def misfit(axis: str, ranks: int, engine: EngineSettings, shape: ModelShape) -> str:
    """Why a model cannot be cut over so many ranks of an axis; empty where it can.

    Args:
        axis: "tp", "pp" or "ep"; others always fit.
        ranks: Along it.
        engine: For how the axis is used.
        shape: The model's.
    """
    if ranks == 1:
        return ""
    why = {"tp": _tp_misfit, "pp": _pp_misfit, "ep": _ep_misfit}.get(axis)
    return why(ranks, engine, shape) if why is not None else ""


def _tp_misfit(tp: int, engine: EngineSettings, shape: ModelShape) -> str:
    if shape.heads % tp:
        heads = shape.heads
        return f"does not divide train.heads {heads}; use {_divisors(heads)}, or other heads"
    if shape.dim % tp:
        return f"does not divide train.dim {shape.dim}; use a number that does"
    if shape.hidden % tp:
        return (
            f"does not divide {shape.hidden}, the width of the MLP that follows from train.dim "
            f"{shape.dim}; use a number that does, or another train.dim"
        )
    if engine.sequence_parallel and shape.seq_len % tp:
        return (
            f"does not divide train.seq_len {shape.seq_len}, as engine.sequence_parallel needs; "
            "use a number that does, another train.seq_len, or engine.sequence_parallel=false"
        )
    return ""


def _pp_misfit(pp: int, engine: EngineSettings, shape: ModelShape) -> str:
    on_each = engine.pp_stages_per_rank if engine.pp_schedule == "interleaved" else 1
    if pp * on_each <= shape.layers:
        return ""
    stages = "" if on_each == 1 else f" x engine.pp_stages_per_rank {on_each}"
    most = shape.layers // on_each
    instead = f"{most} at most" if most else "fewer stages per rank"
    return (
        f"{stages} needs {pp * on_each} layers, and train.layers is {shape.layers}; "
        f"use {instead}, or more layers"
    ).removeprefix(" ")


def _ep_misfit(ep: int, engine: EngineSettings, shape: ModelShape) -> str:
    del engine
    if not shape.experts:
        return "needs a model with experts, and train.experts is 0; set it, or engine.ep 1"
    if shape.experts % ep:
        return f"does not divide train.experts {shape.experts}; use {_divisors(shape.experts)}"
    return ""


def _divisors(number: int) -> str:
    """All divisors of a number as one says them."""
    return one_of(divisors(number))


def divisors(number: int) -> list[int]:
    """All that divide it, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})

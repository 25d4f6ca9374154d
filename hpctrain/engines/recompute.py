"""Activation checkpointing: what a block computed is computed again in the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hpctrain.engines.blocks import every_block
from hpctrain.engines.torch_private import checkpoint_wrapped, operators

if TYPE_CHECKING:
    from torch import nn

KEPT = operators(
    (
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_cudnn_attention",
        "_c10d_functional.all_reduce",
        "_c10d_functional.reduce_scatter_tensor",
    )
)
"""What selective recomputation keeps, since it costs the most: matrix products, attention, and
sums over the ranks of `tp`."""


def recompute_blocks(model: nn.Module, how: str) -> None:
    """Have each block of a model compute its forward pass again in the backward pass. In place.

    Each block is wrapped, before it is compiled and sharded. Random numbers are drawn again as they
    were.

    Args:
        model: In place; its parameters stay the same ones.
        how: "full" keeps a block's inputs alone; "selective" also the results in `KEPT`.
    """
    blocks = {id(block) for block in every_block(model)}
    options: dict[str, Any] = {}
    if how == "selective":
        options["context_fn"] = _contexts
    checkpoint_wrapped(model, lambda module: id(module) in blocks, **options)


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

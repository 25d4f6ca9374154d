"""The layout of a decoder model, told by names and structure, and the mesh's axes as device meshes.

A model fits when every parameter has a place in it; what does not is named, since a matrix that is
cut the wrong way trains on wrong numbers without an error. tests/engines/test_tensor_parallel.py
and test_experts.py hold the promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpctrain.core.base.mesh import AXES
from hpctrain.core.torch_private import split_axis
from hpctrain.errors import UsageError
from hpctrain.train.engines.blocks import find_blocks
from hpctrain.train.engines.stages import PassThrough

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from hpctrain.core.base.mesh import Mesh

NAMES = {
    # around the blocks
    "embedding": ("embedding", "embed_tokens", "tok_embeddings", "tok"),
    "norm": ("norm", "final_norm"),
    "head": ("head", "lm_head", "output", "out"),
    # in a block
    "attention": ("attention", "self_attn", "attn"),
    "mlp": ("mlp", "feed_forward"),
    # in an attention
    "query": ("query", "q_proj", "wq"),
    "key": ("key", "k_proj", "wk"),
    "value": ("value", "v_proj", "wv"),
    "mix": ("out", "o_proj", "wo"),
    "query_norm": ("query_norm", "q_norm"),
    "key_norm": ("key_norm", "k_norm"),
    # in an MLP
    "gate": ("gate", "gate_proj", "w1"),
    "up": ("up", "up_proj", "w3"),
    "down": ("down", "down_proj", "w2"),
}
"""What a module does -> its names in the recipe, in Hugging Face's decoders, in torchtitan's."""

NORMS = (
    *("attention_norm", "mlp_norm", "attn_norm", "ffn_norm"),
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
"""A block's norms, before or behind its attention and its MLP: all of them have its full width."""

CUT = ("query", "key", "value", "mix", "gate", "up", "down")
"""A block's matrices."""
FUSED = {
    "attention": ("qkv", "qkv_proj", "wqkv", "c_attn", "in_proj", "query_key_value"),
    "mlp": ("gate_up_proj", "w13"),
}
"""Names of matrices that hold several: query, key and value; gate and up."""
HEAD_COUNTS = ("heads", "n_heads", "num_heads", "n_kv_heads", "num_key_value_heads", "n_head")
"""Where an attention keeps how many heads it has; of those of these names that it has."""
TABLES = ("rotary_emb",)
"""Beside the blocks: makes tables of positions, as many as the embedding's output has."""

ASK = "name each matrix's style in run.parallelize(..., plan=ModelPlan(tensor_parallel={...}))"
_MATRICES = nn.Linear | nn.Embedding


@dataclass(frozen=True)
class BlockNames:
    """Names of a block's modules in the whole model, by what they do.

    Attributes:
        name: Of the block itself.
        norms: All that work on its full width.
        query_norm: Of the query, of each head or of all together; None without one.
        key_norm: The same of the key.
    """

    name: str
    norms: tuple[str, ...]
    attention: str
    query: str
    key: str
    value: str
    mix: str
    mlp: str
    gate: str
    up: str
    down: str
    query_norm: str | None
    key_norm: str | None


@dataclass(frozen=True)
class Layout:
    """Names of a model's modules by what they do; None for what is not there.

    A part of a model that a pipeline has cut has no embedding, or no head.

    Attributes:
        embedding: Tokens to activations.
        norm: Behind the blocks.
        head: Activations to logits.
        tables: What makes tables of positions from the embedding's output.
    """

    embedding: str | None
    blocks: Sequence[BlockNames]
    norm: str | None
    head: str | None
    tables: str | None


def recognise(model: nn.Module) -> Layout:
    """The layout of a decoder model.

    Raises:
        UsageError: it is none of the common ones; with the module that does not fit.
    """
    names = {id(module): name for name, module in model.named_modules()}
    blocks = find_blocks(model)
    if not blocks:
        raise UsageError(f"engine.tp: {type(model).__name__} has no list of blocks; {ASK}")
    listed = names[id(blocks[0])].rpartition(".")[0]
    trunk = listed.rpartition(".")[0]
    layout = Layout(
        embedding=_find(model, (trunk,), "embedding"),
        blocks=[_block(model, names[id(block)]) for block in blocks],
        norm=_find(model, (trunk,), "norm"),
        head=_find(model, ("", trunk), "head"),
        tables=next((one for name in TABLES if _has(model, one := _join(trunk, name))), None),
    )
    _check_whole(model, layout, listed)
    return layout


def planned(layout: Layout) -> Iterator[str]:
    """Names of all modules whose parameters have a place in a layout."""
    for name in (layout.embedding, layout.norm, layout.head):
        if name is not None:
            yield name
    for block in layout.blocks:
        yield from block.norms
        yield from (getattr(block, role) for role in CUT)
        yield from (name for name in (block.query_norm, block.key_norm) if name is not None)


def owners(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parameters of their own, by name; not what stands in for another stage's."""
    for name, module in model.named_modules():
        held = next(module.parameters(recurse=False), None)
        if held is not None and not isinstance(module, PassThrough):
            yield name, module


def _block(model: nn.Module, name: str) -> BlockNames:
    attention, mlp = _need(model, name, "attention"), _need(model, name, "mlp")
    _refuse_fused(model, attention, mlp)
    return BlockNames(
        name=name,
        norms=tuple(norm for own in NORMS if _has(model, norm := _join(name, own))),
        attention=attention,
        mlp=mlp,
        query_norm=_find(model, (attention,), "query_norm"),
        key_norm=_find(model, (attention,), "key_norm"),
        **{role: _need(model, attention, role) for role in ("query", "key", "value", "mix")},
        **{role: _need(model, mlp, role) for role in ("gate", "up", "down")},
    )


def _refuse_fused(model: nn.Module, attention: str, mlp: str) -> None:
    """Refuse what would give each rank a part of the wrong thing."""
    parts = ((attention, "attention", "query, key and value"), (mlp, "mlp", "gate and up"))
    for parent, kind, held in parts:
        for fused in FUSED[kind]:
            if _has(model, path := _join(parent, fused)):
                raise UsageError(
                    f"engine.tp: {path} holds {held} in one matrix, which cannot be cut in each; "
                    "give the model one nn.Linear for each, or " + ASK
                )
    if _has(model, path := _join(mlp, "experts")):
        raise UsageError(
            f"engine.tp: {path} are experts, which tensor parallelism does not cut; set engine.tp "
            "to 1 (FSDP2 shards experts, engine.ep shares them), or " + ASK
        )


def _check_whole(model: nn.Module, layout: Layout, listed: str) -> None:
    """Refuse blocks with a parameter that has no place, or with a matrix that is none."""
    planned_names = set(planned(layout))
    for name, module in owners(model):
        if name.startswith(listed + ".") and name not in planned_names:
            raise UsageError(
                f"engine.tp: {name} ({type(module).__name__}) has parameters and is no part of a "
                f"common decoder's block; {ASK}"
            )
    matrices = [layout.embedding, layout.head]
    matrices += [getattr(block, role) for block in layout.blocks for role in CUT]
    for matrix in matrices:
        if matrix is not None and not isinstance(model.get_submodule(matrix), _MATRICES):
            kind = type(model.get_submodule(matrix)).__name__
            raise UsageError(f"engine.tp: {matrix} is a {kind}, not an nn.Linear; {ASK}")


def _need(model: nn.Module, parent: str, role: str) -> str:
    name = _find(model, (parent,), role)
    if name is None:
        kind = type(model.get_submodule(parent)).__name__
        raise UsageError(
            f"engine.tp: {parent} ({kind}) has no {role} (known names: {', '.join(NAMES[role])}), "
            f"so its layout is not a common decoder's; {ASK}"
        )
    return name


def _find(model: nn.Module, parents: Sequence[str], role: str) -> str | None:
    for parent in parents:
        for name in NAMES[role]:
            if _has(model, full_name := _join(parent, name)):
                return full_name
    return None


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def _has(model: nn.Module, name: str) -> bool:
    parent, _, child = name.rpartition(".")
    attribute = getattr(model.get_submodule(parent), child, None)
    return isinstance(attribute, nn.Module) and not isinstance(attribute, PassThrough)


@dataclass(frozen=True)
class DeviceMeshes:
    """Device meshes, cut from one.

    Attributes:
        root: Over all ranks, with the axes of `base.mesh.AXES`.
        dense: For parameters: `dp_shard`, with `dp_replicate` before it where there are copies.
        ep: Ranks beside each other that share the experts; None without expert parallelism.
        expert_shard: For experts, like `dense`: ranks that share one expert, with copies before
            them. Else None.
        cp: Ranks beside each other that share sequences; None where none do.
    """

    root: DeviceMesh
    dense: DeviceMesh
    ep: DeviceMesh | None = None
    expert_shard: DeviceMesh | None = None
    cp: DeviceMesh | None = None


def make_meshes(mesh: Mesh, device: torch.device) -> DeviceMeshes:
    """Make the groups of all axes. Collective: every rank calls it."""
    sizes = tuple(getattr(mesh, axis) for axis in AXES)
    root = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    dense = root["dp_replicate", "dp_shard"] if mesh.dp_replicate > 1 else root["dp_shard"]
    if mesh.cp > 1:
        cut = (mesh.dp_shard // mesh.cp, mesh.cp)
        return DeviceMeshes(
            root, dense, cp=split_axis(root, "dp_shard", cut, ("dp_only", "cp"))["cp"]
        )
    if mesh.ep == 1:
        return DeviceMeshes(root, dense)
    cut = (mesh.dp_shard // mesh.ep, mesh.ep)
    # Cut from the same root: torch joins a parameter's meshes only where they have one in common.
    sparse = split_axis(root, "dp_shard", cut, ("ep_shard", "ep"))
    copied = mesh.dp_replicate > 1
    shard = sparse["dp_replicate", "ep_shard"] if copied else sparse["ep_shard"]
    return DeviceMeshes(root, dense, sparse["ep"], shard)

"""Import from DeepSpeed's ZeRO-1, 2 and 3 directories: fp32 weights and moments, by name.

DeepSpeed itself is not needed. Each rank has a part of one long row of numbers for each group of
parameters: ZeRO-1 and 2 cut the row in equal parts, ZeRO-3 cuts each parameter in equal parts; both
pad the end.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from hpctrain.checkpoint.exchange.contents import Contents, NestedValue, Tensor
from hpctrain.checkpoint.exchange.untrusted import DTYPE_NAMES, Inert, as_tensor, load, raw
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpctrain.checkpoint.exchange.contents import Bytes

LATEST = "latest"
OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")
MODEL = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]+)_model_states\.pt")
FP32 = "fp32"


class Stage(Inert):
    """Stands for DeepSpeed's number of a ZeRO stage."""

    number: int

    def __new__(cls, number: object = None, *_: object, **__: object) -> Self:
        """Keep the number."""
        stage = object.__new__(cls)
        stage.number = number if isinstance(number, int) else -1
        return stage


ALLOWED: list[tuple[type, str]] = [
    (Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
    (Inert, "deepspeed.runtime.zero.config.DeepSpeedZeroConfig"),
]


@dataclass
class _Rows:
    """The long rows of all ranks, as `groups`: what ("fp32", "exp_avg", ...) to each rank's part.

    `numbers` are shared by all ranks, such as the step. A rank's part of a group stands for `part`
    elements, padding included. With ZeRO-3, `starts` is where each group starts in one rank's part
    of all.
    """

    where: Path
    groups: list[dict[str, list[torch.Tensor]]]
    numbers: list[dict[str, torch.Tensor]]
    part: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


def read(source: Path) -> Contents:
    """What the directory holds, or the newest one that its `latest` names.

    Raises:
        CheckpointError: it is cut, not complete, of a kind that is not understood, or wants to run
            something.
    """
    directory = _tagged(source)
    models, optims = _files(directory, MODEL), _files(directory, OPTIM)
    try:
        states = [load(path, allowed=ALLOWED) for path in models]
        shards = [load(path, allowed=ALLOWED)["optimizer_state_dict"] for path in optims]
        return _contents(directory, states, shards)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{directory} is not a ZeRO checkpoint as DeepSpeed 0.19 writes it: "
            f"{type(error).__name__}: {error}"
        ) from error


def _tagged(source: Path) -> Path:
    if not source.is_dir():
        raise CheckpointError(f"{source} is no directory, as DeepSpeed's checkpoints are")
    if not (source / LATEST).is_file():
        return source
    tag = (source / LATEST).read_text(errors="replace").strip()
    if "/" in tag or tag in {"", ".", ".."} or not (source / tag).is_dir():
        raise CheckpointError(
            f"{source / LATEST} names {tag!r}, which is not there; give the step's own directory"
        )
    return source / tag


def _files(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return one kind of file of all ranks, in order; refuse a missing rank and split tensors."""
    by_rank: dict[int, Path] = {}
    for path in directory.iterdir():
        match = pattern.fullmatch(path.name)
        if not match:
            continue
        if int(match[2]):
            raise CheckpointError(
                f"{path} is of tensor parallel rank {int(match[2])}; only data parallel"
                " ZeRO is read"
            )
        if by_rank.setdefault(int(match[1] or 0), path) != path:
            raise CheckpointError(f"{directory} has two files of rank {int(match[1] or 0)}")
    if sorted(by_rank) != list(range(len(by_rank))) or not by_rank:
        kind = pattern.pattern.rpartition("_")[0].rpartition("_")[2]
        raise CheckpointError(
            f"{directory} lacks {kind} states of some rank; there are those of {sorted(by_rank)}"
        )
    return [by_rank[rank] for rank in sorted(by_rank)]


def _contents(directory: Path, states: list[Any], shards: list[Any]) -> Contents:
    stage = shards[0]["zero_stage"]
    stage = stage.number if isinstance(stage, Stage) else int(stage)
    if stage not in {1, 2, 3}:
        raise CheckpointError(f"{directory} is of ZeRO stage {stage}; 1, 2 and 3 are read")
    counts = {count for shard in shards for count in _listed(shard["partition_count"])}
    if counts != {len(shards)}:
        raise CheckpointError(
            f"{directory} has {len(shards)} ranks' files and was saved by {sorted(counts)}"
        )
    if stage == 3 and len(states) != len(shards):  # noqa: PLR2004
        raise CheckpointError(
            f"{directory} has model states of {len(states)} of {len(shards)} ranks"
        )
    _refuse_experts(directory, states[0])
    shapes = [_shapes(group) for group in states[0]["param_shapes"]]
    rows = _rows_of_3(directory, shards) if stage == 3 else _rows_of_1(directory, shards)  # noqa: PLR2004
    leaves = _whole_3(rows, shapes) if stage == 3 else _whole_1(rows, shapes, shards)  # noqa: PLR2004
    leaves += _frozen(directory, states) if stage == 3 else []  # noqa: PLR2004
    leaves += _others(directory, states[0], leaves)
    contents = Contents("deepspeed", directory, leaves)
    contents.step = states[0].get("global_steps")
    if states[0].get("lr_scheduler"):
        contents.notes.append("left out: DeepSpeed's learning rate schedule")
    return contents


def _listed(value: Any) -> list[int]:
    return [int(one) for one in value] if isinstance(value, list | tuple) else [int(value)]


def _refuse_experts(directory: Path, state: dict[str, Any]) -> None:
    for key in ("num_experts", "autoep_layers", "ds_autoep_layers"):
        value = state.get(key)
        if isinstance(value, list) and any(value):
            raise CheckpointError(f"{directory} has experts ({key}), whose files are not read")


def _shapes(group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {str(name): tuple(int(size) for size in shape) for name, shape in group.items()}


def _rows(directory: Path, weights: list[list[torch.Tensor]], bases: list[Any]) -> _Rows:
    """Weights and the optimizer's state of each group, one part for each rank."""
    groups: list[dict[str, list[torch.Tensor]]] = []
    numbers: list[dict[str, torch.Tensor]] = []
    for number in range(len(weights[0])):
        groups.append({FP32: [of_rank[number] for of_rank in weights]})
        numbers.append({})
        states = [base["state"].get(number, {}) for base in bases]
        for key in states[0]:
            values = [torch.as_tensor(state[key]) for state in states]
            if values[0].dim():
                groups[-1][str(key)] = values
                continue
            if any(value != values[0] for value in values):
                raise CheckpointError(f"{directory}: {key} is not the same on all ranks")
            numbers[-1][str(key)] = values[0].float()
    return _Rows(directory, groups, numbers)


def _rows_of_1(directory: Path, shards: list[Any]) -> _Rows:
    bases = [shard["base_optimizer_state"] for shard in shards]
    if not all(isinstance(base, dict) and "state" in base for base in bases):
        raise CheckpointError(
            f"{directory} was saved with elastic_checkpoint, whose optimizer state is not read"
        )
    weights = [shard["single_partition_of_fp32_groups"] for shard in shards]
    rows = _rows(directory, weights, bases)
    for number in range(len(rows.groups)):
        # The end of the row, which is padding, is cut off in the weights and not in the moments.
        sizes = {
            len(own_rows[number]) + int(shard["group_paddings"][number])
            for own_rows, shard in zip(weights, shards, strict=True)
        }
        if len(sizes) != 1:
            raise CheckpointError(f"{directory}: group {number} is not cut in equal parts")
        rows.part.append(sizes.pop())
    return rows


def _rows_of_3(directory: Path, shards: list[Any]) -> _Rows:
    weights = [one["fp32_flat_groups"] for one in shards]
    rows = _rows(directory, weights, [one["optimizer_state_dict"] for one in shards])
    rows.part = [len(group) for group in weights[0]]
    rows.starts = [0, *accumulate(rows.part)]
    return rows


def _whole_1(
    rows: _Rows, shapes: list[dict[str, tuple[int, ...]]], shards: list[Any]
) -> list[NestedValue]:
    if len(shapes) != len(rows.groups):
        raise CheckpointError(
            f"{rows.where} names {len(shapes)} groups and holds {len(rows.groups)}"
        )
    gaps = shards[0].get("param_alignment_paddings")
    leaves: list[NestedValue] = []
    for number, group in enumerate(shapes):
        position, part = 0, rows.part[number]
        gap = gaps[number] if gaps else [0] * len(group)
        if sum(map(math.prod, group.values())) + sum(gap) > len(shards) * part:
            raise CheckpointError(f"{rows.where}: group {number} is shorter than its parameters")
        for (name, shape), behind in zip(group.items(), gap, strict=True):
            count = math.prod(shape)
            spans = [
                (number, rank, low - rank * part, high - rank * part)
                for rank, low, high in _cut(position, position + count, part)
            ]
            leaves += _parameter(rows, name, shape, spans)
            position += count + int(behind)
    return leaves


def _cut(low: int, high: int, part: int) -> list[tuple[int, int, int]]:
    """A range of the row by ranks: (rank, from, to)."""
    ranges = []
    while low < high:
        rank = low // part
        end = min(high, (rank + 1) * part)
        ranges.append((rank, low, end))
        low = end
    return ranges


def _whole_3(rows: _Rows, shapes: list[dict[str, tuple[int, ...]]]) -> list[NestedValue]:
    ranks = len(rows.groups[0][FP32])
    position = 0
    leaves: list[NestedValue] = []
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        count = math.prod(shape)
        part = -(-count // ranks)
        spans = []
        for rank in range(ranks):
            held = max(0, min(part, count - rank * part))
            for number, low, high in _groups_of(rows, position, position + held):
                spans.append((number, rank, low, high))
        leaves += _parameter(rows, name, shape, spans)
        position += part
    if position != rows.starts[-1]:
        raise CheckpointError(
            f"{rows.where}: each rank holds {rows.starts[-1]:,} elements, its parameters take "
            f"{position:,}"
        )
    return leaves


def _groups_of(rows: _Rows, low: int, high: int) -> list[tuple[int, int, int]]:
    """A range of one rank's elements by groups: (group, from, to)."""
    ranges = []
    for number, (start, end) in enumerate(zip(rows.starts, rows.starts[1:], strict=False)):
        if max(low, start) < min(high, end):
            ranges.append((number, max(low, start) - start, min(high, end) - start))
    return ranges


def _parameter(
    rows: _Rows, name: str, shape: tuple[int, ...], spans: Sequence[tuple[int, int, int, int]]
) -> list[NestedValue]:
    group = spans[0][0] if spans else 0
    leaves = []
    for what in rows.groups[group]:
        parts = [rows.groups[number][what][rank] for number, rank, _, _ in spans]
        for tensor, (_, rank, low, high) in zip(parts, spans, strict=True):
            if tensor.dim() != 1 or not 0 <= low <= high <= len(tensor):
                raise CheckpointError(f"{rows.where}: {what} of {name} lies outside of rank {rank}")
        path = ("model", name) if what == FP32 else ("optimizer", "state", name, what)
        leaves.append(NestedValue(path, _joined(name, shape, parts, spans)))
    for what, value in rows.numbers[group].items():
        path = ("optimizer", "state", name, what)
        leaves.append(NestedValue(path, as_tensor(name, value, rows.where)))
    return leaves


def _joined(
    name: str,
    shape: tuple[int, ...],
    parts: Sequence[torch.Tensor],
    spans: Sequence[tuple[int, int, int, int]],
) -> Tensor:
    def content() -> Bytes:
        ranges = [raw(part[low:high]) for part, (_, _, low, high) in zip(parts, spans, strict=True)]
        return np.concatenate([np.zeros(0, np.uint8), *ranges])

    dtypes = {DTYPE_NAMES[str(part.dtype).removeprefix("torch.")] for part in parts} or {"F32"}
    if len(dtypes) != 1:
        raise CheckpointError(f"{name} is of different types on different ranks")
    return Tensor(name, dtypes.pop(), shape, content)


def _frozen(directory: Path, states: list[Any]) -> list[NestedValue]:
    """Parameters that are not trained: ZeRO-3 has a part of each beside the model's states."""
    leaves = []
    for name, size in (states[0].get("frozen_param_shapes") or {}).items():
        shape = tuple(int(length) for length in size)
        parts = [state["frozen_param_fragments"][name].reshape(-1) for state in states]
        left, spans = math.prod(shape), []
        for rank, part in enumerate(parts):
            count = min(left, len(part))
            spans.append((0, rank, 0, count))
            left -= count
        if left:
            raise CheckpointError(
                f"{directory}: {name}, which is not trained, lacks {left} elements"
            )
        leaves.append(NestedValue(("model", name), _joined(name, shape, parts, spans)))
    return leaves


def _others(
    directory: Path, state: dict[str, Any], leaves: Sequence[NestedValue]
) -> list[NestedValue]:
    """Return the model's other values: tied weights, buffers and, before ZeRO-3, frozen weights.

    Refuse a missing name: a weight that was left out would start from random numbers.
    """
    weights = {str(leaf.path[1]): leaf.tensor for leaf in leaves if leaf.path[0] == "model"}
    others = []
    shared = state.get("shared_params") or {}
    for name, tensor in state["module"].items():
        if name in weights:
            continue
        same = weights.get(str(shared.get(name)))
        if same is not None:
            whole = Tensor(name, same.dtype, same.shape, same.read)
        elif name in state["buffer_names"] or tensor.numel():
            whole = as_tensor(name, tensor, directory)
        else:
            raise CheckpointError(f"{directory} names {name} and no rank's file holds it")
        others.append(NestedValue(("model", name), whole))
    return others

"""What a rank holds of each parameter under DeepSpeed: flat ranges of DeepSpeed's own buffers.

DeepSpeed keeps its fp32 masters and moments in flat tensors; a rank has a range of each such row
(stages 1 and 2) or of each parameter (stage 3). Nothing is gathered or copied to save. Weights that
are not trained have no master there; where the model works in 16 bits each rank keeps its range of
them as they were, in host memory.

DeepSpeed rounds weights to 16 bits before it makes fp32 masters of them; `Before` gives what they
were. The promises are held by tests/engines/test_zero.py and test_deferred.py.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.checkpoint.tensors.boxes import Flat, State
from hpctrain.errors import CheckpointError
from hpctrain.train.engines.state import MODEL, OPTIM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.optim import Optimizer

    from hpctrain.train.engines.state import Place

    Made = Callable[[str, nn.Parameter], torch.Tensor]
    """Makes a parameter's elements, whole, by its name."""
    Before = Callable[[int, int], torch.Tensor]
    """A parameter's elements before they were rounded: from the n-th on, so many."""


ROUNDED = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""What DeepSpeed takes to the precision that it works in."""


def fill(
    named: Mapping[str, nn.Parameter],
    made: Made | None,
    _config: dict[str, Any],
    precision: torch.dtype,
    device: torch.device,
) -> dict[int, Before]:
    """Give parameters their values whole, as stages 0 to 2 have them. In place; not collective.

    Args and returns as those of `spread`; `Before` gives any range.
    """
    before: dict[int, Before] = {}
    for name, parameter in _each(named):
        is_rounded = parameter.dtype in ROUNDED - {precision}
        if made is not None:
            whole = made(name, parameter)
            parameter.data = whole.to(device, precision if is_rounded else parameter.dtype)
            del whole  # else it would be there while the next one is made
        if is_rounded:
            before[id(parameter)] = _again(name, parameter, made)
    return before


def spread(
    named: Mapping[str, nn.Parameter],
    made: Made | None,
    config: dict[str, Any],
    precision: torch.dtype,
    device: torch.device,
) -> dict[int, Before]:
    """Cut every parameter over the ranks, as stage 3 has them. In place; collective.

    Beside this rank's ranges one whole parameter is held at a time. `named` has the names in the
    model as built. `made` makes the values; None if the parameters have them. Return this rank's
    range of each parameter that was rounded to `precision`, by identity.
    """
    # All memory first: what comes and goes between the ranges would leave holes that nothing fits.
    sizes = [p.numel() for _, p in _each(named) if p.dtype in ROUNDED - {precision}]
    working = torch.empty(max(sizes, default=0), dtype=precision, device=device)
    ranks = dist.get_world_size()
    room = torch.empty(sum(math.ceil(size / ranks) for size in sizes))
    before: dict[int, Before] = {}
    cut = _ParameterCut(config)
    for name, parameter in _each(named):
        is_rounded = parameter.dtype in ROUNDED - {precision}
        whole = parameter.data if made is None else made(name, parameter)
        if is_rounded:
            parameter.data = working[: whole.numel()].view(whole.shape).copy_(whole)
        else:
            parameter.data = whole.to(device, parameter.dtype)
        cut(parameter)
        if is_rounded:
            begin, count = _range_of(parameter)
            own, room = room[:count], room[count:]
            own.copy_(whole.reshape(-1).narrow(0, begin, count))
            before[id(parameter)] = _kept(own, begin)
        del whole  # else it would be there while the next one is made
    return before


class _ParameterCut:
    """DeepSpeed's cutting of parameters, one by one. Collective."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._first: Any = None
        self._deepspeed: Any = importlib.import_module("deepspeed")
        backend = self._deepspeed.get_accelerator().communication_backend_name()
        self._deepspeed.init_distributed(dist_backend=backend, dist_init_required=False)

    def __call__(self, parameter: nn.Parameter) -> None:
        """Leave a parameter's memory to this rank's range of it alone."""
        if self._first is not None:
            self._first.convert_to_zero_parameters(param_list=[parameter])
            return
        alone = nn.Module()
        alone.register_parameter("parameter", parameter)
        self._deepspeed.zero.Init(module=alone, config_dict_or_path=self._config)
        self._first = parameter


def _range_of(parameter: Any) -> tuple[int, int]:
    """A rank's range of a parameter at stage 3, without the padding that makes ranges equal."""
    size = parameter.ds_tensor.ds_numel
    first = min(dist.get_rank(parameter.ds_process_group) * size, parameter.ds_numel)
    return first, min(size, parameter.ds_numel - first)


def _each(named: Mapping[str, nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """Each parameter once, by the first of its names."""
    first = dict[int, str]()
    for name, parameter in named.items():
        first.setdefault(id(parameter), name)
    return [(name, named[name]) for name in first.values()]


def _kept(own: torch.Tensor, begin: int) -> Before:
    return lambda first, count: own.narrow(0, first - begin, count)


def _again(name: str, parameter: nn.Parameter, made: Made | None) -> Before:
    """From values that lie where they lay, or are made once more."""
    if made is None:
        whole = parameter.detach().reshape(-1)
        return lambda first, count: whole.narrow(0, first, count)
    return lambda first, count: made(name, parameter).reshape(-1).narrow(0, first, count)


SPREADS_PARAMETERS = 3
"""The stage at which each rank holds but a part of the weights."""


@dataclass(frozen=True)
class FlatBuffer:
    """An fp32 tensor that the optimizer updates: a parameter, or a row of parameters' ranges.

    `group` is the number of the optimizer's parameter group that it is updated by.
    """

    tensor: torch.Tensor
    group: int


@dataclass(frozen=True)
class Fragment:
    """This rank's range of one parameter.

    Attributes:
        buffer: Where the master lies.
        offset: First element in the buffer.
        first: First element in the parameter.
        count: Elements; 0 where the rank has none of the parameter.
        shape: Of the whole parameter.
        whole: The buffer is the parameter itself, on every rank.
    """

    buffer: FlatBuffer
    offset: int
    first: int
    count: int
    shape: tuple[int, ...]
    whole: bool = False

    def view(self, tensor: torch.Tensor) -> torch.Tensor | Flat:
        """The same range of a tensor that lies as the buffer does; memory is shared."""
        if self.whole:
            return tensor.detach()
        return Flat(tensor.detach().narrow(0, self.offset, self.count), self.first, self.shape)


def _copied(optimizer: Optimizer) -> dict[int, Fragment]:
    return {
        id(parameter): Fragment(
            FlatBuffer(parameter, number),
            0,
            0,
            parameter.numel(),
            tuple(parameter.shape),
            whole=True,
        )
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def _rows_spread(zero: Any) -> dict[int, Fragment]:
    """Stages 1 and 2: each rank has a range of the row of all parameters of a group."""
    fragments = {}
    for number, parameters in enumerate(zero.bit16_groups):
        buffer = FlatBuffer(zero.single_partition_of_fp32_groups[number], number)
        for parameter in parameters:
            held = parameter._hp_mapping  # noqa: SLF001 - what DeepSpeed's own safe_get_* read
            here = (held.hp_fragment_address.start, held.lp_fragment_address.start) if held else ()
            count = held.lp_fragment_address.numel if held else 0
            offset, first = here or (0, 0)
            shape = tuple(parameter.shape)
            fragments[id(parameter)] = Fragment(buffer, offset, first, count, shape)
    return fragments


def _each_spread(parameters: Iterable[Any], zero: Any) -> dict[int, Fragment]:
    """Stage 3: each rank has a range of each parameter; a row is of some parameters' ranges."""
    fragments = {}
    flat_buffers = [
        FlatBuffer(flat, zero.sub_group_to_group_id[number])
        for number, flat in enumerate(zero.fp32_partitioned_groups_flat)
    ]
    group_of = {id(p): n for n, group in enumerate(zero.fp16_groups) for p in group}
    for parameter in parameters:
        number = group_of.get(id(parameter))
        if number is None:
            continue
        _, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
        first, count = _range_of(parameter)
        shape = tuple(parameter.ds_shape)
        fragments[id(parameter)] = Fragment(flat_buffers[number], offset, first, count, shape)
    return fragments


class ZeroState:
    """All that a rank holds of a model and its optimizer under DeepSpeed, by full names."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        buffers: Sequence[Place],
        optimizer: Optimizer,
        *,
        zero: Any,
        stage: int,
        before: Mapping[int, Before],
    ) -> None:
        """Look where DeepSpeed has put everything. Collective if `before` is not empty.

        `named` has every name of the original model's parameters; one parameter can have several.
        `buffers` are those of the state.
        `zero` is DeepSpeed's optimizer around `optimizer`; stage 0 needs none. If the model works
        in 16 bits, `before` has its parameters as they were, by identity. Masters begin with these
        values, asked once for each range.
        """
        self._named, self._buffers, self._optimizer = dict(named), buffers, optimizer
        # As torch does it: weights are listed under all their names, moments under the first one.
        self._first_names = frozenset(name for name, _ in _each(named))
        self._zero, self._stage = zero, stage
        # Where this rank's range of each trained parameter lies, by the parameter's identity.
        if stage == 0:
            self._fragments = _copied(optimizer)
        elif stage == SPREADS_PARAMETERS:
            self._fragments = _each_spread(named.values(), zero)
        else:
            self._fragments = _rows_spread(zero)
        flat_buffers = {id(f.buffer.tensor): f.buffer for f in self._fragments.values()}
        self._flat_buffers = list(flat_buffers.values())
        self._frozen = {
            key: (parameter, _frozen_range(parameter, before[key]))
            for key, parameter in ((id(p), p) for _, p in _each(named))
            if key in before and key not in self._fragments
        }
        if before:
            self._begin_with(before)

    @torch.no_grad()
    def _begin_with(self, before: Mapping[int, Before]) -> None:
        """DeepSpeed rounds weights to 16 bits before it makes masters of them; undo that."""
        for key, fragment in self._fragments.items():
            master = fragment.buffer.tensor.narrow(0, fragment.offset, fragment.count)
            if fragment.count:
                master.copy_(before[key](fragment.first, fragment.count))
        self.push()

    # ---- state

    def collect(self, *, with_optimizer: bool, state_names: Iterable[str]) -> State:
        """Return every tensor that this rank holds; only the optimizer's counts are copies.

        With `with_optimizer`, the moments are in it; state of step 0 is made if there is none yet.
        """
        shared: dict[str, torch.Tensor | Flat] = {}
        names = {MODEL + name for name in state_names}
        if with_optimizer:
            self.make_state()
        for name, parameter in self._named.items():
            fragment = self._fragments.get(id(parameter))
            if fragment is None:
                shared.update(self._untrained(MODEL + name, parameter))
                continue
            masters = fragment.buffer.tensor
            values = dict(self._values(fragment.buffer)) if with_optimizer else {}
            if fragment.count or fragment.whole:
                shared[MODEL + name] = fragment.view(masters)
            for key, value in values.items() if name in self._first_names else ():
                full_name = f"{OPTIM}{name}.{key}"
                names.add(full_name)
                if not _is_moment(value, masters):
                    shared[full_name] = torch.as_tensor(value).detach().clone()
                elif fragment.count or fragment.whole:
                    shared[full_name] = fragment.view(value)
        for place in self._buffers:
            buffer = place.module._buffers[place.key]  # noqa: SLF001 - as torch's state_dict does
            shared[MODEL + place.name] = buffer  # type: ignore[assignment]
        return State(shared, elsewhere=frozenset(names - shared.keys()))

    def _untrained(self, name: str, parameter: Any) -> dict[str, torch.Tensor | Flat]:
        _, frozen = self._frozen.get(id(parameter), (None, None))
        if frozen is not None:
            return {name: frozen} if frozen.local.numel() else {}
        if self._stage != SPREADS_PARAMETERS:
            return {name: parameter.detach()}
        first, count = _range_of(parameter)
        part = parameter.ds_tensor.data.narrow(0, 0, count)
        return {name: Flat(part, first, tuple(parameter.ds_shape))} if count else {}

    def _values(self, buffer: FlatBuffer) -> Iterator[tuple[str, Any]]:
        for key, value in self._optimizer.state.get(buffer.tensor, {}).items():
            if value is not None:
                yield key, value

    def make_state(self) -> None:
        """Have the optimizer make what it has no state of yet, as at step 0; nothing is updated.

        Each flat buffer makes one step of rate 0 with gradients of zero, after which nothing tells
        that there was a step.
        """
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        missing = [
            buffer for buffer in self._flat_buffers if not optimizer.state.get(buffer.tensor)
        ]
        try:
            for buffer in missing:
                rate = groups[buffer.group]["lr"]
                still = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
                alone = {**groups[buffer.group], "params": [buffer.tensor], "lr": still}
                optimizer.param_groups = [alone]
                gradient, buffer.tensor.grad = buffer.tensor.grad, torch.zeros_like(buffer.tensor)
                optimizer.step()
                buffer.tensor.grad = gradient
                _set(optimizer.state[buffer.tensor], "step", 0.0)
        finally:
            optimizer.param_groups = groups
        if missing and 0 < self._stage < SPREADS_PARAMETERS:
            # Tell DeepSpeed's own `safe_get_*` of new state.
            self._zero._hp_optimizer_states_linked = False  # noqa: SLF001
            self._zero._lazy_init_hp_params_optimizer_state()  # noqa: SLF001

    def apply_counts(self, tensors: Mapping[str, Any]) -> None:
        """Give the optimizer the counts that were filled in; moments it has already.

        Raises:
            CheckpointError: parameters that DeepSpeed updates together have different counts; on
                every rank.
        """
        counts: dict[tuple[int, str], tuple[str, float]] = {}
        for name, parameter in self._named.items():
            fragment = self._fragments.get(id(parameter))
            if fragment is None:
                continue
            for key, value in self._values(fragment.buffer):
                full_name = f"{OPTIM}{name}.{key}"
                if _is_moment(value, fragment.buffer.tensor) or full_name not in tensors:
                    continue
                place, count = (id(fragment.buffer.tensor), key), float(tensors[full_name])
                other, others_count = counts.setdefault(place, (full_name, count))
                if others_count != count:
                    raise CheckpointError(
                        f"{full_name} is {count:g} and {other} is {others_count:g}, but DeepSpeed "
                        "counts both together; resume with fsdp2 or ddp"
                    )
        for buffer in self._flat_buffers:
            for key, _ in list(self._values(buffer)):
                place = (id(buffer.tensor), key)
                if place in counts:
                    _set(self._optimizer.state[buffer.tensor], key, counts[place][1])

    # ---- gradients

    def forget_gradients(self) -> None:
        """After a step: DeepSpeed overwrites gradients parameter by parameter, where it keeps them.

        One that gets none in the next step would be given this step's once more.
        """
        for buffer in self._flat_buffers:
            if buffer.tensor.grad is not None:
                buffer.tensor.grad.zero_()
        if self._stage == SPREADS_PARAMETERS:
            self._zero.grad_partitions_flat_buffer.zero_()

    # ---- working copies

    @torch.no_grad()
    def push(self) -> None:
        """Make the working copies of all ranks what the masters say. Collective."""
        if self._stage == 0:
            return
        if self._stage == SPREADS_PARAMETERS:
            self._push_each()
            return
        self._zero.update_lp_params()
        for parameter, frozen in self._frozen.values():
            _gather_frozen(parameter.data, frozen.local)

    def _push_each(self) -> None:
        """As DeepSpeed's own step does it: small parameters stay whole, and would be stale."""
        zero = self._zero
        zero._partition_all_parameters()  # noqa: SLF001 - no public way; the step's own
        for parameter, frozen in self._frozen.values():
            part: Any = parameter
            part.ds_tensor.data.narrow(0, 0, frozen.local.numel()).copy_(frozen.local)
        for number in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(number)  # noqa: SLF001
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        zero.invalidate_secondary_tensor()


def _is_moment(value: Any, row: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == row.shape


def _set(values: dict[str, Any], key: str, number: float) -> None:
    """Set a count, which some optimizers keep as a tensor and some as a number."""
    held = values.get(key)
    if isinstance(held, torch.Tensor):
        held.fill_(number)
    elif held is not None:
        values[key] = type(held)(number)


def _frozen_range(parameter: Any, before: Before) -> Flat:
    """This rank's range of an untrained parameter, as it was before it became 16 bits."""
    if hasattr(parameter, "ds_tensor"):
        shape = tuple(parameter.ds_shape)
        first, count = _range_of(parameter)
    else:
        shape = tuple(parameter.shape)
        size = math.ceil(parameter.numel() / dist.get_world_size())
        first = min(dist.get_rank() * size, parameter.numel())
        count = min(size, parameter.numel() - first)
    return Flat(before(first, count).to("cpu", torch.float32, copy=True), first, shape)


def _gather_frozen(working: torch.Tensor, own: torch.Tensor) -> None:
    """Fill a working copy from all ranks' ranges. Collective; of one parameter at a time."""
    size = math.ceil(working.numel() / dist.get_world_size())
    padded = torch.zeros(size, dtype=working.dtype, device=working.device)
    padded[: own.numel()].copy_(own)
    whole = padded.new_empty(size * dist.get_world_size())
    dist.all_gather_into_tensor(whole, padded)
    working.copy_(whole[: working.numel()].view_as(working))

"""The state of a model and its optimizer as full parameter names -> tensors, under any engine.

Names are those of the unwrapped model (``model.blocks.0.attn.wq.weight``,
``optim.blocks.0.attn.wq.weight.exp_avg``). A wrapper (DDP, `torch.compile`, recomputation) is known
by its class, never by its name. Sharded parameters stay sharded (DTensor). What is no tensor in an
optimizer's state has its type at the end of the name: ``optim.weight.step:int``,
``optim.weight.history:json``. The optimizer's groups are `runtime.fitting`'s matter.

At a load the checkpoint says which state there is: `wanted` makes memory for it, and `apply` gives
it to the program. State of a parameter that the optimizer does not update yet waits until it does.
tests/engines/test_changed_programs.py, test_what_steps_do.py, test_names_of_state.py and
test_save_and_restore.py hold the promises.
"""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from hpctrain.checkpoint.tensors.boxes import DTYPES
from hpctrain.checkpoint.tensors.value_reading import decode
from hpctrain.checkpoint.tensors.values import encode
from hpctrain.errors import CheckpointError
from hpctrain.train.engines.norm import local

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from torch import nn
    from torch.optim import Optimizer

    from hpctrain.checkpoint.format.manifest import TensorEntry

    Entries = Mapping[str, TensorEntry]


WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "_checkpoint_wrapped_module"
    ),
}
"""Classes of wrappers, and the attribute that holds the module. Subclasses are wrappers too."""
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"


class Place(NamedTuple):
    """Where a model holds a tensor.

    Attributes:
        name: The tensor's full name.
    """

    name: str
    module: nn.Module
    key: str


def modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module and the stem of its tensors' names, such as `blocks.0.`; a shared one each time.

    Raises:
        CheckpointError: FSDP1 has made flat parameters of the program's own.
    """
    pending = [("", model)]
    while pending:
        stem, module = pending.pop()
        kind: Any = type(module)
        held = _wrapped(kind)
        yield stem, module
        children = [
            (stem if name == held else f"{stem}{name}.", child)
            for name, child in module._modules.items()  # noqa: SLF001 - as torch's own walks
            if child is not None
        ]
        pending.extend(reversed(children))


def parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter by its name; one that is tied comes under each of its names."""
    for stem, module in modules(model):
        for key, parameter in module._parameters.items():  # noqa: SLF001 - the same
            if parameter is not None:
                yield stem + key, parameter


def buffers(model: nn.Module) -> Iterator[tuple[Place, torch.Tensor | None]]:
    """Each buffer that belongs to the state, None where the program has not made it yet."""
    for stem, module in modules(model):
        for key, buffer in module._buffers.items():  # noqa: SLF001 - the same
            if key not in module._non_persistent_buffers_set:  # noqa: SLF001 - the same
                yield Place(stem + key, module, key), buffer


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is a wrapper of a library, whose attributes are that library's."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}" in WRAPPERS


@functools.cache
def _wrapped(kind: type) -> str:
    """The attribute in which a wrapper's class holds the module; "" where it is no wrapper."""
    for base in kind.__mro__:
        path = f"{base.__module__}.{base.__qualname__}"
        if path == FSDP1:
            raise CheckpointError(
                "the model is wrapped by FullyShardedDataParallel (FSDP1), whose flat parameters "
                "have no names of their own; use torch's fully_shard or run.parallelize"
            )
        if path in WRAPPERS:
            return WRAPPERS[path]
    return ""


MODEL, OPTIM = "model.", "optim."
NUMBERS: dict[str, tuple[type, torch.dtype]] = {
    "bool": (bool, torch.bool),
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}
"""Python's numbers in an optimizer's state: the end of the name, and the dtype that is exact."""
INT_BITS = 64
JSON = "json"
"""The end of the name of any other object; its tensors have names below its own."""
ODD_KEYS = "__keys__"
"""In place of keys of a parameter's state that are no plain words: one dictionary has them all."""
_TORCH = {word: dtype for dtype, word in DTYPES.items()}
_UNSEEN: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()
"""Names that only a model's own `state_dict` knows; found once, since torch takes milliseconds."""
_WAITING: weakref.WeakKeyDictionary[Optimizer, Waiting] = weakref.WeakKeyDictionary()


def collect(model: nn.Module, optimizer: Optimizer | None) -> dict[str, torch.Tensor]:
    """Return every tensor of the model and the optimizer by its full name; memory is shared.

    Raises:
        CheckpointError: the optimizer holds state that cannot be saved, or has no name.
    """
    _reshard(model)
    state: dict[str, torch.Tensor] = {}
    moments: dict[str, torch.Tensor] = {}
    held = _held_by(optimizer)
    for name, parameter in parameters(model):
        state[MODEL + name] = parameter.detach()
        for key, value in _plain_keys(held.pop(parameter, {})).items():
            _put(moments, f"{OPTIM}{name}.{key}", value)
    for place, buffer in buffers(model):
        if buffer is not None:
            state[MODEL + place.name] = buffer
    if held:
        shape = list(next(iter(held)).shape)
        raise CheckpointError(
            f"{type(optimizer).__name__} updates a parameter of shape {shape} that is in no module "
            "of the tracked model, so its state has no name; make it a parameter of the model"
        )
    return state | _unseen(model, state) | moments


def wanted(
    model: nn.Module, optimizer: Optimizer | None, entries: Entries
) -> dict[str, torch.Tensor]:
    """Return what to fill from a checkpoint: the model's tensors, and new ones for the rest.

    New are the optimizer's state, buffers that the program has not made yet or has in another
    shape, and what only `state_dict` knows. The program gets them by `apply`. A tensor that the
    checkpoint does not have is in here too, if the model has it. Lazy parameters get their shape
    from the checkpoint. Without `optimizer`, its state is not loaded.
    """
    _reshard(model)
    tensors: dict[str, torch.Tensor] = {}
    owners = dict(parameters(model))
    # A count of steps lies beside its parameter where torch's optimizers have it so.
    groups = optimizer.param_groups if optimizer is not None else []
    on_device = any(group.get("fused") or group.get("capturable") for group in groups)
    for name, parameter in owners.items():
        entry = entries.get(MODEL + name)
        if isinstance(parameter, UninitializedParameter) and entry is not None:
            parameter.materialize(entry.shape)
        tensors[MODEL + name] = parameter.detach()
    device = next((local(p).device for p in owners.values()), torch.device("cpu"))
    for place, buffer in buffers(model):
        name = MODEL + place.name
        if _is_other(buffer, entries.get(name)):
            near = _device_in(place.module) or device
            tensors[name] = _empty(entries[name], near)
        elif buffer is not None:
            tensors[name] = buffer
    for name in _below(_names_unseen(model, tensors.keys()), entries):
        at = torch.device("cpu") if name.endswith(f":{JSON}") else device
        tensors[name] = _empty(entries[name], at)
    for name, entry in entries.items() if optimizer is not None else ():
        owner, key, kind = _parsed(name, owners) if name.startswith(OPTIM) else (None, "", "")
        if owner is not None and kind:
            tensors[name] = _empty(entry, torch.device("cpu"))
        elif owner is not None:
            tensors[name] = _state_like(owner, key, entry, on_device=on_device)
    return tensors


def apply(model: nn.Module, optimizer: Optimizer | None, tensors: Mapping[str, Any]) -> None:
    """Give a program the tensors of `wanted` that were filled since.

    What the model holds itself is filled in place and needs nothing. Without `optimizer`, its state
    was not loaded. Other names in `tensors` are passed over.
    """
    names_seen = set()
    for place, buffer in list(buffers(model)):
        names_seen.add(MODEL + place.name)
        loaded = tensors.get(MODEL + place.name)
        if loaded is not None and loaded is not buffer and not _is_same(loaded, buffer):
            place.module._buffers[place.key] = loaded  # noqa: SLF001 - torch has no other way
    owners = dict(parameters(model))
    names_seen.update(MODEL + name for name in owners)
    if unseen := _unseen_values(_names_unseen(model, names_seen), tensors):
        set_model_state_dict(model, unseen, options=StateDictOptions(strict=False))
    else:  # what torch calls at the end of a load: modules make anew what they derive of weights
        for module in model.modules():
            for hook in module._load_state_dict_post_hooks.values():  # noqa: SLF001 - the same
                hook(module, _IncompatibleKeys([], []))
    if optimizer is not None:
        _give_state(optimizer, owners, tensors)


def buffers_of_other_form(model: nn.Module, entries: Entries) -> list[tuple[str, str, str]]:
    """Return buffers of another shape or type in a checkpoint: name, its form, the model's."""
    forms = [
        (place.name, _form(entries[MODEL + place.name]), _form(buffer))
        for place, buffer in buffers(model)
        if buffer is not None
        and not isinstance(buffer, UninitializedBuffer)
        and _is_other(buffer, entries.get(MODEL + place.name))
    ]
    return [each for each in forms if each[1] != each[2]]


def _form(tensor: torch.Tensor | TensorEntry) -> str:
    dtype = DTYPES.get(tensor.dtype, "") if isinstance(tensor, torch.Tensor) else tensor.dtype
    return f"{dtype}[{','.join(map(str, tensor.shape))}]"


def without_state(model: nn.Module, optimizer: Optimizer, entries: Entries) -> list[str]:
    """Return the names of trained parameters of which a checkpoint has no optimizer state."""
    owners = dict(parameters(model))
    have = {id(_parsed(name, owners)[0]) for name in entries if name.startswith(OPTIM)}
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    bare = updated - have
    lacking: dict[int, str] = {}
    for name, parameter in owners.items():
        if id(parameter) in bare and parameter.requires_grad:
            lacking.setdefault(id(parameter), name)
    return list(lacking.values())


def state_keys(entries: Entries, model: nn.Module) -> dict[nn.Parameter, set[str]]:
    """Return under which keys a checkpoint has state of each parameter of a model."""
    owners = dict(parameters(model))
    keys: dict[nn.Parameter, set[str]] = {}
    for name in entries:
        owner, key, _ = _parsed(name, owners) if name.startswith(OPTIM) else (None, "", "")
        if owner is not None:
            keys.setdefault(owner, set()).add(key.partition(".")[0])
    return keys


class Waiting:
    """Loaded state of parameters that an optimizer does not update yet.

    It is part of what `collect` gives, and becomes the optimizer's own when it is about to update
    the parameter.
    """

    def __init__(self, optimizer: Optimizer, state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Wait with some state for an optimizer's next step."""
        self.state = state
        self._optimizer = weakref.ref(optimizer)
        # What is no optimizer of torch's may have no hooks: there a save hands over.
        with contextlib.suppress(AttributeError):
            optimizer.register_step_pre_hook(lambda *_: self.claim())

    def claim(self) -> None:
        """Hand over the state of what has come to the optimizer's groups since."""
        optimizer = self._optimizer()
        if optimizer is None or not self.state:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                values = self.state.pop(parameter, None)
                if values is not None and not optimizer.state.get(parameter):
                    optimizer.state[parameter] = values


def _held_by(optimizer: Optimizer | None) -> dict[torch.Tensor, dict[str, Any]]:
    """The state of each parameter that an optimizer updates, or that waits for it."""
    if optimizer is None:
        return {}
    waiting = _WAITING.get(optimizer)
    if waiting is not None:
        waiting.claim()
    state = optimizer.state
    held = {
        parameter: state[parameter]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if state.get(parameter)
    }
    return held if waiting is None else waiting.state | held


def _plain_keys(state: Mapping[Any, Any]) -> Mapping[str, Any]:
    """The state of a parameter under keys that can be part of a name."""
    odd = [key for key in state if type(key) is not str or {".", ":"} & set(key)]
    if not odd:
        return state
    plain = {key: value for key, value in state.items() if key not in odd}
    return {**plain, ODD_KEYS: {key: state[key] for key in odd}}


def _put(moments: dict[str, torch.Tensor], name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        moments[name] = value
        return
    fits = not isinstance(value, int) or value.bit_length() < INT_BITS
    for kind, (number, dtype) in NUMBERS.items():
        if type(value) is number and fits:
            moments[f"{name}:{kind}"] = torch.tensor(value, dtype=dtype)
            return
    moments.update(_as_json(value, name))


def _as_json(value: Any, name: str) -> dict[str, torch.Tensor]:
    form, tensors = encode(value, name)
    text = bytearray(json.dumps(form).encode())
    return {**tensors, f"{name}:{JSON}": torch.frombuffer(text, dtype=torch.uint8)}


def _parsed(name: str, owners: Mapping[str, nn.Parameter]) -> tuple[nn.Parameter | None, str, str]:
    """The parameter that state is of, its key and the kind of number; None for another model's."""
    owner, key = name.removeprefix(OPTIM), ""
    while owner:
        owner, _, last = owner.rpartition(".")
        key = f"{last}.{key}" if key else last
        if owner in owners:
            stem, _, kind = key.rpartition(":")
            # Below an object are its tensors, whose names have the program's own words in them.
            is_kind = "." not in key and (kind in NUMBERS or kind == JSON)
            return owners[owner], *((stem, kind) if is_kind else (key, ""))
    return None, "", ""


def _give_state(
    optimizer: Optimizer, owners: Mapping[str, nn.Parameter], tensors: Mapping[str, Any]
) -> None:
    loaded: dict[torch.Tensor, dict[str, Any]] = {}
    objects: list[tuple[torch.Tensor, str, Any]] = []
    for name, tensor in tensors.items():
        if not name.startswith(OPTIM):
            continue
        owner, key, kind = _parsed(name, owners)
        if owner is not None and kind != JSON:
            value = NUMBERS[kind][0](tensor.item()) if kind else tensor
            loaded.setdefault(owner, {})[key] = value
        elif owner is not None:
            objects.append((owner, key, json.loads(bytes(tensor.tolist()))))
    for parameter, key, form in objects:
        values = loaded.setdefault(parameter, {})
        for part in [each for each in values if each == key or each.startswith(key + ".")]:
            del values[part]
        value = decode(form, tensors)
        values.update(value if key == ODD_KEYS else {key: value})
    updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    later = {parameter: loaded.pop(parameter) for parameter in loaded.keys() - updated}
    for parameter, values in loaded.items():
        optimizer.state[parameter] = values
    if later:
        _WAITING[optimizer] = Waiting(optimizer, later)
    # Torch calls them at a load, and a program may make anew there what it keeps beside.
    for hook in getattr(optimizer, "_optimizer_load_state_dict_post_hooks", {}).values():
        hook(optimizer)


def _state_like(
    parameter: nn.Parameter, key: str, entry: TensorEntry, *, on_device: bool
) -> torch.Tensor:
    """Memory for one value of a parameter's state: cut as the parameter is, if it is as large.

    With `on_device`, counts of steps lie beside the parameter.
    """
    own = local(parameter)
    if key == "step" and not on_device:
        return _empty(entry, torch.device("cpu"))
    if not isinstance(parameter, DTensor) or not entry.shape:
        if entry.shape != tuple(parameter.shape):
            return _empty(entry, own.device)
        return torch.empty_like(own, dtype=_TORCH[entry.dtype])  # in the same order of memory
    mesh = parameter.device_mesh
    if entry.shape == tuple(parameter.shape):
        return DTensor.from_local(
            torch.empty(own.shape, dtype=_TORCH[entry.dtype], device=own.device),
            mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=torch.empty(entry.shape, device="meta").stride(),
        )  # fmt: skip
    whole = _empty(entry, own.device)
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _empty(entry: TensorEntry, device: torch.device) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=_TORCH[entry.dtype], device=device)


def _is_other(buffer: torch.Tensor | None, entry: TensorEntry | None) -> bool:
    """Return whether a checkpoint has a buffer that cannot be loaded into the model's own memory.

    The model lacks it, has it in another shape or type, or as an expanded view of fewer elements.
    """
    if entry is None:
        return False
    if buffer is None or isinstance(buffer, UninitializedBuffer):
        return True
    form = (tuple(buffer.shape), DTYPES.get(buffer.dtype, ""))
    return form != (entry.shape, entry.dtype) or (0 in local(buffer).stride())


def _is_same(loaded: Any, buffer: torch.Tensor | None) -> bool:
    if buffer is None or isinstance(buffer, UninitializedBuffer):
        return False
    return loaded.shape == buffer.shape and (local(loaded).data_ptr() == local(buffer).data_ptr())


def _device_in(module: nn.Module) -> torch.device | None:
    held = (*module._parameters.values(), *module._buffers.values())  # noqa: SLF001 - its own alone
    return next((local(tensor).device for tensor in held if tensor is not None), None)


def _reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _names_unseen(model: nn.Module, seen: AbstractSet[str]) -> frozenset[str]:
    """Names that a model's own `state_dict` has beyond its parameters and buffers."""
    if model not in _UNSEEN:
        given_by_torch = {MODEL + name for name in get_model_state_dict(model)}
        _UNSEEN[model] = frozenset(given_by_torch - seen)
    return _UNSEEN[model]


def _unseen(model: nn.Module, seen: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    unseen_values: dict[str, torch.Tensor] = {}
    unseen = _names_unseen(model, seen.keys())
    values = get_model_state_dict(model) if unseen else {}
    for name in unseen:
        value = values.get(name.removeprefix(MODEL))
        if isinstance(value, torch.Tensor):
            unseen_values[name] = value
        elif value is not None:
            unseen_values |= _as_json(value, name)
    return unseen_values


def _below(stems: AbstractSet[str], entries: Entries) -> list[str]:
    """Names of a checkpoint's that hold the values of some names: tensors, or objects' parts."""
    if not stems:
        return []
    ends = tuple(stem + mark for stem in stems for mark in (".", f":{JSON}"))
    return [name for name in entries if name in stems or name.startswith(ends)]


def _unseen_values(stems: AbstractSet[str], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """What was loaded under names that only `state_dict` knows, without the prefix."""
    loaded = {}
    for name in stems:
        if name in tensors:
            loaded[name.removeprefix(MODEL)] = tensors[name]
        elif (text := tensors.get(f"{name}:{JSON}")) is not None:
            loaded[name.removeprefix(MODEL)] = decode(json.loads(bytes(text.tolist())), tensors)
    return loaded

"""Every name of torch that the engines use and that torch does not promise to keep.

Each is fetched when it is first needed, so that an engine that does without one works on a torch
that lacks it, and the others end with one line that names it. docs/reliability.md says which
releases were run; tests/engines/test_torch_private.py holds the promises.

`let_groups_go_last` repairs DDP's end: it lets go of its process group last, and no program hangs
there. A program that destroys its process group while a DDP object lives leaves the last reference
to DDP's C++ half. That half goes with the GIL held, and the group's end waits for gloo's thread,
which may just be waiting for the GIL to let go of what a backward pass left behind. The Python
reference gives the GIL away first; it only has to be the last one.
tests/engines/test_program_ends.py holds that.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_common"
_CHECKPOINT = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_COLLECTIVES = "torch.distributed._functional_collectives"


def _get(module: str, name: str, what_for: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        raise _lacks(f"{module}.{name}", what_for) from None


def _lacks(name: str, what_for: str) -> UsageError:
    return UsageError(
        f"{what_for} needs {name}, which torch {torch.__version__} has not; see "
        "`hpctrain help reliability` for the releases that were run"
    )


# ---- FSDP2: experts are cut over another mesh than the rest


def cuts_over(mesh: DeviceMesh) -> Callable[[Any], Any]:
    """Return a function from a `Shard` to what `shard_placement_fn` returns, for this mesh.

    Made once for all of them: torch takes two descriptions of one mesh for two meshes. If `mesh`
    has two axes, copies come first.
    """
    result = _get(_FSDP, "ShardPlacementResult", "engine.ep")
    if mesh.ndim == 1:
        info = _get(_FSDP, "FSDPMeshInfo", "engine.ep")(mesh, shard_mesh_dim=0)
    else:
        both = _get(_FSDP, "HSDPMeshInfo", "engine.ep")
        info = both(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return lambda placement: result(placement, info)


def add_up_gradients(module: Any) -> None:
    """Add what a backward pass left at FSDP2's parameters to its sums, in the dtype of these.

    FSDP2's own hooks do so where gradients of inputs are computed too.
    """
    state = module._get_fsdp_state()  # noqa: SLF001
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # noqa: SLF001
    for parameter in (each for group in groups if group is not None for each in group.fsdp_params):
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()


def split_axis(
    mesh: DeviceMesh, axis: str, sizes: Sequence[int], names: Sequence[str]
) -> DeviceMesh:
    """A mesh with one axis cut in several. Collective."""
    if not hasattr(mesh, "_unflatten"):
        raise _lacks("DeviceMesh._unflatten", "engine.ep")
    cut: DeviceMesh = mesh._unflatten(axis, tuple(sizes), tuple(names))  # noqa: SLF001
    return cut


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that one was cut from, or itself."""
    if hasattr(mesh, "_get_root_mesh"):
        own: DeviceMesh = mesh._get_root_mesh()  # noqa: SLF001
        return own
    # Older releases keep it beside all meshes.
    resources = _get("torch.distributed.device_mesh", "_mesh_resources", "engine.tp")
    older: DeviceMesh = resources.get_root_mesh(mesh)
    return older


def local(tensor: DTensor) -> torch.Tensor:
    """This rank's part, as the same memory; `to_local()` builds a node for autograd each time."""
    part: torch.Tensor = tensor._local_tensor  # noqa: SLF001
    return part


# ---- recomputation


def checkpoint_wrapped(
    model: torch.nn.Module, check: Callable[[torch.nn.Module], bool], **options: Any
) -> None:
    """Wrap modules so that they compute again what they computed, in place."""
    apply = _get(_CHECKPOINT, "apply_activation_checkpointing", "engine.activation_checkpointing")
    wrapper = _get(_CHECKPOINT, "checkpoint_wrapper", "engine.activation_checkpointing")
    apply(model, checkpoint_wrapper_fn=functools.partial(wrapper, **options), check_fn=check)


# ---- collectives that autograd knows


def all_to_all(tokens: torch.Tensor, receive: Any, send: Any, group: Any) -> torch.Tensor:
    """Exchange parts of a tensor without gradients. Collective."""
    exchange = _get(_COLLECTIVES, "all_to_all_single", "engine.ep")
    out: torch.Tensor = exchange(tokens, receive, send, group)
    return out


def all_to_all_with_gradient(
    tokens: torch.Tensor, receive: Any, send: Any, group: Any
) -> torch.Tensor:
    """The same, and gradients travel back. Collective."""
    exchange = _get(_COLLECTIVES, "all_to_all_single_autograd", "engine.ep")
    out: torch.Tensor = exchange(tokens, receive, send, group)
    return out


# ---- pipelines


def without_outputs(schedule: Any) -> dict[str, bool]:
    """What tells a schedule's `step` and `eval` not to join the outputs of all microbatches.

    Older releases know no such word and hand it on to the model: there the last stage holds them.
    """
    takes_it = "return_outputs" in inspect.signature(schedule.step).parameters  # eval hands it on
    return {"return_outputs": False} if takes_it else {}


# ---- nested values


def map_tensors(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """Change the tensors of a kind in a nested value."""
    over = _get("torch.utils._pytree", "tree_map_only", "engine.tp")
    return over(kind, change, value)


# ---- DDP


def fill_buckets(model: DistributedDataParallel) -> None:
    """Fill the buckets in which gradients travel for good, in the order of torch's own list.

    Torch does it after the first backward pass otherwise. Collective.
    """
    reducer = model.reducer
    if not hasattr(reducer, "_push_all_rebuilt_params") or not hasattr(reducer, "_rebuild_buckets"):
        raise _lacks("Reducer._push_all_rebuilt_params", "engine.kind ddp")
    reducer._push_all_rebuilt_params()  # noqa: SLF001
    reducer._rebuild_buckets()  # noqa: SLF001


def sync_buffers(model: DistributedDataParallel) -> None:
    """Give all ranks rank 0's buffers now, and not before the next forward pass. Collective.

    After the pass whose gradients travel.
    """
    if not hasattr(model, "_sync_buffers") or not hasattr(model, "require_forward_param_sync"):
        raise _lacks("DistributedDataParallel._sync_buffers", "engine.kind ddp")
    if model.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        model._sync_buffers()  # type: ignore[no-untyped-call]  # noqa: SLF001
        model.require_forward_param_sync = False


# ---- what is done to tensors


@contextlib.contextmanager
def intercepting(
    operator: Callable[[Any, Any, Any], Any], function: Callable[[Any, Any, Any], Any]
) -> Iterator[None]:
    """Route a block's calls of torch through functions of ours, which call what they are for.

    `operator` gets each operator, its args and its kwargs; what it calls itself is torch's own.
    `function` gets the same of each function, method and property that Python code uses.
    """
    what_for = "a function that makes the model"
    modes: Any = _get("torch.utils._python_dispatch", "TorchDispatchMode", what_for)
    plain: Any = _get("torch._C", "DisableTorchFunction", what_for)

    def dispatch(_self: Any, called: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with plain():
            return operator(called, args, kwargs or {})

    def python(_self: Any, called: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(called, args, kwargs or {})

    operators = type("Operators", (modes,), {"__torch_dispatch__": dispatch})
    functions = type("Functions", (TorchFunctionMode,), {"__torch_function__": python})
    with functions(), operators():
        yield


def without_modes() -> Any:
    """Around code that shall call torch as if it were not inside `intercepting`."""
    return _get(
        "torch.utils._python_dispatch", "_disable_current_modes", "a function that makes the model"
    )()


_init = DistributedDataParallel.__init__


@functools.wraps(_init)
def _group_last(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    own = vars(self)
    if "process_group" in own:  # attributes go in the order in which they came
        own["process_group"] = own.pop("process_group")


def let_groups_go_last() -> None:
    """From now on, for every DDP object of this process. Harmless when repeated."""
    DistributedDataParallel.__init__ = _group_last  # type: ignore[method-assign]

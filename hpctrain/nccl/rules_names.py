"""Rules for names: misspelt and dead ones, NVIDIA's debugging class, and what no preset sets."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING

from hpctrain.nccl import names
from hpctrain.nccl.rule import ERROR, Context, Problem, error, reason, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIXES = ("NCCL_", "RCCL_", "OFI_NCCL_", "TORCH_NCCL_", "TORCH_FR_", "FI_", "GLOO_")
"""Of the variables that are judged: an empty value, quotes and blanks around it never help them."""

_SECRET = re.compile(r"(?:.*_)?(?:TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY)")
_BLANKS = frozenset({"NCCL_DEBUG_TIMESTAMP_FORMAT"})
_EXPANSION = re.compile(r"\$\{?[A-Za-z_]\w*\}?|\$\(|`")

_TORCH_READS = "torch reads the old name too for now, but the newer name wins over it"
DEAD: dict[str, tuple[str, str]] = {
    "NCCL_ASYNC_ERROR_HANDLING": (_TORCH_READS, "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "NCCL_BLOCKING_WAIT": (_TORCH_READS, "TORCH_NCCL_BLOCKING_WAIT"),
    "NCCL_DESYNC_DEBUG": (_TORCH_READS, "TORCH_NCCL_DESYNC_DEBUG"),
    "NCCL_ENABLE_TIMING": (_TORCH_READS, "TORCH_NCCL_ENABLE_TIMING"),
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": (
        _TORCH_READS,
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    ),
    "TORCH_NCCL_ASYNC_HANDLING": (
        "nothing reads this common misspelling",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ),
    "NCCL_CHECKS_DISABLE": ("NCCL has not read it since 2.2", "NCCL_CHECK_MODE"),
    "NCCL_IB_CUDA_SUPPORT": ("NCCL has not read it since 2.4", "NCCL_NET_GDR_LEVEL"),
    "NCCL_IB_GDR_LEVEL": ("NCCL has not read it since 2.4", "NCCL_NET_GDR_LEVEL"),
    "NCCL_LL_THRESHOLD": ("NCCL has not read it since 2.5", "NCCL_PROTO"),
    "NCCL_MAX_NRINGS": ("is the name of NCCL 2.4", "NCCL_MAX_NCHANNELS"),
    "NCCL_MIN_NRINGS": ("is the name of NCCL 2.4", "NCCL_MIN_NCHANNELS"),
    "NCCL_NET_MAX_REQUESTS": ("is fixed when NCCL is built", ""),
    "NCCL_SINGLE_RING_THRESHOLD": ("NCCL has not read it since 2.3", "NCCL_ALGO"),
    "NCCL_SOCKET_TIMEOUT": ("nothing reads it", "NCCL_SOCKET_RETRY_CNT"),
    "NCCL_TIMEOUT": (
        "nothing reads it: the time-out of collectives is an argument of init_process_group",
        "",
    ),
    "NCCL_TREE_THRESHOLD": ("NCCL has not read it since 2.5", "NCCL_ALGO"),
    "RDMAV_FORK_SAFE": ("AWS says not to use it; newer kernels need neither", "FI_EFA_FORK_SAFE"),
}
"""Names that do nothing, or no longer: what became of them, and the name to use ("" for none)."""

_GLOO = frozenset(
    {
        "GLOO_DEVICE_TRANSPORT",
        "GLOO_DISABLE_CONNECTION_RETRIES",
        "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER",
        "GLOO_LOG_LEVEL",
        "GLOO_SOCKET_IFNAME",
    }
)
_READERS: dict[str, tuple[str, frozenset[str]]] = {
    "NCCL_": ("NCCL 2.30", names.NCCL | names.NCCL_OTHERS),
    "RCCL_": ("RCCL 2.21", names.RCCL),
    "OFI_NCCL_": ("the plugin for libfabric", names.OFI_NCCL),
    "TORCH_NCCL_": ("torch", names.TORCH),
    "TORCH_FR_": ("torch", names.TORCH),
    "FI_CXI_": ("libfabric 2", names.FI_CXI),
    "FI_EFA_": ("libfabric 2", names.FI_EFA),
    "GLOO_": ("Gloo", _GLOO),
}
"""Prefix to who reads the variables of that prefix, and their names."""

_REPLACES = {
    "PATH": "programs",
    "LD_LIBRARY_PATH": "libraries",
    "PYTHONPATH": "packages",
    "LD_PRELOAD": "libraries",
}
_FABRIC_POLICY = frozenset({"NCCL_IB_FIFO_TC", "NCCL_IB_SL", "NCCL_IB_TC"})
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for each kernel",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits in each collective",
    "TORCH_NCCL_DESYNC_DEBUG": "each collective is written to the store",
    "TORCH_NCCL_NAN_CHECK": "each collective's input is searched for NaN",
}


def check_name(name: str, value: str, context: Context) -> Iterator[Problem]:
    """What is to be said of the name, and of any value that this name may have."""
    del context
    if name in DEAD:
        yield from _dead(name, value)
    else:
        yield from _unknown(name, value)
    if _SECRET.fullmatch(name) and value:
        yield Problem(
            ERROR,
            f"{name} looks like a secret: presets can be read by everybody, and spec.json and the "
            "logs record the environment; let each user set it in the job's own shell",
        )
    if name in _REPLACES and "$" not in value:
        yield warning(
            name,
            value,
            f"takes the place of the {_REPLACES[name]} that modules and the virtual environment "
            "have put there; use [modules] instead",
        )
    if name.startswith("SLURM_"):
        yield warning(
            name,
            value,
            "reaches the ranks only, after srun has read its own; use slurm.extra or "
            "slurm.srun_args",
        )
    yield from _text(name, value)
    yield from _class(name, value)


def _text(name: str, value: str) -> Iterator[Problem]:
    """What a shell would have done to the value, and nobody does here."""
    expansion = _EXPANSION.search(value)
    if expansion:
        yield error(
            name,
            value,
            f"nobody expands {expansion.group()} here: ranks see this very text; write the value "
            "itself, or set the variable in slurm.setup",
        )
    if not name.startswith(PREFIXES):
        return
    if not value:
        yield error(
            name,
            value,
            "is empty, which is no value: most readers take it for not set, and NCCL no longer "
            "looks into /etc/nccl.conf; leave it out, or name the variable in env.unset",
        )
    elif value[0] in "\"'" and value[-1] == value[0]:
        yield error(
            name,
            value,
            "the quotes are part of the value, as a shell would not have it, and then it fits "
            f"nothing; write {value.strip(value[0])}",
        )
    elif value != value.strip() and name not in _BLANKS:
        yield error(
            name, value, f'the blank around it is part of the value; write "{value.strip()}"'
        )


def _class(name: str, value: str) -> Iterator[Problem]:
    if name in names.NCCL_DEBUGGING:
        yield reason(
            name,
            value,
            "is one of NVIDIA's debugging variables, not to be kept in scripts: a newer NCCL may "
            'choose better; leave it out, or say why it stays: { value = "...", why = "..." }',
        )
    elif name in _FABRIC_POLICY:
        yield reason(
            name,
            value,
            "is a policy of this one fabric's switches, wrong on any other; say why: "
            '{ value = "...", why = "..." }',
        )
    elif name in _SLOW and value.lower() not in {"0", "false", "f", "no", "n"}:
        yield reason(
            name,
            value,
            f"slows training: {_SLOW[name]}; leave it out, or say why it stays: "
            '{ value = "...", why = "..." }',
        )


def _dead(name: str, value: str) -> Iterator[Problem]:
    what, instead = DEAD[name]
    write = f"use {instead}" if instead else "leave it out"
    yield warning(name, value, f"{what}; {write}")


def _unknown(name: str, value: str) -> Iterator[Problem]:
    for prefix, (reader, known) in _READERS.items():
        if not name.startswith(prefix):
            continue
        if name not in known and not name.startswith(names.NCCL_FAMILIES):
            yield warning(name, value, f"{reader} has no variable of this name; {_hint(name)}")
        return
    yield from _nearly_known(name, value)


def _hint(name: str) -> str:
    """The name that was meant, if one is near: its last part is compared, the prefix is common."""
    if f"TORCH_{name}" in names.TORCH:
        return f"did you mean TORCH_{name}?"
    if name.startswith("NCCL_OFI_"):
        return f"did you mean OFI_NCCL_{name.removeprefix('NCCL_OFI_')}?"
    prefix = next(prefix for prefix in _READERS if name.startswith(prefix))
    ends = [known.removeprefix(prefix) for known in _READERS[prefix][1]]
    near = get_close_matches(name.removeprefix(prefix), ends, 1, 0.7)
    return f"did you mean {prefix}{near[0]}?" if near else "leave it out if nothing else reads it"


def _nearly_known(name: str, value: str) -> Iterator[Problem]:
    """A name that only just misses: nccl_debug, NCCLDEBUG, NNCL_DEBUG, FI_MR_CACHE_MONITR."""
    every = names.NCCL | names.TORCH | names.FI_CORE | _GLOO
    if name in every:
        return
    near = [name.upper()] if name.upper() in every else get_close_matches(name, every, 1, 0.9)
    if near:
        yield warning(name, value, f"nothing reads this name; did you mean {near[0]}?")

"""The device that a rank computes on: the accelerator that torch knows, or the CPU.

Written against `torch.accelerator` and torch's module of the device, so a GPU of any vendor is one
case. What NVIDIA's torch has alone stays where it is used: cudart, the memory history.
tests/unit/runtime/test_device.py runs each branch on a stand-in; a GPU never has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")


def device_of_rank(local_rank: int) -> torch.device:
    """The device of the rank with this number on its node; it becomes the process's own."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return CPU
    # Slurm may show each rank its own device alone, as number 0.
    torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def is_accelerator(device: torch.device) -> bool:
    """Whether it is another than the CPU."""
    return device.type != "cpu"


def device_name(device: torch.device) -> str:
    """What the ledger calls a device: "cpu", or the GPU's name as its driver has it."""
    if not is_accelerator(device):
        return device.type
    return str(_module(device).get_device_name(device))


def group_backend(device: torch.device) -> str:
    """Of the program's process group: gloo for host memory, the vendor's own for a device's."""
    if not is_accelerator(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def has_host_backend() -> bool:
    """Whether the program's process group takes tensors in host memory; one of nccl alone does not.

    The group must have been made.
    """
    return "cpu:" in str(dist.get_backend_config())


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def timing_event(device: torch.device) -> torch.Event:
    """A moment in the device's work, from here on; `elapsed_time` tells the time between two."""
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def computes_bf16(device: torch.device) -> bool:
    """Whether the device has bf16 units, as far as torch says."""
    supported = getattr(_module(device), "is_bf16_supported", None)
    return is_accelerator(device) and supported is not None and bool(supported())


def nvidia_capability(device: torch.device) -> tuple[int, int]:
    """NVIDIA's compute capability; (0, 0) of anything else."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    major, minor = _module(device).get_device_capability(device)
    return major, minor


def memory_stats(device: torch.device) -> dict[str, int]:
    """What torch's allocator counts, by torch's names; nothing on a CPU."""
    if not is_accelerator(device):
        return {}
    return dict(_module(device).memory_stats(device))


def random_state(device: torch.device) -> torch.Tensor:
    """The device's random generator, as bytes of host memory."""
    state: torch.Tensor = _module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Continue with what `random_state` gave."""
    _module(device).set_rng_state(state, device)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)

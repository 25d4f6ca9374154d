"""Runs a program of torchtitan on CPUs; what follows is as `preempted.py` has it.

torchtitan asks an accelerator for its name and memory, reduces as NCCL alone can, and is written
for torch 2.14. What it trains, reads and saves is its own.
"""

from __future__ import annotations

from types import SimpleNamespace

import preempted
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

GIB = 1 << 30
divide = FSDPModule.set_gradient_divide_factor


def divide_after(module: FSDPModule, factor: float) -> None:
    module.set_force_sum_reduction_for_comms(True)
    divide(module, factor)


def main() -> None:
    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        set_device=torch.cpu.set_device,
        synchronize=torch.cpu.synchronize,
        device_count=lambda: 64,
        current_device=lambda: 0,
        get_device_name=lambda _: "cpu",
        get_device_properties=lambda _: SimpleNamespace(total_memory=GIB),
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda _: {},
    )
    FSDPModule.set_gradient_divide_factor = divide_after
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = _set_pg_timeout
    preempted.main()


if __name__ == "__main__":
    main()

"""What is asked of a device, on a stand-in for torch's module of it; no GPU runs this."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hpctrain
from hpctrain.core import device as devices
from hpctrain.core.world import World
from hpctrain.train.runtime import own_loop, telemetry
from hpctrain.train.runtime.generators import Generators

CPU = torch.device("cpu")
NVIDIAS_OWN = {"cudart", "nccl", "profiler", "memory", "is_available", "get_device_name"}
STATS = {
    "allocated_bytes.all.current": 5,
    "allocated_bytes.all.peak": 7,
    "reserved_bytes.all.peak": 9,
    "num_alloc_retries": 2,
}


@pytest.fixture(params=["cuda", "xpu"])
def gpu(monkeypatch, request):
    """A node of four GPUs, of which this process has made number `chosen` its own."""
    state = {"chosen": 0, "random": torch.zeros(3, dtype=torch.uint8), "waited": []}
    accelerator = {
        "current_accelerator": lambda check_available: torch.device(request.param),
        "device_count": lambda: 4,
        "set_device_index": lambda index: state.update(chosen=index),
        "current_device_index": lambda: state["chosen"],
        "synchronize": state["waited"].append,
    }
    for name, act in accelerator.items():
        monkeypatch.setattr(torch.accelerator, name, act)
    module = SimpleNamespace(
        get_device_name=lambda device: f"GPU of {device}",
        memory_stats=lambda device: {**STATS, "device": device.index},
        get_rng_state=lambda _: state["random"],
        set_rng_state=lambda new, _: state.update(random=new),
        is_bf16_supported=lambda: True,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    return SimpleNamespace(kind=request.param, state=state, module=module)


def test_a_rank_has_the_device_of_its_number_on_its_node(gpu):
    assert devices.device_of_rank(2) == torch.device(gpu.kind, 2)
    assert gpu.state["chosen"] == 2
    assert devices.device_of_rank(5) == torch.device(gpu.kind, 1)


def test_without_an_accelerator_it_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert devices.device_of_rank(3) == CPU
    assert devices.device_name(CPU) == "cpu"
    assert devices.group_backend(CPU) == "gloo"
    assert devices.memory_stats(CPU) == {}
    assert not devices.computes_bf16(CPU)
    assert not devices.is_accelerator(CPU)
    devices.synchronize(CPU)


def test_groups_of_a_device_have_its_vendors_backend_and_gloo_for_the_host():
    assert devices.group_backend(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"
    assert devices.group_backend(torch.device("xpu", 1)) == "cpu:gloo,xpu:xccl"


def test_a_device_is_asked_through_torchs_module_of_it(gpu):
    device = torch.device(gpu.kind, 3)
    assert devices.device_name(device) == f"GPU of {gpu.kind}:3"
    assert devices.computes_bf16(device)
    devices.synchronize(device)
    assert gpu.state["waited"] == [device]
    del gpu.module.is_bf16_supported
    assert not devices.computes_bf16(device)


def test_moments_are_events_of_the_devices_own_work(gpu, monkeypatch):
    made = []

    class Event:
        def __init__(self, device, *, enable_timing):
            made.append((device, enable_timing, self))
            self.is_recorded = False

        def record(self):
            self.is_recorded = True

    monkeypatch.setattr(torch, "Event", Event)
    device = torch.device(gpu.kind, 1)

    event = devices.timing_event(device)

    assert made == [(device, True, event)]
    assert event.is_recorded


def test_memory_in_samples_is_the_allocators(gpu):
    device = torch.device(gpu.kind, 3)
    assert telemetry.memory(device) == {
        "mem_peak_bytes": 7.0,
        "mem_reserved_bytes": 9.0,
        "mem_retries": 2.0,
    }
    assert own_loop.memory_in_use(device) == 5


def test_the_devices_generator_travels_with_the_ranks_others(gpu):
    world = World(3, 3, 4, torch.device(gpu.kind, 3))
    gpu.state["random"] = torch.arange(3, dtype=torch.uint8)
    saved = Generators(world).capture()
    gpu.state["random"] = torch.zeros(3, dtype=torch.uint8)

    Generators(world).apply(saved, is_same_mesh=True, seed=0, step=0)

    assert torch.equal(gpu.state["random"], torch.arange(3, dtype=torch.uint8))
    assert f"rng.rank-00003.{gpu.kind}" in saved


def test_generators_of_a_gpu_are_left_where_ranks_have_none(gpu):
    saved = Generators(World(0, 0, 1, torch.device(gpu.kind, 0))).capture()
    gpu.state["random"] = None

    Generators(World(0, 0, 1, CPU)).apply(saved, is_same_mesh=True, seed=0, step=0)

    assert gpu.state["random"] is None


def test_torch_cuda_is_named_for_what_nvidia_has_alone():
    """Whatever else there is goes through torch.accelerator, for every vendor.

    `lint` and `doctor` name what others' programs and logs do; they ask no device for anything.
    """
    root = Path(hpctrain.__file__).parent
    named = {
        (str(path.relative_to(root)), name)
        for path in root.rglob("*.py")
        if path.parent.name not in {"doctor", "lint"}
        for line in path.read_text().splitlines()
        if not line.lstrip().startswith("#")
        for name in re.findall(r"(?<!`)torch\.cuda\.(\w+)", line)
    }
    assert {name for _, name in named} <= NVIDIAS_OWN, sorted(named)

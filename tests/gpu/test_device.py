"""What hpctrain reads of the GPU: its device, its memory, its driver, its place near CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.cluster.preflight import facts as probe
from hpctrain.core import device as devices
from hpctrain.ledger.history.progress import peak_flops
from hpctrain.node.agent import cpus
from hpctrain.node.agent.environment import gpu_name, versions_here
from hpctrain.train.engines.norm import precision_of
from hpctrain.train.runtime import telemetry
from hpctrain.train.runtime.own_loop import memory_in_use
from tests.support.ports import free_port

MIB = 1 << 20
CONTEXT_MIB = 2048
"""What CUDA and NCCL take of a GPU beside torch's allocator, at most."""
SMI_S = 30.0


def smi(fields: str) -> list[str]:
    """What nvidia-smi says of the first GPU."""
    words = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "--id=0"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [cell.strip() for cell in done.stdout.split(",")]


def test_the_rank_takes_the_gpu_and_tells_what_it_is(device, note):
    assert devices.device_of_rank(0) == device
    name = devices.device_name(device)
    before = devices.random_state(device) if devices.is_accelerator(device) else None
    drawn = torch.rand(4, device=device)
    devices.synchronize(device)
    assert devices.memory_stats(torch.device("cpu")) == {}
    bf16 = device.type == "cuda"
    assert precision_of("auto", device) is (torch.bfloat16 if bf16 else torch.float32)
    if note.on_gpu("device.py: name, capability, bf16, generator, events, allocator"):
        assert devices.device_of_rank(5) == device, "SLURM shows each rank its own GPU as number 0"
        assert name == smi("name")[0] == torch.cuda.get_device_name()
        assert devices.nvidia_capability(device) >= (8, 0)
        assert devices.computes_bf16(device)
        devices.set_random_state(device, before)
        assert torch.rand(4, device=device).equal(drawn)
        first = devices.timing_event(device)
        torch.ones(4096, 4096, device=device) @ torch.ones(4096, 4096, device=device)
        last = devices.timing_event(device)
        devices.synchronize(device)
        assert first.elapsed_time(last) > 0
        assert devices.memory_stats(device)["allocated_bytes.all.peak"] >= 3 * 64 * MIB


def test_the_group_of_a_rank_is_nccl_with_gloo_beside_it(device, world, note):
    gathered = torch.ones(8, device=device)
    torch.distributed.all_reduce(gathered)
    torch.distributed.all_reduce(torch.ones(8))
    assert gathered.sum().item() == 8 * world.world_size
    assert devices.has_host_backend()
    if note.on_gpu("device.group_backend: a real NCCL communicator"):
        assert devices.group_backend(device) == "cpu:gloo,cuda:nccl"
        assert world.device == device


def test_telemetry_counts_what_nvidia_smi_counts(device, note):
    held = torch.ones(256 * MIB // 4, device=device)
    numbers = telemetry.memory(device)
    assert numbers["mem_peak_bytes"] >= held.nbytes
    assert memory_in_use(device) >= held.nbytes
    if note.on_gpu("telemetry.memory against nvidia-smi"):
        used = float(smi("memory.used")[0])
        reserved = numbers["mem_reserved_bytes"] / MIB
        note.at_most("nvidia-smi's memory beside torch's", used - reserved, CONTEXT_MIB, "MiB")
        assert used >= reserved
        assert numbers["mem_retries"] == 0


def test_a_step_is_timed_on_the_device_that_computes_it(device, world):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
    timer = telemetry.ComputeTime(model, elsewhere_s=lambda: 0.0)
    seconds = []
    for _ in range(3):
        timer.step_began()
        model(torch.ones(8, 64, device=device)).sum().backward()
        devices.synchronize(device)
        timer.step_done()
        seconds.append(timer.take(1))
    assert all(second is not None and second > 0 for second in seconds), seconds


def test_preflight_and_the_agent_read_the_same_gpu(device, note):
    gpus = probe.read_gpus(Path("/"), partial(probe.run_command, timeout_s=SMI_S))
    versions = versions_here()
    assert versions.torch == torch.__version__
    if note.on_gpu("preflight.facts.read_nvidia, agent.environment.versions_here"):
        name, driver = smi("name,driver_version")
        assert (gpus[0].name, gpus[0].driver) == (name, driver)
        assert gpus[0].uncorrected in {0, None}
        assert versions.nccl == ".".join(map(str, torch.cuda.nccl.version()[:3]))
        assert gpu_name() in {"", name}, "the driver tells it where /proc/driver is"
        assert peak_flops(name), f"status knows no peak of {name}"


ORDER = {
    "address": "127.0.0.1", "host": True, "name": "gpu", "first": 0, "world": 1, "ranks": 1,
    "timeout_s": 60.0,
}  # fmt: skip


def test_preflights_collective_runs_on_the_gpu_in_a_forked_rank(device, note):
    port = free_port()
    orders = [{**ORDER, "store": port}, {**ORDER, "port": port, "size_mib": 8}]
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain.cluster.preflight.collective"],
        input="".join(json.dumps(order) + "\n" for order in orders),
        capture_output=True,
        text=True,
        check=True,
    )
    ready, answer = map(json.loads, done.stdout.splitlines())
    assert ready == {"ready": True}
    [rank] = answer["ranks"]
    assert rank["product"] is not None
    if note.on_gpu("preflight.collective: the product of matrices of 4096"):
        numbers = torch.arange(4096 * 4096, dtype=torch.float32).reshape(4096, 4096)
        weights = torch.arange(4096, dtype=torch.float64) % 11
        right = ((numbers % 7 - 3).to(device) @ (numbers % 5 - 2).to(device)).double()
        assert rank["product"] == float((right @ weights.to(device)).sum().item())


SEES = """
import json, torch
from hpctrain.core.device import device_of_rank
print(json.dumps([str(device_of_rank(0)), torch.cuda.device_count()]))
"""


@pytest.mark.parametrize("visible", ["0", "", "uuid"])
def test_a_rank_keeps_to_the_gpus_that_slurm_shows_it(visible, note):
    if not note.on_gpu(f"a rank with CUDA_VISIBLE_DEVICES={visible!r}") and visible:
        return
    value = smi("uuid")[0] if visible == "uuid" else visible
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": value}
    done = subprocess.run(
        [sys.executable, "-c", SEES], env=environ, capture_output=True, text=True, check=True
    )
    expected = ["cuda:0", 1] if value else ["cpu", 0]
    assert json.loads(done.stdout) == expected


def test_cpus_near_the_gpu_are_those_of_its_pci_address(note):
    root = Path("/")
    named = cpus.machine({"CUDA_VISIBLE_DEVICES": "GPU-8f2c"}, root)
    numbered = cpus.machine({"SLURM_STEP_GPUS": "0", "CUDA_VISIBLE_DEVICES": "0"}, root)
    assert named.near == []
    assert numbered.cores
    plan = cpus.plan(1, os.sched_getaffinity(0), numbered, own=True)
    if note.on_gpu("agent.cpus: the driver's list of GPUs, and Linux's CPUs near one"):
        where: Any = torch.cuda.get_device_properties(0)
        place = (where.pci_domain_id, where.pci_bus_id, where.pci_device_id)
        address = "{:04x}:{:02x}:{:02x}.0".format(*place)
        local = Path("/sys/bus/pci/devices") / address / "local_cpulist"
        listed = Path("/proc/driver/nvidia/gpus").is_dir() and local.exists()
        text = local.read_text().strip() if listed else ""
        assert list(numbered.near) in ([cpus.cpus_of(text)], []), text
        assert numbered.near or not text, "where the system tells it, it is known"
        assert not plan or plan[0] <= os.sched_getaffinity(0)

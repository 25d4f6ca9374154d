"""What Linux tells of a node's cores, NUMA nodes and GPUs; nothing is run, and nothing is guessed.

NVIDIA's GPUs are taken in the order of their PCI addresses and AMD's in that of the kernel driver,
which is how CUDA (with one model in a node) and HIP number them. tests/unit/test_topology.py holds
the promises, on trees as machines have them.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.agent.cpu_plan import Cpus, Machine, cpus_of

if TYPE_CHECKING:
    from collections.abc import Mapping

VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
STEP_GPUS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""The machine's own numbers, where the job sees its GPUs alone and renumbered."""


def machine(environ: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """The node that this process is on, with the GPUs that its ranks will use.

    Args:
        environ: Of the job: which GPUs it was given.
        root: Where /sys and /proc are.
    """
    system = root / "sys/devices/system"
    cores = {
        _cpus(path)
        for path in system.glob("cpu/cpu[0-9]*/topology/thread_siblings_list")
        if _cpus(path)
    }
    numbered = sorted(system.glob("node/node[0-9]*"), key=lambda path: int(path.name[4:]))
    numa = [cpus for path in numbered if (cpus := _cpus(path / "cpulist"))]
    gpus = _nvidia(root) or _amd(root)
    return Machine(sorted(cores, key=min), numa, _used(gpus, environ))


def numbers_of_gpus(environ: Mapping[str, str]) -> list[int] | None:
    """The machine's numbers of the job's GPUs; None where the job does not tell them."""
    for name in (*STEP_GPUS, *VISIBLE):
        parts = environ.get(name, "").split(",")
        if all(part.strip().isdigit() for part in parts):
            return [int(part) for part in parts]
    return None


def _used(gpus: list[Cpus], environ: Mapping[str, str]) -> list[Cpus]:
    """CPUs near the GPUs that the job was given; none where one of them is not known."""
    numbers = numbers_of_gpus(environ)
    if numbers is None:
        # Names in the place of numbers (GPU-8f2c...) may be in any order.
        named = any(environ.get(name) for name in (*STEP_GPUS, *VISIBLE))
        return [] if named or not all(gpus) else gpus
    near = [gpus[number] for number in numbers if number < len(gpus)]
    return near if len(near) == len(numbers) and all(near) else []


def _nvidia(root: Path) -> list[Cpus]:
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*:*:*.*"))
    return [_near(root, folder.name.lower()) for folder in folders]


def _amd(root: Path) -> list[Cpus]:
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    found = []
    for node in sorted(nodes, key=lambda path: int(path.name)):
        facts = dict(
            line.split(maxsplit=1)
            for line in _text(node / "properties").splitlines()
            if len(line.split(maxsplit=1)) > 1
        )
        with contextlib.suppress(ValueError):
            if int(facts.get("simd_count", "0")) == 0:
                continue  # a CPU
            where, domain = int(facts.get("location_id", "0")), int(facts.get("domain", "0"))
            bus, device, function = where >> 8 & 0xFF, where >> 3 & 0x1F, where & 7
            found.append(_near(root, f"{domain:04x}:{bus:02x}:{device:02x}.{function}"))
    return found


def _near(root: Path, address: str) -> Cpus:
    """CPUs near a PCI device; its NUMA node's where it tells no list of its own."""
    device = root / "sys/bus/pci/devices" / address
    if cpus := _cpus(device / "local_cpulist"):
        return cpus
    number = _text(device / "numa_node").strip()
    return _cpus(root / "sys/devices/system/node" / f"node{number}" / "cpulist")


def _cpus(path: Path) -> Cpus:
    with contextlib.suppress(ValueError):
        return cpus_of(_text(path))
    return frozenset()


def _text(path: Path) -> str:
    """A file of the kernel's; "" where there is none that can be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

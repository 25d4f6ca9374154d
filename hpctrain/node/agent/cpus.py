"""CPUs of ranks: the machine's cores, NUMA nodes and GPUs read, a share for each rank, its binding.

Each gets CPUs near its GPU, never one that the job was not given; nothing is run, and nothing is
guessed. NVIDIA's GPUs are taken in the order of their PCI addresses and AMD's in that of the kernel
driver, which is how CUDA (with one model in a node) and HIP number them. docs/plan.md;
tests/unit/agent/test_cpus.py holds the promises, and test_rank_topology.py those of the reading, on
trees as machines have them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from hpctrain.core.settings.spec import Spec

log = logging.getLogger("hpctrain.agent")

Cpus = frozenset[int]
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
STEP_GPUS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""The machine's own numbers, where the job sees its GPUs alone and renumbered."""


@dataclass(frozen=True)
class Machine:
    """What is known of a node.

    Attributes:
        cores: CPUs of each core: several where it has threads.
        numa: CPUs of each NUMA node.
        near: CPUs near each GPU that the ranks use, in their order; empty where nobody knows.
    """

    cores: Sequence[Cpus] = field(default_factory=list)
    numa: Sequence[Cpus] = field(default_factory=list)
    near: Sequence[Cpus] = field(default_factory=list)


def cpus_of_ranks(
    spec: Spec,
    environ: Mapping[str, str],
    allowed: Collection[int] | None = None,
    root: Path | None = None,
    *,
    shared: bool = False,
) -> list[str]:
    """Return lists of CPUs for this node's ranks, such as "49-55"; empty if they stay unbound.

    `allowed` is what the job was given; the default is what this process may use. `shared`: all
    nodes are processes of this machine.
    """
    slurm, asked = spec.settings.slurm, spec.settings.run.cpu_bind
    if asked == "no" or shared or (asked == "auto" and not slurm.gpus_per_node):
        return []
    given = os.sched_getaffinity(0) if allowed is None else frozenset(allowed)
    node = machine(environ, *([root] if root is not None else []))
    if not slurm.gpus_per_node:
        node = replace(node, near=[])
    elif near := _from_map(spec, environ):
        node = replace(node, near=near)
    elif not node.near:
        return []  # GPUs of which nobody knows where they are
    return [as_list(one) for one in plan(slurm.ranks(), given, node, own=_owns(given, environ))]


def bind(cpus: list[str]) -> None:
    """Bind this rank's process to its CPUs, by its number on the node."""
    rank = int(os.environ["LOCAL_RANK"])
    if rank >= len(cpus):
        return
    try:
        os.sched_setaffinity(0, cpus_of(cpus[rank]))
    except OSError as error:  # slower, and no reason to stop
        log.warning("not bound to CPUs %s: %s", cpus[rank], error.strerror)


def plan(ranks: int, allowed: Collection[int], machine: Machine, *, own: bool) -> list[Cpus]:
    """Return the CPUs of each rank of a node; empty if ranks are better left alone.

    Rank i uses GPU i, and gets its share of what is near that GPU. Ranks whose GPUs share CPUs
    divide them by cores. If the job does not `own` all of `allowed`, ranks get the whole
    neighbourhood: another job's ranks may have taken a share of it.
    """
    given = frozenset(allowed)
    if machine.near:
        wanted = [machine.near[rank % len(machine.near)] & given for rank in range(ranks)]
        if not all(wanted):
            return []  # the job was given CPUs elsewhere than its GPUs: a half plan is none
    else:
        wanted = [given] * ranks
    if not own:
        return wanted if len(set(wanted)) > 1 else []
    shares = dict[Cpus, list[Cpus]]()
    for cpus in dict.fromkeys(wanted):
        shares[cpus] = _divide(_cores(cpus, machine), wanted.count(cpus)) or [cpus] * ranks
    shares_of_ranks = [shares[cpus].pop(0) for cpus in wanted]
    return shares_of_ranks if any(cpus != given for cpus in shares_of_ranks) else []


def machine(environ: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """Return the node that this process is on, with the GPUs that its ranks will use."""
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


def cpus_of(text: str) -> Cpus:
    """Return the CPUs of a list as Linux and SLURM write it, `0-3,8`; else raise ValueError."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def as_list(cpus: Iterable[int]) -> str:
    """The other way round."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _from_map(spec: Spec, environ: Mapping[str, str]) -> list[Cpus]:
    """The preset's map, for the GPUs that the job was given."""
    if spec.preset is None:
        return []
    from hpctrain.cluster.site.schema import Site

    with contextlib.suppress(ValueError):
        near = [cpus_of(text) for text in Site.from_plain(spec.preset).cpus.of_gpu]
        numbers = numbers_of_gpus(environ)
        if numbers is None:
            return near[: spec.settings.slurm.gpus_per_node]
        return [near[number] for number in numbers] if max(numbers) < len(near) else []
    return []


def _owns(given: Collection[int], environ: Mapping[str, str]) -> bool:
    """Whether SLURM gave the job all CPUs that it sees; where it confines nobody it sees all."""
    on_node = environ.get("SLURM_CPUS_ON_NODE", "")
    return on_node.isdigit() and int(on_node) >= len(given)


def _cores(cpus: Cpus, machine: Machine) -> list[Cpus]:
    cores = {core & cpus for core in machine.cores} - {frozenset()}
    left = cpus.difference(*cores) if cores else cpus
    cores |= {frozenset({cpu}) for cpu in left}
    places = {cpu: number for number, node in enumerate(machine.numa) for cpu in node}
    return sorted(cores, key=lambda core: (places.get(min(core), 0), min(core)))


def _divide(cores: Sequence[Cpus], parts: int) -> list[Cpus]:
    """Cores beside each other for each part, as many as for the others; none where too few."""
    each = len(cores) // parts
    if not each:
        return []
    return [frozenset[int]().union(*cores[n * each : (n + 1) * each]) for n in range(parts)]


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
    near_each = []
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
            near_each.append(_near(root, f"{domain:04x}:{bus:02x}:{device:02x}.{function}"))
    return near_each


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
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

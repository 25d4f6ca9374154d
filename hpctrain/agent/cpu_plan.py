"""Which CPUs each rank of a node gets: those near its GPU, never one that the job was not given.

Pure: the machine's facts come in. tests/unit/test_cpu_plan.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

Cpus = frozenset[int]


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


def plan(ranks: int, allowed: Collection[int], machine: Machine, *, own: bool) -> list[Cpus]:
    """The CPUs of each rank of a node; empty where ranks are better left alone.

    Rank i uses GPU i, and gets its share of what is near that GPU. Ranks whose GPUs share CPUs
    divide them by cores.

    Args:
        ranks: Of this node.
        allowed: CPUs that the job was given: the agent's own affinity.
        machine: See there.
        own: The job has all of `allowed` for itself. Else ranks get the whole neighbourhood: a
            share of it might be what another job's ranks have taken too.
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
    found = [shares[cpus].pop(0) for cpus in wanted]
    return found if any(cpus != given for cpus in found) else []


def cpus_of(text: str) -> Cpus:
    """CPUs of a list as Linux and SLURM write it: `0-3,8`.

    Raises:
        ValueError: it is none.
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def as_list(cpus: Iterable[int]) -> str:
    """The other way round."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _cores(cpus: Cpus, machine: Machine) -> list[Cpus]:
    """These CPUs as cores, NUMA node by NUMA node."""
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

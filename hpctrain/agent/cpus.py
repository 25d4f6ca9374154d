"""Binds ranks to the CPUs near their GPUs, as the site's map or the machine itself tells.

An agent plans for its node and the ranks bind themselves, first of all that they do: what they
start (data loaders, the writer of checkpoints) stays there with them. docs/engines.md and
tests/unit/test_cpu_plan.py.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.agent import topology
from hpctrain.agent.cpu_plan import as_list, cpus_of, plan

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from hpctrain.agent.cpu_plan import Cpus
    from hpctrain.settings.spec import Spec


def cpus_of_ranks(
    spec: Spec,
    environ: Mapping[str, str],
    allowed: Collection[int] | None = None,
    root: Path | None = None,
) -> list[str]:
    """Lists of CPUs for this node's ranks, such as "49-55"; empty where they stay unbound.

    Args:
        spec: The run's.
        environ: Of the job.
        allowed: What the job was given; by default what this process may use.
        root: Where /sys and /proc are, for tests.
    """
    slurm, asked = spec.settings.slurm, spec.settings.run.cpu_bind
    if asked == "no" or spec.cluster != "slurm" or (asked == "auto" and not slurm.gpus_per_node):
        return []
    given = os.sched_getaffinity(0) if allowed is None else frozenset(allowed)
    found = topology.machine(environ, *([root] if root is not None else []))
    if not slurm.gpus_per_node:
        found = replace(found, near=[])
    elif near := _from_map(spec, environ):
        found = replace(found, near=near)
    elif not found.near:
        return []  # GPUs of which nobody knows where they are
    return [as_list(one) for one in plan(slurm.ranks(), given, found, own=_owns(given, environ))]


def bind(cpus: list[str]) -> None:
    """Bind this rank's process to its CPUs, by its number on the node."""
    rank = int(os.environ["LOCAL_RANK"])
    if rank >= len(cpus):
        return
    try:
        os.sched_setaffinity(0, cpus_of(cpus[rank]))
    except OSError as error:  # slower, and no reason to stop
        print(f"hpctrain: not bound to CPUs {cpus[rank]}: {error.strerror}", flush=True)


def _from_map(spec: Spec, environ: Mapping[str, str]) -> list[Cpus]:
    """The preset's map, for the GPUs that the job was given."""
    if spec.preset is None:
        return []
    from hpctrain.site.preset import Site

    with contextlib.suppress(ValueError):
        near = [cpus_of(text) for text in Site.from_plain(spec.preset).cpus.of_gpu]
        numbers = topology.numbers_of_gpus(environ)
        if numbers is None:
            return near[: spec.settings.slurm.gpus_per_node]
        return [near[number] for number in numbers] if max(numbers) < len(near) else []
    return []


def _owns(given: Collection[int], environ: Mapping[str, str]) -> bool:
    """Whether SLURM gave the job all CPUs that it sees; where it confines nobody it sees all."""
    told = environ.get("SLURM_CPUS_ON_NODE", "")
    return told.isdigit() and int(told) >= len(given)

"""What a training job can die of: a closed set, each with its code, its name and what to do.

What is known of each stands in faults.toml. `docs/doctor.md` has a row for each code:
tests/unit/doctor/test_faults.py holds that; test_of_run.py holds that every member has its entry,
and every cause of the ledger its fault.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from hpctrain.ledger.history.causes import EndCause


class FaultKind(StrEnum):
    """What ended a job, finer than the ledger's `EndCause`: a closed set."""

    GPU_OOM = "gpu_oom"
    GPU_ERROR = "gpu_error"
    GPU_ASSERT = "gpu_assert"
    GPU_SETUP = "gpu_setup"
    HOST_OOM = "host_oom"
    SHARED_MEMORY = "shared_memory"
    DATA_WORKER = "data_worker"
    STORAGE_FULL = "storage_full"
    STORAGE_ERROR = "storage_error"
    HANG = "hang"
    DESYNC = "desync"
    TRANSPORT = "transport"
    INTERFACE = "interface"
    PORT_IN_USE = "port_in_use"
    RENDEZVOUS = "rendezvous"
    LAUNCH = "launch"
    VERSIONS = "versions"
    COMPILER = "compiler"
    DOWNLOAD = "download"
    STALE_SHARED_MEMORY = "stale_shared_memory"
    CHECKPOINT = "checkpoint"
    FP16_OVERFLOW = "fp16_overflow"
    NAN = "nan"
    LOSS_SPIKE = "loss_spike"
    CODE = "code"
    NATIVE = "native"
    KILLED = "killed"
    WALLTIME = "walltime"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    NODE_FAIL = "node_fail"
    STOPPED = "stopped"
    NO_PROGRESS = "no_progress"
    UNFIT_NODE = "unfit_node"
    FENCED = "fenced"
    REQUEUED = "requeued"
    HUNG_END = "hung_end"
    COMPLETED = "completed"
    RUNNING = "running"
    UNKNOWN = "unknown"


class Certainty(StrEnum):
    """How sure a diagnosis is."""

    CERTAIN = "certain"
    """What failed said so itself, and nothing before it explains it."""
    LIKELY = "likely"
    POSSIBLE = "possible"
    NOT_KNOWN = "not known"

    @property
    def rank(self) -> int:
        """0 for the surest."""
        return list(Certainty).index(self)


@dataclass(frozen=True)
class Knowledge:
    """What is known of a kind of fault.

    Attributes:
        code: Its code, as in docs/doctor.md.
        title: What happened, in a few words.
        do: What to do about it, in the order in which to try it.
        first_of: What stands behind the title: the first of these whose parts are all known.
        all_of: Or those of these whose parts are known.
    """

    code: str
    title: str
    do: tuple[str, ...]
    first_of: tuple[str, ...] = ()
    all_of: tuple[str, ...] = ()


TABLE: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("faults.toml").read_text("utf-8")
)
"""faults.toml, whose comments say what each part is."""
KNOWLEDGE: dict[FaultKind, Knowledge] = {
    FaultKind(name): Knowledge(
        row["code"],
        row["title"],
        tuple(row["do"]),
        tuple(row.get("first_of", ())),
        tuple(row.get("all_of", ())),
    )
    for name, row in TABLE["faults"].items()
}
OF_CAUSE: dict[EndCause, FaultKind] = {
    EndCause(cause): FaultKind(name)
    for name, row in TABLE["faults"].items()
    for cause in row.get("ledger_causes", ())
}
"""Which fault each cause of the ledger is where nothing finer is known."""


def groups_of(part: str) -> dict[str, frozenset[FaultKind]]:
    """Kinds of fault by a name, as a part of faults.toml groups them."""
    return {name: frozenset(map(FaultKind, kinds)) for name, kinds in TABLE[part].items()}

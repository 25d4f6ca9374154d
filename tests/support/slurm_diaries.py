"""What each version of SLURM does with jobs, as data: tests/data/slurm_diaries/VERSION.json.

    python -m tests.support.slurm_diaries                                        # this SLURM
    tests/support/slurm_system.sh run 24.11 python -m tests.support.slurm_diaries

writes it anew. tests/slurm/test_cluster_facts.py holds each version against its recording, and
tests/unit/entry/test_local_contract.py holds the embedded cluster against what they have in common.

Of a job: the signals of its tasks and of its batch script, each once, in their order; what it sees
of itself when they come; how its tasks end; what follows.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hpctrain.cluster.scheduler.slurm.jobs import job_facts
from hpctrain.core.base.records import JobState
from tests.support.slurm_cluster import parse_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.core.base.records import JobFacts

FOLDER = Path(__file__).parents[1] / "data" / "slurm_diaries"
RECORD = "HPCTRAIN_RECORD_DIARIES"
WAITS = frozenset({JobState.PENDING, JobState.CONFIGURING, JobState.RUNNING})


@dataclass
class Recording:
    """What is recorded of one version, or is being recorded."""

    path: Path
    is_new: bool
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, version: tuple[int, int]) -> Self:
        """Of a version, such as (22, 5)."""
        path = FOLDER / "{}.{:02}.json".format(*version)
        is_new = bool(os.environ.get(RECORD))
        return cls(path, is_new, {} if is_new else json.loads(path.read_text()))

    def hold(self, name: str, facts: Mapping[str, Any]) -> None:
        """Compare what a job did with what is recorded of it, or record it."""
        if self.is_new:
            self.facts[name] = facts
        facts, recorded = as_compared(facts), as_compared(self.facts[name])
        assert facts == recorded, f"{name}: {json.dumps(facts)}\nrecorded: {json.dumps(recorded)}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_new:
            FOLDER.mkdir(exist_ok=True)
            self.path.write_text(json.dumps(self.facts, indent=1, sort_keys=True) + "\n")


def as_compared(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts without the order of what comes at one moment, and without what is sent in vain.

    As SLURM takes a job from its nodes it sends SIGUSR2 and SIGTERM together, and a task may see
    either first. A job that had its SIGTERM while it ran gets that SIGUSR2 only where 22.05 was
    once told to send user signals (it forgets no such order before it is restarted), and on a busy
    machine its task may be killed before it comes.
    """
    facts = dict(facts)
    if "tasks" in facts:
        tasks = dict(facts["tasks"])
        ends = [one for one in tasks["seen"] if one["state"] == "COMPLETING"]
        lives = [one for one in tasks["seen"] if one["state"] != "COMPLETING"]
        before = [one["at"] for one in lives]
        in_vain = {"SIGUSR2"} - set(before) if "SIGTERM" in before else set()
        ends = [one for one in ends if one["at"] not in in_vain]
        tasks["seen"] = lives + sorted(ends, key=lambda one: str(one["at"]))
        tasks["signals"] = [n for n in tasks["signals"] if n in before] + sorted(
            n for n in tasks["signals"] if n not in {*before, *in_vain}
        )
        facts["tasks"] = tasks
    return facts


def seen_facts(at: str, facts: JobFacts) -> dict[str, Any]:
    """What a job sees of itself when a signal comes."""
    return {
        "at": at,
        "state": str(facts.state),
        "restarts": facts.restarts,
        "reason": facts.reason,
        "in grace": facts.preempt_time is not None,
    }


def attempt_facts(events: Sequence[Mapping[str, Any]], ends_after: float = 0) -> dict[str, Any]:
    """Return what a diary says of one attempt on one node.

    Args:
        events: Its lines.
        ends_after: So long after its first signal it lives at least, where it does not leave.
    """
    signals = [e for e in events if e["event"].startswith("SIG")]
    names = dict.fromkeys(e["event"] for e in signals)
    seen: list[dict[str, Any]] = []
    for e in events:
        if e["event"] == "record":
            one = seen_facts(e["at"], job_facts(parse_record(e["record"])))
            seen += [one] if one not in seen else []
    stays = events[-1]["t"] - signals[0]["t"] if signals else 0
    return {
        "signals": [name for name in names if name != "SIGCONT"],
        "seen": seen,
        "requeue": next((e["status"] for e in events if e["event"] == "requeue"), None),
        "lives on": bool(ends_after) and stays >= ends_after,
    }


def next_facts(record: Mapping[str, str], *, before: int) -> dict[str, Any]:
    """Return what follows an attempt, as SLURM says; empty while it is not known.

    Args:
        record: What SLURM says of the job.
        before: The restarts with which the attempt began.
    """
    facts = job_facts(record)
    return following(facts.state, facts.restarts or 0, before=before)


def following(state: JobState, restarts: int, *, before: int) -> dict[str, Any]:
    """Return what follows an attempt; empty while it is not known."""
    if state is JobState.COMPLETING:
        return {}
    if restarts > before:
        return {"state": "runs again", "restarts": before + 1}
    return {} if state in WAITS else {"state": str(state), "restarts": restarts}


def shared(name: str) -> list[Any]:
    """Return what the recorded versions say of a job, oldest first."""
    return [json.loads(path.read_text())[name] for path in sorted(FOLDER.glob("*.json"))]


def main() -> int:
    """Record this machine's version."""
    import pytest

    os.environ[RECORD] = "1"
    return int(pytest.main(["-q", "-n0", "tests/slurm/test_cluster_facts.py"]))


if __name__ == "__main__":
    sys.exit(main())

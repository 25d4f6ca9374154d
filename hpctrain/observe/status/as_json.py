"""The status of a run as a JSON value, for programs. Pure.

Seconds since the epoch and bytes, as plain numbers; what is not known is null. Every number is one
that JSON has a word for: a loss of NaN is null. tests/unit/cli/test_status.py holds the promises.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.text import placed
from hpctrain.ledger.history.goodput import TimeClass
from hpctrain.observe.status.text import in_words, next_commands

if TYPE_CHECKING:
    from hpctrain.ledger.history.attempts import AttemptView
    from hpctrain.ledger.history.goodput import Goodput
    from hpctrain.ledger.history.progress import RankSample, Saving
    from hpctrain.observe.status.status import Link, RunStatus


def as_json(status: RunStatus) -> dict[str, Any]:
    """Everything that the screen shows, and what it leaves out."""
    progress, now = status.progress, status.ledger_state
    value = {
        "run": status.name,
        "run_dir": status.root,
        "state": status.state.value,
        "words": in_words(status),
        "step": progress.step,
        "total_steps": progress.total,
        "loss": progress.loss,
        "step_s": progress.step_s,
        "left_s": status.left_s,
        "finish": asdict(status.finish) if status.finish else None,
        "last_seen": progress.seen,
        "since": now.t or None,
        "cluster": status.cluster,
        "image": status.image or None,
        "job_id": now.job_id,
        "job": asdict(status.answer.job) if status.answer.job else None,
        "cluster_problem": status.answer.problem or None,
        "accounting_problem": status.answer.unaccounted or None,
        "cancel_requested": now.cancel or None,
        "exit_code": now.exit_code,
        "why": now.detail or None,
        "checkpoint": asdict(status.checkpoint) if status.checkpoint else None,
        "verified": dict(status.verified),
        "not_taken": [asdict(one) for one in status.skipped],
        "interval": asdict(status.saving.interval) if status.saving.interval else None,
        "saves": _saves(status.saving),
        "evaluations": [asdict(one) for one in status.evaluations],
        "disk_free_bytes": status.disk_free_bytes,
        "after": list(status.after),
        "chain": [_link(link) for link in status.chain],
        "mesh": _mesh(status),
        "mishaps": asdict(status.incidents),
        "attempts": [_attempt(one) for one in status.attempts],
        "steps_lost": status.steps_lost.steps,
        "not_known": status.steps_lost.why or None,
        "speed": asdict(status.speed) if status.speed else None,
        "goodput": goodput_json(status.goodput),
        "last_24h": goodput_json(status.day),
        "failure": asdict(status.failure) if status.failure else None,
        "failure_log": status.failure_log or None,
        "next": next_commands(status),
    }
    finite: dict[str, Any] = plain(value)
    return finite


def goodput_json(spent: Goodput) -> dict[str, Any]:
    """Where the time went. `share` is of the allocated node-seconds; the queue has none in it."""
    classes = {
        kind.value: {
            "seconds": seconds,
            "node_seconds": spent.node_seconds.get(kind),
            "share": _share(spent, kind),
        }
        for kind, seconds in spent.seconds.items()
    }
    return {
        "classes": classes,
        "allocated_s": spent.allocated_s,
        "submitted_s": spent.submitted_s,
        "useful_of_allocated": spent.useful_of_allocated,
        "useful_since_submit": spent.useful_since_submit,
    }


def plain(value: Any) -> Any:
    """The value with null for each number that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def _share(spent: Goodput, kind: TimeClass) -> float | None:
    if kind is TimeClass.QUEUE or spent.allocated_s <= 0:
        return None
    return spent.node_seconds[kind] / spent.allocated_s


def _link(link: Link) -> dict[str, Any]:
    names = ("run", "run_dir", "state", "job_id", "after", "words")
    return {name: getattr(link, name) for name in names}


def _mesh(status: RunStatus) -> dict[str, Any] | None:
    """The newest attempt's mesh, with every rank's node and place on each axis."""
    if status.mesh is None:
        return None
    now = status.mesh
    return {**asdict(now), "ranks": placed(now.mesh, now.nodes, now.ranks_per_node)}


def _saves(saves: Saving) -> dict[str, Any]:
    value = asdict(saves)
    del value["interval"]
    return value


def _attempt(attempt: AttemptView) -> dict[str, Any]:
    value = asdict(attempt)
    value["failure"] = attempt.failure.summary if attempt.failure else None
    value["read_from"] = attempt.read_from or None
    return value


def ranks_as_json(sample: RankSample | None) -> dict[str, Any] | None:
    """The newest sample of every rank; null where there is none."""
    return None if sample is None else plain(asdict(sample))

"""Notifications of an attempt's end: what there is to tell, and the start of who tells it.

The telling is a process of its own (`notify_child.py`), in a session of its own: it may hang, flood
its output or be missing, and nobody here waits for it. Started where its starter lives on: by node
0's agent when ranks start again in the allocation, else by the batch side, since SLURM kills what a
step leaves behind when its last task exits. docs/notifications.md documents every field;
tests/unit/agent/test_notify.py holds the promises.
"""

from __future__ import annotations

import logging
import shlex
import subprocess
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.base.process import own_program
from hpctrain.base.records import EndReason, Next

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.run.events import Event
    from hpctrain.run.layout import RunDir
    from hpctrain.settings.schema import NotifySettings

log = logging.getLogger("hpctrain.agent")

SPARE_S = 5.0
"""Beyond `notify.timeout_s`: for the child's own start and its line in the ledger."""
MOST_WHY = 2000
"""Characters of a reason: an argument and a chat message have their limits."""
_ENDED_ON_WISH = frozenset({EndReason.STOPPED, EndReason.CANCELLED})
_started: list[subprocess.Popen[bytes]] = []  # kept: a Popen that is collected warns


@dataclass(frozen=True)
class Notification:
    """What a [notify] command and webhook get."""

    what: str
    """done, failed, stopped: the run is over; attempt: an attempt ended and the run goes on."""
    run: str
    run_dir: str
    attempt: int
    job_id: str | None
    reason: str
    """Why the attempt ended, as `hpctrain status` has it."""
    step: int | None
    """The last step that it is known to have done."""
    saved_step: int | None
    """The newest step that a committed checkpoint has."""
    steps_lost: int | None
    """What a resume from there does again."""
    loss: float | None
    why: str
    next: str
    """A command that helps now."""
    text: str
    """All that matters in one line; chat services that take `text` show it."""

    def as_json(self) -> dict[str, Any]:
        """Every field, as JSON values."""
        return asdict(self)


def notify(run: RunDir, settings: NotifySettings, attempt: int) -> subprocess.Popen[bytes] | None:
    """Start to tell of an attempt's end, which is in the ledger; None where nobody asked for it.

    Costs the start of a process, never more; what comes of it is in the ledger as `notified`.
    """
    if not settings.on or not (settings.command or settings.webhook_file):
        return None
    command = own_program("hpctrain.agent.notify_child", str(run.root), str(attempt))
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:  # no memory, no process to be had: the run's end goes on without it
        log.warning("nobody is notified: %s", error)
        return None
    _started.append(child)
    return child


def telling() -> set[int]:
    """The processes that tell news just now."""
    return {child.pid for child in _started if child.poll() is None}


def wait_for(child: subprocess.Popen[bytes] | None, limit_s: float) -> None:
    """Let it finish where its end would come with ours; leaves it alone after the limit."""
    if child is not None:
        try:
            child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return


def notification_of(run: RunDir, events: Sequence[Event], attempt: int) -> Notification | None:
    """The news of an attempt; None where it has not ended."""
    own = [event for event in events if event.attempt == attempt]
    stuck = _stuck(own)
    end = _last(own, "attempt_ended") or ({"reason": EndReason.UNKNOWN} if stuck else None)
    if end is None:
        return None
    stopped = _last(own, "run_stopped")
    what = "failed" if stuck else _what(end, stopped)
    failure = _last(own, "failure") or {}
    detail = (stopped or {}).get("detail") or failure.get("summary") or end.get("detail")
    why = str(stuck or detail or "")
    step = end.get("step")
    saved = max((e.data["step"] for e in events if e.kind == "saved"), default=None)
    lost = None if step is None else max(0, step - (saved or 0))
    reason = end["reason"]
    return Notification(
        what=what,
        run=run.name,
        run_dir=str(run.root),
        attempt=attempt,
        job_id=(_last(own, "attempt_started") or {}).get("job_id"),
        reason=reason,
        step=step,
        saved_step=saved,
        steps_lost=lost,
        loss=_loss(own),
        why=why[:MOST_WHY],
        next=_next(run, what),
        text=_text(run.name, what, attempt=attempt, reason=reason, step=step, why=why),
    )


def _what(end: dict[str, Any], stopped: dict[str, Any] | None) -> str:
    if end.get("by") == "successor":  # the run goes on already
        return "attempt"
    reason = EndReason(end["reason"])
    if stopped is not None:
        return "failed" if reason is EndReason.USER_ERROR else "stopped"
    if end.get("next") != Next.STOP:
        return "attempt"
    if reason is EndReason.COMPLETED:
        return "done"
    return "stopped" if reason in _ENDED_ON_WISH else "failed"


def _stuck(own: Sequence[Event]) -> str:
    """Why the job could not be requeued, where nobody could; "" where it was or need not be."""
    tries = [event for event in own if event.kind in {"requeued", "requeue_failed"}]
    if not tries or tries[-1].kind == "requeued":
        return ""
    return f"the job could not be requeued: {tries[-1].data.get('why', '')}"


def _last(events: Sequence[Event], kind: str) -> dict[str, Any] | None:
    return next((event.data for event in reversed(events) if event.kind == kind), None)


def _loss(events: Sequence[Event]) -> float | None:
    """The last loss that was told; None also for one that JSON has no word for."""
    for event in reversed(events):
        loss = event.data.get("loss")
        if event.kind == "steps" and isinstance(loss, (int, float)):
            return float(loss)
    return None


def _next(run: RunDir, what: str) -> str:
    path = shlex.quote(str(run.root))
    if what == "failed":
        return f"hpctrain logs {path} --err"
    return f"hpctrain {'resume' if what == 'stopped' else 'status'} {path}"


def _text(name: str, what: str, *, attempt: int, reason: str, step: int | None, why: str) -> str:
    at = "" if step is None else f" at step {step}"
    if what == "done":
        return f"{name}: done{at}"
    because = f": {' '.join(why.split())}" if why else ""
    head = f"{name}: attempt {attempt} ended" if what == "attempt" else f"{name}: {what}"
    return f"{head}{at} ({reason}){because}"[:MOST_WHY]

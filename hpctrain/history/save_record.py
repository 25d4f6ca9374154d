"""A record of the run's saves: how often, what failed or was left out, since when. Pure.

tests/unit/cli/test_status.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpctrain.history.run_state import live
from hpctrain.run.event_fields import finite, text, whole

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpctrain.run.events import Event


@dataclass(frozen=True)
class SaveInterval:
    """How often the run saves, as its newest attempt said.

    Attributes:
        seconds: Between two saves; None where steps count.
        steps: The same in steps; None where seconds count.
        why: What decided.
        cost_s: What training loses to one save, as it was measured.
        mtbf_s: Seconds between failures, as they were expected.
    """

    seconds: float | None = None
    steps: int | None = None
    why: str = ""
    cost_s: float | None = None
    mtbf_s: float | None = None


@dataclass(frozen=True)
class Missed:
    """A save that was due and did not come."""

    step: int | None
    why: str


@dataclass(frozen=True)
class Saving:
    """How saving goes in the newest attempt that came to train.

    Attributes:
        interval: How often; None where the ledger does not say.
        since: From when on the interval counts: the last save or the restore.
        committed: Saves that were committed.
        skipped: Saves that were left out while the one before was still being written.
        last_skipped: The newest of them.
        failed: Saves that failed since the last one that was committed.
        last_failed: The newest of them.
        mode: How the newest was written: "async" or "sync".
        seconds: How long it took until it was committed.
        stall_s: How long training waited for it.
    """

    interval: SaveInterval | None = None
    since: float | None = None
    committed: int = 0
    skipped: int = 0
    last_skipped: Missed | None = None
    failed: int = 0
    last_failed: Missed | None = None
    mode: str = ""
    seconds: float | None = None
    stall_s: float | None = None


def saving(events: Iterable[Event]) -> Saving:
    """How saving goes; what an earlier attempt missed is in the steps that it lost."""
    now = Saving()
    for event in live(events):
        if event.kind == "attempt_started":  # it may run with other settings
            now = replace(now, interval=None)
        elif event.kind == "restored":
            now = Saving(interval=now.interval, since=event.t)
        elif event.kind == "interval":
            now = replace(now, interval=_interval(event))
        elif event.kind == "saved":
            now = _saved(now, event)
        elif event.kind == "save_skipped":
            now = replace(now, since=event.t, skipped=now.skipped + 1, last_skipped=_missed(event))
        elif event.kind == "save_failed":
            now = replace(now, since=event.t, failed=now.failed + 1, last_failed=_missed(event))
    return now


def _interval(event: Event) -> SaveInterval:
    data = event.data
    return SaveInterval(
        seconds=finite(data.get("seconds")) or None,
        steps=whole(data.get("steps")) or None,
        why=text(data.get("why")),
        cost_s=finite(data.get("cost_s")),
        mtbf_s=finite(data.get("mtbf_s")),
    )


def _saved(now: Saving, event: Event) -> Saving:
    seconds, stall_s = finite(event.data.get("seconds")), finite(event.data.get("stall_s"))
    # Training had gone on long before a save in the background was committed.
    behind = max(0.0, seconds - stall_s) if seconds is not None and stall_s is not None else 0.0
    return replace(
        now,
        since=event.t - behind,
        committed=now.committed + 1,
        failed=0,
        last_failed=None,
        mode=text(event.data.get("mode")),
        seconds=seconds,
        stall_s=stall_s,
    )


def _missed(event: Event) -> Missed:
    return Missed(whole(event.data.get("step")), text(event.data.get("why")))

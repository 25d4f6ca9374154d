"""Run directories with real ledgers, for tests of what is derived from them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.core.settings.schema import Settings, TrainSettings
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.ledger.history.lineage import lineage
from hpctrain.ledger.run.event_fields import KINDS, UnknownFact, typed
from hpctrain.ledger.run.events import Event, append
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.ledger.history.run_history import RunHistory


BATCH = 8
"""Samples of one step."""


class Story:
    """Writes a run's ledger event by event, a second apart, as the real writers do."""

    def __init__(
        self, root: Path, *, t: float = 1_763_700_000.0, cluster: str = "local", steps: int = 400
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.run = RunDir(root)
        self.t = t
        settings = Settings(train=TrainSettings(steps=steps))
        entry = Entry(kind="recipe", cwd=str(root))
        Spec(root.name, "id", t, cluster, "", entry, settings).dump(self.run.spec)

    def add(self, kind: str, attempt: int | None = None, **fields: Any) -> Story:
        self.t += 1
        t = fields.pop("t", self.t)
        append(self.run, UnknownFact(kind, fields), attempt=attempt, t=t)
        return self

    def submitted(self, job_id: str = "17", token: str = "tok-1", **fields: Any) -> Story:
        self.add("submit_intent", token=token, script=f"{token}.sh")
        return self.add(
            "submitted",
            token=token,
            job_id=job_id,
            cluster="local",
            nodes="4",
            by="submit",
            **fields,
        )

    def started(
        self, attempt: int, job_id: str = "17", nodes: tuple[str, ...] = ("n1", "n2"), **fields: Any
    ) -> Story:
        where = {"nodes": list(nodes), "world_size": 2 * len(nodes), "ranks_per_node": 2}
        more = {"restarts": 0, "token": "x", "by": "start", **fields}
        return self.add("attempt_started", attempt, job_id=job_id, **where, **more)

    def restored(self, attempt: int, step: int = 0, skipped: list[dict[str, Any]] | None = None):
        name = f"step-{step:010d}" if step else None
        return self.add(
            "restored", attempt, step=step, checkpoint=name, world_size=4, skipped=skipped or []
        )

    def steps(self, attempt: int, first: int, last: int, loss: float = 2.5) -> Story:
        samples = {"sample_first": (first - 1) * BATCH, "sample_last": last * BATCH}
        seconds = 0.5 * (last - first + 1)
        return self.add(
            "steps", attempt, first=first, last=last, **samples, loss=loss, seconds=seconds
        )

    def saved(self, attempt: int, step: int) -> Story:
        name = f"step-{step:010d}"
        return self.add("saved", attempt, step=step, bytes=4096, seconds=0.1, checkpoint=name)

    def ended(self, attempt: int, reason: str, following: str, **fields: Any) -> Story:
        more = {"by": "agent", "facts": {}, **fields}
        return self.add("attempt_ended", attempt, reason=reason, next=following, **more)

    def log(self, attempt: int, rank: int, text: str) -> Path:
        """Add to a rank's log."""
        path = self.run.rank_log(attempt, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)
        return path


def local_job(folder: Path, job_id: str, **fields: Any) -> None:
    """A job of the embedded cluster as its controller would leave it on disk."""
    from hpctrain.cluster.scheduler import local as client

    record = client.LocalJobRecord(
        job_id=job_id,
        token="tok-1",
        run_dir="",
        min_nodes=1,
        max_nodes=4,
        time_s=60,
        signal_lead_s=5,
    )
    for name, value in fields.items():
        setattr(record, name, value)
    (folder / job_id).mkdir(parents=True, exist_ok=True)
    staged = folder / job_id / "job.json.new"
    staged.write_text(json.dumps(vars(record)))
    staged.replace(folder / job_id / "job.json")


def fields_of(event: Event) -> dict[str, Any]:
    """The fields of an event that say something, as JSON holds them."""
    return {name: value for name, value in all_fields(event).items() if says_something(value)}


def all_fields(event: Event) -> dict[str, Any]:
    """The fields of an event, also those that say nothing, as JSON holds them."""
    fact = event.fact
    names = [field.name for field in dataclasses.fields(fact)] if is_dataclass(fact) else []
    own = {name: _plain(getattr(fact, name)) for name in names}
    return {**(own or fact.fields_set()), **event.extra}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return dataclasses.asdict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def write_event(
    run: RunDir, kind: str, *, attempt: int | None = None, t: float | None = None, **fields: Any
) -> None:
    """Add an event by its kind, also one that no version writes."""
    append(run, UnknownFact(kind, fields), attempt=attempt, t=t)


def says_something(value: object) -> bool:
    """Whether it is more than what a field is that was not told."""
    return not (value is None or value is False or value in ("", [], {}))


def event_of(
    t: float, kind: str, attempt: int | None = None, data: dict[str, Any] | None = None
) -> Event | None:
    """An event as readers get it; None for one that says nothing."""
    extra = dict(data or {})
    fact = typed(kind, extra)
    return None if fact is None else Event(t, attempt, fact, {} if kind not in KINDS else extra)


def coverage(history: RunHistory) -> list[tuple[int, int]]:
    """Ranges [first, last) of sample positions that were read for the final weights, in order.

    Ranges that join are one: a run that read every sample exactly once has exactly one, from 0 on.
    What of it was left out is in the lineage's holes.
    """
    ranges: list[tuple[int, int]] = []
    for piece in lineage(history).pieces:
        if piece.sample_first is None or piece.sample_last is None:
            continue
        if ranges and ranges[-1][1] == piece.sample_first:
            ranges[-1] = (ranges[-1][0], piece.sample_last)
        else:
            ranges.append((piece.sample_first, piece.sample_last))
    return ranges

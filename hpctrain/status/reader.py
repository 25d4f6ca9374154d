"""Everything that `hpctrain status` looks at: ledger, heartbeat, checkpoints, disk, scheduler.

tests/unit/test_status_cli.py holds the promises.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from hpctrain.run.find_run import runs_flag

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hpctrain.base.records import Cluster, JobStart, Skipped
    from hpctrain.history.rank_samples import RankSample
    from hpctrain.run.events import Event
    from hpctrain.run.layout import RunDir
    from hpctrain.settings.spec import Spec
    from hpctrain.status.status import Answer, Checkpoint, RunStatus

    _T = TypeVar("_T")
    _Schedulers = Mapping[str, Cluster] | None
    _Starts = tuple[list[JobStart], str]

ASKED_AT_ONCE = 8
RANKS_TAIL_BYTES = 4 * 2**20
"""More than a line of ranks.jsonl takes with 16,384 ranks."""


@dataclass
class Looker:
    """Looks at runs, also again and again; a scheduler is then asked no more often than it must.

    Attributes:
        runs: The folder of all runs, for the commands that are shown.
        ask_every_s: The least time between two questions about one run's job.
        account_every_s: The same for accounting, which costs a cluster more.
        unreadable: Folders that could not be looked into by the last look at all runs.
    """

    runs: Path
    ask_every_s: float = 0.0
    account_every_s: float = 0.0
    unreadable: int = 0
    _answers: dict[Path, tuple[float, tuple[object, ...], Answer]] = field(default_factory=dict)
    _starts: dict[Path, tuple[float, tuple[object, ...], _Starts]] = field(default_factory=dict)

    def look(self, run: RunDir, *, thorough: bool = True) -> RunStatus:
        """All that is known of a run.

        Args:
            run: The run.
            thorough: Also look at its checkpoints, each of which costs a few file operations, and
                ask accounting.
        """
        return self._status(_read(run), thorough=thorough, account=thorough)

    def _status(
        self, known: _Known, *, thorough: bool, account: bool, schedulers: _Schedulers = None
    ) -> RunStatus:
        """Put together with the scheduler's word; of a run that is over it is not asked."""
        from hpctrain.history.speed import speed
        from hpctrain.run.heartbeat import read_heartbeat
        from hpctrain.status.pulse import with_heartbeat
        from hpctrain.status.status import status_of

        run, events, spec = known.run, known.events, known.spec
        answer, starts = self._scheduler(known, account=account, schedulers=schedulers or {})
        newest, skipped = _checkpoints(run, events) if thorough else (None, [])
        inside = run.root.parent == self.runs
        recipe = spec is not None and spec.entry.kind == "recipe"
        status = status_of(
            events,
            answer,
            name=run.name,
            root=str(run.root),
            cluster=spec.cluster if spec else "",
            total=spec.settings.train.steps if spec and recipe else None,
            checkpoint=newest,
            skipped=skipped,
            attempt_log=run.rank_log,
            starts=starts,
            speed=speed(events),
            disk_free_bytes=_disk_free(run),
            label=run.name if inside else str(run.root),
            flags=runs_flag(self.runs) if inside else "",
        )
        if not status.attempts:
            return status
        beat = read_heartbeat(run, status.attempts[-1].number)
        return status if beat is None else with_heartbeat(status, beat.t, beat.step)

    def look_at_all(self, *, thorough: bool) -> list[RunStatus]:
        """All runs, the newest first, by one question to a scheduler and one to accounting.

        What is over by its ledger is nobody asked about, not even for its accounts. What others own
        is asked about run by run: a user's own queue does not have their jobs.

        Args:
            thorough: See `look`; not for what other users own, whose checkpoints may be anything.
        """
        from hpctrain.run.find_run import look_into
        from hpctrain.run.ownership import is_mine
        from hpctrain.scheduler.base import get_cluster
        from hpctrain.status.job import job_ids

        folder = look_into(self.runs)
        self.unreadable = folder.unreadable

        def one(known: _Known) -> RunStatus:
            mine = is_mine(known.run.root)
            return self._status(
                known,
                thorough=thorough and mine,
                account=thorough and not known.is_over,
                schedulers=schedulers if mine else {},
            )

        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            runs = list(pool.map(_read, folder.runs))
            ids: dict[str, list[str]] = {}
            for known in runs:
                if known.spec is not None and not known.is_over:
                    name = known.spec.cluster
                    here = job_ids(known.events, get_cluster(name)) if name else []
                    ids.setdefault(name, []).extend(here)
            schedulers = {name: get_cluster(name).survey(ids[name]) for name in ids if name}
            return list(pool.map(one, runs))

    def _scheduler(
        self, known: _Known, *, account: bool, schedulers: Mapping[str, Cluster]
    ) -> tuple[Answer, list[JobStart]]:
        """The scheduler's word on the newest job and, beside it, accounting's on all starts."""
        from hpctrain.status.job import ask, job_starts
        from hpctrain.status.status import Answer

        run, events, spec = known.run, known.events, known.spec
        if spec is None:  # a ledger alone still tells most
            return Answer(None, asked=False, problem=known.problem), []
        jobs = tuple(e.t for e in events if e.kind in {"submitted", "attempt_started", "requeued"})
        cluster, scheduler = spec.cluster, schedulers.get(spec.cluster)

        def starts() -> _Starts:
            if not account:
                return [], ""
            every = self.account_every_s
            return _lately(
                self._starts, run.root, jobs, every, lambda: job_starts(cluster, events, scheduler)
            )

        if known.is_over:
            found, silent = starts()
            return Answer(unaccounted=silent), found

        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(starts)
            every = self.ask_every_s
            answer = _lately(
                self._answers, run.root, jobs, every, lambda: ask(run, cluster, events, scheduler)
            )
            found, silent = beside.result()
            return replace(answer, unaccounted=answer.unaccounted or silent), found


@dataclass(frozen=True)
class _Known:
    """What a run's own files say."""

    run: RunDir
    events: Sequence[Event]
    spec: Spec | None
    problem: str
    """Why the spec cannot be read."""
    is_over: bool
    """By the ledger; no scheduler's word changes that."""


def _read(run: RunDir) -> _Known:
    from hpctrain.ledger.derive import OVER, standing
    from hpctrain.run import events as ledger

    events = ledger.read(run, marks="few")
    spec, problem = _spec(run)
    return _Known(run, events, spec, problem, standing(events).phase in OVER)


def _lately(
    known: dict[Path, tuple[float, tuple[object, ...], _T]],
    key: Path,
    about: tuple[object, ...],
    every_s: float,
    ask: Callable[[], _T],
) -> _T:
    """The last answer where it is young and about the same; else a new one."""
    now = time.monotonic()
    t, asked_about, answer = known.get(key, (0.0, None, None))
    if answer is not None and asked_about == about and now - t < every_s:
        return answer
    fresh = ask()
    known[key] = (now, about, fresh)
    return fresh


def _spec(run: RunDir) -> tuple[Spec | None, str]:
    from hpctrain.errors import HpctrainError
    from hpctrain.settings.spec import load_spec

    try:
        return load_spec(run.spec), ""
    except HpctrainError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{run.spec} cannot be read: {error}"


def _checkpoints(
    run: RunDir, events: Sequence[Event]
) -> tuple[Checkpoint | None, Sequence[Skipped]]:
    """The newest that could be loaded, and what was passed over for it."""
    from hpctrain.checkpoint.store import find
    from hpctrain.status.status import Checkpoint

    choice = find.choose(run, to_show=True)
    writing = _being_written(run, events)
    newest = None
    if choice.found is not None and choice.found.manifest is not None:
        manifest = choice.found.manifest
        newest = Checkpoint(choice.found.name, choice.found.step, manifest.created, manifest.size)
    return newest, [one for one in choice.skipped if one.name not in writing]


def _being_written(run: RunDir, events: Sequence[Event]) -> set[str]:
    """Checkpoints that the newest attempt has begun, and may yet commit."""
    from hpctrain.checkpoint.store import find
    from hpctrain.ledger.derive import RunState, standing

    begun = find.staged(run)
    now = standing(events) if begun else None
    if now is None or now.phase is not RunState.RUNNING:
        return set()
    return {one.path.name for one in begun if one.attempt == now.attempt}


def _disk_free(run: RunDir) -> int | None:
    """Bytes that this user may still write there; quotas are not seen."""
    try:
        found = os.statvfs(run.root)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def newest_ranks(run: RunDir, attempt: int) -> RankSample | None:
    """The attempt's newest sample of its ranks; only the end of the file is read."""
    from hpctrain.base.files import open_plain
    from hpctrain.history.rank_samples import newest_sample

    try:
        with open_plain(run.rank_times(attempt)) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - RANKS_TAIL_BYTES))
            return newest_sample(file.read(), attempt)
    except OSError:
        return None

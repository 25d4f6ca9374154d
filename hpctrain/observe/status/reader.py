"""The reader of a run's status: ledger, heartbeat, checkpoints, disk, and scheduler.

`ask` and `job_starts` are what the scheduler and its accounting know of a run's jobs, also for
`logs` and `cancel`; an answer that did not come is reported, and no error.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hpctrain.cluster.scheduler.base import Cluster, get_cluster
from hpctrain.core.base import clock, records
from hpctrain.core.base.files import open_plain
from hpctrain.core.base.records import TERMINAL_JOB, JobInfo, JobStart, JobState, Skipped
from hpctrain.core.settings.schema import Settings
from hpctrain.core.settings.spec import Spec, load_spec, spec_or_why
from hpctrain.errors import AccountingSilent, ClusterError, FileSystemFault, UsageError, WrongState
from hpctrain.launch.live_job import copied_from, elsewhere, jobs_here, newest_submission, not_own
from hpctrain.ledger.history.progress import RankSample, newest_sample
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_state import OVER, RunState, run_state
from hpctrain.ledger.run.attempt_files import read_heartbeat
from hpctrain.ledger.run.event_types import AttemptStarted
from hpctrain.ledger.run.find_run import Folder, IndexedRun, indexed, look_into, record
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.ownership import is_mine
from hpctrain.observe.status.status import (
    UNDER_WAY_STATES,
    Answer,
    Checkpoint,
    RunStatus,
    status_of,
    with_heartbeat,
)
from hpctrain.observe.status.text import chained

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.ledger.history.evaluations import EvaluationView
    from hpctrain.ledger.run.events import Event

    _T = TypeVar("_T")
    _Schedulers = Mapping[str, Cluster] | None
    _Starts = tuple[list[JobStart], str]

ASKED_AT_ONCE = 8
LONGEST_CHAIN = 200
RANKS_TAIL_BYTES = 4 * 2**20
"""More than a line of ranks.jsonl takes with 16,384 ranks."""


@dataclass
class StatusReader:
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

        `thorough` also looks at its checkpoints, each of which costs a few file operations, and
        asks accounting.
        """
        files = _read(run)
        status = self._status(files, thorough=thorough, account=thorough)
        others = _chain(files)
        if not others:
            return status
        schedulers = _bulk_queries(others)
        statuses = [
            self._status(other, thorough=False, account=False, schedulers=schedulers)
            for other in others
        ]
        return chained([status, *statuses])[0]

    def _status(
        self, files: _RunFiles, *, thorough: bool, account: bool, schedulers: _Schedulers = None
    ) -> RunStatus:
        """Put together with the scheduler's word; of a run that is over it is not asked."""
        run, history, spec = files.run, files.history, files.spec
        answer, starts = self._scheduler(files, account=account, schedulers=schedulers or {})
        newest, skipped = _checkpoints(run, history) if thorough else (None, [])
        recipe = spec is not None and spec.entry.kind == "recipe"
        status = status_of(
            history,
            answer,
            name=run.name,
            root=str(run.root),
            cluster=spec.cluster if spec else "",
            image=image_of(spec),
            total=spec.settings.train.steps if spec and recipe else None,
            checkpoint=newest,
            skipped=skipped,
            attempt_log=run.rank_log,
            starts=starts,
            evaluations=_evaluations(files),
            disk_free_bytes=_disk_free(run),
            after=spec.after if spec else (),
            label=run.typed,
        )
        if not status.attempts:
            return status
        beat = read_heartbeat(run, status.attempts[-1].number)
        return status if beat is None else with_heartbeat(status, beat.t, beat.step)

    def look_at_all(
        self, *, thorough: bool, named: Sequence[RunDir] = (), elsewhere: str = ""
    ) -> list[RunStatus]:
        """All runs, the newest first, by one question to a scheduler and one to accounting.

        What is over by its ledger is nobody asked about, not even for its accounts. What others own
        is asked about run by run: a user's own queue does not have their jobs.

        Args:
            thorough: See `look`; not for what other users own, whose checkpoints may be anything.
            named: These runs; all of the folder where there are none.
            elsewhere: With the user's runs in other folders: "live" or "all"; "" for none of them.
        """
        folder = Folder(self.runs, named) if named else look_into(self.runs)
        self.unreadable = folder.unreadable

        def look_with_answers(files: _RunFiles) -> RunStatus:
            is_own = is_mine(files.run.root)
            return self._status(
                files,
                thorough=thorough and is_own,
                account=thorough and not files.is_over,
                schedulers=schedulers if is_own else {},
            )

        listed = {one.run.root: one for one in indexed()} if elsewhere else {}
        here = os.path.realpath(self.runs)
        others = [
            one.run
            for root, one in listed.items()
            if (elsewhere == "all" or not one.is_over) and os.path.realpath(root.parent) != here
        ]
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            runs = list(pool.map(_read, [*folder.runs, *others]))
            _repair(runs, listed) if elsewhere else None
            if elsewhere == "live":
                runs = [files for files in runs if _is_in(self.runs, files) or not files.is_over]
            before = _before(runs)
            schedulers = _bulk_queries([*runs, *before])
            looks = chained([*pool.map(look_with_answers, [*runs, *before])])[: len(runs)]
        if elsewhere == "live":  # a run that is lost is not live either
            pairs = zip(runs, looks, strict=True)
            return [s for r, s in pairs if _is_in(self.runs, r) or s.state in UNDER_WAY_STATES]
        return looks

    def _scheduler(
        self, files: _RunFiles, *, account: bool, schedulers: Mapping[str, Cluster]
    ) -> tuple[Answer, list[JobStart]]:
        """The scheduler's word on the newest job and, beside it, accounting's on all starts."""
        run, history, spec = files.run, files.history, files.spec
        if spec is None:  # a ledger alone still tells most
            return Answer(None, asked=False, problem=files.problem), []
        jobs = tuple(history.job_times)
        cluster, scheduler = spec.cluster, schedulers.get(spec.cluster)

        def starts() -> _Starts:
            if not account:
                return [], ""
            every = self.account_every_s
            return _lately(
                self._starts, run.root, jobs, every, lambda: job_starts(cluster, history, scheduler)
            )

        if files.is_over:
            of_jobs, silent = starts()
            return Answer(unaccounted=silent), of_jobs

        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(starts)
            every = self.ask_every_s
            answer = _lately(
                self._answers, run.root, jobs, every, lambda: ask(run, cluster, history, scheduler)
            )
            of_jobs, silent = beside.result()
            return replace(answer, unaccounted=answer.unaccounted or silent), of_jobs


def image_of(spec: Spec | None) -> str:
    """The image in which its ranks run; "" where they run in none."""
    if (
        spec is None
        or not spec.settings.container.image
        or get_cluster(spec.cluster).on_this_machine
    ):
        return ""
    return spec.settings.container.image


def ask(run: RunDir, cluster: str, history: RunHistory, scheduler: Cluster | None = None) -> Answer:
    """What the scheduler knows of the run's newest job; an answer that did not come is no error.

    A job that is another run's, of which this is a copy, is none; `scheduler` may be a
    `bulk_query`.
    """
    token, job_id = newest_submission(history)
    if token is None and job_id is None:
        return Answer()
    if job_id is not None and job_id.startswith(TERMINAL_JOB):
        answer = _ask_machine(job_id, history)
    else:
        try:
            scheduler = scheduler or get_cluster(cluster)
            if copied_from(run, history) is None and (why := elsewhere(history, scheduler)):
                return Answer(None, asked=False, problem=why, note=why)
            job = scheduler.job(job_id) if job_id else scheduler.find_job(token or "")
        except AccountingSilent as error:
            return Answer(None, unaccounted=str(error))
        except (ClusterError, UsageError) as error:
            return Answer(None, asked=False, problem=str(error))
        answer = Answer(job)
    why = not_own(run, history, token, answer.job) if answer.job is not None else ""
    return Answer(note=why) if why else answer


def running_attempt(run: RunDir, events: Sequence[Event]) -> tuple[int, AttemptStarted] | None:
    """Return the number and the start of the attempt that runs; None before the first one.

    Raises:
        WrongState: by its ledger and its scheduler the run does not run.
    """
    history = RunHistory.of(events)
    answer = ask(run, load_spec(run.spec).cluster, history)
    state = run_state(history.state, answer.job, asked=answer.asked)
    if state is not RunState.RUNNING:
        raise WrongState(f"{run.name} does not run, so there is nothing to look at: it is {state}")
    started = [(e.attempt or 0, e.fact) for e in events if isinstance(e.fact, AttemptStarted)]
    return started[-1] if started else None


def job_starts(
    cluster: str, history: RunHistory, scheduler: Cluster | None = None
) -> tuple[list[JobStart], str]:
    """Every start of the run's jobs that accounting remembers, and why it told nothing, or "".

    The jobs that it had on other clusters are left out: the ledger's own times do without.
    """
    try:
        scheduler = scheduler or get_cluster(cluster)
        ids = job_ids(history, scheduler)
        return (scheduler.starts(ids) if ids else []), ""
    except (ClusterError, UsageError) as error:  # the ledger's own times do without
        return [], str(error)


def job_ids(history: RunHistory, scheduler: Cluster) -> list[str]:
    """Every job that a run had here, as far as its ledger names them."""
    return [one for one in jobs_here(history, scheduler) if not one.startswith(TERMINAL_JOB)]


def newest_ranks(run: RunDir, attempt: int) -> RankSample | None:
    """The attempt's newest sample of its ranks; only the end of the file is read."""
    try:
        with open_plain(run.rank_times(attempt)) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - RANKS_TAIL_BYTES))
            return newest_sample(file.read(), attempt)
    except OSError:
        return None


@dataclass(frozen=True)
class _RunFiles:
    """What a run's own files say."""

    run: RunDir
    history: RunHistory
    spec: Spec | None
    problem: str
    """Why the spec cannot be read."""
    is_over: bool
    """By the ledger; no scheduler's word changes that."""


def _read(run: RunDir) -> _RunFiles:
    history = RunHistory.read(run, marks="few")
    spec, problem = spec_or_why(run.spec)
    return _RunFiles(run, history, spec, problem, history.state.phase in OVER)


def _is_in(runs: Path, files: _RunFiles) -> bool:
    return files.run.root.parent == runs


def _repair(seen: Sequence[_RunFiles], listed: Mapping[Path, IndexedRun]) -> None:
    """Add to the user's index what it does not have of these runs."""
    new = []
    for files in seen:
        before = listed.get(files.run.root)
        if before is None or before.is_over != files.is_over:
            jobs = frozenset(filter(None, [files.history.state.job_id]))
            new.append(IndexedRun(files.run, jobs, files.is_over))
    record([one for one in reversed(new) if is_mine(one.run.root)])


def _bulk_queries(runs: Sequence[_RunFiles]) -> dict[str, Cluster]:
    """Schedulers by their names, each of which is asked about all of these runs at once."""
    ids: dict[str, list[str]] = {}
    for files in runs:
        if files.spec is not None and not files.is_over:
            name = files.spec.cluster
            here = job_ids(files.history, get_cluster(name)) if name else []
            ids.setdefault(name, []).extend(here)
    return {name: get_cluster(name).bulk_query(ids[name]) for name in ids if name}


def _chain(first: _RunFiles) -> list[_RunFiles]:
    """The other runs that wait for this one or are waited for, however far away."""
    members, todo = {str(first.run.root): first}, [first]
    while todo and len(members) < LONGEST_CHAIN:
        files = todo.pop()
        after = files.spec.after if files.spec else []
        for path in [*after, *files.history.followers]:
            if path in members:
                continue
            other = _read_other(path)
            if other and other.spec:
                members[path] = other
                todo.append(other)
    return list(members.values())[1:]


def _before(runs: Sequence[_RunFiles]) -> list[_RunFiles]:
    """The runs of other folders for which some of these wait."""
    here = {str(files.run.root) for files in runs}
    after = {path for files in runs if files.spec for path in files.spec.after}
    others = [_read_other(path) for path in sorted(after - here)]
    return [files for files in others if files and files.spec]


def _read_other(path: str) -> _RunFiles | None:
    """The files of a run that another one names; None where it may not be looked into."""
    try:
        return _read(RunDir(Path(path)))
    except OSError:
        return None


def _evaluations(files: _RunFiles) -> list[EvaluationView]:
    """Of the run's checkpoints; of those that are not decided, by the ledgers of their own runs."""
    history, settings = files.history, files.spec.settings if files.spec else Settings()
    if not (settings.evaluate.script or history.evaluations or history.asked_evaluations):
        return []
    from hpctrain.launch.evaluations import children
    from hpctrain.ledger.history.evaluations import evaluations_of, views

    awaited = evaluations_of(history, settings.evaluate).awaited
    try:
        states = {
            step: RunHistory.read(child, marks="few").state.phase.value
            for step, child in (children(files.run).items() if awaited else ())
            if step in awaited
        }
    except OSError:  # another user's, whose evaluations nobody else may look into
        states = dict.fromkeys(awaited, "waiting or running")
    return views(history, settings, states)


def _lately(
    kept: dict[Path, tuple[float, tuple[object, ...], _T]],
    key: Path,
    about: tuple[object, ...],
    every_s: float,
    ask: Callable[[], _T],
) -> _T:
    """The last answer where it is young and about the same; else a new one."""
    now = clock.monotonic()
    t, asked_about, answer = kept.get(key, (0.0, None, None))
    if answer is not None and asked_about == about and now - t < every_s:
        return answer
    fresh = ask()
    kept[key] = (now, about, fresh)
    return fresh


def _checkpoints(run: RunDir, history: RunHistory) -> tuple[Checkpoint | None, Sequence[Skipped]]:
    """The newest that could be loaded, and what was passed over for it."""
    from hpctrain.checkpoint.store import find

    choice = find.choose(run, to_show=True)
    writing = _being_written(run, history)
    newest = None
    if choice.checkpoint is not None and choice.checkpoint.manifest is not None:
        manifest = choice.checkpoint.manifest
        newest = Checkpoint(
            choice.checkpoint.name, choice.checkpoint.step, manifest.created, manifest.size
        )
    passed_over = [one for one in choice.skipped if one.name not in writing]
    if newest is None and not passed_over:
        return _sealed(run)
    return newest, passed_over


def _sealed(run: RunDir) -> tuple[Checkpoint | None, Sequence[Skipped]]:
    """The same of a program with checkpoints of its own."""
    from hpctrain.checkpoint.sealed import seals

    try:
        listing = seals.listing(run) if seals.has_any(run) else []
    except FileSystemFault as error:
        return None, [records.Skipped(0, run.sealed.name, str(error))]
    if not listing:
        return None, []
    from hpctrain.checkpoint.sealed.resume import look

    skipped: list[Skipped] = []
    for stored in listing:
        looked, seal = look(stored), stored.seal
        if seal is not None and looked.state == "ok":
            return Checkpoint(seal.path, seal.step, seal.created, seal.size), skipped
        why = "; ".join(looked.problems) or "its files were removed"
        step = 0 if seal is None else seal.step or 0
        skipped.append(records.Skipped(step, stored.name if seal is None else seal.path, why))
    return None, skipped


def _being_written(run: RunDir, history: RunHistory) -> set[str]:
    """Checkpoints that the newest attempt has begun, and may yet commit."""
    now = history.state
    if now.phase is not RunState.RUNNING:
        return set()
    from hpctrain.checkpoint.store import find

    return {one.path.name for one in find.staged(run) if one.attempt == now.attempt}


def _disk_free(run: RunDir) -> int | None:
    """Bytes that this user may still write there; quotas are not seen."""
    try:
        file_system = os.statvfs(run.root)
    except OSError:
        return None
    return file_system.f_bavail * file_system.f_frsize


def _ask_machine(job_id: str, history: RunHistory) -> Answer:
    """Whether a process that no agent started is still there, as far as this machine can tell."""
    newest = [attempt for attempt in history.attempts if attempt.started is not None][-1]
    nodes = newest.nodes
    if nodes != (os.uname().nodename,):
        return Answer(
            None, asked=False, problem=f"{job_id} ran in a terminal of {', '.join(nodes)}"
        )
    try:
        begun = _process_start(job_id.removeprefix(TERMINAL_JOB))
    except PermissionError:  # /proc hides what others run
        return Answer(None, asked=False, problem=f"{job_id} is another user's process")
    # Another process may have the number by now; ours began before its attempt did.
    if begun is None or begun > newest.began + 1:
        return Answer()
    return Answer(JobInfo(job_id, JobState.RUNNING, alive=True, nodes=nodes[0], start_time=begun))


def _process_start(pid: str) -> float | None:
    """When a process began, seconds since the epoch; None when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        boot = Path("/proc/stat").read_text().split("btime ", 1)[1].split(None, 1)[0]
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return None
    if fields[0] == "Z":
        return None
    return int(boot) + int(fields[19]) / os.sysconf("SC_CLK_TCK")

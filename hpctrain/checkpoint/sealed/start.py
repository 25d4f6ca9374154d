"""What the ranks of an attempt resume from, and what the patterns match that nobody has sealed.

Only what was changed since the run's first start counts. What lies there before the first ranks
start is written down, since the times of a file server cannot be compared with a node's clock.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.checkpoint.sealed import files as unit
from hpctrain.checkpoint.sealed import seals
from hpctrain.checkpoint.sealed.files import proves_itself
from hpctrain.checkpoint.sealed.patterns import parse
from hpctrain.checkpoint.sealed.resume import Choice, Resume, refuse_lost_seals, set_aside
from hpctrain.checkpoint.store import find
from hpctrain.checkpoint.store.commit import errors_named
from hpctrain.core.base.files import Patience, read_plain, replace_text
from hpctrain.errors import CheckpointError, FileSystemFault
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import CheckpointSetAside, ResumeChosen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpctrain.checkpoint.sealed.files import UnitFile
    from hpctrain.checkpoint.sealed.patterns import NamedPath, Pattern
    from hpctrain.checkpoint.sealed.seals import StoredSeal
    from hpctrain.core.base.records import Skipped
    from hpctrain.core.settings.schema import CheckpointSettings
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir


log = logging.getLogger("hpctrain.checkpoint")

NS = 1_000_000_000
BEFORE = "there-before.json"
"""In the folder of seals: what lay there before the run's first ranks, or a kill has left."""
MOST_BYTES = 256 << 20
RETURNED = "returned"
"""In an attempt's folder: all its ranks have returned, so nothing of it was left half written."""


@dataclass(frozen=True)
class UnsealedSave:
    """A checkpoint of the program's, as it lies there just now.

    Attributes:
        match: The path, and what its name says.
    """

    match: NamedPath
    files: tuple[UnitFile, ...]

    @property
    def mtime_ns(self) -> int:
        """When something of it was last changed."""
        return max(file.mtime_ns for file in self.files)

    @property
    def state(self) -> list[int]:
        """What would be another had it been saved anew."""
        return [self.mtime_ns, sum(file.size for file in self.files), len(self.files)]

    @property
    def is_file(self) -> bool:
        """Whether it is a single file, and no folder."""
        return [file.name for file in self.files] == [self.match.path.name] and (
            not self.match.path.is_dir()
        )


@dataclass(frozen=True)
class _Before:
    """What lay there before the run's first ranks, as far as these patterns stand for it."""

    patterns: list[str] = field(default_factory=list)
    there: dict[str, list[int]] = field(default_factory=dict)


class Unsealed:
    """Looks for them; keeps what it knows of folders that have not changed."""

    def __init__(self, run: RunDir, patterns: Sequence[str], roots: Sequence[Path]) -> None:
        self._run = run
        self._patterns = parse(patterns)
        self._roots = roots
        self._matched: set[str] = set()
        self._refused: dict[Path, str] = {}

    @property
    def idle(self) -> list[Pattern]:
        """Patterns for which nothing was there in any look."""
        return [pattern for pattern in self._patterns if pattern.text not in self._matched]

    def matches(self) -> Iterator[NamedPath]:
        """Every path for which a pattern stands, once."""
        seen: set[Path] = set()
        for pattern in self._patterns:
            for root in self._roots:
                for match in pattern.matches(root):
                    self._matched.add(pattern.text)
                    if match.path not in seen:
                        seen.add(match.path)
                        yield match

    def unit(self, match: NamedPath) -> UnsealedSave | None:
        """What lies there; None where that is no checkpoint. Says so, once for each reason."""
        try:
            files = unit.unit_files(match.path, anybodys=seals.anybodys(self._run))
        except (FileNotFoundError, NotADirectoryError):  # pruned or renamed while we look
            return None
        except (CheckpointError, OSError) as error:
            self.refuse(match.path, str(error))
            return None
        return UnsealedSave(match, tuple(files))

    def refuse(self, path: Path, why: str) -> None:
        """Say why something is not sealed, once."""
        if self._refused.get(path) != why:
            self._refused[path] = why
            log.warning("%s is not registered: %s", path, why)

    def is_new(self, save: UnsealedSave) -> bool:
        """Whether it did not lie there, as it is, before the run's first ranks."""
        return self._before.there.get(str(save.match.path)) != save.state

    def due(self) -> list[UnsealedSave]:
        """All that the run has saved and that is not sealed as it is, the oldest first."""
        stored = seals.listing(self._run)
        units = [save for match in self.matches() if (save := self.unit(match)) is not None]
        return sorted(
            (save for save in units if self.is_new(save) and not is_sealed(save, stored)),
            key=lambda save: save.mtime_ns,
        )

    def remember_before(self, attempt: Attempt, *, anew: bool) -> None:
        """Write down what lies there; called before each start of ranks.

        Of a pattern that the run has had before nothing is new. One that comes later stands for
        what was saved since the first start too: here alone stamps of files are held against the
        clock of a node.

        Args:
            attempt: The attempt that begins.
            anew: No ranks of the run have saved so far, or a person has gone back to an older step:
                what was newer than that still lies there, and would be sealed again.

        Raises:
            OSError: it cannot be written.
        """
        listed = _Before() if anew else self._before
        fresh = [one.text for one in self._patterns if one.text not in listed.patterns]
        if not fresh:
            return
        since_ns = None if anew else _first_start_s(self._run, attempt) * NS
        there = dict(listed.there)
        look = Unsealed(self._run, fresh, self._roots)
        for save in filter(None, map(look.unit, look.matches())):
            if since_ns is None or save.mtime_ns < since_ns:
                there[str(save.match.path)] = save.state
        self._write(_Before([*listed.patterns, *fresh], there))

    def pass_over(self, saves: Sequence[UnsealedSave]) -> None:
        """Write down what is not to be sealed as it is, as if it had been there before the run.

        Raises:
            OSError: it cannot be written.
        """
        if saves:
            more = {str(save.match.path): save.state for save in saves}
            self._write(_Before(self._before.patterns, {**self._before.there, **more}))

    def _write(self, before: _Before) -> None:
        self._run.sealed.mkdir(exist_ok=True)
        self._before = before
        replace_text(self._run.sealed / BEFORE, json.dumps(asdict(before)))

    @cached_property
    def _before(self) -> _Before:
        try:
            before = json.loads(read_plain(self._run.sealed / BEFORE, MOST_BYTES))
            return _Before(list(before["patterns"]), dict(before["there"]))
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            return _Before()


def _first_start_s(run: RunDir, attempt: Attempt) -> float:
    """When the run's first ranks were started, or the first since a person has gone back."""
    since = [attempt.started]
    for record in RunHistory.read(run, marks="few").attempts:
        since = [attempt.started] if record.went_back else [*since, record.began]
    return min(since)


def roots_of(run: RunDir, cwd: str) -> list[Path]:
    """The folders to which patterns are relative."""
    return [*([Path(cwd)] if cwd else []), run.output]


def is_sealed(save: UnsealedSave, stored: Sequence[StoredSeal]) -> bool:
    """Whether the newest seal of this path is of these very files."""
    path = str(save.match.path.resolve())
    newest = next((s.seal for s in stored if s.seal is not None and s.seal.path == path), None)
    if newest is None:
        return False
    sealed = {file.name: (file.size, file.mtime_ns) for file in newest.files}
    return sealed == {file.name: (file.size, file.mtime_ns) for file in save.files}


def cut(save: UnsealedSave, on_bytes: Callable[[int], object] | None = None) -> str | None:
    """Return why a checkpoint cannot be complete, by its files' formats; None if none shows it.

    Raises:
        FileSystemFault: a file cannot be read.
    """
    root = save.match.path.parent if save.is_file else save.match.path
    for file in save.files:
        try:
            why = unit.cut(root / file.name, on_bytes)
        except FileNotFoundError:
            return f"{file.name} is missing"
        except OSError as error:
            raise FileSystemFault(f"{root / file.name} cannot be read: {error}") from error
        if why is not None:
            return f"{file.name}: {why}"
    return None


def seal(
    run: RunDir,
    attempt: Attempt,
    save: UnsealedSave,
    settings: CheckpointSettings,
    on_bytes: Callable[[int], object] | None = None,
) -> StoredSeal:
    """Seal it for the program, and write that down.

    Raises:
        CheckpointError: it was not sealed.
    """
    match = save.match
    has_name_of_its_own = match.step is not None
    copy = True if match.is_written_over else False if has_name_of_its_own else None
    plan = seals.begin(run, attempt, match.path, step=match.step, copy=copy)
    try:
        if plan.files != save.files:
            raise CheckpointError(f"{match.path} was changed while it was registered")
        files = [plan.seal_file(file, on_bytes) for file in plan.files]
        stored = seals.commit(run, attempt, plan, files, step=match.step, by="agent")
    except OSError as error:
        raise FileSystemFault(f"{match.path} cannot be registered: {error}") from error
    finally:
        seals.discard(plan)
    seals.sealed_now(run, attempt, plan, stored, settings.keep_sealed)
    return stored


def resume_at_start(
    run: RunDir,
    attempt: Attempt,
    settings: CheckpointSettings,
    *,
    cwd: str = "",
    on_bytes: Callable[[int], object] | None = None,
) -> str | None:
    """Return the path of the newest complete registered checkpoint; None if nothing was registered.

    Nothing of the run may write but the caller. Several threads call `on_bytes` for each part that
    is read; what it raises ends all. `cwd` is the program's working directory, "" for none.

    Raises:
        CheckpointError: see `Choice.choose`; or the run's seals are gone.
    """
    history = RunHistory.read(run, marks="few") if attempt.number > 1 else RunHistory()
    asked = history.asked_seal
    is_anew = attempt.number == 1 or asked is not None
    aside: list[Skipped] = []
    unsealed = Unsealed(run, settings.sealed, roots_of(run, cwd))
    if settings.sealed and not is_anew:
        _patiently(
            settings,
            lambda: _take_in(run, attempt, settings, unsealed, aside=aside, on_bytes=on_bytes),
        )
    _set_aside(run, attempt, aside)
    resume = None
    if seals.has_any(run):
        choice = Choice(run, attempt, patience_s=settings.patience_s, on_bytes=on_bytes)
        resume = choice.choose(at_step=asked)
    else:
        resume = _without_seals(run, history)
    if settings.sealed and is_anew:
        _patiently(settings, lambda: unsealed.remember_before(attempt, anew=True))
    if resume is None:
        return None
    _write_down(run, attempt, resume)
    if resume.path is None:
        return None
    step = "" if resume.step is None else f" of step {resume.step}"
    log.info("the newest complete registered checkpoint%s is %s", step, resume.path)
    return str(resume.path)


def _without_seals(run: RunDir, history: RunHistory) -> Resume | None:
    """What a run without seals resumes from: None where that is for others to say."""
    if history.asked_seal is not None:
        # Written down, or each start after it would go back again.
        return None if find.steps(run) else Resume()
    # Checkpoints are listed only where seals are missed: memory may hold the state of a run whose
    # disk gives errors. Where there are some it has changed over to checkpoints of ours.
    if history.sealed_path and not find.steps(run):
        refuse_lost_seals(run, history)
    return None


def _patiently(settings: CheckpointSettings, act: Callable[[], None]) -> None:
    with errors_named("checkpoints cannot be looked at", FileSystemFault):
        Patience(settings.patience_s)(act)


def _take_in(
    run: RunDir,
    attempt: Attempt,
    settings: CheckpointSettings,
    unsealed: Unsealed,
    *,
    aside: list[Skipped],
    on_bytes: Callable[[int], object] | None,
) -> None:
    """Seal what the last attempt saved and nobody sealed; `aside` takes what is torn.

    If its ranks had not returned, take only the newest file that its own checksums prove: a kill
    may have left anything else half written.
    """
    unsealed.remember_before(attempt, anew=False)
    units = unsealed.due()
    returned = (run.attempt(attempt.number - 1) / RETURNED).exists()
    left: list[UnsealedSave] = []
    while units:
        save = units.pop(0 if returned else -1)
        path = save.match.path
        why = cut(save, on_bytes)
        if why is not None and save.is_file:
            aside += set_aside(path, attempt.number, why, step=save.match.step)
        elif why is None and (returned or (save.is_file and proves_itself(path, on_bytes))):
            seal(run, attempt, save, settings, on_bytes)
            if not returned:
                left += units
                break
        else:
            unsealed.refuse(path, why or "a kill may have left it half written")
            left.append(save)
    # It lies still, as what is whole does: the watch beside the next ranks would seal it.
    unsealed.pass_over(left)


def _set_aside(run: RunDir, attempt: Attempt, aside: Sequence[Skipped]) -> None:
    for torn in aside:
        fact = CheckpointSetAside(name=torn.name, step=torn.step or None, reason=torn.reason)
        ledger.record(run, fact, attempt=attempt.number)


def _write_down(run: RunDir, attempt: Attempt, resume: Resume) -> None:
    _set_aside(run, attempt, resume.set_aside)
    chosen = ResumeChosen(
        step=resume.step,
        path=str(resume.path or ""),
        name=resume.name,
        seconds=round(resume.seconds, 3),
        bytes_read=resume.read_bytes,
        put_back=resume.put_back,
        skipped=resume.skipped,
    )
    ledger.record(run, chosen, attempt=attempt.number)

"""The seals of a run: which there are, how one is committed, and which are removed.

A seal is staged beside the others, with its copy where it has one, flushed, and renamed under the
run's lock by the newest attempt alone. Whatever dies in between leaves a staged folder, which
nobody looks at.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.checkpoint.format.manifest import MAX_STEP
from hpctrain.checkpoint.sealed import files as unit
from hpctrain.checkpoint.sealed.files import FILES_NAME, SEAL_NAME, Seal
from hpctrain.checkpoint.store.commit import describe, errors_named, remove_tree, write_new
from hpctrain.core.base import clock
from hpctrain.core.base.files import ROOT, flush_directory, proves_absence
from hpctrain.errors import (
    CheckpointError,
    FileSystemFault,
    NotWritten,
    OtherFormat,
    TornCheckpoint,
)
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import CheckpointSealed, PruneFailed
from hpctrain.ledger.run.fence import publishing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.checkpoint.sealed.files import SealedFile, UnitFile, Writer
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir

STAGED, DELETING, FORGOTTEN = "staged-", "deleting-", ".forgotten"
KEEP_GONE = 10
"""Newest seals whose files the program has removed that are still shown."""


@dataclass(frozen=True)
class StoredSeal:
    """A committed seal.

    Attributes:
        number: The higher one is the newer one.
        seal: What it says; None where it could not be read.
        problem: Why it could not.
        doubt: Whether nobody could judge it: the disk refused, or a newer hpctrain wrote it.
    """

    number: int
    folder: Path
    seal: Seal | None
    problem: str = ""
    doubt: bool = False

    @property
    def name(self) -> str:
        """Its folder's name."""
        return self.folder.name

    @property
    def copy(self) -> Path | None:
        """Where its own copy lies; None for one that was sealed in place."""
        if self.seal is None or not self.seal.is_copy:
            return None
        copies = self.folder / FILES_NAME
        return copies if self.seal.is_folder else copies / Path(self.seal.path).name


@dataclass(frozen=True)
class SealPlan:
    """What is about to be sealed; plain data, the same on every rank.

    Attributes:
        is_folder: Which of the two.
        staged: Where the seal is put together.
        began: Seconds since the epoch.
    """

    path: Path
    is_folder: bool
    files: tuple[UnitFile, ...]
    staged: Path
    is_copy: bool
    began: float

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def seal_file(
        self, file: UnitFile, on_bytes: Callable[[int], object] | None = None
    ) -> SealedFile:
        """Read one of the files, and copy it where that is wanted; see `files.sealed_file`."""
        source = unit.root_of(self.path, is_folder=self.is_folder) / file.name
        copy = self.staged / FILES_NAME / file.name if self.is_copy else None
        return unit.sealed_file(source, file, copy, on_bytes)


def listing(run: RunDir) -> list[StoredSeal]:
    """Every committed seal, newest first.

    Raises:
        FileSystemFault: the folder cannot be listed.
    """
    numbers = [n for name in _names(run) if (n := unit.parse_seal(name)) is not None]
    return [_stored(run, number) for number in sorted(numbers, reverse=True)]


def has_any(run: RunDir) -> bool:
    """Whether the run ever sealed something that is still on record.

    Raises:
        FileSystemFault: nobody can tell.
    """
    return any(unit.parse_seal(name) is not None for name in _names(run))


def _names(run: RunDir) -> list[str]:
    try:
        return [path.name for path in run.sealed.iterdir()]
    except OSError as error:
        if proves_absence(error):
            return []
        raise FileSystemFault(f"seals of {run.name} cannot be listed: {error}") from error


def _stored(run: RunDir, number: int) -> StoredSeal:
    folder = run.sealed / unit.seal_name(number)
    path = folder / SEAL_NAME
    try:
        if not anybodys(run) and os.lstat(path).st_uid not in {os.geteuid(), ROOT}:
            return StoredSeal(number, folder, None, f"{SEAL_NAME} belongs to another user")
        return StoredSeal(number, folder, unit.load(path))
    except TornCheckpoint as error:
        return StoredSeal(number, folder, None, str(error))
    except (FileSystemFault, OtherFormat) as error:
        return StoredSeal(number, folder, None, str(error), doubt=True)
    except OSError as error:
        absent = proves_absence(error)
        why = f"{SEAL_NAME} is missing" if absent else f"{SEAL_NAME}: {error.strerror}"
        return StoredSeal(number, folder, None, why, doubt=not absent)


def anybodys(run: RunDir) -> bool:
    """Whether the run's group may write into it: then files may be any member's.

    Raises:
        OSError: the run's folder cannot be asked.
    """
    return bool(run.root.stat().st_mode & stat.S_IWGRP)


def begin(
    run: RunDir, attempt: Attempt, path: Path, *, step: int | None, copy: bool | None = None
) -> SealPlan:
    """List what is to be sealed, and make the folder in which the seal is put together.

    Links in `path` are resolved. `copy` says whether the seal has the bytes too; None decides by
    the name, which may have the step in it.

    Raises:
        CheckpointError: it cannot be sealed; see `files.unit_files`.
        NotWritten: the seal's folder cannot be made.
    """
    path = _resolved(path)
    _refuse_own(run, path)
    try:
        files = tuple(unit.unit_files(path, anybodys=anybodys(run)))
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is not there; nothing was registered") from error
    except OSError as error:
        raise FileSystemFault(f"{path} cannot be registered: {error}") from error
    copies = _is_written_over(listing(run), path, step) if copy is None else copy
    staged = run.sealed / f"{STAGED}{attempt.number:04d}-{secrets.token_hex(4)}"
    try:
        run.sealed.mkdir(exist_ok=True)
        flush_directory(run.root)
        staged.mkdir()
    except OSError as error:
        raise NotWritten(f"{path} cannot be registered: {describe(error, run.sealed)}") from error
    return SealPlan(path, path.is_dir(), files, staged, copies, clock.now())


def _resolved(path: Path) -> Path:
    try:
        return path.resolve(strict=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there; nothing was registered") from error
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be registered: {error}") from error


def _refuse_own(run: RunDir, path: Path) -> None:
    """Refuse what is the run's own, or holds it; its `output` is the program's."""
    root = run.root.resolve()
    output = root / run.output.name
    if path in {root, output} or root.is_relative_to(path):
        raise CheckpointError(f"{path} holds the run's own files; seal what the program wrote")
    if path.is_relative_to(root) and not path.is_relative_to(output):
        raise CheckpointError(f"{path} is one of the run's own files; programs write to {output}")


def _is_written_over(seals: Sequence[StoredSeal], path: Path, step: int | None) -> bool:
    """Return whether the next save may write over this one, which then needs a copy.

    It may not if the step is part of the name, or the run has sealed before but never this path.
    The first without a number is copied: a kill during the second save would leave nothing.
    """
    if step is not None and step in _numbers_in(path.name):
        return False
    earlier = [stored.seal.path for stored in seals if stored.seal is not None]
    return not earlier or str(path) in earlier


def _numbers_in(name: str) -> list[int]:
    """The numbers in a name, e.g. of ``epoch=3-step=50.ckpt`` 3 and 50."""
    digits = "".join(c if c.isascii() and c.isdigit() else " " for c in name)
    return [int(number) for number in digits.split() if len(number) <= len(str(MAX_STEP))]


def commit(
    run: RunDir,
    attempt: Attempt,
    plan: SealPlan,
    files: Sequence[SealedFile],
    *,
    step: int | None,
    by: Writer,
) -> StoredSeal:
    """Make a staged seal the newest one of the run.

    Raises:
        NotWritten: the disk refused; nothing is there.
        Fenced: a newer attempt has taken the run over.
    """
    seal = Seal(
        path=str(plan.path),
        is_folder=plan.is_folder,
        step=step,
        attempt=attempt.number,
        created=round(plan.began, 3),
        by=by,
        is_copy=plan.is_copy,
        files=tuple(files),
    )
    try:
        write_new(plan.staged / SEAL_NAME, unit.dump(seal))
        unit.flush_tree(plan.staged)
        if not plan.is_copy:  # the names of what was sealed must be as durable as the seal
            _flush_names(plan)
        with publishing(run, attempt):
            numbers = [n for name in _names(run) if (n := _any_number(name)) is not None]
            number = max(numbers, default=0) + 1
            target = run.sealed / unit.seal_name(number)
            plan.staged.rename(target)
            flush_directory(run.sealed)
    except OSError as error:
        raise NotWritten(
            f"{plan.path} cannot be registered: {describe(error, run.sealed)}"
        ) from error
    return StoredSeal(number, target, seal)


def _flush_names(plan: SealPlan) -> None:
    root = unit.root_of(plan.path, is_folder=plan.is_folder)
    for folder in {(root / file.name).parent for file in plan.files} | {plan.path.parent}:
        with contextlib.suppress(PermissionError):  # a folder that may be entered but not read
            flush_directory(folder)


def _any_number(name: str) -> int | None:
    """Also of one that was forgotten: its number is not given again."""
    return unit.parse_seal(name.removesuffix(FORGOTTEN))


def discard(plan: SealPlan) -> None:
    """Remove what was staged; a disk that refuses costs room and nothing else."""
    with contextlib.suppress(OSError):
        remove_tree(plan.staged)


def sweep(run: RunDir) -> None:
    """Remove what earlier attempts have begun and not committed. The newest attempt calls it."""
    for name in _names(run):
        if name.startswith((STAGED, DELETING)):
            with contextlib.suppress(OSError):
                remove_tree(run.sealed / name)


def remove(run: RunDir, attempt: Attempt, stored: StoredSeal) -> None:
    """Remove a seal and its copy; what it names elsewhere stays.

    Raises:
        CheckpointError: it cannot be removed.
        Fenced: a newer attempt has taken the run over.
    """
    going = run.sealed / f"{DELETING}{secrets.token_hex(4)}"
    try:
        with publishing(run, attempt):
            stored.folder.rename(going)
        remove_tree(going)
    except FileNotFoundError:  # the program's ranks and the agent both tidy up
        return
    except OSError as error:
        raise CheckpointError(f"{stored.name} cannot be removed: {error}") from error


def forget(run: RunDir, attempt: Attempt, stored: StoredSeal) -> None:
    """Take a seal out of the choice, for good: the run went back behind it.

    Raises:
        CheckpointError: it cannot be renamed.
        Fenced: a newer attempt has taken the run over.
    """
    with errors_named(f"{stored.name} cannot be renamed"), publishing(run, attempt):
        stored.folder.rename(stored.folder.with_name(stored.name + FORGOTTEN))
        flush_directory(run.sealed)


def _superfluous(seals: Sequence[StoredSeal], keep: int) -> list[StoredSeal]:
    """Return seals that may go: older copies, and records of files that no longer exist.

    `seals` are newest first; `keep` copies stay, and so does one that could not be read.
    """
    going: list[StoredSeal] = []
    copies, gone, paths = 0, 0, set[str]()
    for stored in seals:
        if stored.seal is None:
            continue
        if stored.seal.is_copy:
            copies += 1
            going += [stored] if copies > keep else []
            continue
        # A newer seal of the same path says what lies there now.
        is_old = stored.seal.path in paths
        paths.add(stored.seal.path)
        gone += not is_old and not os.path.lexists(stored.seal.path)
        going += [stored] if is_old or gone > KEEP_GONE else []
    return going


def prune(run: RunDir, attempt: Attempt, keep: int) -> list[StoredSeal]:
    """Remove what need not be kept; returns it.

    Raises:
        CheckpointError: it cannot be removed.
        Fenced: a newer attempt has taken the run over.
    """
    going = _superfluous(listing(run), keep)
    for stored in going:
        remove(run, attempt, stored)
    return going


def sealed_now(
    run: RunDir,
    attempt: Attempt,
    plan: SealPlan,
    stored: StoredSeal,
    keep: int,
    *,
    own_s: float | None = None,
) -> None:
    """Record a new seal, and remove what need not be kept any more.

    The removal is housekeeping: if the disk refuses, only space is lost. `own_s` is what the
    program's own save took; None if unknown.
    """
    if stored.seal is None:
        return
    fact = CheckpointSealed(
        step=stored.seal.step,
        path=stored.seal.path,
        bytes=stored.seal.size,
        seconds=round(max(0.0, clock.now() - plan.began), 3),
        own_s=None if own_s is None else round(own_s, 3),
        by=stored.seal.by,
        name=stored.name,
        is_copy=stored.seal.is_copy,
    )
    ledger.record(run, fact, attempt=attempt.number)
    try:
        prune(run, attempt, keep)
    except CheckpointError as error:
        failed = PruneFailed(step=stored.seal.step, why=str(error))
        ledger.record(run, failed, attempt=attempt.number)

"""What the patterns of `checkpoint.sealed` stand for and nobody has sealed so far.

Only what was changed since the run's first start counts: the checkpoints of an earlier run in the
same folder are not this run's. tests/unit/agent/test_sealing.py holds the promises.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.checkpoint.sealed import files as unit
from hpctrain.checkpoint.sealed import proof, seals
from hpctrain.checkpoint.sealed.patterns import parse
from hpctrain.errors import CheckpointError, FileSystemFault
from hpctrain.history.run_history import RunHistory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hpctrain.checkpoint.sealed.files import UnitFile
    from hpctrain.checkpoint.sealed.patterns import NamedPath, Pattern
    from hpctrain.checkpoint.sealed.seals import StoredSeal
    from hpctrain.run.fence import Attempt
    from hpctrain.run.layout import RunDir
    from hpctrain.settings.schema import CheckpointSettings

log = logging.getLogger("hpctrain.checkpoint")

NS = 1_000_000_000
TICK_S = 0.01
"""A kernel's stamp on a file may be a tick of its timer older than its clock."""
RETURNED = "returned"
"""In an attempt's folder: all its ranks have returned, so nothing of it was left half written."""


@dataclass(frozen=True)
class UnsealedSave:
    """A checkpoint of the program's, as it lies there just now.

    Attributes:
        match: The path, and what its name says.
        files: Every file of it.
    """

    match: NamedPath
    files: tuple[UnitFile, ...]

    @property
    def mtime_ns(self) -> int:
        """When something of it was last changed."""
        return max(file.mtime_ns for file in self.files)

    @property
    def is_file(self) -> bool:
        """Whether it is a single file, and no folder."""
        return [file.name for file in self.files] == [self.match.path.name] and (
            not self.match.path.is_dir()
        )


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
            log.warning("%s is not sealed: %s", path, why)

    def since(self, first_start_s: float) -> list[UnsealedSave]:
        """All that was changed since then and is not sealed as it is, the oldest first."""
        stored = seals.listing(self._run)
        units = [found for match in self.matches() if (found := self.unit(match)) is not None]
        fresh = [save for save in units if save.mtime_ns >= first_start_s * NS]
        return sorted(
            (save for save in fresh if not is_sealed(save, stored)), key=lambda save: save.mtime_ns
        )


def first_start_s(run: RunDir, attempt: Attempt) -> float:
    """When the run's first ranks were started: what is older was there before it.

    After a person has gone back to an older step: the first ones since then. What was newer than
    that step still lies there, and would be sealed again.
    """
    if attempt.number == 1:
        return attempt.started - TICK_S
    since, tick_s = [attempt.started], TICK_S
    for record in RunHistory.read(run, marks="few").attempts:
        since = [attempt.started] if record.went_back else [*since, record.began]
        tick_s = 0.0 if record.went_back else tick_s  # what they went back behind may be that new
    return min(since) - tick_s


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
    """Why it cannot be whole, by the formats of its files; None where none says so.

    Args:
        save: The checkpoint.
        on_bytes: Told how many bytes were read.

    Raises:
        FileSystemFault: a file cannot be read.
    """
    root = save.match.path.parent if save.is_file else save.match.path
    for file in save.files:
        try:
            why = proof.cut(root / file.name, on_bytes)
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
        if {file.name: file for file in plan.files} != _by_name(save):
            raise CheckpointError(f"{match.path} was changed while it was sealed")
        files = [plan.seal_file(file, on_bytes) for file in plan.files]
        stored = seals.commit(run, attempt, plan, files, step=match.step, by="agent")
    except OSError as error:
        raise FileSystemFault(f"{match.path} cannot be sealed: {error}") from error
    finally:
        seals.discard(plan)
    seals.sealed_now(run, attempt, plan, stored, settings.keep_sealed)
    return stored


def _by_name(save: UnsealedSave) -> Mapping[str, UnitFile]:
    return {file.name: file for file in save.files}

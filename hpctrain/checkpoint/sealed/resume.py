"""The newest whole sealed checkpoint at a start, proved by its digests; torn ones quarantined.

The first agent asks once for each start, before any rank is there, so nothing writes meanwhile. A
path of which the run has its own copy is put back when a kill has torn it. What is quarantined is
renamed beside itself, never deleted. An error of the file system is no damage: it is retried, then
raised.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpctrain.checkpoint.format.reader import in_threads
from hpctrain.checkpoint.sealed import files as unit
from hpctrain.checkpoint.sealed import seals
from hpctrain.checkpoint.sealed.files import proves_itself
from hpctrain.checkpoint.store.commit import errors_named
from hpctrain.core.base import clock
from hpctrain.core.base.files import NOT_PLAIN, Patience, flush_directory, proves_absence
from hpctrain.core.base.records import Skipped
from hpctrain.core.base.text import size
from hpctrain.errors import FileSystemFault, NoCheckpoint, NotWritten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpctrain.checkpoint.sealed.files import SealedFile
    from hpctrain.checkpoint.sealed.seals import StoredSeal
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir

log = logging.getLogger("hpctrain.checkpoint")

T = TypeVar("T")

THREADS = 4
LOG_EVERY_S = 10.0
"""Between two words about a verification that takes long."""
SHOWN = 3


@dataclass(frozen=True)
class Resume:
    """What a start resumes from.

    Attributes:
        path: The file or folder, whole where the program saved it; None where there is none.
        step: Its step, where that is known.
        put_back: Whether it was put back from the run's copy.
        read_bytes: How many bytes were read to prove it and those before it.
        seconds: How long that took.
        skipped: Newer ones that were not taken, each with the reason.
        set_aside: Paths that were renamed, and why; their old names.
    """

    path: Path | None = None
    step: int | None = None
    name: str = ""
    put_back: bool = False
    read_bytes: int = 0
    seconds: float = 0.0
    skipped: tuple[Skipped, ...] = ()
    set_aside: tuple[Skipped, ...] = ()


@dataclass
class Verdict:
    """What became of a checkpoint's files since they were sealed.

    Attributes:
        problems: One line for each file that is not as it was sealed.
        gone: Nothing of it is there any more.
    """

    problems: list[str] = field(default_factory=list)
    gone: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether every byte is as it was sealed."""
        return not self.problems and not self.gone

    @property
    def why(self) -> str:
        """The problems in one line."""
        more = f" (and {len(self.problems) - SHOWN} more)" if len(self.problems) > SHOWN else ""
        return "; ".join(self.problems[:SHOWN]) + more


class BytesRead:
    """How many bytes were read; says so now and then where it takes long. Threads share one."""

    def __init__(self, what: str = "", on_bytes: Callable[[int], object] | None = None) -> None:
        self.bytes = 0
        self._what = what
        self._on_bytes = on_bytes or (lambda _: None)
        self._next = clock.monotonic() + LOG_EVERY_S
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        """So many more."""
        self._on_bytes(count)
        with self._lock:
            self.bytes += count
            if self._what and clock.monotonic() > self._next:
                self._next = clock.monotonic() + LOG_EVERY_S
                log.info("%s: %s read so far", self._what, size(self.bytes))


def verify(
    path: Path,
    files: Sequence[SealedFile],
    *,
    is_folder: bool,
    deep: bool = True,
    patience: Patience | None = None,
    threads: int = THREADS,
    on_bytes: Callable[[int], object] | None = None,
) -> Verdict:
    """Check whether a checkpoint's files are as they were sealed; ignore files beside them.

    Without `deep`, compare sizes alone. The reading threads call `on_bytes` with the bytes read.

    Raises:
        FileSystemFault: the file system gave an error that is no damage.
    """
    again = patience or Patience()
    root = unit.root_of(path, is_folder=is_folder)
    problems: dict[str, str] = {}

    def work(share: Iterator[SealedFile]) -> int:
        for file in share:
            problem = _problem(root / file.name, file, again, on_bytes, deep=deep)
            if problem is not None:
                problems[file.name] = problem
        return 0

    largest_first = sorted(files, key=lambda file: -file.size)
    in_threads(largest_first, min(threads, len(files)), work)
    is_gone = len(problems) == len(files) and not os.path.lexists(path)
    lines = [f"{name} {problem}" for name, problem in sorted(problems.items())]
    return Verdict([] if is_gone else lines, gone=is_gone)


def _problem(
    place: Path,
    file: SealedFile,
    again: Patience,
    on_bytes: Callable[[int], object] | None,
    *,
    deep: bool,
) -> str | None:
    digest: str | None = file.digest
    with errors_named(f"{place} cannot be read", FileSystemFault):
        size_now = again(lambda: _or_none(lambda: os.lstat(place).st_size))
        if deep and size_now == file.size:
            digest = again(lambda: _or_none(lambda: unit.digest_of(place, on_bytes)))
    if size_now is None or digest is None:
        return "is missing"
    if size_now != file.size:
        return f"is {size_now:,} bytes, sealed were {file.size:,}"
    return None if digest == file.digest else "has other bytes than were registered"


def _or_none(act: Callable[[], T]) -> T | None:
    """What an action returns; None where no ordinary file is there, which need not be retried."""
    try:
        return act()
    except OSError as error:
        if proves_absence(error) or error.strerror == NOT_PLAIN:
            return None
        raise


@dataclass(frozen=True)
class Looked:
    """A seal with what became of its files; to be shown.

    Attributes:
        state: "ok"; "gone": the program has removed it; "changed", "torn"; or "unreadable".
        problems: What is wrong, a line each; none where it is ok or gone.
    """

    stored: StoredSeal
    state: str
    problems: tuple[str, ...] = ()

    @property
    def is_damaged(self) -> bool:
        """Whether bytes that should be there are not."""
        return self.state in {"changed", "torn"}


def look(
    stored: StoredSeal,
    *,
    deep: bool = False,
    threads: int = THREADS,
    on_bytes: Callable[[int], object] | None = None,
) -> Looked:
    """Check a seal's files, or its copy if it has one; change nothing.

    Without `deep`, compare sizes alone. The reading threads call `on_bytes` with the bytes read.
    """
    seal = stored.seal
    if seal is None:
        return Looked(stored, "unreadable" if stored.doubt else "torn", (stored.problem,))
    path = stored.copy or Path(seal.path)
    try:
        verdict = verify(
            path,
            seal.files,
            is_folder=seal.is_folder,
            deep=deep,
            threads=threads,
            on_bytes=on_bytes,
        )
    except FileSystemFault as error:
        return Looked(stored, "unreadable", (str(error),))
    if verdict.gone:
        missing = ("its copy is missing",)
        return Looked(stored, "torn", missing) if stored.copy else Looked(stored, "gone")
    if verdict.is_whole:
        return Looked(stored, "ok")
    return Looked(stored, "torn" if stored.copy else "changed", tuple(verdict.problems))


def is_as_sealed(stored: StoredSeal) -> bool:
    """Whether the sealed path itself is as it was, by sizes and times."""
    if stored.seal is None:
        return False
    path = Path(stored.seal.path)
    root = unit.root_of(path, is_folder=stored.seal.is_folder)
    try:
        now = [os.lstat(root / file.name) for file in stored.seal.files]
    except OSError:
        return False
    sealed = [(file.size, file.mtime_ns) for file in stored.seal.files]
    return sealed == [(status.st_size, status.st_mtime_ns) for status in now]


def glance(run: RunDir, *, at_step: int | None = None) -> tuple[Looked | None, list[Skipped]]:
    """What a start would take by sizes alone, and what it would pass over; nothing is changed.

    Raises:
        NoCheckpoint: `at_step` cannot be had, or nothing that was sealed is whole.
        FileSystemFault: nobody can tell.
    """
    skipped: list[Skipped] = []
    everything = seals.listing(run)
    for stored in everything:
        if at_step is not None and _step(stored) != at_step:
            continue
        looked = look(stored)
        if looked.state == "unreadable":
            raise FileSystemFault(f"{stored.name}: {looked.problems[0]}")
        if looked.state == "ok":
            return looked, skipped
        why = "; ".join(looked.problems[:SHOWN]) or "its files were removed"
        skipped.append(Skipped(_step(stored) or 0, stored.name, why))
    if at_step:
        raise _not_there(run, everything, at_step)
    if at_step is None and everything:
        raise _nothing_whole(run, everything, skipped)
    return None, skipped


class Choice:
    """Goes through the seals of a run, newest first, until one is whole."""

    def __init__(
        self,
        run: RunDir,
        attempt: Attempt,
        *,
        patience_s: float,
        on_bytes: Callable[[int], object] | None = None,
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._patience = Patience(patience_s)
        self._reading = BytesRead(f"verifying the registered checkpoints of {run.name}", on_bytes)
        self._skipped: list[Skipped] = []
        self._aside: list[Skipped] = []
        self._looked_at = set[Path]()

    def choose(self, *, at_step: int | None = None) -> Resume:
        """The newest whole one, ready to be loaded; nothing where the run has sealed nothing.

        Args:
            at_step: Only this step will do; 0 is the beginning. Newer seals are forgotten then.

        Raises:
            NoCheckpoint: `at_step` cannot be had; or the run has sealed, and none is whole: it
                would forget all that it has done.
            FileSystemFault: the file system gave errors for too long.
            CheckpointError: a torn one cannot be moved, or a copy not be put back.
            Fenced: a newer attempt has taken the run over.
        """
        started = clock.monotonic()
        seals.sweep(self._run)
        everything = self._patience(lambda: seals.listing(self._run))
        wanted = [s for s in everything if at_step is None or _step(s) == at_step]
        taken = None
        for stored in wanted:
            taken = self._try(stored, may_be_newer=at_step is None)
            if taken is not None:
                break
        if at_step is not None and everything:
            self._go_back(everything, at_step, taken)
        elif taken is None and everything:
            raise _nothing_whole(self._run, everything, self._skipped)
        return Resume(
            **(taken or {}),
            read_bytes=self._reading.bytes,
            seconds=clock.monotonic() - started,
            skipped=tuple(self._skipped),
            set_aside=tuple(self._aside),
        )

    def _try(self, stored: StoredSeal, *, may_be_newer: bool) -> dict[str, Any] | None:
        if stored.doubt:
            raise FileSystemFault(f"{stored.name}: {stored.problem}")
        seal = stored.seal
        if seal is None:
            self._skip(stored, stored.problem)
            return None
        path = Path(seal.path)
        taken: dict[str, Any] = {
            "path": path,
            "step": seal.step,
            "name": stored.name,
        }
        verdict = self._verify(path, seal.files, is_folder=seal.is_folder)
        if verdict.is_whole:
            return taken
        if stored.copy is None:
            if verdict.gone:
                self._skip(stored, f"{path} was removed")
            else:
                self._skip(stored, verdict.why)
                self._set_aside(path, seal.step, verdict.why)
            return None
        if may_be_newer and not verdict.gone:
            newer = self._seal_newer(stored, path)
            if newer is not None:
                return newer
        copy = self._verify(stored.copy, seal.files, is_folder=seal.is_folder)
        if not copy.is_whole:
            self._skip(stored, f"its copy is damaged: {copy.why or 'it is missing'}")
            return None
        if not verdict.gone:
            self._set_aside(path, seal.step, verdict.why)
        self._put_back(stored.copy, path)
        return taken | {"put_back": True}

    def _seal_newer(self, stored: StoredSeal, path: Path) -> dict[str, Any] | None:
        """Seal a file that was saved after the newest seal (a kill came between) and proves itself.

        Not a folder: nobody could say that no file of it is missing.
        """
        if path in self._looked_at or stored.seal is None or stored.seal.is_folder:
            return None
        self._looked_at.add(path)
        status = self._patience(lambda: os.lstat(path))
        if status.st_mtime_ns <= stored.seal.files[0].mtime_ns:
            return None
        taken = _seal_proved(self._run, self._attempt, path, self._patience, self._reading)
        if taken is None or taken.seal is None:
            return None
        return {"path": path, "name": taken.name}

    def _verify(self, path: Path, files: Sequence[SealedFile], *, is_folder: bool) -> Verdict:
        return verify(
            path, files, is_folder=is_folder, patience=self._patience, on_bytes=self._reading
        )

    def _set_aside(self, path: Path, step: int | None, why: str) -> None:
        self._aside += set_aside(path, self._attempt.number, why, step=step)

    def _put_back(self, copy: Path, path: Path) -> None:
        with errors_named(f"{path} cannot be put back from {copy}"):
            unit.put_back(copy, path, self._reading)
        log.warning("%s was put back from the run's copy of it", path)

    def _skip(self, stored: StoredSeal, why: str) -> None:
        self._skipped.append(Skipped(_step(stored) or 0, stored.name, why))

    def _go_back(
        self, everything: Sequence[StoredSeal], at_step: int, taken: dict[str, Any] | None
    ) -> None:
        if taken is None and at_step:
            raise _not_there(self._run, everything, at_step)
        for stored in everything:
            if taken is not None and stored.name == taken["name"]:
                return
            seals.forget(self._run, self._attempt, stored)


def _not_there(run: RunDir, everything: Sequence[StoredSeal], at_step: int) -> NoCheckpoint:
    steps = sorted({step for s in everything if (step := _step(s)) is not None})
    return NoCheckpoint(
        f"{run.name} has no complete registered checkpoint of step {at_step}; registered steps: "
        f"{', '.join(map(str, steps)) or 'none'}"
    )


def _nothing_whole(
    run: RunDir, everything: Sequence[StoredSeal], skipped: Sequence[Skipped]
) -> NoCheckpoint:
    shown = [f"{row.name}: {row.reason}" for row in skipped[:SHOWN]]
    more = f"; and {len(everything) - SHOWN} more" if len(everything) > SHOWN else ""
    return NoCheckpoint(
        f"{run.name} has registered {len(everything)} checkpoints, and none is complete: "
        f"{'; '.join(shown)}{more}. It does not start over by itself: bring one back, or "
        f"`hpctrain resume {run.typed} --from 0`"
    )


def refuse_lost_seals(run: RunDir, history: RunHistory) -> None:
    """Refuse to begin anew where the run has sealed; asked where it has no seal.

    Raises:
        NoCheckpoint: somebody has removed its seals.
    """
    if history.sealed_path:
        raise NoCheckpoint(
            f"{run.name} has registered checkpoints, the newest of {history.sealed_path}, and no "
            f"record of them is left in {run.sealed}. It does not start over by itself: bring them "
            f"back, or `hpctrain resume {run.typed} --from 0`"
        )


def _seal_proved(
    run: RunDir, attempt: Attempt, path: Path, patience: Patience, on_bytes: BytesRead
) -> StoredSeal | None:
    """Seal a file that its own checksums prove whole, with a copy; None where they do not."""
    with errors_named(f"{path} cannot be read", FileSystemFault):
        if not patience(lambda: _or_none(lambda: proves_itself(path, on_bytes))):
            return None
    plan = seals.begin(run, attempt, path, step=None, copy=True)
    try:
        sealed = [plan.seal_file(file, on_bytes) for file in plan.files]
        return seals.commit(run, attempt, plan, sealed, step=None, by="agent")
    except OSError as error:
        raise NotWritten(f"{path} cannot be registered: {error}") from error
    finally:
        seals.discard(plan)


def set_aside(path: Path, attempt: int, why: str, *, step: int | None) -> list[Skipped]:
    """Rename what is torn: the program must not come upon it, a person may want it.

    Returns:
        What was renamed: its step, its old path, and why; nothing where nothing is there.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    if not os.path.lexists(path):
        return []
    aside = free_name(path, attempt)
    with errors_named(f"{path} is torn and cannot be set aside"):
        path.rename(aside)
        flush_directory(path.parent)
    log.warning("%s is torn (%s); it is %s now", path, why, aside.name)
    return [Skipped(step or 0, str(path), f"{why}; renamed to {aside.name}")]


def free_name(path: Path, attempt: int) -> Path:
    """The name of a torn path: ``<name>.torn-<attempt>``, counted on where that is taken."""
    target, number = path.with_name(f"{path.name}.torn-{attempt}"), 1
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{path.name}.torn-{attempt}.{number}")
    return target


def _step(stored: StoredSeal) -> int | None:
    return None if stored.seal is None else stored.seal.step

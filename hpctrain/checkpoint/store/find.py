"""The checkpoints of a run that could be loaded, by cheap checks, newest first by step.

Nothing is trusted but what a manifest proves: no `latest` file, no modification time, no highest
number. The bytes themselves are read by `verify.py`. Not collective: rank 0 asks and broadcasts the
answer, since ranks can see a shared file system at different moments.

A run that has saved never starts at step 0 by itself (`refuse_to_forget`): whatever keeps its
checkpoints from being found or loaded (a folder that is not mounted, one that somebody has emptied,
damage to all of them), weeks of training would be forgotten without a word. A person may ask for
it, and `asked_step` reads that from the ledger.
"""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.checkpoint.format import manifest as manifests
from hpctrain.checkpoint.format.manifest import parse_step
from hpctrain.core.base.files import proves_absence, read_plain
from hpctrain.core.base.records import Skipped
from hpctrain.core.testing import points
from hpctrain.errors import FileSystemFault, NoCheckpoint, NotFound, OtherFormat, TornCheckpoint
from hpctrain.ledger.history.run_history import RunHistory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpctrain.checkpoint.format.manifest import FileEntry, Manifest
    from hpctrain.ledger.run.layout import RunDir

REASON_NAME = "SET-ASIDE.txt"
SHOWN = 3
SAMPLE = 64
"""Files of a checkpoint whose sizes are looked at where a server must not be asked for each."""
LOOKERS = 32
"""Looks in flight at once: at a checkpoint of 16,384 files, one after the other, at a server that
takes 0.3 ms for each, a start would wait for 5 s."""
MANY = 256
"""Files from which on threads are worth their start."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A directory that has a committed checkpoint's name.

    Attributes:
        step: From its name.
        manifest: None if it could not be read.
        problem: Why it must not be loaded; None if the cheap checks found nothing.
        doubt: "unreadable" or "other format" where nobody could judge it; only from `glance`.
    """

    step: int
    path: Path
    manifest: Manifest | None
    problem: str | None
    doubt: str | None = None

    @property
    def state(self) -> str:
        """In a word: ok, torn, unreadable, or other format."""
        return self.doubt or ("torn" if self.problem else "ok")

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name


@dataclass(frozen=True)
class CheckpointChoice:
    """What to load, and what was passed over for it: damaged or unfinished ones that are newer."""

    checkpoint: FoundCheckpoint | None
    skipped: list[Skipped] = field(default_factory=list)


@dataclass(frozen=True)
class Staged:
    """A checkpoint that was begun and, as yet, not committed."""

    step: int
    attempt: int
    path: Path

    @property
    def reason(self) -> str:
        """Why it is not loaded."""
        return f"staged by attempt {self.attempt}, never committed"


@dataclass(frozen=True)
class SetAside:
    """A damaged checkpoint that was moved away."""

    step: int
    path: Path
    reason: str


def step_path(run: RunDir, step: int) -> Path:
    """Where the committed checkpoint of a step lies, or would lie."""
    return run.checkpoints / manifests.step_name(step)


def candidates(run: RunDir) -> list[FoundCheckpoint]:
    """Every directory with a committed checkpoint's name, newest first by step; to be shown."""
    return [glance(run, step) for step in steps(run)]


def steps(run: RunDir) -> list[int]:
    """The steps that have a committed checkpoint's name, whole or torn, newest first."""
    numbers = [step for name in _listing(run) if (step := manifests.parse_step(name)) is not None]
    return sorted(numbers, reverse=True)


def staged(run: RunDir) -> list[Staged]:
    """What is being written, or was when its writer died, newest first by step."""
    folders = [
        Staged(*parsed, run.checkpoints / name)
        for name in _listing(run)
        if (parsed := manifests.parse_aside(name, manifests.STAGED)) is not None
    ]
    return sorted(folders, key=lambda one: (one.step, one.attempt), reverse=True)


def set_aside(run: RunDir) -> list[SetAside]:
    """What was moved away as damaged, each with its reason, newest first by step."""
    folders = [
        SetAside(parsed[0], run.checkpoints / name, _reason(run.checkpoints / name))
        for name in _listing(run)
        if (parsed := manifests.parse_aside(name, manifests.SET_ASIDE)) is not None
    ]
    return sorted(folders, key=lambda one: (one.step, one.path.name), reverse=True)


def require_known(run: RunDir, wanted: Sequence[int]) -> None:
    """Refuse a step that has no checkpoint.

    Raises:
        NotFound: with the steps that are there.
    """
    there = steps(run)
    for step in wanted:
        if step not in there:
            listed = ", ".join(map(str, there)) or "none"
            raise NotFound(f"{run.name} has no checkpoint of step {step}; there are: {listed}")


def look(run: RunDir, step: int, *, looks: int | None = None) -> FoundCheckpoint:
    """Make the cheap checks: the manifest proves itself, every file is there with its size.

    At most `looks` sizes are compared, None for all. Missing files are always found.

    Raises:
        FileSystemFault: the file system gave an error; nobody knows whether it is whole.
        OtherFormat: it has a format of another hpctrain.
    """
    return look_at(step_path(run, step), step, looks=looks)


def look_at(path: Path, step: int, *, looks: int | None = None) -> FoundCheckpoint:
    """The same of a directory that somebody has named."""
    try:
        manifest = manifests.load(path / manifests.MANIFEST_NAME)
    except TornCheckpoint as error:
        return FoundCheckpoint(step, path, None, str(error))
    if manifest.step != step:
        return FoundCheckpoint(
            step, path, manifest, f"manifest is of step {manifest.step}, not {step}"
        )
    # A sample first: twenty damaged ones of thousands of files each are else asked for every file.
    problems = size_problems(path, manifest.files, looks=SAMPLE if looks is None else looks)
    if looks is None and not problems and len(manifest.files) > SAMPLE:
        problems = size_problems(path, manifest.files)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return FoundCheckpoint(step, path, manifest, problems[0] + more if problems else None)


def glance(run: RunDir, step: int, *, looks: int | None = None) -> FoundCheckpoint:
    """The same to be shown, not to act upon: what nobody can judge has a `doubt`."""
    try:
        return look(run, step, looks=looks)
    except FileSystemFault as error:
        return FoundCheckpoint(step, step_path(run, step), None, str(error), "unreadable")
    except OtherFormat as error:
        return FoundCheckpoint(step, step_path(run, step), None, str(error), "other format")


def choose(run: RunDir, *, at_step: int | None = None, to_show: bool = False) -> CheckpointChoice:
    """The newest checkpoint that the cheap checks find whole; its bytes are still to be verified.

    Args:
        run: Whose checkpoints.
        at_step: Only this one will do; 0 is the beginning, where no checkpoint has that step.
        to_show: Nothing is loaded: what nobody can judge is passed over like a damaged one, and
            of many files a `SAMPLE` has its sizes looked at.

    Raises:
        NoCheckpoint: `at_step` was asked for and cannot be had. Without it, no checkpoint is no
            error.
        FileSystemFault: the file system gave an error, at one that would be loaded or passed over.
        OtherFormat: the same, of one in another hpctrain's format.
    """
    if at_step is not None:
        _refuse_other_formats(run, at_step)
        return CheckpointChoice(_exactly(run, at_step) if at_step or 0 in steps(run) else None)
    taken: FoundCheckpoint | None = None
    skipped: list[Skipped] = []
    for step in steps(run):
        candidate = glance(run, step, looks=SAMPLE) if to_show else look(run, step)
        if candidate.problem is None:
            taken = candidate
            break
        skipped.append(Skipped(candidate.step, candidate.name, candidate.problem))
    newer_than = -1 if taken is None else taken.step
    skipped += [
        Skipped(one.step, one.path.name, one.reason) for one in staged(run) if one.step > newer_than
    ]
    return CheckpointChoice(taken, sorted(skipped, key=lambda one: -one.step))


def size_problems(
    path: Path,
    files: Sequence[FileEntry],
    *,
    looks: int | None = None,
    no_others: bool = False,
) -> list[str]:
    """Return which files of a directory are missing or of another size; read none.

    The directory is listed once. At most `looks` sizes are compared, spread over the files; None
    for all. With `no_others`, also report files that should not be there.

    Raises:
        FileSystemFault: it cannot be listed, or a file in it not be asked.
    """
    names = _names(path)
    there = [entry.name for entry in files if entry.name in names]
    every = 1 if looks is None else max(1, -(-len(there) // looks))
    sizes = _sizes(path, there[::every])
    problems = []
    for entry in files:
        if entry.name not in names or sizes.get(entry.name, entry.size) is None:
            problems.append(f"shard {entry.name} is missing")
        elif (size := sizes.get(entry.name, entry.size)) != entry.size:
            problems.append(f"shard {entry.name} is {size:,} bytes, manifest says {entry.size:,}")
    if no_others:
        others = names.difference(entry.name for entry in files)
        problems += [f"{name} is not in the manifest" for name in sorted(others)]
    return problems


def file_sizes(path: Path) -> dict[str, int | None]:
    """Name to bytes of everything in a directory; None for what is not a regular file.

    A directory that is not there has nothing in it.

    Raises:
        FileSystemFault: it cannot be listed, or a file in it not be asked.
    """
    return _sizes(path, sorted(_names(path)))


def _names(path: Path) -> set[str]:
    try:
        with os.scandir(path) as entries:
            return {entry.name for entry in entries}
    except OSError as error:
        if proves_absence(error):
            return set()
        raise FileSystemFault(f"{path.name} cannot be listed: {error}") from error


def _sizes(path: Path, names: Sequence[str]) -> dict[str, int | None]:
    """Several at a time where they are many: each may be a question to a server."""

    def look(part: Sequence[str]) -> list[int | None]:
        return [_size(f"{path}/{name}") for name in part]

    try:
        if len(names) < MANY:
            return dict(zip(names, look(names), strict=True))
        parts = [names[first::LOOKERS] for first in range(LOOKERS)]
        with ThreadPoolExecutor(LOOKERS) as pool:
            looked = list(pool.map(look, parts))
        return {
            name: size
            for part, sizes in zip(parts, looked, strict=True)
            for name, size in zip(part, sizes, strict=True)
        }
    except OSError as error:
        raise FileSystemFault(f"{path.name} cannot be listed: {error}") from error


def _size(path: str) -> int | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - a Path for each of thousands takes longer
    except OSError as error:
        if proves_absence(error):  # a dangling link, or deleted while we look
            return None
        raise
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _exactly(run: RunDir, step: int) -> FoundCheckpoint:
    candidate = look(run, step) if step in steps(run) else None
    if candidate is not None and candidate.problem is None:
        return candidate
    whole = [str(one.step) for one in candidates(run) if one.problem is None]
    there = f"whole ones: {', '.join(whole)}" if whole else "there is no whole one"
    why = f"is torn: {candidate.problem}" if candidate is not None else "is not there"
    raise NoCheckpoint(f"checkpoint of step {step} of {run.name} {why}; {there}")


def _refuse_other_formats(run: RunDir, at_step: int) -> None:
    """Going back sets newer ones aside; not those that another hpctrain can read."""
    for step in steps(run):
        if step > at_step:
            doubt = glance(run, step)
            if doubt.doubt == "other format":
                raise OtherFormat(
                    f"{doubt.problem}; to go back without it, delete it with `hpctrain "
                    f"checkpoints rm {run.typed} {step} --force`"
                )


def _listing(run: RunDir) -> list[str]:
    try:
        points.reach("choose.list", path=run.checkpoints)
        return [path.name for path in run.checkpoints.iterdir()]
    except FileNotFoundError:  # nothing was saved yet
        return []
    except OSError as error:
        raise FileSystemFault(f"checkpoints of {run.name} cannot be listed: {error}") from error


def _reason(path: Path) -> str:
    try:
        return read_plain(path / REASON_NAME).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):  # died between the move and the note
        return "no reason was left"
    except OSError as error:
        return f"the reason cannot be read: {error.strerror}"


def refuse_to_forget(run: RunDir, passed_over: Sequence[Skipped]) -> None:
    """Refuse to begin at step 0 if the run has saved; called if nothing can be loaded.

    `passed_over` are checkpoints that are damaged or were never committed.

    Raises:
        NoCheckpoint: with what became of the checkpoints, and how to begin anew.
    """
    # A committed name is a save as well, whatever the ledger has lost.
    saved_steps = [row.step for row in passed_over if parse_step(row.name) is not None]
    newest = RunHistory.read(run).newest_saved
    saved_steps += [] if newest is None else [newest]
    if not saved_steps:
        return
    shown = [f"{row.name}: {row.reason}" for row in passed_over[:SHOWN]]
    more = [f"and {len(passed_over) - SHOWN} more"] if len(passed_over) > SHOWN else []
    why = "; ".join(shown + more) or f"none lies in {run.checkpoints}"
    raise NoCheckpoint(
        f"{run.name} has saved up to step {max(saved_steps)}, and none of its checkpoints can be "
        f"loaded: {why}. It does not start over by itself: bring one back, or `hpctrain resume "
        f"{run.typed} --from 0`"
    )

"""A pin keeps a checkpoint: a file PINNED in its directory, with the reason in it.

The file lies inside, so that a pin goes with the checkpoint wherever that is moved or copied, and
`touch PINNED` is one too. Whoever deletes asks `carries` first. Pins are made and taken away under
the run's lock, as is every choice of what may go.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpctrain.base.files import read_plain
from hpctrain.checkpoint.format.manifest import PINNED_NAME
from hpctrain.checkpoint.store import find
from hpctrain.checkpoint.store.commit import flush_directory
from hpctrain.errors import CheckpointError, NotFound
from hpctrain.run.fence import run_lock

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.run.layout import RunDir


def pin(run: RunDir, step: int, reason: str = "") -> bool:
    """Keep a checkpoint from being deleted; returns whether that changed anything.

    A second pin replaces the reason. What is written is there whole or not at all.

    Raises:
        NotFound: there is no checkpoint of that step.
        CheckpointError: it is torn, or the disk refused.
    """
    path = find.step_path(run, step)
    text = one_line(reason)
    try:
        with run_lock(run):
            require_known(run, [step])
            problem = find.look(run, step).problem
            if problem is not None:
                raise CheckpointError(
                    f"step {step} of {run.name} is torn and was not pinned: {problem}"
                )
            if carries(path) and reason_of(path) == text:
                return False
            _write(path, text)
    except OSError as error:
        raise CheckpointError(f"step {step} of {run.name} cannot be pinned: {error}") from error
    return True


def unpin(run: RunDir, step: int) -> bool:
    """Take a pin away; returns whether there was one.

    Raises:
        NotFound: there is no checkpoint of that step.
        CheckpointError: the disk refused.
    """
    try:
        with run_lock(run):
            require_known(run, [step])
            return take_away(find.step_path(run, step))
    except OSError as error:
        raise CheckpointError(f"step {step} of {run.name} cannot be unpinned: {error}") from error


def pinned(run: RunDir) -> dict[int, str]:
    """Step to reason of every pinned checkpoint, newest first."""
    paths = {step: find.step_path(run, step) for step in find.steps(run)}
    return {step: reason_of(path) for step, path in paths.items() if carries(path)}


def carries(path: Path) -> bool:
    """Whether a directory is pinned.

    Raises:
        OSError: nobody can say; "no" would let a pinned checkpoint go for a server's hiccup.
    """
    try:
        os.lstat(path / PINNED_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def take_away(path: Path) -> bool:
    """Remove a directory's pin, durably; the caller has the run's lock."""
    if not carries(path):
        return False
    (path / PINNED_NAME).unlink()
    flush_directory(path)
    return True


def require_known(run: RunDir, steps: list[int]) -> None:
    """Refuse a step that has no checkpoint.

    Raises:
        NotFound: with the steps that are there.
    """
    there = find.steps(run)
    for step in steps:
        if step not in there:
            listed = ", ".join(map(str, there)) or "none"
            raise NotFound(f"{run.name} has no checkpoint of step {step}; there are: {listed}")


def one_line(text: str) -> str:
    """A reason as it is shown: one line, and nothing in it that a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def reason_of(path: Path) -> str:
    """What a pin says; nothing where it was made without a word."""
    try:
        return one_line(read_plain(path / PINNED_NAME).decode(errors="replace"))
    except OSError as error:  # it is pinned all the same
        return f"the reason cannot be read: {error.strerror}"


def _write(path: Path, reason: str) -> None:
    """The pin replaces nothing until its last byte is on disk: a full disk leaves no empty pin."""
    staged = path / f"{PINNED_NAME}.new"
    try:
        with staged.open("w") as file:
            file.write(reason + "\n")
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path / PINNED_NAME)
    except OSError:
        staged.unlink(missing_ok=True)
        raise
    flush_directory(path)

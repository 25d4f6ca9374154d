"""Are the bytes what the manifest says? And out of the way with a checkpoint where they are not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from hpctrain.checkpoint.commit import set_aside_locked
from hpctrain.checkpoint.digest import file_digest
from hpctrain.errors import CheckpointError
from hpctrain.rundir.fence import publishing, run_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hpctrain.checkpoint.find import Found
    from hpctrain.checkpoint.manifest import FileEntry
    from hpctrain.rundir.fence import Attempt
    from hpctrain.rundir.layout import RunDir

T = TypeVar("T")


def verify(
    found: Found,
    files: Sequence[str] | None = None,
    *,
    threads: int = 1,
    on_bytes: Callable[[int], object] | None = None,
) -> list[str]:
    """Read files of a checkpoint and compare their digests: one line for each damaged one.

    Args:
        found: The checkpoint.
        files: Names to read, this rank's share; None for all.
        threads: How many files are read at a time; hashing does not hold Python's lock.
        on_bytes: Told how many bytes were read, from those threads, for a progress bar.
    """
    if found.manifest is None:
        return [found.problem or "manifest is missing"]
    entries = {entry.name: entry for entry in found.manifest.files}
    wanted = list(entries) if files is None else list(files)
    problems = [f"{name} is not in the manifest" for name in wanted if name not in entries]

    def check(name: str) -> str | None:
        return _problem(found.path / name, entries[name], on_bytes)

    known = [name for name in wanted if name in entries]
    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        problems += [problem for problem in pool.map(check, known) if problem is not None]
    return problems


def share(files: Sequence[T], rank: int, world_size: int) -> list[T]:
    """The part of the files that one rank reads: every file is in exactly one rank's share."""
    return list(files[rank::world_size])


def set_aside(run: RunDir, found: Found, reason: str, attempt: Attempt | None) -> Path:
    """Move a damaged checkpoint away, with the reason inside; returns where it lies then.

    Args:
        run: Whose checkpoint.
        found: Which one.
        reason: One line, kept in its `SET-ASIDE.txt`.
        attempt: Who does it; None for a person at the login node.

    Raises:
        Fenced: a newer attempt has taken the run over.
        CheckpointError: it is gone, or cannot be renamed.
    """
    try:
        with run_lock(run) if attempt is None else publishing(run, attempt):
            return set_aside_locked(found.path, found.step, reason)
    except OSError as error:
        raise CheckpointError(f"{found.path} cannot be set aside: {error}") from error


def _problem(path: Path, entry: FileEntry, on_bytes: Callable[[int], object] | None) -> str | None:
    try:
        size = path.stat().st_size
        if size != entry.size:
            return f"shard {entry.name} is {size:,} bytes, manifest says {entry.size:,}"
        digest = file_digest(path, on_bytes=on_bytes)
    except FileNotFoundError:
        return f"shard {entry.name} is missing"
    except OSError as error:  # a bad sector is damage like any other
        return f"shard {entry.name} cannot be read: {error}"
    if digest != entry.digest:
        return f"{entry.name}: digest {digest}, manifest says {entry.digest} (damaged bytes)"
    return None

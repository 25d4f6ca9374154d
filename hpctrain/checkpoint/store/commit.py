"""From staged to committed in one rename: a checkpoint is there whole, or not there.

Rank 0 alone calls this. Order is the protocol: the ranks write and flush their shards into a staged
directory, and check the size of their files; the names are checked against the manifest, which is
written and flushed last; the directory is flushed; under the run's lock, and only by the newest
attempt, it is renamed; its parent is flushed. Whatever dies in between leaves a staged directory,
which nobody loads.

`forecast` says before a save why there is no room for it; None promises nothing, because others
write too and many quotas do not show.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
from typing import TYPE_CHECKING

from hpctrain.checkpoint.format import manifest as manifests
from hpctrain.checkpoint.store import find
from hpctrain.core.base.files import flush_directory
from hpctrain.core.base.text import size
from hpctrain.core.testing import points
from hpctrain.errors import CheckpointError, NotWritten
from hpctrain.ledger.run.fence import publishing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hpctrain.checkpoint.format.layout import RankPart
    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir


REMOVE_TRIES = 100
"""Of a directory from which others remove files at the same time."""
ADVICE = "free some with `hpctrain checkpoints prune`, or keep fewer (checkpoint.keep_last)"


def stage(run: RunDir, step: int, attempt: Attempt) -> Path:
    """An empty directory for the shards of a step, which this attempt may later publish.

    A torn directory in the way is quarantined with its reason; what this attempt left of an earlier
    try at the same step is removed.

    Raises:
        CheckpointError: the step is committed already, or the directory cannot be made.
        Fenced: a newer attempt has taken the run over.
    """
    staged = run.checkpoints / manifests.aside_name(step, manifests.STAGED, attempt.number)
    with errors_named(f"step {step} of {run.name} cannot be staged", NotWritten):
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        flush_directory(run.root)  # else a run's first checkpoints go with the folder's own name
        with publishing(run, attempt):
            _clear_way(run, step)
            left = rename_away(staged, step, manifests.DELETING) if staged.exists() else None
            staged.mkdir()
        points.reach("stage.made", path=staged, step=step)
        if left is not None:
            remove_tree(left)
    return staged


def write_table(staged: Path, manifest: Manifest, parts: Sequence[RankPart]) -> None:
    """Put all ranks' parts together: the chunk table on disk, files and tensors in the manifest.

    Raises:
        CheckpointError: the parts do not make up the tensors, or the disk refused.
    """
    # Not above: pinning and deleting go through this module too, and need no numpy.
    from hpctrain.checkpoint.format import table
    from hpctrain.checkpoint.format.layout import assemble

    files, manifest.tensors, whole = assemble(parts, manifest.block_bytes)
    content = whole.dump()
    manifest.files = [*files, table.entry_of(content)]
    path = staged / manifests.TABLE_NAME
    with errors_named(f"step {manifest.step} cannot be committed", NotWritten):
        points.reach("table.write", path=path, step=manifest.step, bytes=len(content))
        write_new(path, content)


def write_new(path: Path, content: bytes) -> None:
    """Write a file where none is, flushed to disk.

    Raises:
        OSError: one is there, or it cannot be written.
    """
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def publish(run: RunDir, staged: Path, manifest: Manifest, attempt: Attempt) -> Path:
    """Make a staged checkpoint the committed one of its step; returns where it lies then.

    The ranks have flushed their shards; the manifest is written here, with this attempt's number
    and token in it. On an error nothing is there that could be loaded, except that the checkpoint
    may be committed already if only the last flush failed.

    Raises:
        CheckpointError: a file is missing, of another size, or not in the manifest; the step is
            committed already; or the disk refused.
        Fenced: a newer attempt has taken the run over.
    """
    step = manifest.step
    if staged.name != manifests.aside_name(step, manifests.STAGED, attempt.number):
        raise CheckpointError(
            f"{staged.name} is not what attempt {attempt.number} staged for step {step}; "
            f"nothing was published"
        )
    stamped = dataclasses.replace(
        manifest, attempt=attempt.number, attempt_token=attempt.token, self_digest=""
    )
    target = find.step_path(run, step)
    with errors_named(f"step {step} of {run.name} cannot be published", NotWritten):
        _require_complete(staged, manifest)
        manifests.dump(stamped, staged / manifests.MANIFEST_NAME)
        flush_directory(staged)
        with publishing(run, attempt):
            # rename() itself would replace an empty directory without a word
            if os.path.lexists(target):
                raise _committed(step, target)
            points.reach("publish.rename", path=staged, step=step)
            try:
                staged.rename(target)
            except OSError as error:
                if error.errno in {errno.EEXIST, errno.ENOTEMPTY}:
                    raise _committed(step, target) from error
                raise
            points.reach("publish.flush", path=target, step=step)
            flush_directory(run.checkpoints)
    return target


def discard(staged: Path) -> None:
    """Remove what was staged; nothing happens if it is gone, or was published.

    Raises:
        ValueError: the name is not that of a staged checkpoint.
    """
    if manifests.parse_aside(staged.name, manifests.STAGED) is None:
        raise ValueError(f"{staged} is not a staged checkpoint")
    remove_tree(staged)


def rename_away(path: Path, step: int, kind: str) -> Path:
    """Give a directory the first free name of its new kind, durably; the caller has the lock.

    `kind` is `manifest.SET_ASIDE` or `manifest.DELETING`.
    """
    number = 1
    while os.path.lexists(target := path.with_name(manifests.aside_name(step, kind, number))):
        number += 1
    path.rename(target)
    flush_directory(path.parent)
    return target


def set_aside_locked(path: Path, step: int, reason: str) -> Path:
    """Move a damaged checkpoint away, the reason in it; the caller has the run's lock.

    The move comes first: dying after it leaves nothing that could be chosen, only the note is
    missing.
    """
    aside = rename_away(path, step, manifests.SET_ASIDE)
    if aside.is_dir():
        write_new(aside / find.REASON_NAME, f"{reason}\n".encode())
    return aside


def remove_tree(path: Path) -> None:
    """Remove what has no committed checkpoint's name; others may be removing it as well.

    A file that somebody on another NFS client holds open cannot go yet; the next sweep takes it.
    """
    for _ in range(REMOVE_TRIES):
        if not os.path.lexists(path):
            return
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except FileNotFoundError:  # another one was faster with some file: continue with the rest
            continue
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY}:
                return
            raise


def _clear_way(run: RunDir, step: int) -> None:
    target = find.step_path(run, step)
    if not os.path.lexists(target):
        return
    published = find.look(run, step)
    if published.problem is None:
        raise _committed(step, target)
    set_aside_locked(target, step, published.problem)


def _require_complete(staged: Path, manifest: Manifest) -> None:
    """Refuse missing or other names in the directory; of the sizes check a sample.

    Each writer has checked the size of its own file; all of 16,384 would take seconds. The listing
    shows that all nodes wrote into this very directory.
    """
    problem = manifests.files_problem(manifest.files)
    problems = (
        [problem]
        if problem
        else find.size_problems(staged, manifest.files, looks=find.SAMPLE, no_others=True)
    )
    if problems:
        raise CheckpointError(
            f"{staged.name} is not complete, nothing was published: {problems[0]}"
        )


def _committed(step: int, target: Path) -> CheckpointError:
    return CheckpointError(f"step {step} is already committed: {target} was left as it is")


@contextlib.contextmanager
def errors_named(what: str, kind: type[CheckpointError] = CheckpointError) -> Iterator[None]:
    """Raise an error of the file system as one of a checkpoint's, in words: ``<what>: <error>``."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error}") from error


def forecast(path: Path, need_bytes: int, need_files: int = 1) -> str | None:
    """Return why a save of this size would not fit; None if it fits or nobody can say.

    What counts is what a user may take (f_bavail), not the reserve of root's (f_bfree). `path` need
    not exist yet. The save adds `need_files` files and directories.
    """
    stat = _stat(path)
    if stat is None:
        return None
    free = stat.f_bavail * stat.f_frsize
    # Some FUSE and network file systems report no blocks at all: that is no full disk.
    if stat.f_blocks > 0 and free < need_bytes:
        return (
            f"{path} has {_exact(free)} free and the next checkpoint needs {_exact(need_bytes)}; "
            f"{ADVICE}"
        )
    # The same for inodes: file systems that make them as needed (btrfs, many servers) report none.
    if stat.f_files > 0 and stat.f_favail < need_files:
        return (
            f"{path} has room for {stat.f_favail:,} more files (inodes) and the next checkpoint "
            f"needs {need_files:,}; {ADVICE}"
        )
    return None


def describe(error: OSError, path: Path) -> str:
    """An error of writing, in words that a user can act on: which limit was hit, and what helps."""
    stat = _stat(path)
    if error.errno == errno.EDQUOT:
        return (
            f"quota exceeded at {path}: a limit of your user, group or project, not of the disk; "
            f"{ADVICE}, or ask for a larger quota (`quota -s`, `lfs quota`)"
        )
    if error.errno != errno.ENOSPC:
        return f"{path}: {error.strerror or error}"
    left = _left(stat)
    # Room first: XFS has no inodes left whenever it has no blocks left.
    if left and stat is not None and stat.f_files > 0 and stat.f_favail == 0:
        return f"no file can be added at {path}: the file system is out of inodes; {ADVICE}"
    # XFS reports a project's quota as a full disk, and others may have freed something meanwhile.
    hint = "; if that is plenty, it was a quota" if left else ""
    return f"disk full at {path}{left}{hint}; {ADVICE}"


def _stat(path: Path) -> os.statvfs_result | None:
    """Return the nearest existing directory's statistics; None if the file system gives none."""
    for place in (path, *path.parents):
        try:
            return os.statvfs(place)
        except (FileNotFoundError, NotADirectoryError):  # not made yet
            continue
        except OSError:
            return None
    return None


def _left(stat: os.statvfs_result | None) -> str:
    if stat is None or stat.f_blocks == 0 or stat.f_bavail <= 1:
        return ""
    return f" ({size(stat.f_bavail * stat.f_frsize)} of the file system are free by now)"


def _exact(count: int) -> str:
    """Both forms: rounded ones can look alike when bytes are missing."""
    return f"{size(count)} ({count:,} bytes)"


def one_line(text: str) -> str:
    """A reason as it is shown: one line, and nothing in it that a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())

"""Which checkpoints may go: never the last valid one, never one that is being loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.checkpoint import find, names
from hpctrain.checkpoint.commit import remove_tree, rename_away
from hpctrain.errors import CheckpointError
from hpctrain.rundir.fence import publishing, run_lock

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from hpctrain.rundir.fence import Attempt
    from hpctrain.rundir.layout import RunDir


def to_delete(
    found: Iterable[tuple[int, bool]],
    *,
    keep_last: int,
    keep_every: int = 0,
    protect: Collection[int] = (),
) -> list[int]:
    """The steps that need not be kept, oldest first.

    Everything from the `keep_last`-th newest valid one upwards is kept, torn ones too, so that a
    person can look at them; they never count. While there are fewer valid ones than that, nothing
    goes. Whether an older one is valid makes no difference.

    Args:
        found: Step, and whether the checkpoint is valid.
        keep_last: How many of the newest valid ones stay; at least 1.
        keep_every: Multiples of this stay as well; 0 for none.
        protect: Steps that stay whatever else holds, such as the one being loaded.

    Raises:
        ValueError: `keep_last` is below 1, which could take the last valid one, or `keep_every`
            below 0.
    """
    if keep_last < 1 or keep_every < 0:
        raise ValueError(f"keep_last {keep_last} is below 1 or keep_every {keep_every} is below 0")
    known = dict(found)
    valid = sorted((step for step, ok in known.items() if ok), reverse=True)
    if len(valid) < keep_last:
        return []
    oldest_kept = valid[keep_last - 1]
    return sorted(
        step
        for step in known
        if step < oldest_kept
        and step not in protect
        and not (keep_every and step % keep_every == 0)
    )


def prune(
    run: RunDir,
    *,
    keep_last: int,
    keep_every: int = 0,
    protect: Collection[int] = (),
    attempt: Attempt | None = None,
) -> list[int]:
    """Delete what need not be kept, and return its steps. Rank 0 calls it, after a commit.

    Each one is renamed before its first byte goes, so that dying here leaves no half checkpoint
    under a checkpoint's name.

    Args:
        run: Whose checkpoints.
        keep_last: See `to_delete`.
        keep_every: See `to_delete`.
        protect: See `to_delete`.
        attempt: Who does it; None for a person at the login node.

    Raises:
        Fenced: a newer attempt has taken the run over; nothing was deleted.
        CheckpointError: the disk refused.
    """
    try:
        with run_lock(run) if attempt is None else publishing(run, attempt):
            going = to_delete(
                _looked_at(run, keep_last),
                keep_last=keep_last,
                keep_every=keep_every,
                protect=protect,
            )
            renamed = [
                rename_away(find.step_path(run, step), step, names.deleting_name) for step in going
            ]
        for path in renamed:
            remove_tree(path)
    except OSError as error:
        raise CheckpointError(f"checkpoints of {run.name} cannot be pruned: {error}") from error
    return going


def sweep(run: RunDir, attempt: Attempt) -> list[str]:
    """Remove what older attempts left staged and what is half deleted; returns the names that went.

    Directories that this attempt or a newer one has staged stay.

    Raises:
        Fenced: a newer attempt has taken the run over; nothing was removed.
        CheckpointError: the disk refused.
    """
    try:
        with publishing(run, attempt):
            half_deleted = _half_deleted(run)
            left = [one for one in find.staged(run) if one.attempt < attempt.number]
            # Renamed first: a rank of a dead attempt that still runs can then add no more files.
            renamed = [rename_away(one.path, one.step, names.deleting_name) for one in left]
        for path in half_deleted + renamed:
            remove_tree(path)
    except OSError as error:
        raise CheckpointError(f"checkpoints of {run.name} cannot be swept: {error}") from error
    return [path.name for path in half_deleted] + [one.path.name for one in left]


def _looked_at(run: RunDir, keep_last: int) -> list[tuple[int, bool]]:
    """Steps and validity, newest first; behind enough valid ones no more is looked at."""
    looked: list[tuple[int, bool]] = []
    valid = 0
    for step in find.steps(run):
        ok = valid < keep_last and find.look(run, step).problem is None
        valid += ok
        looked.append((step, ok))
    return looked


def _half_deleted(run: RunDir) -> list[Path]:
    if not run.checkpoints.is_dir():
        return []
    return [
        path for path in run.checkpoints.iterdir() if names.parse_deleting(path.name) is not None
    ]

"""Which checkpoints may go: never the last valid one, never a pinned one, never one being loaded.

The newest, every so many steps, the best by a metric, the pinned, and those whose evaluation is
awaited stay. Each directory is renamed before its first byte goes, and the manifest goes first of
all: whatever dies in between leaves nothing that could be taken for a checkpoint, and the next
sweep takes the rest.

A pin is a file PINNED in the checkpoint's directory, with the reason in it: so it goes with the
checkpoint wherever that is moved or copied, and `touch PINNED` is one too.

`in_use` says which checkpoints a live attempt may be using. A dead one may have had no time to
write down its end, and only the scheduler knows that; hence `idle`.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from hpctrain.checkpoint.format import manifest
from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, PINNED_NAME
from hpctrain.checkpoint.store import find
from hpctrain.checkpoint.store.commit import errors_named, one_line, remove_tree, rename_away
from hpctrain.core.base.files import flush_directory, read_plain, replace_text
from hpctrain.core.testing import points
from hpctrain.errors import CheckpointError, ChecksFailed, RunAlive
from hpctrain.ledger.history.evaluations import Evaluations
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_state import OVER, RunState
from hpctrain.ledger.run.fence import look_anew, publishing, run_lock

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from hpctrain.core.settings.schema import CheckpointSettings
    from hpctrain.ledger.history.run_state import LedgerState
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir

WAIT = "wait until the run has ended, or end it with `hpctrain cancel`"
NO_EVALUATIONS = Evaluations()


def pin(run: RunDir, step: int, reason: str = "") -> bool:
    """Keep a checkpoint from being deleted; returns whether that changed anything.

    A second pin replaces the reason. What is written is there whole or not at all.

    Raises:
        NotFound: there is no checkpoint of that step.
        CheckpointError: it is torn, or the disk refused.
    """
    path = find.step_path(run, step)
    text = one_line(reason)
    with errors_named(f"step {step} of {run.name} cannot be pinned"), run_lock(run):
        find.require_known(run, [step])
        problem = find.look(run, step).problem
        if problem is not None:
            raise CheckpointError(
                f"step {step} of {run.name} is torn and was not pinned: {problem}"
            )
        if carries(path) and reason_of(path) == text:
            return False
        # A full disk leaves no empty pin.
        replace_text(path / PINNED_NAME, text + "\n", durable=True)
    return True


def unpin(run: RunDir, step: int) -> bool:
    """Take a pin away; returns whether there was one.

    Raises:
        NotFound: there is no checkpoint of that step.
        CheckpointError: the disk refused.
    """
    with errors_named(f"step {step} of {run.name} cannot be unpinned"), run_lock(run):
        find.require_known(run, [step])
        return _take_away(find.step_path(run, step))


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


def _take_away(path: Path) -> bool:
    if not carries(path):
        return False
    (path / PINNED_NAME).unlink()
    flush_directory(path)
    return True


def reason_of(path: Path) -> str:
    """What a pin says; nothing where it was made without a word."""
    try:
        return one_line(read_plain(path / PINNED_NAME).decode(errors="replace"))
    except OSError as error:  # it is pinned all the same
        return f"the reason cannot be read: {error.strerror}"


@dataclass(frozen=True)
class Usage:
    """The steps that must stay, and for whom."""

    reason: str
    since: int | None = None
    """This step and all newer ones; None for none of them."""
    only: int | None = None
    """This step alone."""

    def holds(self, step: int) -> bool:
        """Whether it must stay."""
        return step == self.only or (self.since is not None and step >= self.since)


def in_use(history: RunHistory, idle: LedgerState | None = None) -> Usage | None:
    """What must stay for the run as it stands; None where nothing is in use.

    Args:
        history: The run's.
        idle: Where the run stood by the ledger when the scheduler knew of no live job for it. It
            counts as long as nothing has begun since then.
    """
    now = history.state
    if now.phase in OVER:
        return None
    if idle is not None and (now.attempt, now.token) == (idle.attempt, idle.token):
        return None
    if now.phase is RunState.RUNNING:
        return _running(history, now)
    asked = history.asked_step
    if asked is None:
        return None
    return Usage(f"the job that is to go on from step {asked} waits to start", only=asked)


def _running(history: RunHistory, now: LedgerState) -> Usage:
    attempt = history.attempt(now.attempt)
    if attempt is None or attempt.restored_step is None:
        return Usage(f"attempt {now.attempt} is choosing which checkpoint to load", since=0)
    step = attempt.restored_step
    reason = f"attempt {now.attempt} is running on it: it restored step {step}"
    return Usage(reason, since=step)


class Why(StrEnum):
    """Why a checkpoint stays: a closed set."""

    NEWEST = "newest"
    LAST_VALID = "last valid"
    TOO_FEW = "fewer valid than keep_last"
    NEWER = "newer than the oldest of the newest"
    """A torn one that a person may want to look at."""
    EVERY = "every"
    BEST = "best"
    PINNED = "pinned"
    IN_USE = "in use"
    EVALUATION = "evaluation"
    """It is due to be evaluated, or its evaluation runs."""


@dataclass(frozen=True)
class CheckpointRow:
    """What retention knows of one checkpoint."""

    step: int
    valid: bool
    pinned: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rules:
    """What is to be kept, as in the settings [checkpoint].

    Raises:
        ValueError: by these rules the last valid one could go, or they make no sense.
    """

    keep_last: int
    """How many of the newest valid ones stay; at least 1."""
    keep_every: int = 0
    """Multiples of this stay as well; 0 for none."""
    keep_best: int = 0
    """So many of the valid ones with the best metric stay as well; 0 for none."""
    best_metric: str = ""
    best_is: str = "lowest"
    """Or "highest"."""

    @classmethod
    def of(cls, settings: CheckpointSettings) -> Rules:
        """Those of a run's settings."""
        return cls(**{one.name: getattr(settings, one.name) for one in fields(cls)})

    def __post_init__(self) -> None:
        least = {"keep_last": 1, "keep_every": 0, "keep_best": 0}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} {getattr(self, name)} is below {lowest}")
        if self.best_is not in {"lowest", "highest"}:
            raise ValueError(f"best_is {self.best_is!r} is neither lowest nor highest")
        if self.keep_best and not self.best_metric:
            raise ValueError(f"keep_best {self.keep_best} needs a best_metric")


@dataclass(frozen=True)
class KeepDecision:
    """One checkpoint and why it stays; it may go where `why` is empty."""

    row: CheckpointRow
    why: tuple[Why, ...]
    size_bytes: int


def why_kept(
    rows: Iterable[CheckpointRow],
    rules: Rules,
    protect: Collection[int] = (),
    awaited: Collection[int] = (),
) -> dict[int, tuple[Why, ...]]:
    """Map each step that stays to all reasons for it.

    Everything from the `keep_last`-th newest valid one upwards stays, torn ones too, so that a
    person can look at them; they never count. While there are fewer valid ones than that, nothing
    goes. Without `keep_best`, whether an older one is valid makes no difference. Steps in `protect`
    and `awaited` (for an evaluation) stay whatever else holds.
    """
    by_step = {row.step: row for row in rows}
    valid = sorted((step for step, row in by_step.items() if row.valid), reverse=True)
    newest = valid[: rules.keep_last]
    best = best_of(by_step.values(), rules)
    enough = len(newest) == rules.keep_last
    return {
        step: tuple(
            why
            for why, holds in (
                (Why.LAST_VALID, valid == [step]),
                (Why.NEWEST, step in newest),
                (Why.NEWER, enough and step > newest[-1] and step not in newest),
                (Why.EVERY, rules.keep_every > 0 and step % rules.keep_every == 0),
                (Why.BEST, step in best),
                (Why.PINNED, row.pinned),
                (Why.IN_USE, step in protect),
                (Why.EVALUATION, step in awaited),
                (Why.TOO_FEW, not enough),
            )
            if holds
        )
        for step, row in by_step.items()
    }


def best_of(rows: Iterable[CheckpointRow], rules: Rules) -> list[int]:
    """The steps that stay for their metric, the best first; of equal ones the newer.

    A value that is no finite number is never best: a loss that became NaN compares with nothing.
    """
    sign = 1 if rules.best_is == "lowest" else -1
    ranked = sorted(
        (sign * value, -row.step)
        for row in rows
        if row.valid
        and (value := row.metrics.get(rules.best_metric)) is not None
        and math.isfinite(value)
    )
    return [-step for _, step in ranked[: rules.keep_best]]


def prune(
    run: RunDir,
    rules: Rules,
    *,
    protect: Collection[int] = (),
    attempt: Attempt | None = None,
    idle: LedgerState | None = None,
    rows_by_step: dict[int, CheckpointRow] | None = None,
    committed: int | None = None,
    evaluations: Evaluations = NO_EVALUATIONS,
) -> list[int]:
    """Delete what need not be kept, and return its steps.

    Rank 0 calls it after a commit, when every rank has long loaded; then nothing is in use. For a
    person (`attempt` is None), what a live attempt may be using is protected: see `in_use`.

    `rows_by_step` holds what this process has found valid before; new findings are added. Looking
    costs as many calls as there are ranks. The step `committed` just now is only checked for all
    file names and a sample of sizes, which its writers have just seen. `protect` is as in
    `why_kept`.

    Raises:
        Fenced: a newer attempt has taken the run over; nothing was deleted.
        CheckpointError: the disk refused.
    """
    rows_by_step = {} if rows_by_step is None else rows_by_step
    enough = None if rules.keep_best else rules.keep_last
    with errors_named(f"checkpoints of {run.name} cannot be pruned"):
        _looked_at(run, enough, rows_by_step, committed)  # before the lock: saves wait for that
        with run_lock(run) if attempt is None else publishing(run, attempt):
            used = set() if attempt is not None else _used_steps(run, idle)
            rows = _looked_at(run, enough, rows_by_step, committed)
            rows = _with_metrics(rows, evaluations)
            kept = why_kept(rows, rules, used | set(protect), evaluations.awaited)
            going = _unpinned(run, sorted(step for step, why in kept.items() if not why))
            renamed = dict(zip(going, _renamed(run, going), strict=True))
            going = _given_back(run, renamed)
        _remove(renamed[step] for step in going)
    for step in going:
        rows_by_step.pop(step, None)
    return going


def plan(
    run: RunDir,
    rules: Rules,
    *,
    idle: LedgerState | None = None,
    evaluations: Evaluations = NO_EVALUATIONS,
) -> list[KeepDecision]:
    """What `prune` would do for a person, newest first; nothing is changed.

    Raises:
        CheckpointError: the disk refused.
    """
    with errors_named(f"checkpoints of {run.name} cannot be read"):
        rows = _with_metrics(_looked_at(run, None, {}), evaluations)
        kept = why_kept(rows, rules, _used_steps(run, idle), evaluations.awaited)
        return [KeepDecision(row, kept[row.step], size_of(run, row.step)) for row in rows]


def remove(
    run: RunDir,
    steps: Collection[int],
    *,
    force: bool = False,
    idle: LedgerState | None = None,
    evaluations: Evaluations = NO_EVALUATIONS,
) -> list[int]:
    """Delete these checkpoints, for a person: all of them or, if one is refused, none.

    With `force`, also pinned ones, those whose evaluation is awaited, and the last valid one.

    Raises:
        NotFound: one is not there.
        RunAlive: a live attempt may be using one.
        ChecksFailed: one is pinned, or its evaluation awaited, or none would be left that could be
            loaded.
        CheckpointError: the disk refused.
    """
    going = sorted(set(steps))
    with errors_named(f"checkpoints of {run.name} cannot be deleted"):
        with run_lock(run):
            refuse(run, going, force=force, idle=idle, evaluations=evaluations)
            # Before the rename: dying in between must not leave a pin on what no sweep may take.
            for step in going:
                _take_away(find.step_path(run, step))
            renamed = _renamed(run, going)
        _remove(renamed)
    return going


def refuse(
    run: RunDir,
    steps: Collection[int],
    *,
    force: bool,
    idle: LedgerState | None = None,
    evaluations: Evaluations = NO_EVALUATIONS,
) -> None:
    """The checks of `remove`, which deletes nothing where one does not hold.

    Raises:
        HpctrainError: see `remove`.
    """
    find.require_known(run, sorted(steps))
    look_anew(*(find.step_path(run, step) for step in steps))
    usage = in_use(RunHistory.read(run), idle)
    for step in sorted(steps):
        if usage is not None and usage.holds(step):
            raise RunAlive(f"step {step} of {run.name} was not deleted: {usage.reason}; {WAIT}")
        if not force and carries(find.step_path(run, step)):
            reason = pinned(run)[step]
            why = f" ({reason})" if reason else ""
            raise ChecksFailed(
                f"step {step} of {run.name} is pinned{why} and was not deleted; unpin it with "
                f"`hpctrain checkpoints pin {run.typed} {step} --remove`, or add --force"
            )
        if not force and step in evaluations.awaited:
            raise ChecksFailed(
                f"step {step} of {run.name} is to be evaluated and was not deleted; wait until "
                f"`hpctrain status {run.typed}` has its metrics, or add --force if it need not"
            )
    if force:
        return
    valid = {row.step for row in _looked_at(run, None, {}) if row.valid}
    if valid and valid <= set(steps):
        raise ChecksFailed(
            f"step {max(valid)} is the last valid checkpoint of {run.name}: nothing was deleted, "
            f"because the run could only start over, by `hpctrain resume {run.typed} --from 0`; "
            "add --force if it may"
        )


def _used_steps(run: RunDir, idle: LedgerState | None = None) -> set[int]:
    """The steps that a live attempt may be using; see `in_use`."""
    usage = in_use(RunHistory.read(run), idle)
    return {step for step in find.steps(run) if usage is not None and usage.holds(step)}


def size_of(run: RunDir, step: int) -> int:
    """Bytes of all files of a checkpoint, named by its manifest or not."""
    sizes = find.file_sizes(find.step_path(run, step))
    return sum(size or 0 for size in sizes.values())


def bar(run: RunDir, attempt: Attempt) -> list[str]:
    """Take away what older attempts have staged: none of them can commit any more.

    Called before a checkpoint is chosen. An older attempt that found itself the newest, and was
    held up before its rename, has then either committed already, or its rename fails: also where
    locks do not hold between nodes. What it stages from now on it cannot commit, since the fence
    was there before. Returns the names that went; a sweep deletes their bytes.

    Raises:
        Fenced: a newer attempt has taken the run over; nothing was taken away.
        CheckpointError: the disk refused.
    """
    with errors_named(f"checkpoints of {run.name} cannot be swept"), publishing(run, attempt):
        return _barred(run, attempt)


def sweep(run: RunDir, attempt: Attempt) -> list[str]:
    """Remove what older attempts left staged and what is half deleted; returns the names that went.

    Directories that this attempt or a newer one has staged stay, and what carries a pin.

    Raises:
        Fenced: a newer attempt has taken the run over; nothing was removed.
        CheckpointError: the disk refused.
    """
    with errors_named(f"checkpoints of {run.name} cannot be swept"):
        with publishing(run, attempt):
            half_deleted = [path.name for path in _half_deleted(run)]
            barred = _barred(run, attempt)
            going = _half_deleted(run)
        _remove(going)
    return half_deleted + barred


def _barred(run: RunDir, attempt: Attempt) -> list[str]:
    left = [
        one for one in find.staged(run) if one.attempt < attempt.number and not carries(one.path)
    ]
    for step in left:
        # None may be gone meanwhile: its writer has committed it, or taken it back.
        with contextlib.suppress(FileNotFoundError):
            rename_away(step.path, step.step, manifest.DELETING)
    return [one.path.name for one in left]


def _looked_at(
    run: RunDir,
    enough: int | None,
    rows_by_step: dict[int, CheckpointRow],
    committed: int | None = None,
) -> list[CheckpointRow]:
    """Return all checkpoints, newest first; behind `enough` valid ones read nothing but the pin.

    Valid ones in `rows_by_step` are not checked again; new valid ones are added.
    """
    rows: list[CheckpointRow] = []
    valid = 0
    for step in find.steps(run):
        pinned = carries(find.step_path(run, step))
        if step not in rows_by_step and (enough is None or valid < enough):
            checkpoint = find.look(run, step, looks=find.SAMPLE if step == committed else None)
            if checkpoint.problem is None and checkpoint.manifest is not None:
                rows_by_step[step] = CheckpointRow(
                    step, valid=True, metrics=checkpoint.manifest.metrics
                )
        row = replace(rows_by_step.get(step, CheckpointRow(step, valid=False)), pinned=pinned)
        rows.append(row)
        valid += row.valid
    return rows


def _with_metrics(rows: list[CheckpointRow], evaluations: Evaluations) -> list[CheckpointRow]:
    """The same with what evaluations have found."""
    of_step = evaluations.metrics
    return [replace(row, metrics={**row.metrics, **of_step.get(row.step, {})}) for row in rows]


def _unpinned(run: RunDir, steps: Iterable[int]) -> list[int]:
    """Without those that somebody on another node has pinned within the last minute."""
    paths = {step: find.step_path(run, step) for step in steps}
    look_anew(*paths.values())
    return [step for step, path in paths.items() if not carries(path)]


def _given_back(run: RunDir, renamed: Mapping[int, Path]) -> list[int]:
    """Return the steps that stay renamed; give names back to those pinned until then.

    If locks do not hold between nodes, a pin may come between check and rename. After the rename
    none can: its directory's name is gone.
    """
    look_anew(*renamed.values())
    pinned = [step for step, path in renamed.items() if carries(path)]
    for step in pinned:
        renamed[step].rename(find.step_path(run, step))
    return [step for step in renamed if step not in pinned]


def _renamed(run: RunDir, steps: Iterable[int]) -> list[Path]:
    renamed = []
    for step in steps:
        path = find.step_path(run, step)
        points.reach("prune.rename", path=path, step=step)
        renamed.append(rename_away(path, step, manifest.DELETING))
    return renamed


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        points.reach("prune.delete", path=path)
        if path.is_dir() and not path.is_symlink():
            (path / MANIFEST_NAME).unlink(missing_ok=True)
        remove_tree(path)


def _half_deleted(run: RunDir) -> list[Path]:
    if not run.checkpoints.is_dir():
        return []
    return [
        path
        for path in run.checkpoints.iterdir()
        if manifest.parse_aside(path.name, manifest.DELETING) is not None and not carries(path)
    ]

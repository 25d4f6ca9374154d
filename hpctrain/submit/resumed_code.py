"""Which code a resume runs: the copy that the run has, or the checkout as it is now.

A run's own copy goes on by default, so that an edit in the checkout changes no run unasked. The
code of now is taken where it is asked for, where a program is named behind `--`, and where the
run has ended by an error of its program before any step was done: nothing was trained by the old
code, and what the user has corrected is meant. tests/unit/submit/test_resumed_code.py holds the
promises.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base.records import EndReason
from hpctrain.errors import UsageError
from hpctrain.submit.snapshot import Checkout, find_checkout, plan_snapshot, take_snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.history.run_history import RunHistory
    from hpctrain.run.layout import RunDir
    from hpctrain.settings.spec import Entry, Snapshot, Spec

SHOWN = 3


@dataclass(frozen=True)
class CodeChoice:
    """What a resume runs.

    Attributes:
        spec: With the program that was named.
        checkout: What is to be copied into the run before its job starts; None for nothing.
        line: Which code it is, for the user.
        changed: The same for the ledger; "" where nothing is other than before.
        notes: What the user should know besides.
    """

    spec: Spec
    checkout: Checkout | None
    line: str
    changed: str = ""
    notes: tuple[str, ...] = ()


def choose_code(
    run: RunDir,
    spec: Spec,
    history: RunHistory,
    *,
    program: Sequence[str] = (),
    new_code: bool = False,
    environ: Mapping[str, str],
) -> CodeChoice:
    """Choose what the next attempt runs. Writes nothing.

    Args:
        run: The run.
        spec: With the settings of the resume.
        history: Of the run.
        program: A program with its arguments, in the place of the run's; none leaves it.
        new_code: The checkout as it is now.
        environ: The user's.

    Raises:
        NotFound: there is no such program.
        UsageError: it cannot run; or new code was asked for, and there is none.
    """
    if program:
        return _of_program(spec, program, environ)
    if spec.entry.kind == "recipe":
        if new_code:
            raise UsageError("--new-code: the shipped recipe is installed code, no run has a copy")
        return CodeChoice(spec, None, "the shipped recipe")
    if spec.snapshot is None:
        note = ("--new-code has no effect: the run has no copy of its code",) if new_code else ()
        return CodeChoice(spec, None, f"{_name(spec.entry)} as it is now (no copy)", notes=note)
    checkout = find_checkout(Path(spec.snapshot.root or spec.entry.cwd))
    if checkout is None and new_code:
        raise UsageError(
            f"--new-code: {spec.snapshot.root or spec.entry.cwd} is in no git checkout any more; "
            f"name the program: hpctrain resume {run.name} -- PROGRAM ARGS"
        )
    return _of_copy(run, spec, checkout, spec.snapshot, _why_new(history, new_code=new_code))


def _of_copy(
    run: RunDir, spec: Spec, checkout: Checkout | None, copy: Snapshot, why: str | None
) -> CodeChoice:
    """Choose between a run's copy and the checkout; `why` is None where the copy is wanted."""
    kept = f"the copy of commit {_commit(copy.commit)}"
    if checkout is None:
        return CodeChoice(spec, None, kept)
    differs = differing(run.snapshot, checkout)
    if not differs:
        return CodeChoice(spec, None, f"{kept}; your checkout is the same")
    if why is None:
        where = f"your checkout differs in {', '.join(differs[:SHOWN])}{_more(differs)}"
        return CodeChoice(spec, None, f"{kept}; {where}: --new-code takes it")
    fresh = replace(
        spec,
        entry=_in_checkout(spec.entry, run, checkout),
        beside={name: _in_checkout(one, run, checkout) for name, one in spec.beside.items()},
        snapshot=None,
    )
    line = f"your checkout as it is now ({_commit(checkout.commit)}{_edits(checkout)}){why}"
    return CodeChoice(fresh, checkout, line, changed=line)


def _why_new(history: RunHistory, *, new_code: bool) -> str | None:
    """Return why the checkout is taken, for the user's line; None where the copy is to go on."""
    if new_code:
        return ""
    attempts = history.attempts
    failed = bool(attempts) and attempts[-1].reason is EndReason.USER_ERROR
    if failed and not any(attempt.highest_step for attempt in attempts):
        return ", since the run's copy failed before its first step"
    return None


def _of_program(spec: Spec, program: Sequence[str], environ: Mapping[str, str]) -> CodeChoice:
    from hpctrain.scheduler.base import get_cluster
    from hpctrain.submit.checks import runs_inside
    from hpctrain.submit.program import read_program

    inside = runs_inside(spec.settings, get_cluster(spec.cluster))
    named = read_program(program, Path.cwd(), environ, inside=inside)
    # Its checkpoints' patterns and its data are relative to where it has always run.
    entry = replace(named.entry, cwd=spec.entry.cwd or named.entry.cwd)
    env = spec.env | {name: value for name, (value, _) in named.env.items()}
    plan = plan_snapshot(entry, "no" if spec.settings.run.snapshot == "no" else "auto")
    fresh = replace(spec, entry=entry, env=env, snapshot=None)
    words = " ".join([_name(entry), *entry.args])
    as_it_is = (
        f"a copy of it is taken, {_commit(plan.checkout.commit)}" if plan.checkout else "no copy"
    )
    return CodeChoice(
        fresh,
        plan.checkout,
        f"{words}, as it is now ({as_it_is})",
        changed=f"{words}, as it was then",
        notes=(*named.notes, *plan.notes),
    )


def take_code(run: RunDir, choice: CodeChoice) -> None:
    """Copy the code that was chosen into the run, in the place of the older copy, which stays.

    Only under the run's lock and while no job of the run is alive.

    Raises:
        ChecksFailed: it could not be written; the older copy is in its place again.
    """
    if choice.checkout is None:
        return
    number = 1 + sum(1 for _ in run.root.glob(f"{run.snapshot.name}-before-*"))
    older = run.snapshot.with_name(f"{run.snapshot.name}-before-{number}")
    has_older = run.snapshot.is_dir()
    if has_older:
        run.snapshot.rename(older)
    try:
        take_snapshot(run, choice.spec, choice.checkout)
    except BaseException:
        shutil.rmtree(run.snapshot, ignore_errors=True)
        if has_older:
            older.rename(run.snapshot)
        raise


def differing(copy: Path, checkout: Checkout) -> list[str]:
    """Return names of tracked files that are other than their copies, new or gone."""
    theirs = set()
    for folder, _, names in os.walk(copy):
        theirs |= {os.path.relpath(os.path.join(folder, name), copy) for name in names}  # noqa: PTH118 - many
    ours = set(checkout.files)
    both = ours & theirs
    changed = {name for name in both if not _is_same(checkout.root / name, copy / name)}
    made = {name for name in theirs - ours if name.endswith(".pyc") or "__pycache__" in name}
    return sorted(changed | (ours ^ theirs) - made)


def _is_same(ours: Path, copy: Path) -> bool:
    if ours.is_symlink() or copy.is_symlink():
        return True  # a link's target is translated in the copy
    try:
        return filecmp.cmp(ours, copy)
    except OSError:
        return False


def _in_checkout(entry: Entry, run: RunDir, checkout: Checkout) -> Entry:
    """The entry with its file in the checkout again."""
    path = Path(entry.path)
    if not path.is_relative_to(run.snapshot):
        return entry
    outside = [one for one in entry.python_path if not Path(one).is_relative_to(run.snapshot)]
    here = checkout.root / path.relative_to(run.snapshot)
    if not here.exists():
        raise UsageError(
            f"{here} is gone from your checkout; name the program: hpctrain resume {run.name} "
            "-- PROGRAM ARGS"
        )
    return replace(entry, path=str(here), python_path=outside)


def _name(entry: Entry) -> str:
    return entry.module or Path(entry.path).name


def _commit(commit: str) -> str:
    return commit[:8] or "no commit yet"


def _edits(checkout: Checkout) -> str:
    return " with uncommitted edits" if checkout.dirty else ""


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""

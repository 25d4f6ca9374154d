"""Resume a run that is not running: choose its checkpoint, code and nodes, show them, submit.

The run's own copy of the code runs by default. The checkout runs where it is asked for, where a
program stands behind `--`, and where an error of the program ended the run before any step.
`ResumePlan` is what a resume would do, as data: which checkpoint, mesh and batch arithmetic.
tests/unit/submit/test_site_submit.py, test_resumed_code.py, tests/unit/plan/test_mesh.py and
tests/slurm/test_elastic.py hold the promises.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.store import find
from hpctrain.checkpoint.store.find import CheckpointChoice, refuse_to_forget
from hpctrain.cluster.scheduler.base import get_cluster
from hpctrain.core.base.mesh import Mesh, axes_text, plan_micro_batches
from hpctrain.core.base.records import EndReason, Skipped
from hpctrain.core.base.text import count, in_nodes
from hpctrain.core.settings.schema import EngineSettings, Settings
from hpctrain.errors import UsageError, WrongState
from hpctrain.launch.after import Awaited, check_after, redirect_followers, take_beside
from hpctrain.launch.change import ResumeRequest, change_spec
from hpctrain.launch.checks import (
    check_sealed,
    memory_notes,
    plan_meshes,
    runs_inside,
    with_own_places,
)
from hpctrain.launch.launch import kept_out, kept_out_notes, launch
from hpctrain.launch.live_job import as_own_run, refuse_alive
from hpctrain.launch.program import read_program
from hpctrain.launch.snapshot import Checkout, find_checkout, plan_snapshot, take_snapshot
from hpctrain.ledger.history.progress import NO_STEP, reported
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.plan.mesh import passes_of
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import TrainingDone
from hpctrain.ledger.run.fence import look_anew

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.checkpoint.sealed.files import Seal
    from hpctrain.core.settings.spec import Entry, Snapshot, Spec
    from hpctrain.launch.environment_archive import ShowProgress
    from hpctrain.launch.shape import ShapedJob
    from hpctrain.ledger.run.layout import RunDir


def plan_resume(
    run: RunDir, spec: Spec, from_step: int | None, *, goes_further: bool = False
) -> ResumePlan:
    """What the next attempt will find, without reading the shards' bytes (the ranks do, at load).

    `goes_further`: it runs other code or arguments than before, and may do more than was done.

    Raises:
        NoCheckpoint: the step that was asked for has no whole checkpoint; or the run has saved and
            there is none at all.
        FileSystemFault: nobody can say which checkpoint would be loaded.
        OtherFormat: it has a format of another hpctrain.
        WrongState, UsageError: the run is done; some number of nodes has no mesh.
    """
    events = ledger.read(run)
    is_recipe = spec.entry.kind == "recipe"
    if from_step is None and not goes_further:
        _refuse_done(run, spec, events)
    look_anew(run.root, run.checkpoints)
    own, looked = _sealed_choice(run, from_step)
    choice = find.choose(run, at_step=from_step) if own is None else CheckpointChoice(None)
    checkpoint = choice.checkpoint
    if checkpoint is None and own is None and from_step is None:
        refuse_to_forget(run, choice.skipped)
        _refuse_lost_seals(run, spec, events)
    manifest = checkpoint.manifest if checkpoint is not None else None
    taken = (checkpoint.step, checkpoint.path.name) if checkpoint else None
    _, found_meshes, _ = plan_meshes(spec.settings, spec.origins, None, is_recipe=is_recipe)
    ranks = spec.settings.slurm.ranks()
    sizes = [
        NodeMesh(nodes, ranks, mesh, batch_text(spec.settings, mesh) if is_recipe else "")
        for nodes, mesh in sorted(found_meshes.items())
    ]
    history = RunHistory.of(events)
    not_known = NO_STEP if reported(history).is_silent and not (is_recipe or checkpoint) else ""
    step = checkpoint.step if checkpoint else None if not_known else 0
    return ResumePlan(
        run=run.name,
        step=own.step if own is not None else step,
        checkpoint=own.path if own is not None else checkpoint.path.name if checkpoint else None,
        saved_world_size=manifest.world_size if manifest else None,
        saved_engine=manifest.engine if manifest else None,
        saved_mesh=manifest.mesh if manifest else None,
        engine=spec.settings.engine.kind,
        looked_at=looked or looked_at(taken, choice.skipped),
        meshes=sizes,
        not_known=not_known,
        resume_args=spec.settings.run.resume_args,
        has_mesh=is_recipe or manifest is not None or _has_mesh(spec, history),
    )


def _has_mesh(spec: Spec, history: RunHistory) -> bool:
    """Whether a program is known to use an engine of ours: it was asked for, or has said so."""
    is_asked = spec.settings.engine != EngineSettings()
    return is_asked or any(attempt.mesh is not None for attempt in history.attempts)


def _refuse_done(run: RunDir, spec: Spec, events: Sequence[ledger.Event]) -> None:
    """Refuse a run that has done what it was to do, with what it needs to continue."""
    ends = [event.fact.step for event in events if isinstance(event.fact, TrainingDone)]
    is_script = spec.entry.kind != "recipe"
    if not ends or not (is_script or (ends[-1] or 0) >= spec.settings.train.steps):
        return
    step = ends[-1]
    anew = f"name the program with what it is to do: hpctrain resume {run.typed} -- PROGRAM ARGS"
    if step is None:  # a program that counts no steps with us
        raise WrongState(f"{run.name} is done: its program has ended; to run it on, {anew}")
    more = f"to train on, {anew}" if is_script else "to train on, raise --set train.steps=N"
    raise WrongState(f"{run.name} is done (step {step}); {more}, or go back with --from STEP")


def _sealed_choice(run: RunDir, from_step: int | None) -> tuple[Seal | None, list[dict[str, Any]]]:
    """Of a program with checkpoints of its own: what its next start is given, and what not."""
    from hpctrain.checkpoint.sealed import seals
    from hpctrain.checkpoint.sealed.resume import glance

    if find.steps(run) or not seals.has_any(run):
        return None, []
    taken, skipped = glance(run, at_step=from_step)
    rows: list[dict[str, Any]] = [
        {"step": row.step, "name": row.name, "taken": False, "why": row.reason} for row in skipped
    ]
    if taken is None or taken.stored.seal is None:
        return None, []
    seal = taken.stored.seal
    own = {"step": seal.step, "name": seal.path, "taken": True, "why": "newest that was registered"}
    return seal, [*rows, own]


def _refuse_lost_seals(run: RunDir, spec: Spec, events: list[ledger.Event]) -> None:
    """Where the agent could seal what lies there once more, the next start decides."""
    if not spec.settings.checkpoint.sealed:
        from hpctrain.checkpoint.sealed.resume import refuse_lost_seals

        refuse_lost_seals(run, RunHistory.of(events))


@dataclass(frozen=True)
class PreparedResume:
    """A resume that could be started."""

    spec: Spec
    plan: ResumePlan
    notes: list[str]
    """What the user should know."""
    exclude: list[str]
    """Nodes that the job is kept off."""
    code: CodeChoice
    """Which code it runs."""
    awaited: list[Awaited] = field(default_factory=list)
    """Runs for whose jobs its own would wait."""
    shaped: ShapedJob | None = None
    """The shape that was chosen for its job; None where the user has said it."""


def prepare_resume(
    run: RunDir, spec: Spec, request: ResumeRequest, environ: Mapping[str, str]
) -> PreparedResume:
    """Choose what the run continues with. Writes nothing.

    `spec` is as it was submitted.

    Raises:
        RunAlive: a job of the run may still write; with the job and what to do.
        HpctrainError: see `change_spec` and `plan_resume`.
    """
    changed_spec, notes = change_spec(spec, request)
    refuse_alive(run, changed_spec)
    if changed_spec.settings.evaluate.script or spec.beside:
        notes += take_beside(changed_spec, environ, before=spec)
    own, more = as_own_run(run, changed_spec)
    history = RunHistory.read(run, marks="few")
    code = choose_code(
        run, own, history, environ=environ,
        program=request.program, new_code=request.new_code,
    )  # fmt: skip
    entry, settings, env = with_own_places(
        code.spec.entry, code.spec.settings, code.spec.env, run.root
    )
    code = replace(code, spec=replace(code.spec, entry=entry, settings=settings, env=env))
    own = code.spec
    check_sealed(own.settings, own.entry.cwd, run.root, own.after)
    plan = plan_resume(run, own, request.from_step, goes_further=bool(code.changed))
    bad = kept_out(run, own, environ)
    notes += [*more, *code.notes, *kept_out_notes(bad)]
    notes += memory_notes(own.settings, get_cluster(own.cluster), _state_bytes(history))
    waits = check_after(run.root, own)
    if own.settings.shape.choose == "no":
        return PreparedResume(own, plan, notes, list(bad), code, waits)
    from hpctrain.launch.shape import choose_for

    shaped = choose_for(own, run, history=history)
    notes += shaped.notes if shaped else ()
    return PreparedResume(own, plan, notes, list(bad), code, waits, shaped)


def _state_bytes(history: RunHistory) -> int | None:
    """The size of a run's newest checkpoint, which is that of its state; None before the first."""
    sizes = (save.size_bytes for save in reversed(history.saves) if save.kind == "saved")
    return next((nbytes for nbytes in sizes if nbytes), None)


def resume_run(
    run: RunDir,
    prepared: PreparedResume,
    from_step: int | None,
    progress: ShowProgress | None = None,
) -> tuple[str, list[str]]:
    """Start the run's next job, and have those who wait for the run wait for it.

    An evaluation that is repeated is asked for on both sides of the start, so that nobody prunes
    what it is to read: until the job is known, somebody may find it over, as it was before.

    See `launch` for what it raises, and shows by `progress`.

    Returns:
        The job's id, and what became of the runs that are to follow.
    """
    from hpctrain.launch.evaluations import ask_again, look_after

    spec = prepared.spec
    notes: list[str] = []
    if spec.evaluates is not None:
        ask_again(spec.evaluates)
    job_id = launch(
        run,
        spec,
        by="resume",
        from_step=from_step,
        exclude=prepared.exclude,
        notes=notes,
        progress=progress,
        changed=prepared.code.changed,
        under_lock=lambda: take_code(run, prepared.code),
        shaped=prepared.shaped,
    )
    if spec.evaluates is not None:
        ask_again(spec.evaluates)
    notes += redirect_followers(run)
    if spec.beside:
        notes += look_after(run, spec)
    return job_id, notes


SHOWN = 3


@dataclass(frozen=True)
class CodeChoice:
    """What a resume runs.

    `checkout` is to be copied into the run before its job starts. `line` is for the user, `changed`
    for the ledger, "" where nothing is other than before.
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

    `program` stands in the place of the run's; none leaves it. `new_code` is the checkout as it is
    now.

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
            f"name the program: hpctrain resume {run.typed} -- PROGRAM ARGS"
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
    """Return why the checkout is taken, for the user's line; None where the copy is to continue."""
    if new_code:
        return ""
    attempts = history.attempts
    failed = bool(attempts) and attempts[-1].reason is EndReason.USER_ERROR
    if failed and not any(attempt.highest_step for attempt in attempts):
        return ", since the run's copy failed before its first step"
    return None


def _of_program(spec: Spec, program: Sequence[str], environ: Mapping[str, str]) -> CodeChoice:
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
            f"{here} is gone from your checkout; name the program: hpctrain resume {run.typed} "
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


NONE_YET = "none yet: starts from the beginning"


@dataclass(frozen=True)
class NodeMesh:
    """The mesh at one number of nodes."""

    nodes: int
    ranks_per_node: int
    mesh: Mesh
    batch: str = ""
    """How the global batch is cut; "" for a script of the user's own."""


@dataclass(frozen=True)
class ResumePlan:
    """What `hpctrain resume` is about to do."""

    run: str
    step: int | None
    """None where the program continues by itself, and nobody knows from where."""
    checkpoint: str | None
    saved_world_size: int | None
    saved_engine: str | None
    saved_mesh: dict[str, Any] | None
    """Axes and sizes; empty for what was imported."""
    engine: str
    looked_at: list[dict[str, Any]]
    """Every checkpoint that was looked at: step, name, taken, why."""
    meshes: list[NodeMesh]
    """At the fewest and at the most nodes."""
    not_known: str = ""
    """Why it is not known where the run continues and how its ranks stand."""
    resume_args: str = ""
    has_mesh: bool = True
    """Its program is known to use an engine of hpctrain's, so that its ranks form a mesh."""


def batch_text(settings: Settings, mesh: Mesh) -> str:
    """How the recipe's fixed global batch is cut on a mesh; ranks of a tp or pp group share one."""
    batch, ranks = settings.train.global_batch, mesh.data_ranks
    passes = passes_of(settings.engine, mesh)
    plan = plan_micro_batches(batch, ranks, settings.train.micro_batch, passes)
    is_even = batch % (ranks * plan.micro_batches) == 0
    return (
        f"{batch} = {count(ranks, 'data rank')} x {count(plan.micro_batches, 'pass')} of up to "
        f"{plan.largest_piece}"
        f"{'' if is_even else ', shares differ by one sample (the loss is weighted)'}"
    )


def looked_at(taken: tuple[int, str] | None, skipped: Sequence[Skipped]) -> list[dict[str, Any]]:
    """Every checkpoint that was looked at, newest first, with what became of it."""
    rows: list[dict[str, Any]] = [
        {"step": s.step, "name": s.name, "taken": False, "why": s.reason} for s in skipped
    ]
    if taken is not None:
        step, name = taken
        rows.append({"step": step, "name": name, "taken": True, "why": "newest complete one"})
    return sorted(rows, key=lambda row: -int(row["step"]))


def as_text(plan: ResumePlan) -> str:
    """The plan as people read it."""
    lines = [f"run          {plan.run}"]
    lines.extend(
        f"checkpoint   {'takes' if row['taken'] else 'skips'} {row['name']}: {row['why']}"
        for row in plan.looked_at
    )
    if not plan.looked_at:
        how = "the program decides where it resumes"
        if "{" in plan.resume_args:  # filled in by the agent, once the run's files are still
            how = f"the newest that is registered when it starts ({plan.resume_args})"
        elif plan.resume_args:
            how = f"the program resumes by its arguments ({plan.resume_args})"
        none = f"not known ({plan.not_known}): {how}"
        lines.append(f"checkpoint   {none if plan.not_known else NONE_YET}")
    if plan.saved_world_size is not None:
        lines.append(f"saved by     {count(plan.saved_world_size, 'rank')}, {plan.saved_engine}")
    for node_mesh in plan.meshes:
        ranks = f"{in_nodes([node_mesh.nodes])} x {count(node_mesh.ranks_per_node, 'rank')}"
        if plan.not_known or not plan.has_mesh:
            lines.append(f"ranks        {ranks}")
            continue
        lines.append(
            f"mesh         {ranks}: {plan.engine}, {node_mesh.mesh.text}"
            f"{_was(plan, node_mesh.mesh)}"
        )
        if node_mesh.batch:
            lines.append(f"batch        {node_mesh.batch}")
    return "\n".join(lines)


def _was(plan: ResumePlan, mesh: Mesh) -> str:
    """The checkpoint's mesh, where this is another."""
    if not plan.saved_mesh or (plan.saved_engine, plan.saved_mesh) == (plan.engine, mesh.as_dict()):
        return ""
    return f"; was {plan.saved_engine}, {axes_text(plan.saved_mesh)}"

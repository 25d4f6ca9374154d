"""Going on with a run that is not running: choose, show, submit.

tests/unit/submit/test_site_submit.py and tests/slurm/test_elastic.py hold the promises.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.store import find
from hpctrain.checkpoint.store.find import CheckpointChoice, refuse_to_forget
from hpctrain.errors import UsageError
from hpctrain.history.run_history import RunHistory
from hpctrain.history.telling import NO_STEP, telling
from hpctrain.plan.resume import ResumePlan, batching, by_nodes, looked_at
from hpctrain.run import events as ledger
from hpctrain.run.event_types import TrainingDone
from hpctrain.run.fence import look_anew
from hpctrain.scheduler.base import get_cluster
from hpctrain.settings.check import check, engine_flags, profile_flags
from hpctrain.settings.layers import flag_layer, resolve
from hpctrain.settings.secrets import secret_warnings, secrets_in
from hpctrain.site.preset import site_of
from hpctrain.submit.checks import (
    check_hooks_here,
    check_sealed,
    check_versions,
    plan_meshes,
    take_ds_config,
)
from hpctrain.submit.launch import kept_out, kept_out_notes, launch
from hpctrain.submit.live_job import refuse_alive
from hpctrain.submit.own_job import as_own_run
from hpctrain.submit.site_choice import changed, take_locks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.checkpoint.sealed.manifest import Seal
    from hpctrain.run.layout import RunDir
    from hpctrain.scheduler.base import Accounting
    from hpctrain.settings.schema import Settings
    from hpctrain.settings.spec import Spec
    from hpctrain.site.preset import Site

SAME_RUN = (
    "seed",
    "seq_len",
    "layers",
    "dim",
    "heads",
    "experts",
    "experts_per_token",
    "data",
    "data_limit_mb",
)  # fmt: skip
"""Of [train]: another value would be another model, or other samples."""


@dataclass(frozen=True)
class ResumeRequest:
    """What `hpctrain resume` was asked; None stands for "as before"."""

    flags: Mapping[str, tuple[str, object]]
    sets: Sequence[str] = ()
    from_step: int | None = None
    allow_locked: bool = False
    """The user may change what the site's admins have locked; it is recorded."""
    accounting: Accounting | None = None
    """Whom to ask for the user's accounts."""
    ask_accounting: bool = False
    """Where nobody is named, ask the scheduler's own; otherwise its refusal must do."""
    alone: bool = False
    """One process will train, whatever the nodes are set to."""


def resume_request(
    slurm: Mapping[str, object],
    sets: Sequence[str] = (),
    from_step: int | None = None,
    *,
    engine: str | None = None,
    mesh: Mapping[str, str] | None = None,
    profile: Mapping[str, object] | None = None,
    nsys: int | None = None,
    allow_locked: bool = False,
) -> ResumeRequest:
    """What was asked, from the flags; None was not given.

    Args:
        slurm: Keys of [slurm] with their values.
        sets: What stood behind each `--set`.
        from_step: Go on from this checkpoint.
        engine: As `--engine`.
        mesh: What `parse_mesh` made of `--mesh`.
        profile: What `parse_profile` made of `--profile`.
        nsys: As `--nsys`.
        allow_locked: See `ResumeRequest`.
    """
    changes = {f"slurm.{key}": (f"--{key.replace('_', '-')}", slurm[key]) for key in slurm}
    return ResumeRequest(
        changes | engine_flags(engine, mesh) | profile_flags(profile, nsys),
        sets,
        from_step,
        allow_locked=allow_locked,
        ask_accounting=True,
    )


def change_spec(spec: Spec, request: ResumeRequest) -> tuple[Spec, list[str]]:
    """The run's settings with what was asked laid over them; and what the user should know.

    The preset of the submit holds, whatever the site's files say by now; what was chosen from its
    limits is chosen anew. A ds_config.json that is named anew is read, relative to the working
    directory.

    Raises:
        NotFound: there is no such ds_config.json.
        UsageError: an unknown or ill-typed setting, one that would make it another run, nodes
            without a mesh, or a job that the site does not take.
    """
    layer = flag_layer(request.flags, request.sets)
    below, below_origins = spec.given()
    given, origins = resolve([layer], base=below, origins=below_origins)
    chosen = check(given, origins)
    notes = chosen.notes + check_hooks_here(
        given, origins, Path(spec.entry.cwd or Path.cwd()), python=spec.python
    )
    unlocked, is_recipe = list(spec.unlocked), spec.entry.kind == "recipe"
    site, cluster = site_of(spec), get_cluster(spec.cluster)
    if site is not None:
        site_notes, more = _take_locks(spec, site, given, origins, request)
        notes += site_notes
        unlocked += [path for path in more if path not in unlocked]
        ask = request.accounting or (cluster.accounting() if request.ask_accounting else None)
        now = chosen.upon(given, origins)
        here = cluster.check(*now, site, is_script=not is_recipe, accounting=ask)
        notes += here.notes
        chosen += here
    settings, origins = chosen.upon(given, origins)
    notes += check_versions(settings, cluster.setup_lines(site), python=spec.python)
    _refuse_another_run(spec, settings, origins)
    settings, planned, plan_notes = plan_meshes(
        settings, origins, None, is_recipe=is_recipe, alone=request.alone
    )
    ranks = [mesh.data_ranks for mesh in planned.values()]
    if settings.engine.kind.startswith("zero"):
        settings, ds_notes = take_ds_config(
            settings, Path.cwd(), is_recipe=is_recipe, data_ranks=ranks
        )
        notes += ds_notes
    changes = list(chosen.changes)
    fresh = replace(spec, settings=settings, origins=origins, chosen=changes, unlocked=unlocked)
    before = {secret[1:] for secret in secrets_in(spec)}
    secrets = [secret for secret in secrets_in(fresh) if secret[1:] not in before]
    return fresh, notes + plan_notes + secret_warnings(secrets)


def _refuse_another_run(spec: Spec, settings: Settings, origins: Mapping[str, str]) -> None:
    for name in SAME_RUN:
        before, now = getattr(spec.settings.train, name), getattr(settings.train, name)
        if before != now:
            raise UsageError(
                f"train.{name} was {before!r} and cannot become {now!r} on the way "
                f"({origins[f'train.{name}']}): weights or sample order would not fit; "
                "start a new run"
            )


def _take_locks(
    spec: Spec, site: Site, given: Settings, origins: Mapping[str, str], request: ResumeRequest
) -> tuple[list[str], list[str]]:
    """What the user should know, and the locked paths that this resume changes."""
    changes = changed(site, given, origins, {}, {})
    new = {path: origin for path, origin in changes.items() if path not in spec.unlocked}
    # Which file overrides which was settled at submit; only what is new can be refused.
    return take_locks(replace(site, overridden={}), new, allow=request.allow_locked)


def plan_resume(run: RunDir, spec: Spec, from_step: int | None) -> ResumePlan:
    """What the next attempt will find, without reading the shards' bytes (the ranks do, at load).

    Raises:
        NoCheckpoint: the step that was asked for has no whole checkpoint; or the run has saved and
            there is none at all.
        FileSystemFault: nobody can say which checkpoint would be loaded.
        NewerFormat: a newer hpctrain has written it.
        UsageError: the run is done, or some number of nodes has no mesh.
    """
    events = ledger.read(run)
    ends = [event.fact.step for event in events if isinstance(event.fact, TrainingDone)]
    is_script = spec.entry.kind != "recipe"
    if ends and from_step is None and (is_script or (ends[-1] or 0) >= spec.settings.train.steps):
        if ends[-1] is None:  # a program that counts no steps with us
            raise UsageError(f"{run.name} is done: its program has ended; submit it anew")
        raise UsageError(
            f"{run.name} is done (step {ends[-1]}); to train on, raise --set train.steps=N, "
            "or go back with --from STEP"
        )
    look_anew(run.root, run.checkpoints)
    own, looked = _sealed_choice(run, from_step)
    choice = find.choose(run, at_step=from_step) if own is None else CheckpointChoice(None)
    checkpoint = choice.checkpoint
    if checkpoint is None and own is None and from_step is None:
        refuse_to_forget(run, [asdict(skipped) for skipped in choice.skipped])
        _refuse_lost_seals(run, spec, events)
    manifest = checkpoint.manifest if checkpoint is not None else None
    is_recipe = spec.entry.kind == "recipe"
    _, found_meshes, _ = plan_meshes(spec.settings, spec.origins, None, is_recipe=is_recipe)
    sizes = by_nodes(found_meshes, spec.settings.slurm.ranks())
    words = telling(RunHistory.of(events))
    not_known = NO_STEP if words.is_silent and is_script and not checkpoint else ""
    step = checkpoint.step if checkpoint else None if not_known else 0
    return ResumePlan(
        run=run.name,
        step=own.step if own is not None else step,
        checkpoint=own.path if own is not None else checkpoint.path.name if checkpoint else None,
        saved_world_size=manifest.world_size if manifest else None,
        saved_engine=manifest.engine if manifest else None,
        saved_mesh=manifest.mesh if manifest else None,
        engine=spec.settings.engine.kind,
        looked_at=looked
        or looked_at(
            (checkpoint.step, checkpoint.path.name) if checkpoint else None, choice.skipped
        ),
        meshes=sizes,
        batching=batching(spec.settings, sizes) if is_recipe else [],
        not_known=not_known,
    )


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
    own = {"step": seal.step, "name": seal.path, "taken": True, "why": "newest that was sealed"}
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


def prepare_resume(
    run: RunDir, spec: Spec, request: ResumeRequest, environ: Mapping[str, str]
) -> PreparedResume:
    """Choose what the run goes on with. Writes nothing.

    Args:
        run: The run.
        spec: As it was submitted.
        request: What was asked.
        environ: The user's.

    Raises:
        RunAlive: a job of the run may still write; with the job and what to do.
        HpctrainError: see `change_spec` and `plan_resume`.
    """
    changed_spec, notes = change_spec(spec, request)
    refuse_alive(run, changed_spec)
    own, more = as_own_run(run, changed_spec)
    check_sealed(own.settings, own.entry.cwd, run.root)
    plan = plan_resume(run, own, request.from_step)
    bad = kept_out(run, own, environ)
    return PreparedResume(own, plan, [*notes, *more, *kept_out_notes(bad)], list(bad))


def resume_run(run: RunDir, prepared: PreparedResume, from_step: int | None) -> str:
    """Start the run's next job; its id. See `launch` for what it raises."""
    return launch(run, prepared.spec, by="resume", from_step=from_step, exclude=prepared.exclude)

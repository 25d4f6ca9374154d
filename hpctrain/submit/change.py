"""A run's spec with other settings laid over it, checked as a submit checks its own.

For a resume, and for jobs beside a run. tests/unit/submit/test_chosen.py, test_site_submit.py and
test_side_job.py hold the promises.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError
from hpctrain.scheduler.base import get_cluster
from hpctrain.settings.check import check, engine_flags, profile_flags
from hpctrain.settings.layers import flag_layer, resolve
from hpctrain.settings.secrets import secret_warnings, secrets_in
from hpctrain.site.preset import site_of
from hpctrain.submit.checks import (
    check_hooks_here,
    check_versions,
    plan_meshes,
    ranks_python,
    take_ds_config,
)
from hpctrain.submit.site_choice import changed, take_locks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.scheduler.base import Accounting
    from hpctrain.settings.layers import Layer
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
    program: Sequence[str] = ()
    """A program with its arguments, in the place of the run's."""
    new_code: bool = False
    """Run the checkout as it is now, not the copy that the run has."""


def resume_request(
    job: Mapping[str, tuple[str, object]],
    sets: Sequence[str] = (),
    from_step: int | None = None,
    *,
    engine: str | None = None,
    mesh: Mapping[str, str] | None = None,
    profile: Mapping[str, object] | None = None,
    nsys: int | None = None,
    allow_locked: bool = False,
    program: Sequence[str] = (),
    new_code: bool = False,
) -> ResumeRequest:
    """What was asked, from the flags; None was not given.

    Args:
        job: Of [slurm] and [alive], as `layers.flag_layer` takes them.
        sets: What stood behind each `--set`.
        from_step: Go on from this checkpoint.
        engine: As `--engine`.
        mesh: What `parse_mesh` made of `--mesh`.
        profile: What `parse_profile` made of `--profile`.
        nsys: As `--nsys`.
        allow_locked: See `ResumeRequest`.
        program: See `ResumeRequest`.
        new_code: See `ResumeRequest`.
    """
    return ResumeRequest(
        {**job, **engine_flags(engine, mesh), **profile_flags(profile, nsys)},
        sets,
        from_step,
        allow_locked=allow_locked,
        ask_accounting=True,
        program=program,
        new_code=new_code,
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
    return resettle(spec, [flag_layer(request.flags, request.sets)], request)


def resettle(spec: Spec, layers: Sequence[Layer], request: ResumeRequest) -> tuple[Spec, list[str]]:
    """The same with layers of any making, lowest first, in the place of the request's flags."""
    below, below_origins = spec.given()
    given, origins = resolve(layers, base=below, origins=below_origins)
    chosen = check(given, origins)
    python = ranks_python(given, get_cluster(spec.cluster), spec.python)
    folder = Path(spec.entry.cwd or Path.cwd())
    notes = chosen.notes + check_hooks_here(given, origins, folder, python=python)
    unlocked, is_recipe = list(spec.unlocked), spec.entry.kind == "recipe"
    site, cluster = site_of(spec), get_cluster(spec.cluster)
    ask = request.accounting or (cluster.accounting() if request.ask_accounting else None)
    if site is not None:
        site_notes, more = _take_locks(spec, site, given, origins, request)
        notes += site_notes
        unlocked += [path for path in more if path not in unlocked]
        now = chosen.upon(given, origins)
        here = cluster.check(*now, site, is_script=not is_recipe, accounting=ask)
        notes += here.notes
        chosen += here
    settings, origins = chosen.upon(given, origins)
    notes += check_versions(settings, cluster.setup_lines(site), python=python)
    settings, container_notes = cluster.check_container(
        settings, origins, site, folder=folder, environ=os.environ, accounting=ask
    )
    notes += container_notes
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

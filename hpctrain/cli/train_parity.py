"""`hpctrain train --parity N`: whether the engine trains as one process does.

tests/engines/test_parity.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hpctrain.errors import ChecksFailed
from hpctrain.plan.mesh import plan_mesh, shape_of
from hpctrain.plan.parity import least_ranks, summary
from hpctrain.settings.check import check
from hpctrain.settings.layers import flag_layer, resolve
from hpctrain.settings.spec import load_spec
from hpctrain.submit.checks import take_ds_config
from hpctrain.submit.prepare import SubmitRequest, choose_site, flags_of, read_config
from hpctrain.terminal import echo_json, echo_warning

if TYPE_CHECKING:
    from hpctrain.base.mesh import Mesh
    from hpctrain.plan.parity import ParityResult, StepRecord
    from hpctrain.run.layout import RunDir
    from hpctrain.settings.schema import Settings


def parity(
    request: SubmitRequest,
    existing: RunDir | None,
    *,
    steps: int,
    ranks: int | None,
    tolerance: float | None,
    as_json: bool,
) -> None:
    """Run the check and print what came out.

    Args:
        request: Where settings come from.
        existing: A run whose settings are to be checked instead.
        steps: How many steps.
        ranks: Processes of the engine; None for as few as the mesh can be made of.
        tolerance: Of a loss, relative; None for the precision's own.
        as_json: Print for programs.

    Raises:
        ChecksFailed: the engine trains otherwise.
        UsageError: the settings fit neither model, engine, nor machine.
        HpctrainError: a rank failed.
    """
    settings, origins = _settings(request, existing)
    chosen = check(settings, origins)
    settings, origins = chosen.upon(settings, origins)
    ranks = ranks or least_ranks(settings.engine)
    shape = shape_of(settings.train)
    mesh = plan_mesh(settings.engine, ranks, ranks, shape=shape, origins=origins)
    settings, more = take_ds_config(
        settings, request.cwd, is_recipe=True, data_ranks=[mesh.data_ranks]
    )
    notes = chosen.notes + more
    if settings.train.dropout:
        notes.append("train.dropout has no effect on --parity: ranks would differ by chance")
    for note in notes:
        echo_warning(note)
    from hpctrain.recipes.lm.parity import check_parity

    result = check_parity(settings, ranks=ranks, steps=steps, tolerance=tolerance)
    if as_json:
        echo_json(
            {
                "engine": settings.engine.kind,
                "ranks": ranks,
                "mesh": mesh.as_dict(),
                **result.as_dict(),
            }
        )
    else:
        click.echo(_title(settings, ranks, mesh))
        _echo_steps(result)
    if not result.holds:
        raise ChecksFailed(summary(result))
    if not as_json:
        click.echo(summary(result))


def _settings(request: SubmitRequest, existing: RunDir | None) -> tuple[Settings, dict[str, str]]:
    flags = flag_layer(flags_of(request), request.sets)
    if existing is not None:
        spec = load_spec(existing.spec)
        return resolve([flags], base=spec.settings, origins=spec.origins)
    config = read_config(request)
    site = choose_site(request, config, "local")
    layers = [*([site.layer] if site else []), *([config.layer] if config else []), flags]
    return resolve(layers)


def _title(settings: Settings, ranks: int, mesh: Mesh) -> str:
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.as_dict().items())
    return f"engine {settings.engine.kind} on {ranks} ranks ({axes}) against one process"


def _echo_steps(result: ParityResult) -> None:
    from hpctrain.drawing import echo_table

    def cells(record: StepRecord) -> tuple[str, str]:
        return f"{record.loss:.6f}", f"{record.norm:.6f}"

    rows = []
    for row in result.rows:
        (one, norm_one), (engine, norm) = cells(row.one), cells(row.engine)
        mark = "off" if row.off else ""
        rows.append((row.step, one, engine, f"{row.difference:.1e}", norm_one, norm, mark))
    header = ("step", "loss, one", "loss, engine", "difference", "norm, one", "norm, engine", "")
    echo_table(rows, header=header, right=range(6))

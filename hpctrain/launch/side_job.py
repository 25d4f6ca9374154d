"""A job beside a run, as an evaluation of its checkpoints: the run's settings, another program.

What it runs is found out when the run is submitted and kept in its spec (`Spec.beside`): by then
the files are there, and a mistake is told before anything was made. What it runs on are the keys of
its section (`nodes`, `ranks_per_node`, `gpus_per_node`, `time`, `partition`, `qos`), and the run's
own where these say nothing. tests/unit/submit/test_side_job.py holds the promises.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.scheduler.base import get_cluster
from hpctrain.core.base import clock
from hpctrain.core.settings.check import BOUNDED
from hpctrain.core.settings.fields import keys_of
from hpctrain.core.settings.layers import DEFAULT, Layer
from hpctrain.core.settings.schema import EvaluateSettings, Settings, replaced, value_at
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.launch.change import ResumeRequest, resettle
from hpctrain.launch.checks import runs_inside
from hpctrain.launch.program import read_program

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.cluster.scheduler.base import Accounting
    from hpctrain.core.settings.spec import Entry, Spec
    from hpctrain.launch.snapshot import Checkout

EVALUATE = "evaluate"
SECTIONS = (EVALUATE,)
"""Sections of settings that name the program of a job beside the run as their `script`."""
NOT_SEALED = (
    "evaluate: only hpctrain's own checkpoints are evaluated, not those of checkpoint.sealed"
)
PACKAGE = Path(__file__).resolve().parent.parent
"""Of hpctrain itself."""
_ALLOCATION = ("nodes", "ranks_per_node", "gpus_per_node", "time", "partition", "qos")
_RUNS_OWN = ("", -1)
_OF_THE_RUN_ALONE = (
    "alive.shrink",
    "alive.spares",
    "checkpoint.keep_best",
    "checkpoint.sealed",
    "environment.stage",
    *(f"evaluate.{key}" for key in keys_of(EvaluateSettings)),
    "profile.memory",
    "profile.nsys_rank",
    "profile.ranks",
    "profile.steps",
    "run.resume_args",
    "run.resume_if",
    "run.snapshot",
)
"""They are about the run's own program, or would make a job beside the job beside it."""
_MESH = tuple(f"engine.{axis}" for axis in BOUNDED)


def take_beside(
    spec: Spec,
    environ: Mapping[str, str],
    *,
    before: Spec | None = None,
    accounting: Accounting | None = None,
) -> list[str]:
    """Put the programs of all jobs beside the run into its spec, once each is known to work.

    Args:
        spec: The run's; changed.
        environ: The user's shell's, for its PATH.
        before: The same run's as it was, at a resume: what it names already is not looked for anew.
        accounting: Whom to ask for the user's accounts.

    Returns:
        What the user should know.

    Raises:
        NotFound: there is no such program.
        UsageError: it cannot run, or its job cannot be.
    """
    notes: list[str] = []
    kept, spec.beside = spec.beside, {}
    for section in SECTIONS:
        script = value_at(spec.settings, f"{section}.script")
        if not script:
            continue
        same = before is not None and value_at(before.settings, f"{section}.script") == script
        entry = kept.get(section) if same else None
        spec.beside[section] = entry or read_command(spec, section, environ)
        notes += side_spec(spec, section, name=spec.name, accounting=accounting)[1]
        if section == EVALUATE and spec.settings.checkpoint.sealed:
            notes.append(NOT_SEALED)
    return notes


def read_command(spec: Spec, section: str, environ: Mapping[str, str]) -> Entry:
    """What a section's `script` is to run, found as `submit` finds what stands behind `--`.

    Raises:
        NotFound: there is no such program.
        UsageError: it cannot run.
    """
    where = f"{spec.origins.get(f'{section}.script', DEFAULT)}: {section}.script"
    script = value_at(spec.settings, f"{section}.script")
    return read_script(spec, section, script, environ, where=where)


def read_script(
    spec: Spec, section: str, script: str, environ: Mapping[str, str], *, where: str
) -> Entry:
    """The same for a command line from elsewhere, which a message calls `where`."""
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise UsageError(f"{where} cannot be taken apart into words: {error}") from None
    if not words:
        raise UsageError(f"{where} has nothing but blanks; name a program, or leave it empty")
    inside = runs_inside(spec.settings, get_cluster(spec.cluster))
    try:
        program = read_program(words, Path(spec.entry.cwd), environ, inside=inside)
    except HpctrainError as error:
        raise type(error)(f"{where}: {error}") from None
    if program.env or program.asked:
        raise UsageError(
            f"{where} is {words[0]}'s command: name what it starts; {section}.nodes and "
            f"{section}.ranks_per_node say on how many ranks"
        )
    return program.entry


def side_spec(
    spec: Spec, section: str, *, name: str, accounting: Accounting | None = None
) -> tuple[Spec, list[str]]:
    """The spec of a job beside a run, checked as a submit checks its own. Writes nothing.

    Args:
        spec: The run's, with the job's program in `beside`.
        section: Whose program and allocation it has.
        name: The job's.
        accounting: Whom to ask for the user's accounts; None asks nobody.

    Returns:
        It, and what the user should know.

    Raises:
        UsageError: the site or the scheduler would not take such a job.
    """
    own = replace(
        spec,
        name=name,
        run_id=os.urandom(8).hex(),
        created=clock.now(),
        entry=spec.beside[section],
        beside={},
        after=[],
    )
    asked = _layer(spec, section)
    request = ResumeRequest({}, accounting=accounting)
    try:
        job, notes = resettle(own, [asked], request)
    except UsageError as error:
        mesh = {path: value_at(Settings(), path) for path in _MESH}
        if replaced(spec.settings, mesh) == spec.settings:
            raise
        # Its program may not spread the model at all, and then needs no mesh.
        job, notes = resettle(own, [asked, _as_layer(mesh, "default")], request)
        notes = [f"without the run's mesh: {error}", *notes]
    return job, [f"{section}: {note}" for note in notes]


def live_notes(spec: Spec, checkout: Checkout | None) -> list[str]:
    """Which programs beside a run are not in the copy of its code, but for our own."""
    from hpctrain.launch.snapshot import has_copy

    why = "" if checkout is None else ": it is not in the run's copy of the code"
    return [
        f"{section}: later edits of {Path(entry.path).name} count{why}"
        for section, entry in spec.beside.items()
        if entry.kind != "program"
        and not has_copy(entry.path, checkout)
        and not Path(entry.path).is_relative_to(PACKAGE)
    ]


def _layer(spec: Spec, section: str) -> Layer:
    """What the section says of the job's allocation, and what is not for a job beside the run."""
    defaults = Settings()
    values = {path: value_at(defaults, path) for path in _OF_THE_RUN_ALONE}
    values |= {"run.snapshot": "no"}
    for key in _ALLOCATION:
        given = value_at(spec.settings, f"{section}.{key}")
        if given not in _RUNS_OWN:
            values[f"slurm.{key}"] = given
    return _as_layer(values, section, spec.origins)


def _as_layer(
    values: Mapping[str, Any], section: str, origins: Mapping[str, str] | None = None
) -> Layer:
    tree: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        at, _, key = path.partition(".")
        tree.setdefault(at, {})[key] = value

    def where(at: str, key: str) -> str:
        origin = (origins or {}).get(f"{section}.{key}", DEFAULT)
        return f"{origin} ({section}.{key})" if at == "slurm" else DEFAULT

    return Layer(section, tree, where)

"""What `--then` runs after a run: a run of its own, which waits for it, on a small allocation.

tests/unit/submit/test_then.py and tests/slurm/test_after.py hold the promises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.errors import RunExists, UsageError
from hpctrain.submit.side_job import read_script, side_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hpctrain.scheduler.base import Accounting
    from hpctrain.settings.spec import Spec

THEN = "then"
_NAME_LENGTH = 100


def take_then(
    spec: Spec,
    scripts: Sequence[str],
    runs: Path,
    environ: Mapping[str, str],
    *,
    accounting: Accounting | None = None,
) -> tuple[list[Spec], list[str]]:
    """Put the programs into the run's spec, once each is known to work.

    Args:
        spec: The run's; changed.
        scripts: Command lines, each of which runs after the one before it.
        runs: The folder of all runs.
        environ: The user's shell's, for its PATH.
        accounting: Whom to ask for the user's accounts.

    Returns:
        The specs of the runs that are to follow, as they would be, and what the user should know.

    Raises:
        NotFound: there is no such program.
        RunExists: there is a run of such a name.
        UsageError: a program cannot run, or its job cannot be.
    """
    for at, script in enumerate(scripts):
        where = f"--then {script!r}"
        spec.beside[_key(at)] = read_script(spec, THEN, script, environ, where=where)
    following, notes = then_specs(spec, runs / spec.name, accounting=accounting)
    for name in (job.name for job in following):
        if len(name) > _NAME_LENGTH:
            raise UsageError(f"--then makes a run {name}, a name of more than {_NAME_LENGTH}")
        if (runs / name).exists():
            raise RunExists(f"{runs / name} exists, and --then makes a run of that name")
    return following, notes


def then_specs(
    spec: Spec, root: Path, *, accounting: Accounting | None = None
) -> tuple[list[Spec], list[str]]:
    """The runs that are to follow a run, one behind the other. Writes nothing.

    Args:
        spec: The run's, with their programs.
        root: The run's directory.
        accounting: Whom to ask for the user's accounts.
    """
    following: list[Spec] = []
    notes, before = list[str](), root
    while (key := _key(len(following))) in spec.beside:
        own = replace(spec, beside={THEN: spec.beside[key]})
        name = f"{root.name}-{key}"
        job, more = side_spec(own, THEN, name=name, accounting=accounting)
        following.append(replace(job, after=[str(before)]))
        notes += more
        before = root.parent / name
    return following, notes


def _key(at: int) -> str:
    """What the program is called in the spec, and its run behind the run's name."""
    return THEN if at == 0 else f"{THEN}-{at + 1}"

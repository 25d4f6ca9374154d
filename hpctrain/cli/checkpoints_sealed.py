"""What `hpctrain checkpoints` shows of a program's own checkpoints, and `checkpoints path`.

tests/unit/cli/test_checkpoints_sealed.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import complete_run, json_option

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hpctrain.checkpoint.sealed.resume import Looked
    from hpctrain.checkpoint.sealed.seals import StoredSeal
    from hpctrain.run.layout import RunDir


def rows(run: RunDir) -> list[dict[str, Any]]:
    """Every seal, newest first, with the state of its files by their sizes."""
    from hpctrain.checkpoint.sealed import resume

    return [_row(resume.look(stored)) for stored in of_step(run, None)]


def of_step(run: RunDir, step: int | None) -> list[StoredSeal]:
    """The seals of a step, or all of them, newest first."""
    from hpctrain.checkpoint.sealed import seals

    wanted = seals.listing(run)
    return [s for s in wanted if step is None or (s.seal is not None and s.seal.step == step)]


def _row(looked: Looked) -> dict[str, Any]:
    stored, seal = looked.stored, looked.stored.seal
    return {
        "name": stored.name,
        "step": None if seal is None else seal.step,
        "path": None if seal is None else seal.path,
        "created": None if seal is None else seal.created,
        "size_bytes": None if seal is None else seal.size,
        "files": None if seal is None else len(seal.files),
        "by": None if seal is None else seal.by,
        "copy": None if stored.copy is None else str(stored.copy),
        "state": looked.state,
        "why": "; ".join(looked.problems) or None,
    }


def echo_rows(
    sealed: Sequence[dict[str, Any]],
    when: Callable[[float | None], str | None],
    human: Callable[[int], str],
) -> None:
    """A table of them."""
    from hpctrain.drawing import echo_table

    cells = [
        (
            "?" if row["step"] is None else row["step"],
            when(row["created"]),
            None if row["size_bytes"] is None else human(row["size_bytes"]),
            row["path"] or row["name"],
            f"{_state(row)}",
        )
        for row in sealed
    ]
    echo_table(cells, header=("STEP", "WHEN", "SIZE", "SEALED", "STATE"), right=(0, 2))


def _state(row: dict[str, Any]) -> str:
    state = row["state"] if row["why"] is None else f"{row['state']}: {row['why']}"
    return f"{state}, with a copy" if row["copy"] else str(state)


def verdicts(
    wanted: Sequence[StoredSeal],
    *,
    deep: bool,
    threads: int,
    on_bytes: Callable[[int], object],
) -> list[dict[str, Any]]:
    """Check them; all problems of each. What its program has removed is no damage."""
    from hpctrain.checkpoint.sealed import resume

    checked = []
    for stored in wanted:
        looked = resume.look(stored, deep=deep, threads=threads, on_bytes=on_bytes)
        checked.append(
            _row(looked)
            | {
                "problems": list(looked.problems) if looked.is_damaged else [],
                "unreadable": list(looked.problems) if looked.state == "unreadable" else [],
            }
        )
    return checked


@click.command(
    "path",
    epilog="""\b
Examples:
  hpctrain checkpoints path lm-3            the program's newest whole checkpoint
  hpctrain checkpoints path lm-3 4000       that of a step
""",
)
@click.argument("run", shell_complete=complete_run)
@click.argument("step", type=click.IntRange(min=0), required=False)
@json_option
@click.pass_obj
def path_command(runs: Path, run: str, step: int | None, *, as_json: bool) -> None:
    """Print where the newest whole sealed checkpoint of a program lies.

    By sizes alone; a start reads every byte. Of one that the program has written over since, it is
    the run's own copy.
    """
    from hpctrain.checkpoint.sealed import resume
    from hpctrain.errors import NotFound
    from hpctrain.run.find_run import find_run
    from hpctrain.terminal import echo_json

    directory = find_run(run, runs=runs)
    looked, _ = resume.glance(directory, at_step=step)
    if looked is None or looked.stored.seal is None:
        raise NotFound(f"{directory.name} has no sealed checkpoints")
    seal = looked.stored.seal
    as_it_lies = resume.is_as_sealed(looked.stored)
    path = seal.path if as_it_lies else str(looked.stored.copy)
    if as_json:
        echo_json({"run": directory.name, "path": path, "step": seal.step})
        return
    click.echo(path)


def prune(run: RunDir, keep: int, *, is_idle: bool, dry_run: bool, as_json: bool) -> None:
    """Delete all sealed checkpoints but the newest whole ones; files that were not sealed stay.

    Args:
        run: The run.
        keep: How many whole ones stay.
        is_idle: Whether no attempt of the run lives.
        dry_run: Delete nothing.
        as_json: Tell it as JSON.

    Raises:
        RunAlive: its program may be loading or writing them.
        CheckpointError: one cannot be deleted.
    """
    from hpctrain.base.text import size
    from hpctrain.checkpoint.sealed import resume, seals
    from hpctrain.errors import RunAlive
    from hpctrain.terminal import echo_json

    if not is_idle and not dry_run:
        raise RunAlive(
            f"nothing of {run.name} was deleted: its program may be using its checkpoints; try "
            "again when the run has ended"
        )
    staying: list[StoredSeal] = []
    going: list[StoredSeal] = []
    for stored in seals.listing(run):
        looked = resume.look(stored)
        is_kept = looked.state == "unreadable" or (looked.state == "ok" and len(staying) < keep)
        (staying if is_kept else going).append(stored)
    paths = {stored.seal.path for stored in staying if stored.seal is not None}
    freed = sum(stored.seal.size for stored in going if stored.seal is not None)
    for stored in () if dry_run else going:
        if stored.seal is not None and stored.seal.path not in paths:
            seals.remove_files(stored)
        seals.remove(run, None, stored)
    if as_json:
        names = [stored.name for stored in going]
        echo_json({"run": run.name, "dry_run": dry_run, "freed_bytes": freed, "deleted": names})
        return
    for stored in going:
        path = stored.name if stored.seal is None else stored.seal.path
        click.echo(f"{path}  {'would go' if dry_run else 'deleted'}")
    tail = "; nothing was deleted (--dry-run)" if dry_run else ""
    click.echo(f"{len(going)} sealed of {run.name}, {size(freed)}{tail}")

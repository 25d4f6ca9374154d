"""`hpctrain checkpoints` and `evaluate`: what a run has saved, whether its bytes are as written."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from hpctrain.checkpoint.store import find, retention
from hpctrain.checkpoint.store.find import FoundCheckpoint, step_path
from hpctrain.cli.checkpoints_exchange import export_command, import_command
from hpctrain.cli.checkpoints_keep import (
    echo_sealed,
    path_command,
    pin_command,
    prune_command,
    rm_command,
    sealed_of_step,
    sealed_rows,
    sealed_verdicts,
    when,
)
from hpctrain.cli.options import (
    ask_to_act,
    complete_run,
    foreign_option,
    json_option,
    newest_to_act_on,
    own_runs_option,
    run_argument,
    runs_option,
    yes_option,
)
from hpctrain.cli.progress import progress
from hpctrain.core.base.text import size
from hpctrain.core.terminal import echo_json
from hpctrain.errors import ClusterError, FileSystemFault, NotFound, UsageError
from hpctrain.ledger.history.evaluations import due
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import CheckpointVerified, EvaluationAsked
from hpctrain.ledger.run.find_run import LATEST, find_run
from hpctrain.ledger.run.ownership import own_spec

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.core.settings.spec import Spec
    from hpctrain.launch.evaluations import Advanced
    from hpctrain.ledger.run.layout import RunDir

EXIT_DAMAGED = 7
READERS = 4


@click.group("checkpoints")
@runs_option
@click.pass_context
def command(ctx: click.Context, runs: Path) -> None:
    """List, verify, keep and delete a run's checkpoints.

    \b
    hpctrain checkpoints list gpt-a             checkpoints and their state
    hpctrain checkpoints verify gpt-a --deep    read every byte; exit code 7 on damage
    hpctrain checkpoints pin gpt-a 4000         keep it, whatever the settings are
    hpctrain checkpoints prune gpt-a --dry-run  what it would delete and free
    """  # noqa: D301 - click wants the control character
    ctx.obj = runs


for _command in (
    pin_command, prune_command, rm_command, path_command, export_command, import_command,
):  # fmt: skip
    command.add_command(_command)


@command.command("list")
@run_argument
@json_option
@own_runs_option
def list_command(runs: Path, run: str, *, as_json: bool) -> None:
    """List checkpoints, newest first, then those of the program itself.

    Compares sizes with the manifests; `verify` reads bytes.
    """
    directory = find_run(run, runs=runs)
    rows, sealed = _rows(directory), sealed_rows(directory)
    if as_json:
        echo_json({"run": directory.name, "checkpoints": rows, "sealed": sealed})
        return
    if not rows and not sealed:
        click.echo(f"{directory.name} has no checkpoints")
    if rows:
        _echo_rows(rows)
    if rows and sealed:
        click.echo()
    if sealed:
        echo_sealed(sealed)


def _echo_rows(rows: list[dict[str, Any]]) -> None:
    from hpctrain.core.drawing import echo_table
    from hpctrain.observe.status.event_lines import metrics_in_words

    judged = any(row["evaluation"] for row in rows)
    cells = [
        (
            row["step"],
            when(row["created"]),
            None if row["size_bytes"] is None else size(row["size_bytes"]),
            row["world_size"],
            row["engine"],
            *([metrics_in_words(row["evaluation"])] if judged else []),
            _state(row),
        )
        for row in rows
    ]
    header = ("STEP", "WHEN", "SIZE", "RANKS", "ENGINE", *["EVALUATION"] * judged, "STATE")
    echo_table(cells, header=header, right=(0, 2, 3))


@command.command("verify")
@run_argument
@click.argument("step", type=click.IntRange(min=0), required=False)
@click.option("--deep", is_flag=True, help="Read every byte and compare its digest.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Readers for --deep. [default: one for each core, 4 at most]",
)
@json_option
@own_runs_option
def verify_command(
    runs: Path,
    run: str,
    step: int | None,
    *,
    deep: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Check committed checkpoints, all or one; exit code 7 on damage.

    Without --deep it reads only manifests, chunk tables and file sizes. It changes no
    checkpoint: a run quarantines damaged ones. The ledger records what --deep verified.
    """
    directory = find_run(run, runs=runs)
    sealed = sealed_of_step(directory, step)
    if step is None:
        wanted = find.candidates(directory)
    else:
        only_sealed = sealed and step not in find.steps(directory)
        wanted = []
        if not only_sealed:
            find.require_known(directory, [step])
            wanted = [find.glance(directory, step)]
    threads = threads or min(READERS, os.cpu_count() or 1)
    verdicts = _verdicts(wanted, deep=deep, threads=threads)
    of_sealed = sealed_verdicts(sealed, deep=deep, threads=threads)
    damaged = sum(bool(verdict["problems"]) for verdict in verdicts + of_sealed)
    unreadable = sum(bool(verdict["unreadable"]) for verdict in verdicts + of_sealed)
    if deep:
        _note_verified(directory, verdicts)
    if as_json:
        facts = {"run": directory.name, "deep": deep, "damaged": damaged}
        facts["unreadable"] = unreadable
        echo_json(facts | {"checkpoints": verdicts, "sealed": of_sealed})
    elif not wanted and not sealed:
        click.echo(f"{directory.name} has no checkpoints")
    else:
        _echo_verdicts(verdicts + of_sealed)
        done = "every byte was read" if deep else "sizes and tables only, --deep reads every byte"
        refused = f", {unreadable} could not be read" if unreadable else ""
        click.echo(f"{len(wanted) + len(sealed)} verified ({done}), {damaged} damaged{refused}")
    if damaged or unreadable:
        click.get_current_context().exit(EXIT_DAMAGED)


def _verdicts(wanted: list[FoundCheckpoint], *, deep: bool, threads: int) -> list[dict[str, Any]]:
    """Check the checkpoints; all problems of each."""
    from hpctrain.checkpoint.store import verify

    verdicts: list[dict[str, Any]] = []
    total = sum(_size(checkpoint) or 0 for checkpoint in wanted) if deep else 0
    with progress("reading", total) as on_bytes:
        for checkpoint in wanted:
            refused: list[str] = []
            problems = verify.verify(
                checkpoint, threads=threads, on_bytes=on_bytes, deep=deep, unreadable=refused
            )
            verdict: dict[str, Any] = {"step": checkpoint.step, "name": checkpoint.name}
            verdicts.append(verdict | {"problems": problems, "unreadable": refused})
    return verdicts


def _echo_verdicts(verdicts: list[dict[str, Any]]) -> None:
    for each in verdicts:
        ok = f"{each['state']}, {each['path']}" if "state" in each else "ok"
        for problem in each["problems"] + each["unreadable"] or [ok]:
            click.echo(f"{each['name']}: {problem}")


def _note_verified(run: RunDir, verdicts: list[dict[str, Any]]) -> None:
    """For `status`; a user who may only read the run gets the verdict all the same."""
    try:
        for verdict in verdicts:
            if not verdict["problems"] and not verdict["unreadable"]:
                fact = CheckpointVerified(step=verdict["step"], name=verdict["name"])
                ledger.append(run, fact)
    except OSError as error:
        click.echo(f"hpctrain: not noted in the ledger: {error}", err=True)


def _rows(run: RunDir) -> list[dict[str, Any]]:
    facts = RunHistory.read(run, marks="few").evaluations
    metrics = {step: dict(fact.metrics) for step, fact in facts.items()}
    rows = [
        _row(found) | {"pinned": _pin(found), "evaluation": metrics.get(found.step, {})}
        for found in find.candidates(run)
    ]
    rows += [
        _bare(one.step, one.path, "staged", f"by attempt {one.attempt}, not committed")
        for one in find.staged(run)
    ]
    rows += [_bare(one.step, one.path, "set aside", one.reason) for one in find.set_aside(run)]
    return sorted(rows, key=lambda row: (-row["step"], row["name"]))


def _row(checkpoint: FoundCheckpoint) -> dict[str, Any]:
    row = _bare(checkpoint.step, checkpoint.path, checkpoint.state, checkpoint.problem)
    if checkpoint.manifest is not None:
        row["created"] = checkpoint.manifest.created
        row["world_size"] = checkpoint.manifest.world_size
        row["engine"] = checkpoint.manifest.engine
    return row


def _bare(step: int, path: Path, state: str, why: str | None) -> dict[str, Any]:
    return {
        "step": step,
        "name": path.name,
        "created": None,
        "size_bytes": _bytes_in(path),
        "world_size": None,
        "engine": None,
        "state": state,
        "why": why,
        "pinned": None,
        "evaluation": {},
    }


def _bytes_in(path: Path) -> int | None:
    """Bytes of all files; None where the file system does not say."""
    try:
        return sum(size or 0 for size in find.file_sizes(path).values())
    except FileSystemFault:  # the row's state tells it
        return None


def _pin(checkpoint: FoundCheckpoint) -> str | None:
    """Why a checkpoint is pinned, maybe without a word; None if it is not, or nobody can say."""
    try:
        return retention.reason_of(checkpoint.path) if retention.carries(checkpoint.path) else None
    except OSError as error:
        return f"nobody can say: {error.strerror}"


def _size(checkpoint: FoundCheckpoint) -> int | None:
    return None if checkpoint.manifest is None else checkpoint.manifest.size


def _state(row: dict[str, Any]) -> str:
    state = row["state"] if row["why"] is None else f"{row['state']}: {row['why']}"
    if row["pinned"] is None:
        return state
    return f"{state}, pinned ({row['pinned']})" if row["pinned"] else f"{state}, pinned"


@click.command(
    name="evaluate",
    epilog="""\b
Examples:
  hpctrain evaluate lm-3               submit all evaluations that are due
  hpctrain evaluate lm-3 --step 300    also this checkpoint, which was not due
  hpctrain evaluate lm-3 --dry-run     what would be submitted
""",
)
@click.argument("run", required=False, metavar="[RUN]", shell_complete=complete_run)
@click.option("--step", type=int, metavar="N", help="Evaluate the checkpoint of this step too.")
@click.option("--dry-run", is_flag=True, help="Show the plan; do nothing.")
@yes_option
@foreign_option
@runs_option
@json_option
def evaluate(
    *,
    run: str | None,
    step: int | None,
    dry_run: bool,
    yes: bool,
    foreign: bool,
    as_json: bool,
    runs: Path,
) -> int:
    """Submit the evaluations of checkpoints that are due.

    The run's jobs do this themselves ([evaluate] in its settings). Use it if nodes may not
    submit jobs, or to evaluate another checkpoint.

    RUN is a name, a job id, a unique beginning of a name, a path, or - for the newest.
    """
    from hpctrain.launch.evaluations import advance

    if run is None and not yes and not dry_run:
        ask_to_act("evaluate", newest_to_act_on("evaluate", runs))
    run_dir = find_run(run or LATEST, runs=runs)
    spec = own_spec(run_dir, named=run or LATEST, foreign=foreign)
    if "evaluate" not in spec.beside:
        raise UsageError(
            f"{run_dir.name} has no evaluation: its setting evaluate.script names none; submit or "
            "resume it with --set evaluate.script=PROGRAM"
        )
    if step is not None and not dry_run:
        _ask_evaluation(run_dir, spec, step)
    asked = step if dry_run else None
    done = advance(run_dir, spec, insist=True, dry=dry_run, asked=asked)
    if as_json:
        echo_json(_evaluated_facts(run_dir, done))
    else:
        click.echo("\n".join(_evaluated_lines(run_dir, done, dry=dry_run)))
    return ClusterError.exit_code if done.refused else 0


def _ask_evaluation(run: RunDir, spec: Spec, step: int) -> None:
    """Write down that this step is to be evaluated, unless it was due anyway."""
    history, settings = RunHistory.read(run, marks="few"), spec.settings.evaluate
    said = history.evaluations.get(step)
    if said is not None and said.run:
        again = f": {said.why}; `hpctrain resume {run.evaluation(step).typed}` repeats it"
        raise UsageError(f"step {step} was evaluated by {said.run}{again if said.why else ''}")
    if not step_path(run, step).is_dir():
        raise NotFound(
            f"{run.name} has no checkpoint of step {step}; `hpctrain checkpoints list {run.typed}` "
            "shows them"
        )
    if step not in due(history, settings.every, last=settings.last) or said is not None:
        ledger.append(run, EvaluationAsked(step=step))


def _evaluated_facts(run: RunDir, done: Advanced) -> dict[str, Any]:
    return {
        "run": run.name,
        "run_dir": str(run.root),
        "submitted": done.submitted,
        "alive": done.alive,
        "evaluated": [fact.fields_set() for fact in done.said],
        "refused": done.refused,
        "waiting": done.left,
    }


def _evaluated_lines(run: RunDir, done: Advanced, *, dry: bool) -> list[str]:
    lines = []
    for fact in done.said:
        metrics = ", ".join(f"{name} {value:.6g}" for name, value in fact.metrics.items())
        lines.append(f"evaluated    step {fact.step}: {fact.why or metrics}")
    for step, job_id in done.alive.items():
        name = run.evaluation(step).name
        if step not in done.submitted:
            lines.append(f"runs         step {step}: job {job_id} ({name})")
        elif dry:
            lines.append(f"would submit step {step}: {name}")
        else:
            lines.append(f"submitted    step {step}: job {job_id} ({name})")
    lines += [f"refused      step {step}: {why}" for step, why in done.refused.items()]
    waiting = [step for step in done.left if step not in done.refused]
    if waiting:
        lines.append(f"waits        step {', '.join(map(str, waiting))}")
    return lines or ["nothing is due"]

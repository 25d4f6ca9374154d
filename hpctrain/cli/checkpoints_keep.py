"""`hpctrain checkpoints pin`, `prune`, `rm` and `path`, and a program's own checkpoints."""

from __future__ import annotations

import datetime as dt
import sys
from typing import TYPE_CHECKING, Any

import click

from hpctrain.checkpoint.sealed import seals
from hpctrain.checkpoint.store import retention
from hpctrain.checkpoint.store.retention import WAIT, KeepDecision, Rules, Why, in_use, pinned
from hpctrain.cli.options import complete_run, json_option, own_runs_option
from hpctrain.cli.progress import progress
from hpctrain.core.base.files import follow_folder
from hpctrain.core.base.text import size
from hpctrain.core.settings.spec import Spec, load_spec
from hpctrain.core.terminal import echo_json
from hpctrain.errors import NotFound, RunAlive, UsageError
from hpctrain.ledger.history.evaluations import Evaluations, evaluations_of
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run.find_run import find_run
from hpctrain.ledger.run.ownership import refuse_foreign

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpctrain.checkpoint.sealed.resume import Looked
    from hpctrain.checkpoint.sealed.seals import StoredSeal
    from hpctrain.core.settings.schema import CheckpointSettings
    from hpctrain.ledger.history.run_state import LedgerState
    from hpctrain.ledger.run.layout import RunDir


STEP = click.IntRange(min=0)


@click.command(
    "pin",
    epilog="""\b
Examples:
  hpctrain checkpoints pin lm-3 4000 --reason "table 2"   keep it, whatever the settings are
  hpctrain checkpoints pin lm-3 4000 --remove             leave it to the settings again
""",
)
@click.argument("run", shell_complete=complete_run)
@click.argument("step", type=STEP)
@click.option("--reason", default="", metavar="TEXT", help="Why; `list` shows it.")
@click.option("--remove", is_flag=True, help="Take the pin away.")
@own_runs_option
def pin_command(runs: Path, run: str, step: int, *, reason: str, remove: bool) -> None:
    """Keep a checkpoint from being deleted, by the run and by `prune`.

    A pin is a file PINNED in the checkpoint's directory.
    """
    if remove and reason:
        raise UsageError("--reason does not go with --remove")
    directory = find_run(run, runs=runs)
    refuse_foreign(directory)
    follow_folder(directory.root)
    what = f"step {step} of {directory.name}"
    if remove:
        changed = retention.unpin(directory, step)
        click.echo(f"{what} is no longer pinned" if changed else f"{what} was not pinned")
        return
    changed = retention.pin(directory, step, reason)
    click.echo(f"{what} is pinned" if changed else f"{what} was pinned already")


@click.command(
    "prune",
    epilog="""\b
Examples:
  hpctrain checkpoints prune lm-3 --dry-run        what would be deleted, what stays and why
  hpctrain checkpoints prune lm-3 --keep-last 2    fewer than in the settings
  hpctrain checkpoints prune lm-3 --keep-best 3 --metric accuracy --highest
""",
)
@click.argument("run", shell_complete=complete_run)
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the N newest.")
@click.option("--keep-every", type=STEP, metavar="M", help="Keep multiples of M; 0 for none.")
@click.option("--keep-best", type=STEP, metavar="K", help="Keep the K best; 0 for none.")
@click.option(
    "--metric",
    metavar="NAME",
    help="Metric for the best: a name of run.log, or eval.NAME.",
)
@click.option("--highest/--lowest", default=None, help="Which value of the metric is the best.")
@click.option("--dry-run", is_flag=True, help="Show the plan, and delete nothing.")
@json_option
@own_runs_option
def prune_command(
    runs: Path,
    run: str,
    *,
    highest: bool | None,
    dry_run: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Delete checkpoints that need not be kept.

    Defaults are the run's settings. Never deletes the last valid one, pinned ones, those in
    use and those that wait for an evaluation.
    """
    directory = find_run(run, runs=runs)
    refuse_foreign(directory)
    spec = load_spec(directory.spec)
    rules = _rules(spec.settings.checkpoint, highest=highest, **flags)
    idle = _idle(directory, spec.cluster)
    evaluations = _evaluations(directory, spec)
    decisions = retention.plan(directory, rules, idle=idle, evaluations=evaluations)
    _require_metric(directory, rules, decisions)
    _refuse_if_all_in_use(directory, decisions, idle)
    if not dry_run:
        gone = retention.prune(directory, rules, idle=idle, evaluations=evaluations)
        # Those that really went: the run may have saved, or restored, since they were looked at.
        decisions = [_settled(decision, gone=decision.row.step in gone) for decision in decisions]
    _print_pruned(directory, rules, decisions, dry_run=dry_run, as_json=as_json)


@click.command(
    "rm",
    epilog="""\b
Examples:
  hpctrain checkpoints rm lm-3 1000 2000          asks first
  hpctrain checkpoints rm lm-3 1000 --yes         asks nothing, for scripts
""",
)
@click.argument("run", shell_complete=complete_run)
@click.argument("steps", metavar="STEP...", type=STEP, nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Also pinned and awaited ones, and the last valid.")
@json_option
@own_runs_option
def rm_command(
    runs: Path, run: str, steps: tuple[int, ...], *, yes: bool, force: bool, as_json: bool
) -> None:
    """Delete these checkpoints: all of them or, where one is refused, none."""
    directory = find_run(run, runs=runs)
    refuse_foreign(directory)
    spec = load_spec(directory.spec)
    evaluations, idle = _evaluations(directory, spec), _idle(directory, spec.cluster)
    going = sorted(set(steps))
    retention.refuse(directory, going, force=force, idle=idle, evaluations=evaluations)
    _print_taken(directory, going, evaluations)
    sizes = {step: retention.size_of(directory, step) for step in going}
    freed = sum(sizes.values())
    if not yes:
        _ask(f"delete {_counted(len(going))} of {directory.name} ({size(freed)})?")
    evaluations = _evaluations(directory, spec)  # the question may have stood for long
    retention.remove(directory, going, force=force, idle=idle, evaluations=evaluations)
    if as_json:
        rows = [{"step": step, "size_bytes": sizes[step]} for step in going]
        echo_json({"run": directory.name, "freed_bytes": freed, "deleted": rows})
        return
    click.echo(f"deleted {_counted(len(going))} of {directory.name}, {size(freed)} freed")


def _ask(question: str) -> None:
    """Continue only where somebody says so; where nobody can be asked, nothing is deleted."""
    if not sys.stdin.isatty():
        raise UsageError("nothing was deleted: there is no terminal to ask on; add --yes")
    click.confirm(question, abort=True, err=True)


def _print_taken(run: RunDir, going: Sequence[int], evaluations: Evaluations) -> None:
    """What --force takes away beside the bytes, before anybody says yes."""
    for kind, steps in (("pinned", pinned(run)), ("to be evaluated", evaluations.awaited)):
        taken = ", ".join(str(step) for step in going if step in steps)
        if taken:
            click.echo(f"hpctrain: --force also takes what is {kind}: step {taken}", err=True)


def _evaluations(run: RunDir, spec: Spec) -> Evaluations:
    return evaluations_of(RunHistory.read(run), spec.settings.evaluate)


def _idle(run: RunDir, cluster: str) -> LedgerState | None:
    """Where the run stands, if the scheduler has no live job for it.

    An attempt that died with its node has left no end in the ledger: without this its checkpoints
    would count as in use until the run is resumed. None where the scheduler does not answer.
    """
    from hpctrain.ledger.history.run_state import OVER
    from hpctrain.observe.status.reader import ask

    history = RunHistory.read(run)
    now = history.state
    if now.phase in OVER:  # no need to ask
        return now
    answer = ask(run, cluster, history)
    alive = answer.job is not None and answer.job.alive
    return now if answer.asked and not alive else None


def _rules(
    settings: CheckpointSettings,
    *,
    highest: bool | None,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: int | None,
    metric: str | None,
) -> Rules:
    """The settings, with what the flags say instead."""
    best = settings.keep_best if keep_best is None else keep_best
    if not best and (metric is not None or highest is not None):
        raise UsageError("--metric, --highest and --lowest need --keep-best")
    name = settings.best_metric if metric is None else metric
    if best and not name:
        raise UsageError("--keep-best needs a name: --metric NAME, or checkpoint.best_metric")
    return Rules(
        keep_last=settings.keep_last if keep_last is None else keep_last,
        keep_every=settings.keep_every if keep_every is None else keep_every,
        keep_best=best,
        best_metric=name,
        best_is=settings.best_is if highest is None else "highest" if highest else "lowest",
    )


def _require_metric(run: RunDir, rules: Rules, decisions: Sequence[KeepDecision]) -> None:
    """A name that is spelled wrong must not delete what is best by the right one."""
    metrics = sorted({name for decision in decisions for name in decision.row.metrics})
    if rules.keep_best and decisions and rules.best_metric not in metrics:
        raise UsageError(
            f"no checkpoint of {run.name} has the metric {rules.best_metric!r}, nothing was "
            f"deleted; there are: {', '.join(metrics) or 'none'}; --keep-best 0 does without"
        )


def _refuse_if_all_in_use(
    run: RunDir, decisions: Sequence[KeepDecision], idle: LedgerState | None
) -> None:
    """Say so where a live attempt is the only reason that nothing goes."""
    usage = in_use(RunHistory.read(run), idle)
    only = any(decision.why == (Why.IN_USE,) for decision in decisions)
    if usage is not None and only and all(decision.why for decision in decisions):
        raise RunAlive(f"nothing of {run.name} was pruned: {usage.reason}; {WAIT}")


def _settled(decision: KeepDecision, *, gone: bool) -> KeepDecision:
    """What became of a checkpoint, which may be other than was planned."""
    from dataclasses import replace

    return replace(decision, why=() if gone else decision.why or (Why.IN_USE,))


def _print_pruned(
    run: RunDir, rules: Rules, decisions: Sequence[KeepDecision], *, dry_run: bool, as_json: bool
) -> None:
    going = [decision for decision in decisions if not decision.why]
    freed = sum(decision.size_bytes for decision in going)
    if as_json:
        facts: dict[str, Any] = {"run": run.name, "dry_run": dry_run, "freed_bytes": freed}
        facts["deleted"] = [_fact(decision) for decision in going]
        facts["kept"] = [
            _fact(decision) | {"why": [why.value for why in decision.why]}
            for decision in decisions
            if decision.why
        ]
        echo_json(facts)
        return
    reasons = pinned(run)
    gone = "would go" if dry_run else "deleted"
    cells = [
        (
            decision.row.step,
            size(decision.size_bytes),
            "stays" if decision.why else gone,
            _in_words(decision, rules, reasons),
        )
        for decision in decisions
    ]
    if cells:
        from hpctrain.core.drawing import echo_table

        echo_table(cells, header=("STEP", "SIZE", "WHAT", "WHY"), right=(0, 1))
        click.echo()
    if dry_run:
        total = f"{_counted(len(going))} of {run.name} would go, {size(freed)}"
        click.echo(f"{total}; nothing was deleted (--dry-run)")
    else:
        click.echo(f"deleted {_counted(len(going))} of {run.name}, {size(freed)} freed")


def _fact(decision: KeepDecision) -> dict[str, Any]:
    return {"step": decision.row.step, "size_bytes": decision.size_bytes}


def _in_words(decision: KeepDecision, rules: Rules, reasons: dict[int, str]) -> str:
    row = decision.row
    said = {Why.EVERY: f"every {rules.keep_every}", Why.EVALUATION: "to be evaluated"}
    if Why.BEST in decision.why:
        said[Why.BEST] = f"best {rules.best_metric} ({row.metrics[rules.best_metric]:g})"
    if reasons.get(row.step):
        said[Why.PINNED] = f"pinned ({reasons[row.step]})"
    words = [said.get(why, why.value) for why in decision.why]
    return ", ".join(words if row.valid else ["torn", *words])


def _counted(number: int) -> str:
    return f"{number} checkpoint" if number == 1 else f"{number} checkpoints"


def sealed_rows(run: RunDir) -> list[dict[str, Any]]:
    """Every seal, newest first, with the state of its files by their sizes."""
    from hpctrain.checkpoint.sealed import resume

    return [_sealed_row(resume.look(stored)) for stored in sealed_of_step(run, None)]


def sealed_of_step(run: RunDir, step: int | None) -> list[StoredSeal]:
    """The seals of a step, or all of them, newest first."""
    wanted = seals.listing(run)
    return [s for s in wanted if step is None or (s.seal is not None and s.seal.step == step)]


def _sealed_row(looked: Looked) -> dict[str, Any]:
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


def when(created: float | None) -> str | None:
    """Local time with its zone, to the second."""
    if created is None:
        return None
    local = dt.datetime.fromtimestamp(created, tz=dt.UTC).astimezone()
    return local.isoformat(sep=" ", timespec="seconds")


def echo_sealed(sealed: Sequence[dict[str, Any]]) -> None:
    """A table of them."""
    from hpctrain.core.drawing import echo_table

    cells = [
        (
            "?" if row["step"] is None else row["step"],
            when(row["created"]),
            None if row["size_bytes"] is None else size(row["size_bytes"]),
            row["path"] or row["name"],
            f"{_sealed_state(row)}",
        )
        for row in sealed
    ]
    echo_table(cells, header=("STEP", "WHEN", "SIZE", "REGISTERED", "STATE"), right=(0, 2))


def _sealed_state(row: dict[str, Any]) -> str:
    state = row["state"] if row["why"] is None else f"{row['state']}: {row['why']}"
    return f"{state}, with a copy" if row["copy"] else str(state)


def sealed_verdicts(
    wanted: Sequence[StoredSeal], *, deep: bool, threads: int
) -> list[dict[str, Any]]:
    """Check them; all problems of each. What its program has removed is no damage."""
    from hpctrain.checkpoint.sealed import resume

    total = sum(s.seal.size for s in wanted if s.seal is not None) if deep else 0
    with progress("reading", total) as on_bytes:
        looked = [
            resume.look(stored, deep=deep, threads=threads, on_bytes=on_bytes) for stored in wanted
        ]
    return [
        _sealed_row(one)
        | {
            "problems": list(one.problems) if one.is_damaged else [],
            "unreadable": list(one.problems) if one.state == "unreadable" else [],
        }
        for one in looked
    ]


@click.command(
    "path",
    epilog="""\b
Examples:
  hpctrain checkpoints path lm-3            the program's newest complete checkpoint
  hpctrain checkpoints path lm-3 4000       that of a step
""",
)
@click.argument("run", shell_complete=complete_run)
@click.argument("step", type=click.IntRange(min=0), required=False)
@json_option
@own_runs_option
def path_command(runs: Path, run: str, step: int | None, *, as_json: bool) -> None:
    """Print the path of the newest complete registered checkpoint.

    By sizes alone; a start reads every byte. Of one that the program has written over since, it is
    the run's own copy.
    """
    from hpctrain.checkpoint.sealed import resume

    directory = find_run(run, runs=runs)
    looked, _ = resume.glance(directory, at_step=step)
    if looked is None or looked.stored.seal is None:
        raise NotFound(f"{directory.name} has no registered checkpoints")
    seal, copy = looked.stored.seal, looked.stored.copy
    path = seal.path if copy is None or resume.is_as_sealed(looked.stored) else str(copy)
    if as_json:
        echo_json({"run": directory.name, "path": path, "step": seal.step})
        return
    click.echo(path)

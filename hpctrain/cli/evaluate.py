"""`hpctrain evaluate`: the evaluations of a run's checkpoints, looked after from here.

tests/unit/cli/test_evaluate.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import (
    ask_to_act,
    complete_run,
    foreign_option,
    json_option,
    newest_to_act_on,
    runs_option,
    yes_option,
)

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.core.settings.spec import Spec
    from hpctrain.launch.evaluations import Advanced
    from hpctrain.ledger.run.layout import RunDir


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
def command(
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
    from hpctrain.core.terminal import echo_json
    from hpctrain.errors import ClusterError, UsageError
    from hpctrain.launch.evaluations import advance
    from hpctrain.ledger.run.find_run import LATEST, find_run
    from hpctrain.ledger.run.ownership import own_spec

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
        _ask(run_dir, spec, step)
    asked = step if dry_run else None
    done = advance(run_dir, spec, insist=True, dry=dry_run, asked=asked)
    if as_json:
        echo_json(_facts(run_dir, done))
    else:
        click.echo("\n".join(_lines(run_dir, done, dry=dry_run)))
    return ClusterError.exit_code if done.refused else 0


def _ask(run: RunDir, spec: Spec, step: int) -> None:
    """Write down that this step is to be evaluated, unless it was due anyway."""
    from hpctrain.checkpoint.store.find import step_path
    from hpctrain.errors import NotFound, UsageError
    from hpctrain.ledger.history.evaluations import due
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.run import events as ledger
    from hpctrain.ledger.run.event_types import EvaluationAsked

    history, settings = RunHistory.read(run, marks="few"), spec.settings.evaluate
    said = history.evaluations.get(step)
    if said is not None and said.run:
        again = f": {said.why}; `hpctrain resume {run.evaluation(step).root}` repeats it"
        raise UsageError(f"step {step} was evaluated by {said.run}{again if said.why else ''}")
    if not step_path(run, step).is_dir():
        raise NotFound(
            f"{run.name} has no checkpoint of step {step}; `hpctrain checkpoints list {run.name}` "
            "shows them"
        )
    if step not in due(history, settings.every, last=settings.last) or said is not None:
        ledger.append(run, EvaluationAsked(step=step))


def _facts(run: RunDir, done: Advanced) -> dict[str, Any]:
    return {
        "run": run.name,
        "run_dir": str(run.root),
        "submitted": done.submitted,
        "alive": done.alive,
        "evaluated": [fact.fields_set() for fact in done.said],
        "refused": done.refused,
        "waiting": done.left,
    }


def _lines(run: RunDir, done: Advanced, *, dry: bool) -> list[str]:
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

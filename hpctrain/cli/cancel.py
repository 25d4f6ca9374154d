"""`hpctrain cancel`: a run stopped for good, at once or after it has saved.

tests/unit/cli/test_cancel.py and tests/slurm/test_cancel.py hold the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hpctrain.cli.options import foreign_option, json_option, runs_option
from hpctrain.run.layout import runs_flag

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.history.run_history import RunHistory


@click.command(
    name="cancel",
    epilog="""\b
Examples:
  hpctrain cancel lm-3 --save     save, then leave; `hpctrain resume lm-3` loses no step
  hpctrain cancel lm-3            at once; steps since the last checkpoint are lost
""",
)
@click.argument("run", metavar="RUN")
@click.option("--save", is_flag=True, help="Let it save and leave by itself.")
@foreign_option
@runs_option
@json_option
def command(*, run: str, save: bool, foreign: bool, as_json: bool, runs: Path) -> None:
    """Stop a run for good: it is not requeued.

    RUN is a name, a job id, a unique beginning of a name, a path, or - for the newest.
    """
    from hpctrain.api import cancel
    from hpctrain.history.run_history import RunHistory
    from hpctrain.run.layout import RunDir
    from hpctrain.terminal import echo_json

    ended = cancel(run, save=save, foreign=foreign, runs=runs)
    run_dir, job_id, saves = RunDir(ended.dir), ended.job_id, ended.saves
    history = RunHistory.read(run_dir)
    inside = run_dir.root.parent == runs
    name = f"{run_dir.name}{runs_flag(runs)}" if inside else str(run_dir.root)
    if as_json:
        action = "asked to save and stop" if saves else "cancelled"
        echo_json({"run": run_dir.name, "job_id": job_id, "action": action, "saves": saves})
        return
    click.echo(_report(run_dir.name, job_id, history, asked=save, saves=saves))
    click.echo(f"\n  hpctrain status {name}\n  hpctrain resume {name}")


def _report(name: str, job_id: str, history: RunHistory, *, asked: bool, saves: bool) -> str:
    from hpctrain.base.env import HPCTRAIN_STOP_FILE
    from hpctrain.history.progress import progress
    from hpctrain.history.telling import listens, telling

    step = progress(history).saved_step
    if not saves:
        kept = f"its newest checkpoint is of step {step}" if step else "it had saved nothing yet"
        if history.sealed_path:
            kept = f"its newest sealed checkpoint is {history.sealed_path}"
        elif not step and telling(history).is_silent:
            kept = "what it has saved is not known (its program has told of no checkpoint)"
        had = "; it was not training, so there was nothing more to save" if asked else ""
        return f"cancelled job {job_id} of {name}; {kept}{had}"
    lines = [f"asked {name} (job {job_id}) to save and leave; it is not requeued"]
    if not listens(history):
        lines.append(
            "its program has not called hpctrain.init() so far; one that never does hears of it by "
            f"SIGTERM, if it catches that, and by {HPCTRAIN_STOP_FILE} (docs/environment.md); one "
            f"that heeds neither goes on: `hpctrain cancel {name}` ends it at once"
        )
    return "\n".join(lines)

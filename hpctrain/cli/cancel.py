"""`hpctrain cancel`: a run stopped for good, at once or after it has saved.

tests/unit/cli/test_cancel.py and tests/slurm/test_cancel.py hold the promises.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from hpctrain.cli.options import foreign_option, json_option, runs_option
from hpctrain.run.find_run import runs_flag

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpctrain.run.events import Event
    from hpctrain.run.layout import RunDir
    from hpctrain.status.status import Answer


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
    from hpctrain.base.files import follow_folder
    from hpctrain.run import events as ledger
    from hpctrain.run.find_run import find_run
    from hpctrain.run.ownership import own_spec
    from hpctrain.status.reader import ask
    from hpctrain.terminal import echo_json

    run_dir = find_run(run, runs=runs)
    follow_folder(run_dir.root)
    cluster = own_spec(run_dir, named=run, foreign=foreign).cluster
    events = ledger.read(run_dir)
    answer = ask(run_dir, cluster, events)
    job_id = _live_job(run_dir, answer, events)
    saves = save and _can_save(answer, events)
    if saves:
        _ask_to_save(run_dir, job_id, events)
    else:
        _cancel(run_dir, job_id, cluster, answer)
    inside = run_dir.root.parent == runs
    name = f"{run_dir.name}{runs_flag(runs)}" if inside else str(run_dir.root)
    if as_json:
        action = "asked to save and stop" if saves else "cancelled"
        echo_json({"run": run_dir.name, "job_id": job_id, "action": action, "saves": saves})
        return
    click.echo(_report(run_dir.name, job_id, events, asked=save, saves=saves))
    click.echo(f"\n  hpctrain status {name}\n  hpctrain resume {name}")


def _live_job(run: RunDir, answer: Answer, events: Sequence[Event]) -> str:
    """The job that may still write. Where the scheduler is silent, the one on record counts.

    Raises:
        ClusterUnreachable: nobody can say whether there is one.
        UsageError: there is nothing to cancel.
    """
    from hpctrain.errors import ClusterUnreachable, UsageError
    from hpctrain.history.run_state import OVER, ledger_state, run_state

    if answer.job is not None and answer.job.alive:
        return answer.job.job_id
    state, job_id = run_state(events, answer.job, asked=answer.asked), ledger_state(events).job_id
    if not answer.asked and state not in OVER:
        if job_id is None:
            raise ClusterUnreachable(
                f"{run.name}: nobody can say whether it has a job ({answer.problem}); try again"
            )
        return job_id
    why = f"; {answer.note}" if answer.note else ""
    raise UsageError(f"{run.name} has no job that could be cancelled: it is {state.value}{why}")


def _can_save(answer: Answer, events: Sequence[Event]) -> bool:
    """Whether there are ranks that could save: what waits in the queue has nothing to save."""
    from hpctrain.history.run_state import RunState, run_state

    return run_state(events, answer.job, asked=answer.asked) is RunState.RUNNING


def _ask_to_save(run: RunDir, job_id: str, events: Sequence[Event]) -> None:
    """Leave the request that rank 0 looks for, whole or not at all."""
    import json
    import time

    from hpctrain.base.files import write_plain
    from hpctrain.errors import HpctrainError
    from hpctrain.history.run_state import ledger_state
    from hpctrain.run import events as ledger

    request = {"time": time.time(), "job_id": job_id, "token": ledger_state(events).token}
    staged = run.stop_request.with_suffix(".new")
    try:
        write_plain(staged, json.dumps(request) + "\n")
        # On record before it can be heard: an attempt that ends for another reason meanwhile must
        # not be requeued. Only after there was room for it: else the run trains on, and is done
        # for at its next preemption.
        ledger.append(run, "cancel_requested", save=True, job_id=job_id)
        staged.replace(run.stop_request)
    except OSError as error:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)
        raise HpctrainError(
            f"{run.name} cannot be asked to save: {error.strerror} ({run.root}); make "
            "room, or leave out --save to end it at once"
        ) from None


def _cancel(run: RunDir, job_id: str, cluster: str, answer: Answer) -> None:
    """Cancel the job; that it was meant to is written down first, so that it is never requeued.

    Where the scheduler could not say that the number is this run's job, nothing is cancelled: on a
    cluster that shares the folder it may be another one.
    """
    from hpctrain.errors import ClusterError, ClusterUnreachable, UsageError
    from hpctrain.run import events as ledger
    from hpctrain.scheduler.base import get_cluster
    from hpctrain.status.reader import TERMINAL_JOB

    if job_id.startswith(TERMINAL_JOB):
        pid = job_id.removeprefix(TERMINAL_JOB)
        raise UsageError(
            f"{run.name} runs in a terminal (process {pid}); press Ctrl-C there, or use --save"
        )
    recorded = ledger.record(run, "cancel_requested", save=False, job_id=job_id)
    on_record = f"it is on record that {run.name} is not to be requeued. " if recorded else ""
    try:
        if answer.problem:
            raise ClusterUnreachable(answer.problem)
        get_cluster(cluster).cancel(job_id)
    except ClusterError as error:
        again = "Cancel it there" if answer.note else "Try again"
        raise type(error)(f"job {job_id} was not cancelled: {error}; {on_record}{again}") from error


def _report(name: str, job_id: str, events: Sequence[Event], *, asked: bool, saves: bool) -> str:
    from hpctrain.history.lineage import progress
    from hpctrain.status.reader import listens

    step = progress(events).saved_step
    if not saves:
        kept = f"its newest checkpoint is of step {step}" if step else "it had saved nothing yet"
        had = "; it was not training, so there was nothing more to save" if asked else ""
        return f"cancelled job {job_id} of {name}; {kept}{had}"
    lines = [f"asked {name} (job {job_id}) to save and leave; it is not requeued"]
    if not listens(events):
        lines.append(
            "its program has not called hpctrain.init() so far; one that never does cannot hear "
            f"this: `hpctrain cancel {name}` ends it at once"
        )
    return "\n".join(lines)

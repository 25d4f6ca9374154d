"""The verbs of the command line as functions: submit, resume, status, cancel. For notebooks.

Arguments are the commands' flags as Python values, results are frozen, errors are those of
`hpctrain.errors`. Nothing is printed and nothing exits. The commands call the same functions below.
tests/unit/test_api.py and tests/e2e/test_python_api.py hold the promises.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.files import follow_folder
from hpctrain.errors import UsageError
from hpctrain.ledger.run.find_run import LATEST, find_run
from hpctrain.ledger.run.layout import runs_root
from hpctrain.ledger.run.ownership import own_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.ledger.history.attempts import AttemptView
    from hpctrain.observe.status.status import Checkpoint, RunStatus


@dataclass(frozen=True)
class StartedJob:
    """A run whose job was handed to the scheduler, by `submit` or `resume`.

    Attributes:
        run: The run's name.
        dir: The run's directory, absolute.
        job_id: Of the job; None where none was to be started.
        step: The step from which it continues; 0 for the beginning, None where nobody knows.
        checkpoint: The name of the checkpoint that it resumes from; None for the beginning.
        notes: What was adapted, has no effect, or should be known; a line each.
        following: Names of the runs that were made to follow it.
    """

    run: str
    dir: Path
    job_id: str | None
    step: int | None = 0
    checkpoint: str | None = None
    notes: tuple[str, ...] = ()
    following: tuple[str, ...] = ()


@dataclass(frozen=True)
class CancelledJob:
    """A job that was ended, or asked to end.

    Attributes:
        run: The run's name.
        dir: The run's directory, absolute.
        job_id: Of the job; None where the run had none that could be cancelled: it is over.
        saves: It was asked to save and leave; otherwise it was cancelled at once.
    """

    run: str
    dir: Path
    job_id: str | None
    saves: bool


@dataclass(frozen=True)
class Status:
    """Where a run stands; times are seconds since the epoch, what is not known is None.

    Attributes:
        run: The run's name.
        dir: The run's directory, absolute.
        state: created, submitting, pending, running, suspended, requeued, completing, done,
            failed, stopped, cancelled or lost.
        over: Nothing follows by itself: done, failed, stopped or cancelled.
        words: The state in a line, as the screen says it.
        step: The last step that is known to be done.
        total_steps: Steps that it is meant to do.
        loss: The newest one that the program told.
        step_s: Seconds that a step takes lately.
        last_seen: The newest sign of life.
        cluster: Name of its scheduler.
        job_id: Its newest job.
        why: Why it stands where it stands.
        exit_code: Of a run that was stopped for good.
        cluster_problem: Why the scheduler did not answer.
        attempts: Oldest first, each with the cause of its end.
        steps_lost: Steps that had to be done again, over all attempts.
        checkpoint: The newest that could be loaded.
        failure: What made the newest failed attempt fail, in a line.
        failure_log: That rank's log.
        facts: All that `hpctrain status --json` says, under its names.
    """

    run: str
    dir: Path
    state: str
    over: bool
    words: str
    step: int | None
    total_steps: int | None
    loss: float | None
    step_s: float | None
    last_seen: float | None
    cluster: str
    job_id: str | None
    why: str | None
    exit_code: int | None
    cluster_problem: str | None
    attempts: tuple[AttemptView, ...]
    steps_lost: int | None
    checkpoint: Checkpoint | None
    failure: str | None
    failure_log: Path | None
    facts: Mapping[str, Any] = field(repr=False)


def submit(
    command: Sequence[str | os.PathLike[str]] = (),
    *,
    name: str | None = None,
    nodes: int | str | None = None,
    gpus_per_node: int | None = None,
    ranks_per_node: int | None = None,
    time: int | str | None = None,
    prefer: str | None = None,
    max_node_hours: float | None = None,
    partition: str | None = None,
    account: str | None = None,
    qos: str | None = None,
    engine: str | None = None,
    mesh: Mapping[str, int | str] | None = None,
    site: str | None = None,
    cluster: str | None = None,
    container: str | None = None,
    config: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    snapshot: bool | None = None,
    checkpoint: str | Sequence[str] = (),
    resume_args: str | None = None,
    resume_if: str | None = None,
    begin: str = "",
    without: Sequence[str] = (),
    after: str | Sequence[str] = (),
    then: str | Sequence[str] = (),
    allow_locked: bool = False,
    runs: str | Path | None = None,
    start: bool = True,
) -> StartedJob:
    """Make a run and start its job, as `hpctrain submit` does; not collective.

    Args:
        command: The script and its arguments; empty for the shipped recipe.
        name: The run's name; the script's and a number by default.
        nodes: So many, "MIN-MAX" to take what there is, or "auto".
        gpus_per_node: GPUs on each node.
        ranks_per_node: Ranks on each node; one for each GPU by default.
        time: Time limit of one job: minutes, text like "12:00:00", or "auto".
        prefer: What "auto" counts: "time", "cost" or "balanced".
        max_node_hours: What the whole run may take, for "auto".
        partition: Of the scheduler.
        account: To charge.
        qos: Quality of service.
        engine: How the model is spread over the ranks.
        mesh: Ranks along an axis, e.g. {"tp": 4, "pp": "1-2"}.
        site: The cluster's preset: a name, a file, or "none".
        cluster: "slurm" or "local"; slurm if there is an sbatch.
        container: Image in which the ranks run.
        config: Settings file; hpctrain.toml in the working directory if there is one.
        settings: Any setting by "section.key", e.g. {"train.steps": 500}.
        env: Environment of the ranks; no secrets.
        snapshot: Run a copy of the script's git-tracked files; by default up to 64 MB.
        checkpoint: Where the program saves its own checkpoints, as patterns of paths.
        resume_args: Arguments with which the program resumes, in one text; added from
            the second start on. "{checkpoint}" in it is the newest complete registered checkpoint.
        resume_if: Add them where this pattern of paths matches instead.
        begin: RUN or RUN@STEP: begin with that checkpoint of another run.
        without: What of it begins anew: "optimizer", "data".
        after: A run, or several, that must be done before this one begins; each as in `status`.
        then: A command line, or several, to run when it is done, each as a run of its own.
        allow_locked: Change what the site's admins have locked; it is recorded.
        runs: Folder of all runs; HPCTRAIN_RUNS or ./runs by default.
        start: False makes the run's directory and starts no job.

    Raises:
        UsageError: an argument, a setting or a file is wrong, or a run of `after` has ended badly.
        NotFound: there is no such script, site, settings file or run.
        RunExists: there is a run of that name.
        ChecksFailed: something that can be checked beforehand does not hold.
        ClusterError: the scheduler refused; nothing was started and nothing is left.
        ClusterUnreachable: no answer; the job may run, so the run stays and `resume` finds it.
    """
    from hpctrain.advise.lint.render import lint_notes
    from hpctrain.launch.change import flags_of
    from hpctrain.launch.launch import submit_run
    from hpctrain.launch.prepare import SubmitRequest

    request = SubmitRequest(
        cwd=Path.cwd(),
        environ=os.environ,
        runs=runs_root(runs),
        command=[os.fspath(word) for word in _words(command)],
        name=name,
        flags=flags_of(
            nodes=_text(nodes),
            gpus_per_node=gpus_per_node,
            ranks_per_node=ranks_per_node,
            time=_text(time),
            prefer=prefer,
            max_node_hours=max_node_hours,
            partition=partition,
            account=account,
            qos=qos,
            container=container,
            engine=engine,
            mesh=_mesh(mesh),
            checkpoint=[checkpoint] if isinstance(checkpoint, str) else checkpoint,
            resume_args=resume_args,
            resume_if=resume_if,
            snapshot=snapshot,
        ),
        site=site,
        cluster=cluster,
        config=None if config is None else Path(config),
        sets=_sets(settings),
        env=[f"{variable}={value}" for variable, value in (env or {}).items()],
        begin=begin,
        without=list(without),
        after=[after] if isinstance(after, str) else list(after),
        then=[then] if isinstance(then, str) else list(then),
        allow_locked=allow_locked,
        cluster_needed=start,
        ask_accounting=True,
        ask_partitions=True,
        lint=lint_notes,
    )
    made = submit_run(request, start=start)
    return StartedJob(
        made.run.name,
        made.run.root,
        made.job_id,
        notes=tuple(made.notes),
        following=tuple(made.following),
    )


def resume(
    run: str = LATEST,
    *,
    nodes: int | str | None = None,
    gpus_per_node: int | None = None,
    ranks_per_node: int | None = None,
    time: int | str | None = None,
    prefer: str | None = None,
    max_node_hours: float | None = None,
    partition: str | None = None,
    account: str | None = None,
    qos: str | None = None,
    engine: str | None = None,
    mesh: Mapping[str, int | str] | None = None,
    settings: Mapping[str, Any] | None = None,
    from_step: int | None = None,
    program: Sequence[str] = (),
    new_code: bool = False,
    allow_locked: bool = False,
    foreign: bool = False,
    runs: str | Path | None = None,
) -> StartedJob:
    """Continue with a run that is not running, as `hpctrain resume` does; not collective.

    Args:
        run: A name, a job id, a unique beginning of a name, a path, or "-" for the newest.
        nodes: From now on; this and what follows as in `submit`.
        gpus_per_node: From now on.
        ranks_per_node: From now on.
        time: From now on.
        prefer: From now on.
        max_node_hours: From now on.
        partition: From now on.
        account: From now on.
        qos: From now on.
        engine: From now on.
        mesh: From now on.
        settings: Settings to change, by "section.key".
        from_step: Resume from this checkpoint; newer ones are quarantined. 0 begins anew.
        program: A program with its arguments, in the place of the run's.
        new_code: Run the checkout as it is now, not the copy that the run has.
        allow_locked: Change what the site's admins have locked; it is recorded.
        foreign: Trust a run that others own or can write; `run` is its path then.
        runs: Folder of all runs; HPCTRAIN_RUNS or ./runs by default.

    Raises:
        NotFound: there is no such run.
        RunAlive: a job of the run may still write.
        NoCheckpoint: there is no whole checkpoint where there should be one.
        UsageError: the run is done, or an argument is wrong.
        ClusterError: the scheduler refused, or did not answer.
    """
    from hpctrain.launch.change import ResumeRequest, flags_of
    from hpctrain.launch.resume import prepare_resume, resume_run

    if from_step is not None and from_step < 0:
        raise UsageError(f"from_step {from_step} is no step; 0 begins anew")
    request = ResumeRequest(
        flags_of(
            nodes=_text(nodes),
            gpus_per_node=gpus_per_node,
            ranks_per_node=ranks_per_node,
            time=_text(time),
            prefer=prefer,
            max_node_hours=max_node_hours,
            partition=partition,
            account=account,
            qos=qos,
            engine=engine,
            mesh=_mesh(mesh),
        ),
        _sets(settings),
        from_step,
        allow_locked=allow_locked,
        ask_accounting=True,
        program=list(program),
        new_code=new_code,
    )
    run_dir = find_run(run, runs=runs)
    spec = own_spec(run_dir, named=run, foreign=foreign)
    prepared = prepare_resume(run_dir, spec, request, os.environ)
    job_id, more = resume_run(run_dir, prepared, from_step)
    plan, notes = prepared.plan, (*prepared.notes, *more)
    return StartedJob(run_dir.name, run_dir.root, job_id, plan.step, plan.checkpoint, notes)


def status(run: str = LATEST, *, runs: str | Path | None = None) -> Status:
    """Where a run stands, as `hpctrain status` says it; not collective.

    Args:
        run: A name, a job id, a unique beginning of a name, a path, or "-" for the newest.
        runs: Folder of all runs; HPCTRAIN_RUNS or ./runs by default.

    Raises:
        NotFound: there is no such run.
    """
    from hpctrain.observe.status.reader import StatusReader

    reader = StatusReader(runs_root(runs))
    return _public(reader.look(find_run(run, runs=runs)))


def cancel(
    run: str, *, save: bool = False, foreign: bool = False, runs: str | Path | None = None
) -> CancelledJob:
    """Stop a run for good, as `hpctrain cancel` does: it is not requeued; not collective.

    Args:
        run: A name, a job id, a unique beginning of a name, a path, or "-" for the newest.
        save: Let it save and leave by itself; `resume` then loses no step.
        foreign: Trust a run that others own or can write; `run` is its path then.
        runs: Folder of all runs; HPCTRAIN_RUNS or ./runs by default.

    Raises:
        NotFound: there is no such run.
        UsageError: its newest job is another run's, or runs in a terminal.
        ClusterError: the scheduler refused, or did not answer.
    """
    from hpctrain.launch.live_job import cancel_run
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.observe.status.reader import ask

    run_dir = find_run(run, runs=runs)
    follow_folder(run_dir.root)
    cluster = own_spec(run_dir, named=run, foreign=foreign).cluster
    history = RunHistory.read(run_dir)
    answer = ask(run_dir, cluster, history)
    ended = cancel_run(run_dir, cluster, history, answer, save=save)
    return CancelledJob(run_dir.name, run_dir.root, ended.job_id, ended.saves)


def _public(seen: RunStatus) -> Status:
    from hpctrain.ledger.history.run_state import OVER
    from hpctrain.observe.status.text import as_json

    facts = as_json(seen)
    own: dict[str, Any] = {
        "dir": Path(seen.root),
        "over": seen.state in OVER,
        "attempts": tuple(seen.attempts),
        "checkpoint": seen.checkpoint,
        "failure": seen.failure.summary if seen.failure else None,
        "failure_log": Path(seen.failure_log) if seen.failure_log else None,
        "facts": facts,
    }
    names = [one.name for one in fields(Status) if one.name not in own]
    return Status(**own, **{name: facts[name] for name in names})


def _words(command: Sequence[str | os.PathLike[str]]) -> Sequence[str | os.PathLike[str]]:
    """The command's words."""
    if isinstance(command, str):
        raise UsageError(f'command is {command!r}; it takes a list of words: ["train.py", "--lr"]')
    return command


def _text(value: int | str | None) -> str | None:
    return None if value is None else str(value)


def _mesh(mesh: Mapping[str, int | str] | None) -> dict[str, str] | None:
    """As `--mesh` gives it, with the same checks."""
    from hpctrain.core.settings.check import parse_mesh

    if not mesh:
        return None
    return parse_mesh(",".join(f"{axis}={ranks}" for axis, ranks in mesh.items()))


def _sets(settings: Mapping[str, Any] | None) -> list[str]:
    """Each as `--set` takes it; text goes in quotes, so that none is taken for another type."""
    return [f"{path}={json.dumps(value)}" for path, value in (settings or {}).items()]

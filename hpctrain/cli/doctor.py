"""`hpctrain doctor`: why a run, or any training job by its logs, died, and what to do next."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.options import complete_run, json_option, runs_option
from hpctrain.core.base.text import count
from hpctrain.core.terminal import echo_json, echo_note
from hpctrain.errors import NotFound, UsageError
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.find_run import find_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.advise.doctor.faults import Diagnosis, LogFacts
    from hpctrain.advise.doctor.files import LogInput
    from hpctrain.ledger.history.attempts import AttemptView
    from hpctrain.ledger.run.layout import RunDir

TAIL_BYTES = 64 << 20
"""So much of each rank's log of a run is read: what killed it stands near its end."""


@click.command(
    name="doctor",
    epilog="""\b
Examples:
  hpctrain doctor                           the newest run: why its last attempt ended
  hpctrain doctor lm-3 --attempt 2          another attempt of a run
  hpctrain doctor lm-3 --why                all evidence, and what the cause is not
  hpctrain doctor --log slurm-4711.out      any job's log (torchrun, DeepSpeed, ...)
  hpctrain doctor --log logs/ --log n2.gz   folders, several files, gzip, xz, bzip2
  kubectl logs pod | hpctrain doctor --log -
  hpctrain doctor --check-signatures        are your own and the site's signatures right?
Exit codes: 0 a cause was found, or nothing is wrong; 1 nothing says why; 2, 4 no such log or run.
""",
)
@click.argument("run", required=False, metavar="[RUN]", shell_complete=complete_run)
@click.option(
    "--log",
    "log_names",
    multiple=True,
    metavar="FILE",
    help="A log of any job: a file, a folder, or - for standard input.",
)
@click.option(
    "--attempt",
    type=click.IntRange(min=1),
    metavar="N",
    help="This attempt.  [default: the newest]",
)
@click.option(
    "--check-signatures",
    "checked",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Test a signature file with its own examples; without FILE, yours and the site's.",
)
@click.option("--why", is_flag=True, help="Show all evidence, and what the cause is not.")
@json_option
@runs_option
def command(
    *,
    run: str | None,
    log_names: tuple[str, ...],
    attempt: int | None,
    checked: str | None,
    why: bool,
    as_json: bool,
    runs: Path,
) -> int:
    """Diagnose why a run or any training job died: verdict, certainty, evidence, advice.

    RUN is a name, a job id, a unique beginning of a name, a path, or - for the newest. With
    --log it reads logs of any job.
    """
    if checked is not None:
        return _check(checked)
    if log_names and (run is not None or attempt is not None):
        raise UsageError("give a RUN (with --attempt), or logs with --log, not both")
    if log_names:
        from hpctrain.advise.doctor.files import inputs
        from hpctrain.advise.doctor.judge import judge

        logs, notes = _read(inputs(log_names))
        diagnosis = judge(logs)
        named = ""
    else:
        diagnosis, notes, named = _of_run(run or "-", attempt, runs)
    _show(diagnosis, notes, named, why=why, as_json=as_json)
    return 1 if diagnosis.certainty == "not known" and diagnosis.kind == "unknown" else 0


def _show(
    diagnosis: Diagnosis, notes: Sequence[str], named: str, *, why: bool, as_json: bool
) -> None:
    from hpctrain.advise.doctor.words import as_json as document
    from hpctrain.advise.doctor.words import as_text, in_short

    if as_json:
        echo_json({"run": named or None, **document(diagnosis, notes)})
        return
    width = min(120, shutil.get_terminal_size((100, 24)).columns)
    text = (as_text if why else in_short)(diagnosis, notes, width=width)
    click.echo(text.replace(" RUN", f" {named}") if named else text)
    if not why:
        click.echo("              --why shows the rest")


def _read(logs: Sequence[LogInput]) -> tuple[list[LogFacts], list[str]]:
    """Read logs, with a bar for long ones."""
    from hpctrain.advise.doctor.files import scan
    from hpctrain.advise.doctor.signature import with_own
    from hpctrain.cli.progress import progress

    signatures, left_out = with_own(os.environ)
    with progress("reading logs", sum(log.size for log in logs)) as advance:
        facts, notes = scan(logs, advance, signatures)
    return facts, [*left_out, *notes]


def _check(name: str) -> int:
    """Say of each file of signatures whether it does what its examples say."""
    from hpctrain.advise.doctor.signature import faults_of, files_in, paths_here, read

    paths, notes = (files_in(Path(name)), []) if name else paths_here(os.environ)
    for note in notes:
        echo_note(note)
    if not paths:
        click.echo(
            "no signatures but hpctrain's own; yours belong in ~/.config/hpctrain/signatures"
        )
    is_right = not notes
    for path in paths:
        try:
            signatures = read(path)
            faults = faults_of(signatures)
        except UsageError as error:
            faults, signatures = [str(error)], []
        is_right = is_right and not faults
        for fault in faults:
            click.echo(f"wrong  {path}: {fault.removeprefix(f'{path}: ')}")
        if not faults:
            click.echo(f"ok     {path}: {count(len(signatures), 'signature')}")
    return 0 if is_right else 2


def _of_run(name: str, attempt: int | None, runs: Path) -> tuple[Diagnosis, list[str], str]:
    """The diagnosis of one attempt of a run."""
    from hpctrain.advise.doctor.of_run import diagnose
    from hpctrain.observe.status.reader import StatusReader

    run = find_run(name, runs=runs)
    status = StatusReader(runs).look(run)
    if not status.attempts:
        raise NotFound(f"{run.name} has no attempt yet: `hpctrain status {run.typed}` says why")
    views = {view.number: view for view in status.attempts}
    number = attempt if attempt is not None else max(views)
    if number not in views:
        raise NotFound(f"{run.name} has no attempt {number}; it has {min(views)} to {max(views)}")
    notes: list[str] = []
    history = RunHistory.of(ledger.read(run))
    logs = _logs(run, views, number, history)
    facts: list[LogFacts] = []
    if logs:
        try:
            facts, notes = _read(logs)
        except UsageError as why:
            notes = [str(why)]
    else:
        notes = [f"attempt {number} has no log"]
    return diagnose(views[number], facts, history, state=status.state), notes, run.name


def _logs(
    run: RunDir, views: Mapping[int, AttemptView], number: int, history: RunHistory
) -> list[LogInput]:
    """The logs of an attempt's ranks, and of its job's batch side where it was the job's last."""
    from hpctrain.advise.doctor.files import LogInput
    from hpctrain.advise.doctor.lines import rank_of_file

    folder, job_id = run.attempt(number), views[number].job_id
    paths = sorted(folder.glob("rank-*.log")) if folder.is_dir() else []
    is_last = all(view.job_id != job_id for other, view in views.items() if other > number)
    tokens = [one.token for one in history.submissions if one.job_id == job_id and one.token]
    if is_last:
        paths += sorted(path for token in tokens for path in run.jobs.glob(f"{token}*.out"))
    return [
        LogInput(
            str(path.relative_to(run.root)),
            path,
            is_named=False,
            tail_bytes=TAIL_BYTES,
            rank=rank_of_file(path.name) if path.parent == folder else None,
            attempt=number,
        )
        for path in paths
    ]

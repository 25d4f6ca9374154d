"""Rehearse a program on two processors: a few steps, preempted, resumed, and compared.

The comparison is with an undisturbed run and with one rank. Jobs and folder go at the end, also
after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.advise.check.comparison import (
    ROUNDING,
    LossComparison,
    RehearsedAttempt,
    began_again,
    compared,
    place_text,
    printed_losses,
    printed_places,
    rehearsed,
)
from hpctrain.advise.check.forecast import FAIL, NOT_KNOWN, NOTE, OK, CheckLine, CheckList
from hpctrain.cluster.scheduler.base import get_cluster
from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_FAULTS, HPCTRAIN_LOCAL_DIR
from hpctrain.core.base.files import absolute, make_runs_folder, read_text, remove_runs_folder
from hpctrain.core.base.records import EndReason
from hpctrain.core.base.text import size
from hpctrain.errors import HpctrainError
from hpctrain.launch.change import flags_of
from hpctrain.launch.launch import submit_run
from hpctrain.ledger.run import events as ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpctrain.launch.prepare import SubmitRequest
    from hpctrain.ledger.run.layout import RunDir

    Say = Callable[[str], None]
    Enough = Callable[[list[RehearsedAttempt]], bool]


_LOSS = "rehearse: loss"
RANKS = 2
STEPS = 3
"""Before the stop, and behind it."""
HOLD_S = 3.0
"""The save of the third step is held up for so long, so that the notice comes before the end of a
program whose steps take no time."""
SILENT_S = 20.0
"""A program that prints no steps is stopped after so long."""
UNSAVED_S = 60.0
"""One that prints some, and saves nothing."""
PATIENCE_S = 600.0
_NEEDED = frozenset({"submit", "imports", "space"})
"""Where one of these has failed, the program would fail too."""
_HOLD = f"delay:stage.made,rank=0,step={STEPS},attempt=1,seconds={HOLD_S:g}"


def add_rehearsal(
    checks: CheckList, request: SubmitRequest, say: Say, *, patience_s: float = PATIENCE_S
) -> None:
    """Rehearse, unless a check has shown that the program cannot start."""
    broken = next(
        (one.check for one in checks.lines if one.status == FAIL and one.check in _NEEDED), None
    )
    if broken is not None:
        message = f"not tried: {broken} failed"
        checks.lines.append(CheckLine("rehearse", NOT_KNOWN, message, "fix that first"))
        return
    checks.lines += rehearse(
        request, say, calls_hpctrain=checks.calls_hpctrain, patience_s=patience_s
    )


def rehearse(
    request: SubmitRequest, say: Say, *, calls_hpctrain: bool | None, patience_s: float = PATIENCE_S
) -> list[CheckLine]:
    """Try the program, and say what came of it. Leaves nothing behind.

    Args:
        request: The run that is to come.
        say: Told how far it is.
        calls_hpctrain: Whether the program reports its steps; None if that is not known.
        patience_s: So long may each wait take.
    """
    began = clock.monotonic()
    lines: list[CheckLine] = []
    try:
        with rehearsal_stage(request, patience_s=patience_s) as stage:
            lines += _result_lines(stage, say) if calls_hpctrain else _silent(stage, say)
    except HpctrainError as error:
        hint = "nothing of it is left; try it with hpctrain submit --cluster local"
        lines.append(CheckLine("rehearse", FAIL, str(error), hint))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        lines.append(CheckLine("rehearse", NOT_KNOWN, f"{error.strerror or error}{where}"))
    took = clock.monotonic() - began
    return [replace(lines[0], seconds=took), *lines[1:]]


def _result_lines(stage: RehearsalStage, say: Say) -> list[CheckLine]:
    """Of a program that tells of its steps."""
    sets = (f"checkpoint.interval_steps={STEPS}",)
    say(f"rehearse: {RANKS} ranks, until they are preempted")
    run, job_id = stage.start("stopped", RANKS, sets=sets, faults=_HOLD)
    attempts = stage.wait(run, job_id, lambda seen: bool(seen) and seen[-1].last >= STEPS)
    if not attempts or not attempts[-1].last:
        return [_no_steps(attempts)]
    get_cluster(LOCAL).rehearse(job_id, time_limit=False)
    say("rehearse: preempted, until it resumes")
    attempts = stage.wait(run, job_id, lambda seen: len(seen) > 1 and len(seen[1].losses) >= STEPS)
    stage.end(job_id)
    if len(attempts) == 1:
        return [_never_stopped(attempts[0])]
    before, after = attempts[0], attempts[1]
    line = stop_line(before, after)
    if line.status == FAIL:
        return [line]
    say("rehearse: the same, undisturbed")
    run, job_id = stage.start("undisturbed", RANKS, sets=sets)
    whole = stage.wait(run, job_id, lambda seen: bool(seen) and seen[0].last >= after.last)[0]
    stage.end(job_id)
    losses = loss_line(before, after, whole)
    if losses.status == FAIL:
        return [line, losses]
    say("rehearse: the same on one rank")
    return [line, losses, _alone(stage, whole)]


def _no_steps(attempts: list[RehearsedAttempt]) -> CheckLine:
    reason = attempts[-1].reason if attempts else None
    ended = f"it ended ({reason.value})" if reason else "it ended"
    return CheckLine(
        "rehearse",
        NOT_KNOWN,
        f"{ended} and reported no step: nothing could be stopped and compared",
        "`hpctrain help getting-started` says how a program reports its steps",
    )


def _never_stopped(attempt: RehearsedAttempt) -> CheckLine:
    reason = attempt.reason.value if attempt.reason else "not known"
    return CheckLine(
        "rehearse",
        NOT_KNOWN,
        f"the program ended ({reason}, step {attempt.last}) before it could be stopped",
        "let it do more steps",
    )


def stop_line(before: RehearsedAttempt, after: RehearsedAttempt) -> CheckLine:
    """Whether it saved at the notice, and resumed from there."""
    shape = f"{RANKS} ranks, preempted at step {before.last}"
    if before.reason is not EndReason.PREEMPTED:
        reason = before.reason.value if before.reason else "not known"
        return CheckLine("rehearse", FAIL, f"{shape}: it ended as {reason}, not as preempted")
    saved = max(before.saved, default=0)
    if after.restored is None or after.restored < before.last:
        restored = after.restored or 0
        message = (
            f"{shape}: saved step {saved}, resumed from step {restored}: "
            f"{before.last - restored} steps are lost"
        )
        return CheckLine(
            "rehearse", FAIL, message, "`hpctrain help getting-started` says what is saved and when"
        )
    sized = "" if before.save_bytes is None else f" ({size(before.save_bytes)})"
    message = f"{shape}: saved step {saved}{sized}, resumed at {after.restored}, no step lost"
    return CheckLine("rehearse", OK, message)


def loss_line(
    before: RehearsedAttempt, after: RehearsedAttempt, whole: RehearsedAttempt
) -> CheckLine:
    """The losses of the stopped run against those of the one in peace."""
    name = _LOSS
    first, second = compared(before.losses, whole.losses), compared(after.losses, whole.losses)
    if not second.steps:
        message = "the program reports no loss: nothing could be compared"
        return CheckLine(name, NOT_KNOWN, message, "run.log(loss=...) reports it")
    if first.parts_at is not None:
        message = (
            f"two starts differ at step {first.parts_at} already, before any stop: what the stop "
            "changes cannot be told"
        )
        return CheckLine(name, NOT_KNOWN, message, "seed what is random, the same on every start")
    steps = f"steps {min([*first.steps, *second.steps])} to {second.steps[-1]}"
    if second.parts_at is None:
        return CheckLine(name, OK, f"{steps} as in an undisturbed run, bit for bit")
    message = f"from step {second.parts_at} on it differs from an undisturbed run: {_worst(second)}"
    hint = "something is not saved: the data's position, a generator's state, a scheduler"
    return CheckLine(name, FAIL, message, hint)


def _worst(comparison: LossComparison) -> str:
    return f"losses are up to {comparison.worst:.2g} apart (relative)"


def _alone(stage: RehearsalStage, whole: RehearsedAttempt) -> CheckLine:
    """One rank against several."""
    name = "rehearse: 1 rank"
    try:
        run, job_id = stage.start("alone", 1)
        attempts = stage.wait(run, job_id, lambda seen: bool(seen) and seen[0].last >= STEPS)
        stage.end(job_id)
    except HpctrainError as error:
        return CheckLine(name, NOTE, f"it does not run on one rank: {error}")
    comparison = compared(attempts[0].losses if attempts else {}, whole.losses)
    return rank_line(comparison)


def rank_line(comparison: LossComparison) -> CheckLine:
    """What one rank and several make of the same steps."""
    name = "rehearse: 1 rank"
    if not comparison.steps:
        return CheckLine(name, NOT_KNOWN, "no loss of the same step was told on 1 and on 2 ranks")
    steps = f"steps {comparison.steps[0]} to {comparison.steps[-1]}"
    if comparison.parts_at is None:
        return CheckLine(name, OK, f"{steps} on 1 and on {RANKS} ranks: the same losses")
    if comparison.worst <= ROUNDING:
        message = f"{steps} on 1 and on {RANKS} ranks: {_worst(comparison)}, as rounding makes it"
        return CheckLine(name, OK, message)
    message = f"from step {comparison.parts_at} on 1 rank and {RANKS} differ: {_worst(comparison)}"
    hint = (
        "right if the batch grows with the ranks, or the loss is rank 0's own; otherwise "
        "ranks read the same samples, or gradients are not averaged"
    )
    return CheckLine(name, NOTE, message, hint)


def _silent(stage: RehearsalStage, say: Say) -> list[CheckLine]:
    """Of a program that knows nothing of hpctrain: what it prints is all that is known of it."""
    say(f"rehearse: {RANKS} ranks, until they are preempted")
    began = clock.now()
    run, job_id = stage.start("stopped", RANKS)
    attempts = stage.wait(run, job_id, _has_printed(run, 1, STEPS, lambda: stage.has_saved(began)))
    if attempts and attempts[-1].reason is not None:
        return [_no_steps(attempts)]
    saved = stage.has_saved(began)
    get_cluster(LOCAL).rehearse(job_id, time_limit=False)
    asked = clock.now()
    say("rehearse: preempted, until it has started again")
    attempts = stage.wait(run, job_id, _has_printed(run, 2, STEPS))
    stage.end(job_id)
    if len(attempts) == 1:
        return [_never_stopped(attempts[0])]
    lines = [left_line(attempts[0], attempts[0].ended - asked)]
    logs = [_log(run, number) for number in (1, 2)]
    lines.append(resume_line(*map(printed_places, logs), saved=saved))
    before, after = (RehearsedAttempt(printed_losses(log)) for log in logs)
    if lines[-1].status != OK:
        return lines
    if not before.losses or not after.losses:
        message = "it prints no loss with its step: nothing could be compared"
        return [*lines, CheckLine(_LOSS, NOT_KNOWN, message)]
    say("rehearse: the same, undisturbed")
    run, job_id = stage.start("undisturbed", RANKS)
    stage.wait(run, job_id, _has_printed(run, 1, after.last))
    stage.end(job_id)
    return [*lines, printed_line(before, after, RehearsedAttempt(printed_losses(_log(run, 1))))]


def resume_line(
    before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]], *, saved: bool
) -> CheckLine:
    """Whether a program that was started again resumed, by the epochs and steps that it prints.

    Args:
        before: Places that the first start printed.
        after: Those of the second one.
        saved: The first start had written a checkpoint when it was stopped.
    """
    name = "rehearse: resume"
    again = began_again(before, after)
    if again is None:
        message = "not known whether its second start resumed"
        hint = "print the epoch and the step with each line, e.g. `epoch 3 step 20 loss 1.9`"
        return CheckLine(name, NOT_KNOWN, message, hint)
    if not again:
        message = f"came to {place_text(max(before))}, resumed at {place_text(after[0])}"
        return CheckLine(name, OK, message)
    message = (
        f"came to {place_text(max(before))}, started over at {place_text(after[0])}: each "
        "preemption "
        "costs all that was trained"
    )
    hint = "--checkpoint and --resume-args name what to resume (`hpctrain help getting-started`)"
    if saved:
        return CheckLine(name, FAIL, message, hint)
    message = f"{message}, unless it saves later than the rehearsal stopped it"
    return CheckLine(name, NOTE, message, hint)


def printed_line(
    before: RehearsedAttempt, after: RehearsedAttempt, whole: RehearsedAttempt
) -> CheckLine:
    """As `loss_line`, of a program of which hpctrain promises nothing."""
    if whole.losses and min(whole.losses) > min(before.losses):
        message = (
            f"the undisturbed run began with step {min(whole.losses)}, from what the one "
            "before had "
            "left in the program's own folder: nothing could be compared"
        )
        return CheckLine(_LOSS, NOT_KNOWN, message)
    losses = loss_line(before, after, whole)
    return replace(losses, status=NOTE) if losses.status == FAIL else losses


def _has_printed(
    run: RunDir, number: int, steps: int, has_saved: Callable[[], bool] = lambda: True
) -> Enough:
    """Return whether an attempt has printed so many places, and has saved where that is asked."""
    began: float | None = None

    def enough(attempts: list[RehearsedAttempt]) -> bool:
        nonlocal began
        if len(attempts) < number:
            return False
        began = began or clock.monotonic()
        log = _log(run, number)
        losses, places = printed_losses(log), len(set(printed_places(log)))
        if clock.monotonic() > began + (UNSAVED_S if places else SILENT_S):
            return True
        is_enough = places > steps or max(losses, default=0) >= steps > STEPS
        return is_enough and has_saved()

    return enough


def _log(run: RunDir, number: int) -> str:
    """What an attempt's first rank has printed so far."""
    try:
        return read_text(run.rank_log(number, 0))
    except OSError:  # nothing
        return ""


def left_line(before: RehearsedAttempt, seconds: float) -> CheckLine:
    """How a program took the notice of a preemption that hears of it by signal and file alone."""
    shape = f"{RANKS} ranks, told of a preemption"
    if before.reason is EndReason.PREEMPTED:
        return CheckLine(
            "rehearse", OK, f"{shape}: left after {max(0.0, seconds):.1f} s, started again"
        )
    reason = before.reason.value if before.reason else "not known"
    message = f"{shape}: ended {seconds:.0f} s later as {reason}, started again"
    hint = "steps since its last save are lost; to receive stops: `hpctrain help getting-started`"
    return CheckLine("rehearse", NOTE, message, hint)


LOCAL = "local"
_OF_THE_JOB = ("slurm.", "shape.", "alive.", "container.")
"""Settings of which a rehearsal has its own."""
POLL_S = 0.1
END_S = 30.0
"""So long a job may take to end that was cancelled, before its folder goes."""
_SETS = (
    "run.log_every_s=0",
    "run.lint=false",
    "run.restarts_in_job=0",
    "checkpoint.mode=sync",
    "environment.stage=no",
    "notify.webhook_file=",
    "notify.command=",
    "evaluate.script=",
    "budget.time_limits=1",
    "budget.crashes=3",
)
_ENV = ("CUDA_VISIBLE_DEVICES=", "WANDB_MODE=offline")


MOST_FILES = 20_000
_CHECKPOINTS = frozenset(
    {".bin", ".ckpt", ".msgpack", ".npz", ".pickle", ".pkl", ".pt", ".pth", ".safetensors", ".tar"}
)


@contextlib.contextmanager
def rehearsal_stage(request: SubmitRequest, *, patience_s: float) -> Iterator[RehearsalStage]:
    """Have local jobs of this process lie in a folder; at the end end them, then remove it.

    Args:
        request: The run that is to come.
        patience_s: So long may each wait take.
    """
    runs = absolute(request.cwd, request.runs)
    new_runs = [one for one in (runs, *runs.parents) if not one.exists()]
    make_runs_folder(runs)
    folder = Path(tempfile.mkdtemp(prefix=".rehearsal-", dir=runs))
    before = os.environ.get(HPCTRAIN_LOCAL_DIR)
    os.environ[HPCTRAIN_LOCAL_DIR] = str(folder / "jobs")
    stage = RehearsalStage(request, folder, patience_s)
    try:
        try:
            yield stage
        finally:
            for job_id in stage.jobs:
                stage.end(job_id)
    finally:
        if before is None:
            del os.environ[HPCTRAIN_LOCAL_DIR]
        else:
            os.environ[HPCTRAIN_LOCAL_DIR] = before
        shutil.rmtree(folder, ignore_errors=True)
        for made in new_runs:
            with contextlib.suppress(OSError):  # somebody else has put something there
                remove_runs_folder(made)


@dataclass
class RehearsalStage:
    """Runs of a program on this machine's processors."""

    request: SubmitRequest  # the run that is to come
    folder: Path  # of the runs and their jobs
    patience_s: float  # the limit of each wait
    jobs: list[str] = field(default_factory=list)  # those that were started

    def start(
        self, name: str, ranks: int, *, sets: tuple[str, ...] = (), faults: str = ""
    ) -> tuple[RunDir, str]:
        """Start a run.

        Args:
            name: Of the run.
            ranks: On one node.
            sets: More settings.
            faults: What is to go wrong in it.

        Raises:
            HpctrainError: it cannot be made.
        """
        asked = self.request
        env = [*asked.env, *_ENV, *([f"{HPCTRAIN_FAULTS}={faults}"] if faults else [])]
        request = replace(
            asked,
            cluster=LOCAL,
            runs=self.folder / "runs",
            name=name,
            flags={
                **{path: f for path, f in asked.flags.items() if not path.startswith(_OF_THE_JOB)},
                **flags_of(
                    nodes="1",
                    ranks_per_node=ranks,
                    gpus_per_node=0,
                    time="0:30:00",
                    snapshot=False,
                ),
            },
            begin="",
            without=(),
            site=None,
            sets=[*asked.sets, *_SETS, *sets],
            env=env,
            ask_accounting=False,
        )
        submitted = submit_run(request)
        if submitted.job_id is None:
            raise HpctrainError(f"{name} has no job")
        self.jobs.append(submitted.job_id)
        return submitted.run, submitted.job_id

    def wait(self, run: RunDir, job_id: str, enough: Enough) -> list[RehearsedAttempt]:
        """The run's attempts, once there is enough of them, or once its job is over.

        Raises:
            HpctrainError: a rank has failed, or it took too long.
        """
        until = clock.monotonic() + self.patience_s
        while True:
            job = get_cluster(LOCAL).job(job_id)  # before the ledger: what it ended with is in it
            attempts = rehearsed(ledger.read(run))
            failure = next((one.failure for one in attempts if one.failure), "")
            if failure:
                raise HpctrainError(failure)
            if enough(attempts) or job is None or not job.alive:
                return attempts
            if clock.monotonic() > until:
                last = attempts[-1].last if attempts else 0
                raise HpctrainError(
                    f"after {self.patience_s:g} s it had come to step {last} of attempt "
                    f"{len(attempts)}; give it longer with --timeout"
                )
            clock.sleep(POLL_S)

    def has_saved(self, since: float) -> bool:
        """Whether the program has written what looks like a checkpoint into its folder.

        Args:
            since: Seconds since the epoch; older files are not meant.
        """
        seen = 0
        for folder, below, files in os.walk(self.request.cwd):
            below[:] = [name for name in below if not name.startswith(".") and name != "venv"]
            seen += len(files)
            if seen > MOST_FILES:
                return False  # a folder of data; nobody waits for a look at all of it
            for name in files:
                path = Path(folder, name)
                if path.suffix in _CHECKPOINTS and not path.is_relative_to(self.folder):
                    with contextlib.suppress(OSError):  # it is replaced at this moment
                        if path.stat().st_mtime >= since:
                            return True
        return False

    def end(self, job_id: str) -> None:
        """Cancel a job and wait for its end."""
        cluster = get_cluster(LOCAL)
        until = None
        while (job := cluster.job(job_id)) is not None and job.alive:
            if until is None:
                cluster.cancel(job_id)
                until = clock.monotonic() + END_S
            elif clock.monotonic() >= until:
                return
            clock.sleep(POLL_S)

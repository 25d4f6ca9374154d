"""The program itself on two processors: a few steps, preempted, resumed, compared.

It is held against a run in peace, and against one rank. What comes of it are lines like those of
the other checks. tests/unit/check/test_rehearsal.py and test_comparison.py hold the promises.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.base.records import EndReason
from hpctrain.check.comparison import ROUNDING, LossComparison, compared
from hpctrain.check.lines import FAIL, NOT_KNOWN, NOTE, OK, CheckLine
from hpctrain.check.stage import RehearsalStage
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.check.comparison import RehearsedAttempt
    from hpctrain.check.lines import CheckList
    from hpctrain.submit.prepare import SubmitRequest

    Say = Callable[[str], None]

RANKS = 2
STEPS = 3
"""Before the stop, and behind it."""
HOLD_S = 3.0
"""The save of the third step is held up for so long, so that the notice comes before the end of a
program whose steps take no time."""
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
        checks.lines.append(CheckLine("rehearse", NOT_KNOWN, message, "mend that first"))
        return
    checks.lines += rehearse(request, say, tells=checks.tells, patience_s=patience_s)


def rehearse(
    request: SubmitRequest, say: Say, *, tells: bool | None, patience_s: float = PATIENCE_S
) -> list[CheckLine]:
    """Try the program, and say what came of it. Leaves nothing behind.

    Args:
        request: The run that is to come.
        say: Told how far it is.
        tells: Whether the program tells hpctrain of its steps; None where nobody knows.
        patience_s: So long may each wait take.
    """
    began = time.monotonic()
    lines: list[CheckLine] = []
    try:
        with RehearsalStage(request, patience_s=patience_s) as stage:
            lines += _told(stage, say) if tells else _silent()
    except HpctrainError as error:
        hint = "nothing of it is left; try it with hpctrain submit --cluster local"
        lines.append(CheckLine("rehearse", FAIL, str(error), hint))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        lines.append(CheckLine("rehearse", NOT_KNOWN, f"{error.strerror or error}{where}"))
    took = time.monotonic() - began
    return [replace(lines[0], seconds=took), *lines[1:]]


def _told(stage: RehearsalStage, say: Say) -> list[CheckLine]:
    """Of a program that tells of its steps."""
    sets = (f"checkpoint.interval_steps={STEPS}",)
    say(f"rehearse: {RANKS} ranks, until they are preempted")
    run, job_id = stage.start("stopped", RANKS, sets=sets, faults=_HOLD)
    attempts = stage.wait(run, job_id, lambda seen: bool(seen) and seen[-1].last >= STEPS)
    if not attempts or not attempts[-1].last:
        return [_no_steps(attempts)]
    stage.preempt(job_id)
    say("rehearse: preempted, until it goes on")
    attempts = stage.wait(run, job_id, _went_on)
    stage.end(job_id)
    if len(attempts) == 1:
        return [_never_stopped(attempts[0])]
    before, after = attempts[0], attempts[1]
    line = stop_line(before, after)
    if line.status == FAIL:
        return [line]
    say("rehearse: the same in peace")
    run, job_id = stage.start("undisturbed", RANKS, sets=sets)
    whole = stage.wait(run, job_id, lambda seen: bool(seen) and seen[0].last >= after.last)[0]
    stage.end(job_id)
    say("rehearse: the same on one rank")
    return [line, loss_line(before, after, whole), _alone(stage, whole)]


def _went_on(attempts: list[RehearsedAttempt]) -> bool:
    """Whether the second attempt has done its steps."""
    return len(attempts) > 1 and len(attempts[1].losses) >= STEPS


def _no_steps(attempts: list[RehearsedAttempt]) -> CheckLine:
    reason = attempts[-1].reason if attempts else None
    ended = f"it ended ({reason.value})" if reason else "it ended"
    return CheckLine(
        "rehearse",
        NOT_KNOWN,
        f"{ended} and told of no step: nothing could be stopped and compared",
        "docs/programs.md says how a program tells its steps",
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
    """Whether it saved at the notice, and went on from there."""
    shape = f"{RANKS} ranks, preempted at step {before.last}"
    if before.reason is not EndReason.PREEMPTED:
        reason = before.reason.value if before.reason else "not known"
        return CheckLine("rehearse", FAIL, f"{shape}: it ended as {reason}, not as preempted")
    saved = max(before.saved, default=0)
    if after.restored is None or after.restored < before.last:
        restored = after.restored or 0
        message = (
            f"{shape}: saved step {saved}, went on from step {restored}: "
            f"{before.last - restored} steps are lost"
        )
        return CheckLine("rehearse", FAIL, message, "docs/programs.md says what is saved and when")
    message = f"{shape}: saved step {saved}, resumed at {after.restored}, no step lost"
    return CheckLine("rehearse", OK, message)


def loss_line(
    before: RehearsedAttempt, after: RehearsedAttempt, whole: RehearsedAttempt
) -> CheckLine:
    """The losses of the stopped run against those of the one in peace."""
    name = "rehearse: loss"
    first, second = compared(before.losses, whole.losses), compared(after.losses, whole.losses)
    if not second.steps:
        message = "the program tells no loss of its steps: nothing could be compared"
        return CheckLine(name, NOT_KNOWN, message, "run.log(loss=...) tells it")
    if first.parts_at is not None:
        message = (
            f"two starts differ at step {first.parts_at} already, before any stop: what the stop "
            "changes cannot be told"
        )
        return CheckLine(name, NOT_KNOWN, message, "seed what is random, the same on every start")
    steps = f"steps {min([*first.steps, *second.steps])} to {second.steps[-1]}"
    if second.parts_at is None:
        return CheckLine(name, OK, f"{steps} as in a run in peace, bit for bit")
    message = (
        f"from step {second.parts_at} on it trains something else than a run in peace: "
        f"{_worst(second)}"
    )
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
        "right where the batch grows with the ranks, or the loss told is rank 0's own; otherwise "
        "ranks read the same samples, or gradients are not averaged"
    )
    return CheckLine(name, NOTE, message, hint)


def _silent() -> list[CheckLine]:
    """Of a program that knows nothing of hpctrain."""
    message = "the program does not call hpctrain: it tells no steps that could be compared"
    return [CheckLine("rehearse", NOT_KNOWN, message, "docs/programs.md says how it could")]

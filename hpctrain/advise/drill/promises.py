"""The faults of a drill, the promise that each tests, and whether the ledger shows it kept. Pure.

What the ledger cannot show is "not tried", with the reason: "kept" would be a false promise.
tests/unit/drill/test_catalogue.py and test_judging.py hold the promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hpctrain.core.base.text import count
from hpctrain.errors import UsageError
from hpctrain.ledger.history.lineage import lineage
from hpctrain.ledger.history.run_state import OVER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_records import AttemptRecord, SaveRecord


README = "README.md#what-it-promises"


@dataclass(frozen=True)
class DrillFault:
    """One fault.

    Attributes:
        name: As `--faults` has it.
        does: What is done.
        promise: What must come of it.
        anchor: Where that is promised.
        on_live: A run that matters can take it: it costs steps at most, and never data.
        armed: By which words of docs/development/testing-faults.md it is armed when the run
        starts; "" where
            it is done from outside.
    """

    name: str
    does: str
    promise: str
    anchor: str = README
    on_live: bool = True
    armed: str = ""

    @property
    def point(self) -> str:
        """Where an armed fault fires."""
        return self.armed.partition(":")[2].partition(",")[0]


DELAY_S = 5.0
FREEZE_S = 3.0
FAULTS = {
    one.name: one
    for one in (
        DrillFault(
            "power_cut",
            "looks whether the newest committed checkpoint lies on the disk, not in memory alone",
            "a committed checkpoint outlives a power cut: every byte of it is flushed before",
        ),
        DrillFault(
            "kill_rank",
            "SIGKILL to one rank",
            "the run resumes by itself; at most the steps since the last committed checkpoint "
            "are lost",
        ),
        DrillFault(
            "kill_agent",
            "SIGKILL to the agent of a node",
            "the run resumes by itself; at most the steps since the last committed checkpoint "
            "are lost",
        ),
        DrillFault(
            "preempt",
            "sends the notice of a preemption",
            "the run saves, stops, and comes back; no step is lost",
        ),
        DrillFault(
            "tear_checkpoint",
            "cuts a file of the newest checkpoint in half, then kills a rank",
            "a torn checkpoint is never loaded; the next older complete one is, "
            "and the reason is reported",
            on_live=False,
        ),
        DrillFault(
            "flip_bit",
            "turns one bit in a file of the newest checkpoint, then kills a rank",
            "a bit-flipped checkpoint is never loaded; the next older whole one is, and it is told "
            "why",
            on_live=False,
        ),
        DrillFault(
            "freeze_rank",
            f"stops a rank (SIGSTOP) for {FREEZE_S:g} s and continues it",
            "it costs time: the run goes on, and no step since the last committed checkpoint is "
            "lost",
        ),
        DrillFault(
            "fill_disk",
            "a write of a save is refused for want of space (ENOSPC)",
            "no such checkpoint is committed, it is told, training goes on, and the next save is "
            "whole",
            on_live=False,
            armed="fail:shard.write,error=ENOSPC",
        ),
        DrillFault(
            "delay_files",
            f"a flush of a save takes {DELAY_S:g} s",
            "it costs time: the save is committed, in the same attempt",
            on_live=False,
            armed=f"delay:shard.flush,seconds={DELAY_S:g}",
        ),
        DrillFault(
            "second_writer",
            "another attempt takes the run over while its ranks go on (a node thought dead)",
            "two attempts never write into one run: the older one commits nothing more, and exits",
            on_live=False,
        ),
    )
}
"""By name, in the order in which they are planted. The last one ends the run."""


def chosen(names: Sequence[str]) -> list[DrillFault]:
    """The faults that were named, in the drill's order; all of them where none was.

    Raises:
        UsageError: there is no such fault.
    """
    from difflib import get_close_matches

    for name in names:
        if name not in FAULTS:
            near = get_close_matches(name, FAULTS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(FAULTS)}"
            raise UsageError(f"--faults: {name!r} is no fault of the drill; {hint}")
    return [fault for fault in FAULTS.values() if not names or fault.name in names]


Outcome = Literal["kept", "broken", "not tried"]
WRITTEN_ELSEWHERE = "another machine has written it, and only that one can tell"
"""What a node says of a checkpoint of which it has nothing in memory."""


@dataclass(frozen=True)
class DrillVerdict:
    """What came of a fault.

    Attributes:
        outcome: Whether its promise was kept.
        why: In a line.
        again: It came to nothing by chance, and may be tried once more.
    """

    outcome: Outcome
    why: str
    again: bool = False


@dataclass(frozen=True)
class Planted:
    """What is known when a fault has been planted.

    Attributes:
        t: When, seconds since the epoch.
        attempt: The attempt that it met.
        step: The last step that was known to be done.
        saves: How many saves the ledger knew.
        problems: How many joints of the run's samples were wrong before.
        damaged: Name of the checkpoint that was damaged; "" for none.
        damaged_step: Its step.
        on_disk: Names of the checkpoints that were committed.
        fired: An armed fault has been met.
        gave_way: The attempt has written that it was fenced; nobody writes its end but a successor.
    """

    t: float
    attempt: int
    step: int
    saves: int = 0
    problems: int = 0
    damaged: str = ""
    damaged_step: int = 0
    on_disk: frozenset[str] = frozenset()
    fired: bool = True
    gave_way: bool = False


def is_settled(
    fault: DrillFault, planted: Planted, history: RunHistory, on_disk: frozenset[str]
) -> bool:
    """Whether what comes of a fault is there to be judged."""
    if history.state.phase in OVER:
        return True
    newest = history.newest
    if newest is None:
        return False
    if fault.name == "second_writer":
        return bool(on_disk - planted.on_disk) or planted.gave_way
    came_back = newest.number > planted.attempt and _trains(newest)
    if fault.name == "freeze_rank":
        return came_back or (newest.last_step or 0) > planted.step + 1
    if fault.armed:
        saved = [one for one in history.saves[planted.saves :] if one.committed]
        return came_back or (planted.fired and bool(saved) and _reported(fault, planted, history))
    return came_back


def judge(
    fault: DrillFault, planted: Planted, history: RunHistory, on_disk: frozenset[str]
) -> DrillVerdict:
    """Whether the promise was kept.

    Args:
        fault: Which.
        planted: What was known as it was planted.
        history: The run's, when `is_settled` or after the drill's patience.
        on_disk: Names of the checkpoints that are committed now.
    """
    verdict = _JUDGES[fault.name](planted, history, on_disk)
    problems = lineage(history).problems
    if verdict.outcome == "kept" and len(problems) > planted.problems:
        return DrillVerdict("broken", f"samples were skipped or used twice: {problems[-1]}")
    return verdict


def judge_flushed(name: str, answers: Sequence[list[str] | str]) -> DrillVerdict:
    """Whether a checkpoint lies on the disk, by what each node has said of its own memory.

    Args:
        name: The checkpoint's.
        answers: Of each node the files of which it has bytes in memory alone, or why it cannot say.
    """
    lost = sorted({file for one in answers if not isinstance(one, str) for file in one})
    if lost:
        return DrillVerdict("broken", f"{name} is committed; in memory alone: {', '.join(lost)}")
    untold = [one for one in answers if isinstance(one, str)]
    blind = [one for one in untold if one != WRITTEN_ELSEWHERE]
    if blind or len(untold) == len(answers):
        return DrillVerdict("not tried", (blind or [WRITTEN_ELSEWHERE])[0])
    return DrillVerdict("kept", f"{name} is on disk, complete")


def _trains(attempt: AttemptRecord) -> bool:
    """Whether an attempt has come to steps of its own."""
    return attempt.first_step is not None and (
        attempt.restored_step is None or (attempt.last_step or 0) > attempt.restored_step
    )


def _reported(fault: DrillFault, planted: Planted, history: RunHistory) -> bool:
    """A save that was refused is told before the next is made; of a late one there is no word."""
    return fault.name != "fill_disk" or any(
        not one.committed or (one.step or 0) > planted.step
        for one in history.saves[planted.saves :]
    )


def _successor(planted: Planted, history: RunHistory) -> AttemptRecord | None:
    """The first attempt after the one that was met which came to restore something."""
    later = [one for one in history.attempts if one.number > planted.attempt]
    return next((one for one in later if one.restored_step is not None), None)


def _committed(planted: Planted, history: RunHistory, below: int | None = None) -> int:
    """The newest step that was committed by the end of the attempt that was met."""
    steps = [
        one.step
        for one in history.saves
        if one.committed
        and one.step is not None
        and (one.attempt or 0) <= planted.attempt
        and (below is None or one.step < below)
    ]
    return max(steps, default=0)


def _nothing_followed(planted: Planted, history: RunHistory) -> DrillVerdict:
    """Why the run does not go on, as far as the ledger tells."""
    met = history.attempt(planted.attempt)
    if met is None or not met.is_over:
        return DrillVerdict("broken", f"attempt {planted.attempt} neither ended nor continued")
    why = met.stopped_for_good or met.detail
    ended = f"attempt {met.number} ended ({met.reason}{', ' + why if why else ''})"
    return DrillVerdict("broken", f"{ended}, and none trains after it")


def _killed(planted: Planted, history: RunHistory, _: frozenset[str]) -> DrillVerdict:
    met, new = history.attempt(planted.attempt), _successor(planted, history)
    if met is None or new is None:
        return _nothing_followed(planted, history)
    committed, restored = _committed(planted, history), new.restored_step or 0
    if restored < committed:
        return DrillVerdict(
            "broken", f"resumed from step {restored}, though step {committed} was committed"
        )
    lost = max(0, (met.last_step or 0) - restored)
    return DrillVerdict(
        "kept",
        f"attempt {new.number} resumed from step {restored}, the newest committed; "
        f"{count(lost, 'step')} done again",
    )


def _preempted(planted: Planted, history: RunHistory, on_disk: frozenset[str]) -> DrillVerdict:
    met, new = history.attempt(planted.attempt), _successor(planted, history)
    if met is None or new is None:
        return _nothing_followed(planted, history)
    if met.stop_cause is None:
        return DrillVerdict("broken", f"attempt {met.number} ended ({met.reason}) unasked")
    lost = max(0, (met.last_step or 0) - (new.restored_step or 0))
    if lost:
        return DrillVerdict("broken", f"{count(lost, 'step')} lost, though it was told beforehand")
    return (
        _killed(planted, history, on_disk)
        if met.last_step is None
        else DrillVerdict(
            "kept",
            f"saved and left at step {met.last_step}, attempt {new.number} resumed from there",
        )
    )


def _damaged(planted: Planted, history: RunHistory, _: frozenset[str]) -> DrillVerdict:
    new = _successor(planted, history)
    if new is None:
        return _nothing_followed(planted, history)
    restored, name = new.restored_step or 0, planted.damaged
    if new.from_checkpoint == name and new.read_from == "disk":
        return DrillVerdict("broken", f"attempt {new.number} loaded {name}, which was damaged")
    if restored >= planted.damaged_step:
        return DrillVerdict("not tried", "a newer state was restored", again=True)
    older = _committed(planted, history, below=planted.damaged_step)
    if restored < older:
        return DrillVerdict("broken", f"resumed from step {restored}, though {older} was whole")
    reasons = [one.reason for one in (*new.skipped, *history.set_aside) if one.name == name]
    if not reasons:
        return DrillVerdict("broken", f"{name} was passed over, and nobody was told")
    return DrillVerdict("kept", f"resumed from step {restored}; {name} left out: {reasons[0]}")


def _frozen(planted: Planted, history: RunHistory, on_disk: frozenset[str]) -> DrillVerdict:
    newest = history.newest
    if newest is not None and newest.number > planted.attempt:
        return _killed(planted, history, on_disk)
    if newest is None or newest.is_over or (newest.last_step or 0) <= planted.step:
        return _nothing_followed(planted, history)
    return DrillVerdict("kept", f"the same attempt continued, to step {newest.last_step}")


def _in_attempt(planted: Planted, history: RunHistory) -> Sequence[SaveRecord] | DrillVerdict:
    """The saves since, where the attempt went on; else what to say."""
    newest = history.newest
    if not planted.fired:
        return DrillVerdict("not tried", "no save came to the place where it was armed")
    if newest is None or newest.number > planted.attempt or newest.is_over:
        met = history.attempt(planted.attempt)
        reason = "" if met is None else f" ({met.reason})"
        return DrillVerdict("broken", f"attempt {planted.attempt} ended by it{reason}")
    return history.saves[planted.saves :]


def _filled(planted: Planted, history: RunHistory, on_disk: frozenset[str]) -> DrillVerdict:
    saves = _in_attempt(planted, history)
    if isinstance(saves, DrillVerdict):
        return saves
    failed = [one for one in saves if one.kind == "save_failed"]
    if not failed:
        return DrillVerdict("broken", "a write was refused, and no save was told to have failed")
    step = failed[0].step
    if any(_step(name) == step for name in on_disk):
        return DrillVerdict("broken", f"step {step} is there, though a write of it was refused")
    later = [one.step for one in saves if one.committed and (one.step or 0) > (step or 0)]
    if not later:
        return DrillVerdict("broken", f"the save of step {step} failed, and none came after it")
    return DrillVerdict("kept", f"step {step} was not saved ({failed[0].why}); {later[0]} was")


def _delayed(planted: Planted, history: RunHistory, _: frozenset[str]) -> DrillVerdict:
    saves = _in_attempt(planted, history)
    if isinstance(saves, DrillVerdict):
        return saves
    failed = [one for one in saves if one.kind == "save_failed"]
    if failed:
        return DrillVerdict("broken", f"the save of step {failed[0].step} failed: {failed[0].why}")
    saved = [one for one in saves if one.committed]
    if not saved:
        return DrillVerdict("broken", "no save was committed after it")
    slowest = max(saved, key=lambda one: one.seconds or 0.0)
    took = "" if slowest.seconds is None else f" after {slowest.seconds:.1f} s"
    return DrillVerdict("kept", f"step {slowest.step} was committed{took}")


def _fenced(planted: Planted, _: RunHistory, on_disk: frozenset[str]) -> DrillVerdict:
    written = sorted(on_disk - planted.on_disk)
    if written:
        return DrillVerdict(
            "broken", f"attempt {planted.attempt} committed {written[0]} after it was taken over"
        )
    if not planted.gave_way:
        return DrillVerdict("broken", f"attempt {planted.attempt} was never told that it is fenced")
    return DrillVerdict("kept", f"attempt {planted.attempt} wrote nothing more, and left (fenced)")


def _step(name: str) -> int | None:
    """The step in a checkpoint's name."""
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else None


_JUDGES: dict[str, Callable[[Planted, RunHistory, frozenset[str]], DrillVerdict]] = {
    "kill_rank": _killed,
    "kill_agent": _killed,
    "preempt": _preempted,
    "tear_checkpoint": _damaged,
    "flip_bit": _damaged,
    "freeze_rank": _frozen,
    "fill_disk": _filled,
    "delay_files": _delayed,
    "second_writer": _fenced,
}

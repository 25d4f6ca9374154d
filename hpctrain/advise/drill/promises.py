"""The faults of a drill (faults.toml), the promise that each tests, and whether it was kept. Pure.

What the ledger cannot show is "not tried", with the reason: "kept" would be a false promise.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.checkpoint.format.manifest import parse_step
from hpctrain.core.base.text import count
from hpctrain.core.settings.layers import did_you_mean
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
    """One fault."""

    name: str  # as `--faults` has it
    does: str  # what is done
    promise: str  # what must come of it
    anchor: str = README  # where that is promised
    # by which words of docs/development/testing-faults.md it is armed when the run starts; ""
    # where it is done from outside
    armed: str = ""

    @property
    def point(self) -> str:
        """Where an armed fault fires."""
        return self.armed.partition(":")[2].partition(",")[0]


DELAY_S = 5.0
FREEZE_S = 3.0


def _filled_in(row: dict[str, Any]) -> dict[str, Any]:
    """A row of faults.toml with its seconds put in."""
    texts = {key: value for key, value in row.items() if isinstance(value, str)}
    seconds = {"delay_s": DELAY_S, "freeze_s": FREEZE_S}
    return row | {key: text.format(**seconds) for key, text in texts.items()}


_TEXT = Path(__file__).with_name("faults.toml").read_text("utf-8")
FAULTS = {name: DrillFault(name, **_filled_in(row)) for name, row in tomllib.loads(_TEXT).items()}
"""By name, in the order in which they are planted. The last one ends the run."""


def chosen(names: Sequence[str]) -> list[DrillFault]:
    """The faults that were named, in the drill's order; all of them where none was.

    Raises:
        UsageError: there is no such fault.
    """
    for name in names:
        if name not in FAULTS:
            hint = did_you_mean(name, FAULTS, f"there are {', '.join(FAULTS)}")
            raise UsageError(f"--faults: {name!r} is no fault of the drill; {hint}")
    return [fault for fault in FAULTS.values() if not names or fault.name in names]


Outcome = Literal["kept", "broken", "not tried"]


@dataclass(frozen=True)
class DrillVerdict:
    """What came of a fault."""

    outcome: Outcome  # whether its promise was kept
    why: str  # in a line
    again: bool = False  # it came to nothing by chance, and may be tried once more


@dataclass(frozen=True)
class Planted:
    """What is known when a fault has been planted."""

    t: float  # when, seconds since the epoch
    attempt: int  # the attempt that it met
    step: int  # the last step that was known to be done
    saves: int = 0  # how many saves the ledger knew
    problems: int = 0  # how many joints of the run's samples were wrong before
    damaged: str = ""  # name of the checkpoint that was damaged; "" for none
    damaged_step: int = 0  # its step
    on_disk: frozenset[str] = frozenset()  # names of the checkpoints that were committed
    fired: bool = True  # an armed fault has been met
    # the attempt has written that it was fenced; nobody writes its end but a successor
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


def _trains(attempt: AttemptRecord) -> bool:
    """Whether an attempt has come to steps of its own."""
    return attempt.first_step is not None and (
        attempt.restored_step is None or (attempt.last_step or 0) > attempt.restored_step
    )


def _reported(fault: DrillFault, planted: Planted, history: RunHistory) -> bool:
    """A refused save is reported before the next one; a late one is not."""
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
    """Why the run does not continue, as far as the ledger tells."""
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
    if met.last_step is None:
        return _killed(planted, history, on_disk)
    kept = f"saved and left at step {met.last_step}, attempt {new.number} resumed from there"
    return DrillVerdict("kept", kept)


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
    """The saves since, where the attempt continued; else what to say."""
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
    if any(parse_step(name) == step for name in on_disk):
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

"""The saves of a run: when, how, and what becomes of each; the ledger hears of all, failed or not.

Decisions that ranks must share are rank 0's, broadcast, or follow from the step's number.
tests/unit/runtime/test_saves.py, test_save_policy.py, test_last_save.py and
tests/engines/test_save_behind.py hold the promises.
"""

from __future__ import annotations

import logging
import os
import statistics
from enum import StrEnum
from typing import TYPE_CHECKING

from hpctrain.checkpoint.store import retention
from hpctrain.checkpoint.tensors.save import Saved, SavePlace, Saver, save
from hpctrain.core.base import clock
from hpctrain.core.world import broadcast, gather
from hpctrain.errors import CheckpointError, Fenced, FileSystemFault, NotWritten
from hpctrain.ledger.history.evaluations import evaluations_of
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.plan import interval
from hpctrain.ledger.plan.interval import LAST_SAVE_SAFETY
from hpctrain.ledger.run import event_types as facts
from hpctrain.ledger.run import events as ledger

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.save import Outcome
    from hpctrain.core.settings.schema import EvaluateSettings
    from hpctrain.core.world import World
    from hpctrain.ledger.history.evaluations import Evaluations
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.train.runtime.stops import JobClock

    Snapshot = Callable[[], tuple[State, Manifest]]

log = logging.getLogger("hpctrain.runtime")


FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0
"""Between two tries of the last save."""
LOOK_S = 0.25
"""So often a rank that waits for a save looks whether a stop is near."""


class Saves:
    """One rank's side of the run's saves."""

    def __init__(
        self,
        place: SavePlace,
        world: World,
        job_clock: JobClock,
        evaluate: EvaluateSettings,
        near_stop_left_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Prepare saves; in the asynchronous mode collective: every rank calls it.

        `job_clock` learns how long a save takes. `evaluate` says which checkpoints must stay.
        `near_stop_left_s` returns the seconds for a save at the stop that this rank knows of; else
        None.
        """
        self.step = 0
        """The newest step that is committed, or on its way."""
        self._place = place
        self._world = world
        self._clock = job_clock
        self._near_stop_left_s = near_stop_left_s
        self._settings = place.settings
        is_async = place.settings.mode == "async"
        self.saver = Saver(place, world, after=self._prune) if is_async else None
        """What saves behind training; None in the synchronous mode."""
        self._last_at = clock.monotonic()
        self._policy = SavePolicy(place, world, job_clock) if world.rank == 0 else None
        self._flight_s: float | None = None
        self._waited_s = 0.0
        self._is_leaving = False
        self._reported: int | None = None
        self._digest = ""
        self._has_memory = False
        self._rows_by_step: dict[int, retention.CheckpointRow] = {}
        self._evaluations = EvaluationsTail(place.run, evaluate)

    def warm_up(self, snapshot: Snapshot) -> None:
        """After the first step, when there is an optimizer's state: memory for the copy.

        Not before: a new optimizer's state made early is not for every optimizer what its first
        step would make.
        """
        if self.saver is not None:
            self.saver.prepare_behind(snapshot()[0])

    def start(self, step: int) -> None:
        """Training begins at this step, which is committed, or 0."""
        self.step = step
        self._last_at = clock.monotonic()
        self._record_interval()

    def wishes(self) -> bool:
        """Rank 0: whether a save is due by the clock. Also tells the ledger of a landed one."""
        outcome = self.saver.peek() if self.saver is not None else None
        if outcome is not None:
            self._record_fact(outcome)
        if self._policy is None or self._settings.interval_steps:
            return False
        return clock.monotonic() - self._last_at >= self._policy.now.seconds

    def is_due(self, step: int) -> bool:
        """Whether a save is due by the step's number, which all ranks know."""
        every = self._settings.interval_steps
        return bool(every) and step > 0 and step % every == 0

    def periodic(self, step: int, snapshot: Snapshot) -> None:
        """Save in the course of training; a save that fails costs just itself. Collective.

        Raises:
            Fenced: a newer attempt has taken the run over.
        """
        if step in {0, self.step} or self._is_leaving:
            return
        self._last_at = clock.monotonic()
        try:
            if self.saver is None:
                self._now(step, snapshot)
            else:
                self._behind(self.saver, step, snapshot)
        except Fenced:
            raise
        except CheckpointError as error:
            self._failed(step, error)

    def final(self, step: int, snapshot: Snapshot, left_s: float | None) -> None:
        """Save before a stop, in the time that is left; a failure must not become a crash.

        Collective; rank 0's `left_s` counts.

        Raises:
            Fenced: a newer attempt has taken the run over.
        """
        choice = self._choose_last(left_s)
        is_given_up = choice is LastSave.FRESH or self._hangs(choice, left_s)
        if self.saver is not None:
            self._note(self.saver.abandon() if is_given_up else self.saver.land())
        if choice is LastSave.FINISH and self.step:
            self._event(facts.SaveSkipped(step=step, why=f"no time: step {self.step} was finished"))
            return
        try:
            self.patiently(step, snapshot, left_s)
        except Fenced:
            raise
        except CheckpointError as error:
            self._failed(step, error)

    def patiently(self, step: int, snapshot: Snapshot, left_s: float | None = None) -> None:
        """Save like `now`, but retry while the file system refuses and there is time. Collective.

        A periodic save may fail; after the last one before leaving there is no other. Rank 0's
        `left_s`, seconds until the kill, counts; None if unknown.

        Raises:
            CheckpointError: see `now`.
        """
        patience = self._settings.patience_s
        if left_s is not None:
            patience = min(patience, patience_s(left_s, self._clock.expected_save_s()))
        deadline, pause = clock.monotonic() + patience, FIRST_PAUSE_S
        while True:
            try:
                return self.now(step, snapshot)
            except (NotWritten, FileSystemFault) as error:
                if not broadcast(self._world, clock.monotonic() + pause <= deadline):
                    raise
                self._event(facts.SaveFailed(step=step, why=f"{error}; tried again"))
            clock.sleep(pause)  # a file system tells nobody that it is back
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def now(self, step: int, snapshot: Snapshot) -> None:
        """Commit this step while training waits, unless it is committed already. Collective.

        Raises:
            CheckpointError: it was not committed; nothing is lost, the older ones stand.
        """
        self._land()
        if step not in {0, self.step}:
            self._now(step, snapshot)

    def settle(self) -> None:
        """Let a save in flight end, where a program leaves its loop early. Not collective."""
        if self.saver is not None:
            self.saver.settle()

    def close(self) -> None:
        """End the writer process."""
        if self.saver is not None:
            self.saver.close()

    # ---- parts

    def _now(self, step: int, snapshot: Snapshot) -> None:
        self._waited_s = 0.0
        state, manifest = snapshot()
        saved = save(self._place, self._world, state, manifest)
        self.step, self._last_at = step, clock.monotonic()
        self._note_saved(saved, "sync")
        if self._world.rank == 0:
            self._prune(saved)

    def _behind(self, saver: Saver, step: int, snapshot: Snapshot) -> None:
        due = clock.monotonic()
        failed = self._land()
        if failed is not None and broadcast(self._world, self._near_stop_left_s() is not None):
            self._is_leaving = True
            why = f"a stop is near, and step {failed} could not be saved"
            self._event(facts.SaveSkipped(step=step, why=why))
            return
        started = clock.monotonic()
        self._waited_s = started - due
        state, manifest = snapshot()
        if not self._has_memory and not self._take_memory(saver, state):
            self._now(step, snapshot)
            return
        saver.begin(state, manifest, started=started)
        self.step = step

    def _take_memory(self, saver: Saver, state: State) -> bool:
        """Return, before the first background save, whether every rank has memory for its copy."""
        missing = next((why for why in gather(self._world, saver.prepare(state)) if why), "")
        self._has_memory = not missing
        if missing:
            saver.close()
            self.saver = None
            self._event(facts.SaveModeSet(mode="sync", why=missing))
            if self._world.rank == 0:
                log.warning("saves are synchronous: %s", missing)
        return self._has_memory

    def _choose_last(self, left_s: float | None) -> LastSave:
        saver = self.saver
        if saver is None or not broadcast(self._world, saver.in_flight):
            return LastSave.BOTH
        fresh_s = self._clock.expected_save_s()
        usual_s = self._flight_s if self._flight_s is not None else fresh_s
        rest_s = flight_left_s(usual_s, saver.flying_s)
        choice = last_save(left_s, flight_left_s=rest_s, fresh_s=fresh_s)
        return LastSave(broadcast(self._world, choice.value))

    def _hangs(self, choice: LastSave, left_s: float | None) -> bool:
        """Whether the save in flight takes so long that a new one would not fit any more."""
        if self.saver is None or choice is not LastSave.BOTH:
            return False
        hangs = False
        if self._world.rank == 0 and left_s is not None:
            patience = patience_s(left_s, self._clock.expected_save_s())
            hangs = not self.saver.settle(patience)
        return bool(broadcast(self._world, hangs))

    def _land(self) -> int | None:
        """Wait for the save in flight; return the step that could not be saved, on all ranks alike.

        None if it was saved, or none was in flight. It may hang while a stop comes near. A rank
        whose own part is not written then gives up, which fails the save on all ranks; the others
        wait for its answer.
        """
        saver = self.saver
        if saver is None:
            return None
        while not saver.settle(LOOK_S):
            left_s = self._near_stop_left_s()
            fresh_s = self._clock.expected_save_s()
            if left_s is not None and patience_s(left_s, fresh_s) <= LOOK_S:
                return self._note(saver.abandon())
        return self._note(saver.land())

    def _note(self, outcome: Outcome | None) -> int | None:
        if outcome is None:
            return None
        self._record_fact(outcome)
        if isinstance(outcome.error, Fenced):
            raise outcome.error
        if outcome.saved is not None:
            return None
        self.step = 0 if self.step == outcome.step else self.step
        return outcome.step

    def _record_fact(self, outcome: Outcome) -> None:
        """Once for each save, as soon as rank 0 knows."""
        if self._reported == outcome.step:
            return
        self._reported = outcome.step
        if outcome.saved is not None:
            self._flight_s = outcome.saved.seconds
            self._note_saved(outcome.saved, "async")
        elif outcome.error is not None and not isinstance(outcome.error, Fenced):
            self._failed(outcome.step, outcome.error)

    def _note_saved(self, saved: Saved, mode: str) -> None:
        self._clock.saved(saved.seconds)
        is_stale = saved.state_digest == self._digest
        if is_stale:
            # A step later no bit differs: the copy was made from tensors that are no longer used.
            log.warning(
                "step %d holds the same bits as the checkpoint before it; is the model that is "
                "trained the one that is tracked?",
                saved.step,
            )
        self._digest = saved.state_digest
        fact = facts.CheckpointSaved(
            step=saved.step,
            bytes=saved.bytes,
            seconds=round(saved.seconds, 4),
            stall_s=round(saved.stall_s, 4),
            waited_s=round(self._waited_s, 3),
            mode=mode,
            checkpoint=saved.path,
            same_as_before=is_stale or None,
        )
        self._event(fact)
        if self._policy is not None:
            self._policy.saved(saved)
            self._record_interval()

    def _failed(self, step: int, error: Exception) -> None:
        self._event(facts.SaveFailed(step=step, why=str(error)))
        log.warning("%s; training continues", error)

    def _record_interval(self) -> None:
        news = self._policy.news() if self._policy is not None else None
        if news is not None:
            self._event(news)

    def _prune(self, saved: Saved) -> None:
        """Retention is housekeeping: where it fails, disk space is lost and nothing else."""
        try:
            retention.prune(
                self._place.run,
                retention.Rules.of(self._settings),
                attempt=self._place.attempt,
                rows_by_step=self._rows_by_step,
                committed=saved.step,
                evaluations=self._evaluations.now(),
            )
        except (CheckpointError, OSError) as error:
            self._event(facts.PruneFailed(step=saved.step, why=str(error)))

    def _event(self, fact: LedgerFact) -> None:
        if self._world.rank == 0:
            ledger.record(self._place.run, fact, attempt=self._place.attempt.number)


class EvaluationsTail:
    """What evaluations say of a run, read on from where the last look at its ledger ended.

    They write to the ledger from other nodes: what is not seen here yet is awaited, and stays.
    """

    def __init__(self, run: RunDir, settings: EvaluateSettings) -> None:
        self._settings = settings
        self._tail = ledger.Tail(run.events, marks="few")
        self._history = RunHistory()

    def now(self) -> Evaluations:
        """As the ledger is now; nothing where the run has no evaluations.

        Raises:
            OSError: it cannot be read, and nobody knows what must stay.
        """
        if not self._settings.script:
            return retention.NO_EVALUATIONS
        events = self._tail.new()
        # Step marks would grow in memory for as long as the run lives, and say nothing of this.
        self._history.extend(e for e in events if not isinstance(e.fact, facts.StepsDone))
        return evaluations_of(self._history, self._settings)


def sweep_old(place: SavePlace) -> None:
    """Housekeeping: where the disk refuses, room is lost and nothing else."""
    try:
        retention.sweep(place.run, place.attempt)
    except Fenced:
        raise
    except CheckpointError as error:
        log.warning("%s; the next attempt tries again", error)


# ---- policy: the interval, and the last save

NEWS = 0.2
"""An interval that changes by less than this share is not worth a line in the ledger."""


class SavePolicy:
    """The interval between saves; `checkpoint.interval_s` where it is set."""

    def __init__(self, place: SavePlace, world: World, job_clock: JobClock) -> None:
        self._settings = place.settings
        self._is_chosen = interval.as_set(place.settings) is None
        history = RunHistory.read(place.run)
        job_clock.earlier_s = interval.longest_save_s(history, world.world_size)
        self._record = interval.failures(history)
        earlier = interval.costs(history)
        self._costs = [] if earlier is None else [earlier]
        self._nodes = max(1, world.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._job_s = None if job_clock.end_time is None else job_clock.end_time - clock.now()
        self._began = clock.monotonic()
        self._reported: interval.Interval | None = None
        self.now = self._choose()

    def saved(self, saved: Saved) -> None:
        """Learn from a save."""
        self._costs.append(interval.Costs(saved.stall_s, saved.seconds))
        self.now = self._choose()

    def news(self) -> facts.IntervalSet | None:
        """The interval to record, if it is new; each change is recorded once."""
        before = self._reported
        if before is not None and abs(self.now.seconds - before.seconds) <= NEWS * before.seconds:
            return None
        self._reported = self.now
        cost = self._cost()
        is_chosen = self._is_chosen and cost is not None
        return facts.IntervalSet(
            seconds=round(self.now.seconds, 1),
            why=self.now.why,
            steps=self.now.steps or None,
            cost_s=round(cost.cost_s, 4) if is_chosen and cost is not None else None,
            mtbf_s=round(self._mtbf_s(), 1) if is_chosen else None,
        )

    def _choose(self) -> interval.Interval:
        fixed = interval.as_set(self._settings)
        if fixed is not None:
            return fixed
        cost = self._cost()
        return interval.choose(
            None if cost is None else cost.cost_s,
            self._mtbf_s(),
            max_loss_s=self._settings.max_loss_s,
            job_s=self._job_s,
            write_s=0.0 if cost is None else cost.write_s,
        )

    def _cost(self) -> interval.Costs | None:
        newest = self._costs[-interval.SAVES_COUNTED :]
        if not newest:
            return None
        return interval.Costs(
            statistics.median(one.cost_s for one in newest),
            statistics.median(one.write_s for one in newest),
        )

    def _mtbf_s(self) -> float:
        seconds = self._record.observed_s + clock.monotonic() - self._began
        return interval.mtbf_s(interval.Failures(self._record.count, seconds), self._nodes)


class LastSave(StrEnum):
    """What to do before leaving."""

    BOTH = "both"
    """Wait for the save in flight, then save the step that training has come to."""
    FINISH = "finish"
    """Wait for the save in flight and leave with it: a newer one would not be done in time."""
    FRESH = "fresh"
    """Give the save in flight up, so that the newer one is done in time."""


def flight_left_s(usual_s: float, flying_s: float) -> float:
    """What a save that has taken so long is likely to take yet."""
    return max(usual_s - flying_s, flying_s / 4)


def patience_s(left_s: float, fresh_s: float) -> float:
    """How long to wait for the save in flight, so that a new one still fits if it hangs."""
    return max(0.0, left_s - LAST_SAVE_SAFETY * fresh_s)


def last_save(left_s: float | None, *, flight_left_s: float, fresh_s: float) -> LastSave:
    """Choose what loses the fewest steps: the save in flight, or a new one.

    `left_s` is the time until the kill, None if unknown; the others are how long each save probably
    takes. With too little time for either, finish the one in flight: it is the further on.
    """
    if left_s is None or LAST_SAVE_SAFETY * (flight_left_s + fresh_s) <= left_s:
        return LastSave.BOTH
    if LAST_SAVE_SAFETY * fresh_s <= left_s:
        return LastSave.FRESH
    return LastSave.FINISH

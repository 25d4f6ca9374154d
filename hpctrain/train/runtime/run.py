"""The training-side API: ``run = hpctrain.init()``, then a loop that saves, stops and resumes.

Order of a step: exchange requests, leave if all agreed to, save when due, hand the step to the
program, count it. Nothing collective runs in a signal handler. tests/engines/test_resume.py,
test_own_loop.py, test_external_loop.py hold the promises.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from functools import partial
from multiprocessing.util import Finalize
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

import torch

from hpctrain.checkpoint.format.manifest import MAX_STEP
from hpctrain.checkpoint.tensors.restore import Restored, has_checkpoints
from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_JOB_END
from hpctrain.core.device import device_name, is_accelerator
from hpctrain.core.testing import points
from hpctrain.core.world import gather
from hpctrain.errors import UsageError
from hpctrain.ledger.run import event_types as facts
from hpctrain.node.control import heartbeat
from hpctrain.observe.profile.trace import folder_name
from hpctrain.train.runtime import program as program_state
from hpctrain.train.runtime.fitting import NEW, require_known
from hpctrain.train.runtime.guarding import Guarding
from hpctrain.train.runtime.kept_state import NothingKept, TrainingState
from hpctrain.train.runtime.own_loop import earlier_save_s, memory_in_use, seal, step_number
from hpctrain.train.runtime.profiler import Profiler
from hpctrain.train.runtime.program import Program
from hpctrain.train.runtime.stops import JobClock, Stops, start_requests
from hpctrain.train.runtime.telemetry import Telemetry
from hpctrain.train.runtime.trackers import RankRecord
from hpctrain.train.runtime.unsaved import Unsaved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.optim import Optimizer

    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.base.records import StopCause
    from hpctrain.core.settings.schema import Settings
    from hpctrain.core.settings.spec import Spec
    from hpctrain.core.world import World
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.train.data.loader import Loader, LoaderOptions
    from hpctrain.train.data.stream_loader import StreamLoader
    from hpctrain.train.engines.engine import Engine
    from hpctrain.train.engines.parallelize import ModelPlan
    from hpctrain.train.runtime.agreement import StopRequest
    from hpctrain.train.runtime.stops import RankSignals

log = logging.getLogger("hpctrain.runtime")

ONE_LOOP = "run.at() is for a loop of the program's own: use it or run.steps()"


class Stopped(SystemExit):
    """The run was saved and this process must leave; passes the program like a normal exit."""


class Run:
    """One rank's side of a run.

    Attributes:
        world: This rank's place among the ranks.
        settings: The run's settings.
        step: Updates applied so far.
        dir: Where the run's files lie; None outside hpctrain.
        resume_path: The newest whole checkpoint that was sealed, a file or a folder, as it was at
            this start; the same on every rank, and in `HPCTRAIN_RESUME`. None where the run has
            sealed nothing.
    """

    def __init__(
        self,
        world: World,
        settings: Settings,
        *,
        place: SavePlace | None,
        signals: RankSignals,
        spec: Spec | None,
    ) -> None:
        """Use `joining.init`; `place` is where this attempt writes, None outside hpctrain."""
        self.world = world
        self.settings = settings
        self.step = 0
        self.dir = place.run if place is not None else None
        self.resume_path: Path | None = None
        self._place = place
        self._run_id = spec.run_id if spec else ""
        self._record = RankRecord(world, place, spec)
        self._program = Program(world)
        self._program.allow = frozenset(settings.resume.allow)
        self._unsaved = Unsaved(self._program if world.rank == 0 and place is not None else None)
        self._guards = Guarding(
            settings.guard,
            self._program,
            record=self._record.event,
            log_skipped=lambda: self._telemetry.log({"skipped": 1.0}),
            stop=self._end_by_guard,
        )
        end = os.environ.get(HPCTRAIN_JOB_END)
        self._clock = JobClock(
            float(end) if end else None,
            settings.run.stop_margin_s,
            float(end) - clock.now() if end else None,
        )
        requests = start_requests(place, world, self._clock)
        self._stops = Stops(world, signals, requests, self._clock)
        self._telemetry = Telemetry(world)
        folder = place.run.profile / folder_name(place.attempt.number) if place else None
        watches = {"data": self._telemetry.timed("data"), "save": self._telemetry.saving}
        self._profiler = Profiler(world, settings.profile, folder, self._record.event, watches)
        self._cause: StopCause | None = None
        self._kept = NothingKept()  # until the restore
        self._reported_at = 0.0
        self._has_loop = self._has_own_loop = self._has_begun = self._reported_stop = False
        self._has_stepped = self._has_failed = False
        heartbeat.here().enter(heartbeat.START)
        self._record.event(facts.PhaseReached(name="initialised", device=device_name(world.device)))

    # ---- what a program calls

    def parallelize(
        self,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: Optimizer | Callable[[nn.Module], Optimizer],
        *,
        plan: ModelPlan | None = None,
        pretrained: str | Path | None = None,
    ) -> Engine:
        """Spread a model over the ranks as the settings say. Collective; call it before `track`.

        Args:
            model: On the CPU, the same on every rank; or a function that makes it, so that no rank
                ever holds it whole (docs/plan.md).
            optimizer: Of all its parameters, without state; or a function that makes it from the
                model as it is on this rank then.
            plan: How to cut a model of an uncommon layout along `tp` and `pp`.
            pretrained: A Hugging Face folder; a function's model begins with its weights.

        Returns:
            The engine, with `forward_backward`, `evaluate` and `step`.
        """
        from hpctrain.train.engines.parallelize import parallelize

        settings, place, seed = self.settings, self._place, self.settings.train.seed
        is_made = not isinstance(model, torch.nn.Module)
        awaits = is_made and place is not None and has_checkpoints(place, self.world)
        awaits = awaits and NEW not in settings.resume.allow  # what is new needs its own values
        self._program.awaits_weights = awaits
        engine = parallelize(
            model,
            optimizer,
            settings.engine,
            self.world,
            plan=plan,
            seed=seed,
            is_restored=awaits,
            pretrained=pretrained,
        )
        engine.seed = seed
        self._program.use(engine)
        self._guards.guard(engine)
        ranks = self.world.ranks_per_node
        self._record.event(
            facts.MeshBuilt(engine=engine.kind, ranks_per_node=ranks, **asdict(engine.mesh))
        )
        return engine

    def track(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        data: Any = None,
        allow: Sequence[str] = (),
        **others: program_state.Stateful | program_state.Generator,
    ) -> None:
        """Name what a checkpoint holds.

        Args:
            model: The model, wrapped or not; not needed after `parallelize`.
            optimizer: Its optimizer; not needed after `parallelize`.
            data: The position in the data: anything with state_dict/load_state_dict; a key
                ``samples_consumed`` in its state lets the ledger prove that each sample was used
                once.
            allow: Changes of the program since the checkpoint that may pass, beside those of
                `resume.allow`: ``new-parameters``, ``dropped-parameters``, ``optimizer-changed``.
            others: Schedulers and the like by name, whose state is of the types that
                docs/checkpoints.md lists; and random generators: numpy's Generator and RandomState,
                random.Random, torch.Generator. A checkpoint holds each rank's own.

        Raises:
            UsageError: `allow` has something else, or `data` or one of `others` no state_dict().
            CheckpointError: its state, or the model, holds something that cannot be saved; with
                the path.
        """
        require_known(allow)
        program = self._program
        if model is not None:
            program_state.refuse_unsaveable_model(model)
        program.model = model if model is not None else program.model
        program.optimizer = optimizer if optimizer is not None else program.optimizer
        program.track(others, data)  # refused now, not when the first save fails
        program.allow |= frozenset(allow)

    def loader(
        self,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        seed: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        name: str = "data",
        **options: Unpack[LoaderOptions],
    ) -> Loader:
        """A torch DataLoader that uses each sample once per epoch, however often it is stopped.

        Checkpoints hold its state without a further call. Every rank makes it, and takes equally
        many batches from it. Ranks that read the same samples (along `tp` and `pp`) get the same.

        Args:
            dataset: Map-style: with a length, and the n-th sample under ``dataset[n]``.
            global_batch: Samples of a batch, over all ranks. Each rank gets its part of them; where
                the ranks do not divide it, some get a sample more than others (`Loader.weight`).
            micro_batch: Samples of one forward and backward pass at most, 0 for any number. Then
                each batch comes as a list, equally long on every rank and as the engine asks, of
                batches; `Loader.taken` has their weights.
            seed: Of the order; None for ``train.seed``.
            shuffle: Each epoch in an order of its own; False for the order of the dataset.
            drop_last: Leave out what an epoch has beyond whole batches; else its last batch is
                smaller.
            name: Under which a checkpoint holds the state. "data" is what the ledger counts samples
                by; a second loader needs another name.
            options: How it is read: `LoaderOptions`.

        Raises:
            UsageError: the dataset has no length or no samples, or a number makes no sense.
        """
        from hpctrain.train.data.loader import BatchRules, Loader

        seed = self.settings.train.seed if seed is None else seed
        options.setdefault("pin_memory", is_accelerator(self.world.device))
        rules = BatchRules(global_batch, micro_batch, drop_last, seed if shuffle else None)
        place, watch = self._program.data_place, self.timed("data")
        loader = Loader(dataset, rules, options, place=place, watch=watch)
        self._program.add_data(name, loader)
        return loader

    def stream_loader(
        self,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        drop_last: bool = False,
        readers: int | None = None,
        replay: bool = False,
        name: str = "data",
        **options: Unpack[LoaderOptions],
    ) -> StreamLoader:
        """As `loader`, for an iterable dataset; what is promised depends on it (docs/data.md).

        Args:
            dataset: Hugging Face's IterableDataset; or a function of (reader, readers) that returns
                the reader's share, an iterable with state_dict and load_state_dict.
            global_batch: As of `loader`; so are micro_batch and options.
            micro_batch: See there.
            drop_last: End the epoch with the last whole batch; what readers have yet is left out.
            readers: Shares in all, as long as the run lives; None for what many ranks divide.
            replay: After a stop read again what was used and drop it; no state is needed.
            name: As of `loader`.
        """
        from hpctrain.train.data.stream_loader import StreamLoader, StreamRules

        options.setdefault("pin_memory", is_accelerator(self.world.device))
        rules = StreamRules(global_batch, micro_batch, drop_last, readers, replay)
        place, watch = self._program.data_place, self.timed("data")
        speak = partial(gather, self.world)
        loader = StreamLoader(dataset, rules, options, place=place, gather=speak, watch=watch)
        self._program.add_data(name, loader)
        return loader

    def steps(self, total: int) -> Iterator[int]:
        """The steps that are left of `total`, from the restored one on; saves and leaves by itself.

        Collective: every rank iterates. After a stop request all ranks save the same step and
        leave by `Stopped` (a SystemExit with code 0), which is raised out of the loop.
        """
        if self._has_own_loop:
            raise UsageError(ONE_LOOP)
        if self._has_loop:  # behind an earlier loop, which was not the end
            self._record.outcome("left", None, None)
        self._has_loop = True
        self._telemetry.total = int(total) if isinstance(total, Integral) else None  # infinity?
        self._guards.prepare()
        with heartbeat.Phase(heartbeat.RESTORE):
            self._restore()
            self._guards.begin(self.world, self._place)
        consumed = self._program.consumed()
        while self.step < total:
            agreed = self._exchange()
            if (cause := agreed.cause or self._cause) is not None:
                self._leave(cause)
            self._kept.follow(agreed, self.step)
            self._telemetry.step_began(consumed)
            self._program.step_begins()
            self._guards.step_begins(consumed)
            self._come_to(self.step)
            heartbeat.here().at_step(self.step, heartbeat.STEP)
            points.reach("step.begin", step=self.step, rank=self.world.rank)
            try:
                yield self.step
            except GeneratorExit:  # the program left its loop: what is being saved is worth having
                heartbeat.here().enter(heartbeat.END)
                self._telemetry.flush()
                self._kept.settle()
                self._profiler.close()
                if not self._has_failed:
                    self._write_outcome("left", None)
                raise
            consumed = self._step_done(self.step + 1)
            self._guards.step_done(self.step)
        self._guards.close(self.step)
        self._telemetry.tell(at_end=True)
        self._kept.save_at_end(self.step)
        self._end(facts.TrainingDone(step=self.step), "done")

    def at(self, step: int, *, total: float | None = None, **values: float) -> None:
        """Report how many updates are applied now; for a program with a loop of its own.

        Instead of `steps`: a framework's trainer, or a script that saves and resumes by itself,
        calls it before its loop and after each update, or after every so many. `hpctrain status`
        and `hpctrain report` show it. Nothing is saved or restored. Not collective, but every rank
        calls it. A program that has called it and then returns, on every rank, is done.

        The first call, and a step below the last one, say where the program continues: 0, or the
        step that it has restored. With values such a call comes after the first update. The same
        step again adds values to it.

        Args:
            step: Updates applied in the run's life, over all starts.
            total: Updates in all, a whole number, once that is known; for the time left.
            values: Scalars of the last update, as of `log`; rank 0's count.

        Raises:
            UsageError: the program uses `steps` too, or `step` or `total` is no whole number from 0
                on.
        """
        step = step_number(step)
        if total is not None:
            self._telemetry.total = step_number(total, "total")
        if self._has_loop:
            raise UsageError(ONE_LOOP)
        numbers = {name: float(value) for name, value in values.items()}
        heartbeat.here().at_step(step, heartbeat.STEP)
        begins, before = not self._has_own_loop or step < self.step, self.step
        self._has_own_loop, self._reported_at = True, clock.monotonic()
        if begins:
            # Values are a step's: the update before them was done before it was reported.
            before = max(0, step - 1) if numbers else step
            self._telemetry.flush()
            self._begin_own_loop(before)
            self._telemetry.step_began(self._program.consumed())
        self._telemetry.log(numbers)
        if step > before:
            self._step_done(step, steps=step - before, timed=not begins)
            self._telemetry.step_began(self._program.consumed())
        elif not begins:
            self._telemetry.log_late()
        self.step = step
        self._record.log(step, numbers)
        self._come_to(step)

    def should_stop(self) -> bool:
        """Whether all ranks agreed to stop: a preemption, the job's time limit, a user's wish.

        Collective: every rank calls it equally often. After True, a program that uses `steps`
        returns to that loop, which saves and leaves; call it in validation and other long loops.
        A program that uses `at` calls it after each update; when it is True, it saves and calls
        `leave`. Near the job's end it is True while there is time for that: `run.stop_margin_s`,
        and a save as long as the longest so far.
        """
        agreed = self._exchange()
        if agreed.cause is not None:
            self._cause = agreed.cause
            if not self._has_loop:
                self._log_stop(agreed.cause)
        return self._cause is not None

    def leave(self) -> NoReturn:
        """End this process in order, in a program with a loop of its own: saved, or done.

        Collective. After `should_stop` was True: the run continues in its next start. Otherwise the
        run is done. Either way `Stopped`, a SystemExit with code 0, is raised.

        Raises:
            UsageError: the program uses `steps`, which leaves by itself.
        """
        if self._has_loop:
            raise UsageError("run.leave() is not for the loop of run.steps(), which leaves itself")
        if self._cause is not None:
            self._log_stop(self._cause)
            self._telemetry.flush()
            self._go(self._cause)
        self._telemetry.tell(at_end=True)
        self._telemetry.flush()
        self._end(facts.TrainingDone(step=self._step_reported), "done")
        self._record.close()
        raise Stopped(0)

    def timed(self, what: str) -> AbstractContextManager[None]:
        """Report what a part of the loop waits for: ``with run.timed("data"): batch = next(it)``.

        Its seconds are the share of data in `hpctrain status` and in the goodput. Costs about a
        microsecond; not collective, on the thread of the loop.

        Args:
            what: "data", the one kind that only the program knows; saves are timed without it.

        Raises:
            UsageError: another kind.
        """
        return self._telemetry.timed(what)

    def section(self, name: str, *, limit_s: float | None = None) -> AbstractContextManager[object]:
        """Report which part of the program runs: ``with run.section("evaluation"): ...``.

        Where a rank stands still, that part is named, and its time is learnt by its name
        (docs/staying-alive.md). Costs a microsecond; not collective, on the thread of the loop.

        Args:
            name: Of the part; the same each time.
            limit_s: Seconds that it may take; None for what is learnt, `math.inf` for any time.

        Raises:
            UsageError: no name, or no seconds above 0.
        """
        return heartbeat.section(name, limit_s)

    def log(self, **values: float) -> None:
        """Scalars of the step in hand, for TensorBoard and the ledger; rank 0's count.

        Any name goes to TensorBoard. `hpctrain status` and `hpctrain report` also understand, each
        of this step and over all ranks:

        - ``loss`` and ``grad_norm``;
        - ``tokens``: trained on in this step; log them every step;
        - ``flops``: that the model needs for it, forward and backward, without recomputation;
          with the GPU's peak they give MFU;
        - ``skipped``: 1 where the update was left out, as after an overflow of fp16.
        """
        if self.world.rank != 0:
            return
        numbers = {name: float(value) for name, value in values.items()}
        self._telemetry.log(numbers)
        self._record.log(self.step + 1, numbers)

    def guard(self, loss: float, norm: float) -> bool:
        """Return whether to apply a step's update, by `guard.nonfinite` and `guard.spike`.

        Call it between your backward pass and the optimizer's step; an engine of `parallelize` does
        so by itself. Collective: every rank calls it once a step.

        Args:
            loss: This rank's, or all ranks'; the largest counts.
            norm: Of the gradient before clipping; the same.

        Raises:
            GuardStopped: too many steps were not finite; on every rank.
            UsageError: the program has an engine.
        """
        return self._guards.judge(self.world, self.step + 1, float(loss), float(norm))

    def save(self) -> None:
        """Commit a checkpoint of the current step, unless there is one or no step was done.

        Collective: every rank calls it.

        Raises:
            CheckpointError: it was not committed; nothing is lost, the older ones stand.
            UsageError: the program has a loop of its own (`at`), and saves by itself.
        """
        if self._has_own_loop:
            raise UsageError("run.save() goes with run.steps(); with run.at() the program saves")
        self._kept.save(self.step)

    def sealed(self, step: int, path: str | Path) -> None:
        """Take a checkpoint that the program has written in its own way under the run's care.

        Every file is read once for its digest. The checkpoint is then listed and verified, and the
        newest complete one is `resume_path` at the next start. Where each save writes over the same
        path, the run keeps a copy, since a kill in the middle of a save destroys the only file.
        Outside hpctrain it does nothing.

        Collective: every rank calls it, once it has returned from writing.

        Args:
            step: Updates applied.
            path: A file, or a folder with all files of the checkpoint; on a disk that all nodes
                see. Rank 0's counts.

        Raises:
            CheckpointError: it was not sealed; nothing is lost, the older ones stand.
        """
        if self._place is None:
            return
        if isinstance(step, bool) or not isinstance(step, Integral) or not 0 <= step <= MAX_STEP:
            raise UsageError(f"run.sealed takes a step from 0 on, not {step!r}")
        step = int(step)
        own_s = None
        if self._has_own_loop:
            # What the program has saved of the step since it was reported took no longer.
            before, self._reported_at = self._reported_at, clock.monotonic()
            own_s = self._reported_at - before if step == self.step else None
        self._telemetry.saving.seconds += own_s or 0.0
        self._before_save()
        began = clock.monotonic()
        with self._telemetry.saving:
            seal(self._place, self.world, step=step, path=Path(path), own_s=own_s)
        if own_s is not None:
            self._clock.saved(own_s + clock.monotonic() - began)

    # ---- the loop's parts

    def _exchange(self) -> StopRequest:
        save, memory = self._kept.wishes_save(), self._kept.wishes_copy(self.step)
        heartbeat.here().beat()
        tell = self._telemetry.is_report_due()
        agreed = self._stops.exchange(save=save, tell=tell, memory=memory)
        if agreed.tell:
            self._telemetry.tell()
        if agreed.profile:
            self._profiler.asked(self.step, self._stops.take_profile())
        return agreed

    def _come_to(self, step: int) -> None:
        """So many updates are applied, and the next step begins."""
        if step >= self._profiler.due:
            self._profiler.at(step)
        if self._program.engine is not None:
            self._program.engine.at_step(step)

    def _step_done(self, step: int, *, steps: int = 1, timed: bool = True) -> int | None:
        """Count updates up to this one; return how many samples all ranks have used."""
        self.step = step
        consumed = self._program.consumed()
        seconds = self._telemetry.step_done(step, consumed, steps=steps, timed=timed)
        self._clock.stepped(seconds / steps if timed else None)
        if not self._has_stepped:
            self._has_stepped = True
            self._unsaved.after_first_step()
            self._record.event(facts.PhaseReached(name="first_step", **self._telemetry.so_far()))
            self._kept.warm_up(step)
            heartbeat.here().stepped()
            if self._has_own_loop and not self._clock.state_bytes:
                self._clock.state_bytes = memory_in_use(self.world.device)
        return consumed

    def _before_save(self) -> None:
        self._telemetry.flush(at_save=True)
        self._record.flush()

    def _leave(self, cause: StopCause) -> NoReturn:
        self._record.event(facts.StopRequested(cause=cause, rank=self.world.rank))
        self._guards.close(self.step)
        self._kept.save_at_stop(self.step, self._stops.left_s(cause))
        self._go(cause)

    def _go(self, cause: StopCause) -> NoReturn:
        """Leave, with everything saved."""
        self._end(facts.TrainingStopped(step=self._step_reported), "stopped", cause)
        if self.world.rank == 0 and self.dir is not None:
            log.info("leaving at step %d (%s)", self.step, cause.value)
        self._record.close(self._stops.left_s(cause))
        raise Stopped(0)

    def _end_by_guard(self, outcome: str) -> None:
        """A guard is about to raise; "failed" if no other start would go better."""
        self._before_save()
        self._kept.settle()
        self._has_failed = True
        if outcome:
            self._write_outcome(outcome, None)

    def _end(self, fact: LedgerFact, outcome: str, cause: StopCause | None = None) -> None:
        """Say how training has ended, and end what runs beside it; `cause` is that of a stop."""
        heartbeat.here().enter(heartbeat.END)
        self._record.event(fact)
        self._write_outcome(outcome, cause)
        self._profiler.close(self._stops.left_s(cause) if cause is not None else None)

    # ---- a loop of the program's own

    @property
    def _step_reported(self) -> int | None:
        """Updates applied; None where the program has not said so."""
        return self.step if self._has_loop or self._has_own_loop else None

    def _begin_own_loop(self, step: int) -> None:
        size = self.world.world_size
        self._record.event(facts.CheckpointRestored(step=step, world_size=size, by="program"))
        if self._has_begun:
            return
        self._has_begun = True
        self._open(step)
        # What ends without another word is done; a failure shows otherwise.
        self._record.outcome("left", None, None)
        Finalize(None, self._telemetry.flush, exitpriority=0)  # a forked rank skips atexit
        if self.world.rank == 0 and self._place is not None:
            self._clock.earlier_s = earlier_save_s(self._place.run, self.world.world_size)
            self._record.start_trackers(step)

    def _log_stop(self, cause: StopCause) -> None:
        """All ranks will stop; a program that saves and returns without `leave` has stopped."""
        if not self._reported_stop:
            self._reported_stop = True
            self._record.event(facts.StopRequested(cause=cause, rank=self.world.rank))
            self._record.outcome("left", self._step_reported, cause)

    # ---- state

    def _restore(self) -> None:
        self._program.begin()
        restored = Restored()
        if self._place is not None:
            self._kept = kept = TrainingState(
                self._place,
                self.settings,
                self._program,
                world=self.world,
                job_clock=self._clock,
                stops=self._stops,
                record=self._record,
                run_id=self._run_id,
                extra=self._unsaved.recorded_at,
                flush=self._before_save,
                saving=self._telemetry.saving,
            )
            restored = kept.restore()
        if restored.manifest is not None:
            self.step = restored.manifest.step
        self._program.seed(restored.manifest, self.settings.train.seed, self.step)
        self._unsaved.begin(restored.manifest, self.step)
        self._open(self.step)

    def _open(self, step: int) -> None:
        self._telemetry.open(
            self._place, log_every_s=self.settings.run.log_every_s, model=self._program.model
        )
        if self._program.state_bytes:
            self._clock.state_bytes = self._program.state_bytes
        self._profiler.begin(step)

    def _write_outcome(self, outcome: str, cause: StopCause | None) -> None:
        self._record.flush()
        self._record.outcome(outcome, self._step_reported, cause)

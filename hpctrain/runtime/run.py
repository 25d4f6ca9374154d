"""The training-side API: ``run = hpctrain.init()``, then a loop that saves, stops and resumes.

Order of a step: exchange wishes, leave if all agreed to, hand the step to the program, count it,
save when due. Decisions that ranks must share go through `agreement.py`; nothing collective runs
in a handler.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from hpctrain.checkpoint.manifest import Manifest
from hpctrain.checkpoint.restore import Restored, Wanted, restore
from hpctrain.checkpoint.retention import sweep
from hpctrain.checkpoint.save import Place
from hpctrain.clusters import get_control
from hpctrain.errors import UsageError
from hpctrain.ledger import events as ledger
from hpctrain.records import StopCause
from hpctrain.rundir.fence import Attempt, take_attempt
from hpctrain.rundir.layout import RunDir
from hpctrain.runtime import tracked
from hpctrain.runtime.agreement import (
    STOP_CLOCK,
    STOP_INTERRUPT,
    STOP_TERM,
    WARNED,
    Agreement,
    Wish,
)
from hpctrain.runtime.board import Board
from hpctrain.runtime.clock import JobClock
from hpctrain.runtime.listener import Listener
from hpctrain.runtime.marks import StepMarks, note
from hpctrain.runtime.program import Program
from hpctrain.runtime.saves import Saves
from hpctrain.runtime.watcher import Watcher
from hpctrain.settings.schema import Settings
from hpctrain.settings.spec import load_spec
from hpctrain.world import World, broadcast, join_world, on_rank_0

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.optim import Optimizer

    from hpctrain.checkpoint.boxes import State
    from hpctrain.engines.engine import Engine
    from hpctrain.engines.parallelize import ModelPlan
    from hpctrain.settings.spec import Spec


LEAVE_S = 3.0
"""Kept free before the kill: for the processes to leave and for the agent to requeue."""


class Stopped(SystemExit):
    """The run was saved and this process must leave; passes the program like a normal exit."""


def init(settings: Settings | None = None) -> Run:
    """Join the run that hpctrain started this process for.

    Collective: every rank calls it once, early.

    Outside hpctrain (plain ``python train.py``, or torchrun) the same program trains, without a run
    directory: nothing is saved, and a stop signal ends it after the step in hand.

    Args:
        settings: For programs that bring their own; otherwise the run's spec.json counts.
    """
    root = os.environ.get("HPCTRAIN_RUN_DIR")
    run_dir = RunDir(Path(root)) if root else None
    spec = load_spec(run_dir.spec) if run_dir is not None and run_dir.spec.exists() else None
    listener = Listener()
    listener.start(interrupt="HPCTRAIN_ATTEMPT" not in os.environ)
    world = join_world()
    attempt = _attempt(run_dir, world)
    if settings is None:
        settings = spec.settings if spec is not None else Settings()
    return Run(world, settings, run_dir=run_dir, attempt=attempt, listener=listener, spec=spec)


def _attempt(run_dir: RunDir | None, world: World) -> Attempt | None:
    """The attempt that the agent took; without an agent rank 0 takes one itself."""
    if "HPCTRAIN_ATTEMPT" in os.environ:
        return Attempt(**json.loads(os.environ["HPCTRAIN_ATTEMPT"]))
    if run_dir is None:
        return None
    taken = None
    if world.rank == 0:
        taken = asdict(take_attempt(run_dir, job_id=f"pid-{os.getpid()}", restarts=0))
        run_dir.attempt(taken["number"]).mkdir(parents=True, exist_ok=True)
        ledger.append(
            run_dir,
            "attempt_started",
            attempt=taken["number"],
            job_id=taken["job_id"],
            restarts=0,
            nodes=[os.uname().nodename],
            world_size=world.world_size,
            ranks_per_node=world.world_size,
            token=taken["token"],
            by="start",
        )
    return Attempt(**broadcast(world, taken))


class Run:
    """One rank's side of a run.

    Attributes:
        world: This rank's place among the ranks.
        settings: The run's settings.
        step: Updates applied so far.
    """

    def __init__(
        self,
        world: World,
        settings: Settings,
        *,
        run_dir: RunDir | None,
        attempt: Attempt | None,
        listener: Listener,
        spec: Spec | None,
    ) -> None:
        """Use `init`."""
        self.world = world
        self.settings = settings
        self.step = 0
        self.dir = run_dir
        self._attempt = attempt
        self._spec = spec
        self._listener = listener
        self._agreement = Agreement(world)
        self._program = Program(world)
        end = os.environ.get("HPCTRAIN_JOB_END")
        self._clock = JobClock(float(end) if end else None, settings.run.stop_margin_s)
        self._watcher = self._start_watcher()
        self._marks: StepMarks | None = None
        self._board: Board | None = None
        self._cause: StopCause | None = None
        self._saves: Saves | None = None
        self._metrics: dict[str, float] = {}
        self._first_step_at: float | None = None
        self._event("phase", name="initialised")

    # ---- what a program calls

    def parallelize(
        self, model: nn.Module, optimizer: Optimizer, *, plan: ModelPlan | None = None
    ) -> Engine:
        """Spread a model over the ranks as the settings say. Collective; call it before `track`.

        Args:
            model: On the CPU, the same on every rank.
            optimizer: Of all its parameters, without state.
            plan: How to cut a model of an uncommon layout along `tp` and `pp`.

        Returns:
            The engine: `engine.forward_backward`, `engine.evaluate`, `engine.step`.
        """
        from hpctrain.engines.parallelize import parallelize

        engine = parallelize(model, optimizer, self.settings.engine, self.world, plan=plan)
        engine.seed = self.settings.train.seed
        self._program.use(engine)
        ranks = self.world.ranks_per_node
        self._event("mesh", engine=engine.kind, ranks_per_node=ranks, **asdict(engine.mesh))
        return engine

    def track(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        data: Any = None,
        **others: tracked.Stateful,
    ) -> None:
        """Name what a checkpoint holds.

        Args:
            model: The model, wrapped or not; not needed after `parallelize`.
            optimizer: Its optimizer; not needed after `parallelize`.
            data: The position in the data: anything with state_dict/load_state_dict; a key
                ``samples_consumed`` in its state lets the ledger prove that each sample was used
                once.
            others: Scheduler and the like, by name; state of tensors, numbers, strings, lists,
            dicts.
        """
        program = self._program
        program.model = model if model is not None else program.model
        program.optimizer = optimizer if optimizer is not None else program.optimizer
        program.data = data if data is not None else program.data
        for name, thing in others.items():  # said now, not when the first save fails
            tracked.split(name, tracked.state_of(thing), {})
        program.tracked.update(others)

    def steps(self, total: int) -> Iterator[int]:
        """The steps that are left of `total`, from the restored one on; saves and leaves by itself.

        Collective: every rank iterates. After a stop request all ranks save the same step and
        leave by `Stopped` (a SystemExit with code 0), which is raised out of the loop.
        """
        self._restore()
        while self.step < total:
            self._obey(self._exchange())
            started = time.monotonic()
            before = self._consumed()
            if self._program.engine is not None:
                self._program.engine.at_step(self.step)
            try:
                yield self.step
            except GeneratorExit:  # the program left its loop: what is being saved is worth having
                if self._saves is not None:
                    self._saves.settle()
                raise
            self.step += 1
            self._count(time.monotonic() - started, before)
        self._finish()

    def should_stop(self) -> bool:
        """Whether all ranks agreed to stop; for validation, warm-up and other long loops.

        Collective: every rank calls it equally often. After True, go back to the step loop: it
        saves and leaves.
        """
        agreed = self._exchange()
        if agreed.cause is not None:
            self._cause = agreed.cause
        return self._cause is not None

    def log(self, **values: float) -> None:
        """Scalars of the step in hand, for TensorBoard and the ledger (`loss`); rank 0's count."""
        if self.world.rank != 0:
            return
        self._metrics.update({name: float(value) for name, value in values.items()})
        if self._marks is not None and "loss" in values:
            self._marks.loss = float(values["loss"])
        if self._board is not None:
            self._board.log(self.step + 1, {k: float(v) for k, v in values.items()})

    def save(self) -> None:
        """Commit a checkpoint of the current step, unless there is one or no step was done.

        Collective: every rank calls it.

        Raises:
            CheckpointError: it was not committed; nothing is lost, the older ones stand.
        """
        if self._saves is None:
            return
        self._flush_marks()
        self._saves.now(self.step, self._snapshot)

    # ---- the loop's parts

    def _exchange(self) -> Wish:
        agreed = self._agreement.tick(self._wish())
        if agreed.stop >= WARNED:
            # Only now: most ticks of short steps exchange nothing, and would lose it.
            self._listener.warned = False
        if agreed.stop == WARNED and self._watcher is not None:
            self._watcher.warn()
        return agreed

    def _wish(self) -> Wish:
        heard = self._listener
        stop = 0
        if heard.interrupted:
            stop = STOP_INTERRUPT
        elif heard.term:
            stop = STOP_TERM
        elif self._watcher is not None and self._watcher.stop:
            stop = self._watcher.stop
        elif self.world.rank == 0 and self._clock.is_due(time.time()):
            stop = STOP_CLOCK
        elif heard.warned:
            stop = WARNED
        wishes = self.world.rank == 0 and self._saves is not None and self._saves.wishes()
        return Wish(stop, wishes)

    def _obey(self, agreed: Wish) -> None:
        cause = agreed.cause or self._cause
        if cause is not None:
            self._leave(cause)
        if self._saves is not None and (agreed.save or self._saves.is_due(self.step)):
            self._flush_marks()
            self._saves.periodic(self.step, self._snapshot)

    def _flush_marks(self) -> None:
        """Before a save, lest the ledger be behind a checkpoint."""
        if self._marks is not None:
            self._marks.flush()

    def _left_s(self, cause: StopCause) -> float | None:
        """Seconds until the processes are killed; None where nobody says."""
        if cause is StopCause.TERM:
            kill_wait_s = os.environ.get("HPCTRAIN_KILL_WAIT_S")
            if kill_wait_s is None:
                return None
            heard = self._listener.term_at or time.time()
            return max(0.0, heard + float(kill_wait_s) - LEAVE_S - time.time())
        if cause is StopCause.CLOCK and self._clock.end_time is not None:
            return max(0.0, self._clock.end_time - time.time() - LEAVE_S)
        return None

    def _leave(self, cause: StopCause) -> NoReturn:
        self._event("stop_requested", cause=cause.value, rank=self.world.rank)
        if self._saves is not None:
            self._flush_marks()
            self._saves.final(self.step, self._snapshot, self._left_s(cause))
            self._saves.close()
        self._event("stopped", step=self.step)
        self._write_outcome("stopped", cause)
        if self.world.rank == 0 and self.dir is not None:
            print(f"hpctrain: leaving at step {self.step} ({cause.value})", flush=True)
        raise Stopped(0)

    def _finish(self) -> None:
        self.save()
        if self._saves is not None:
            self._saves.close()
        self._event("done", step=self.step)
        self._write_outcome("done", None)

    def _count(self, seconds: float, before: int | None) -> None:
        self._clock.stepped(seconds)
        if self._first_step_at is None:
            self._first_step_at = time.time()
            self._event("phase", name="first_step")
            if self._saves is not None:
                self._saves.warm_up(self._snapshot)
        if self._marks is not None:
            self._marks.add(self.step, (before, self._consumed()))

    def _consumed(self) -> int | None:
        return None if self._marks is None else self._program.consumed()

    # ---- state

    def _snapshot(self) -> tuple[State, Manifest]:
        attempt = self._attempt
        if attempt is None or self.dir is None:
            raise UsageError("there is no run directory to save into")
        state, extra = self._program.snapshot()
        data = self._program.data
        manifest = Manifest(
            run_id=self._spec.run_id if self._spec else "",
            name=self.dir.name,
            step=self.step,
            attempt=attempt.number,
            attempt_token=attempt.token,
            created=time.time(),
            world_size=self.world.world_size,
            mesh=self._program.mesh,
            engine=self._program.kind,
            data=data.state_dict() if data is not None else {},
            rng={"ranks": self.world.world_size},
            versions={"torch": str(torch.__version__), "python": sys.version.split()[0]},
            extra=extra,
            metrics=dict(self._metrics),
        )
        return state, manifest

    def _restore(self) -> None:
        restored = Restored()
        if self.dir is not None and self._attempt is not None:
            restored = self._load(Place(self.dir, self._attempt, self.settings.checkpoint))
        self._program.seed(restored.manifest, self.settings.train.seed, self.step)
        if self._program.state_bytes:
            self._clock.state_bytes = self._program.state_bytes

    def _load(self, place: Place) -> Restored:
        started = time.monotonic()
        self._saves = Saves(place, self.world, self._clock)
        saver = self._saves.saver
        arena = saver.arena if saver is not None else None
        restored = restore(place, self.world, self._wanted, arena=arena)
        on_rank_0(self.world, lambda: sweep(place.run, place.attempt))
        if restored.manifest is not None:
            self._program.take_over(restored.manifest)
            self.step = restored.manifest.step
        elif restored.spoiled:
            self._program.forget()
        self._event(
            "restored",
            step=self.step,
            checkpoint=restored.path.name if restored.path else None,
            from_world_size=restored.manifest.world_size if restored.manifest else None,
            world_size=self.world.world_size,
            seconds=round(time.monotonic() - started, 3),
            bytes_read=restored.bytes_read,
            skipped=restored.skipped,
        )
        if self.world.rank == 0:
            every_s = self.settings.run.log_every_s
            self._marks = StepMarks(place.run, place.attempt, every_s)
            self._board = Board(place.run.tensorboard, self.step + 1 if self.step else 0)
        self._saves.start(self.step)
        return restored

    def _wanted(self, manifest: Manifest) -> Wanted:
        wanted = self._program.wanted(manifest)
        if self._saves is not None and self._saves.saver is not None:
            # also what weights are read into before all agree
            self._saves.saver.prepare(wanted.state)
        return wanted

    # ---- small things

    def _start_watcher(self) -> Watcher | None:
        if self.world.rank != 0 or self.dir is None or self._attempt is None:
            return None
        cluster = os.environ.get("HPCTRAIN_CLUSTER")
        control = None
        if cluster:
            control = get_control(cluster, self._attempt.job_id, self._attempt.restarts)
        watcher = Watcher(
            request=self.dir.stop_request,
            job_id=self._attempt.job_id,
            clock=self._clock,
            control=control,
        )
        watcher.start()
        return watcher

    def _event(self, kind: str, **fields: Any) -> None:
        if self.world.rank == 0 and self.dir is not None and self._attempt is not None:
            note(self.dir, kind, self._attempt, **fields)

    def _write_outcome(self, outcome: str, cause: StopCause | None) -> None:
        if self._board is not None:
            self._board.flush()
        if self.world.rank != 0 or self.dir is None or self._attempt is None:
            return
        path = self.dir.attempt(self._attempt.number) / "outcome.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_suffix(".new")
        text = {"outcome": outcome, "step": self.step, "cause": cause.value if cause else None}
        staged.write_text(json.dumps(text))
        staged.replace(path)

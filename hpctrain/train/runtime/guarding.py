"""What a run's guards look at, and what becomes of what they find: the ledger hears, or all stop.

Every rank calls everything here alike; rank 0 writes. tests/engines/test_guarded_runs.py holds the
promises.
"""

from __future__ import annotations

import logging
import math
import os
from typing import TYPE_CHECKING

from hpctrain.checkpoint.store import find
from hpctrain.core.base.env import HPCTRAIN_NODE
from hpctrain.core.base.text import fold_ranks
from hpctrain.core.world import gather
from hpctrain.errors import CheckpointError, GuardStopped, ReplicasDiverged, UsageError
from hpctrain.ledger.run.event_types import (
    BatchSkipped,
    ReplicasDiffer,
    StepNotFinite,
    StepSpiked,
    TrainingRewound,
)
from hpctrain.train.guards.nonfinite import BadStep, Ruling
from hpctrain.train.guards.own_steps import OwnSteps, RankNumbers
from hpctrain.train.runtime.rewinds import Rewinds, set_aside_newer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.settings.schema import GuardSettings
    from hpctrain.core.world import World
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.train.engines.engine import Engine
    from hpctrain.train.guards.replicas import Divergence
    from hpctrain.train.guards.spikes import Spike
    from hpctrain.train.runtime.program import Program
    from hpctrain.train.runtime.replicas import Comparison, ReplicaWatch

log = logging.getLogger("hpctrain.runtime")

STATE = "hpctrain.guard"
"""Under which a checkpoint holds what the guards remember."""


class Guarding:
    """One rank's side of the run's guards; see `GuardListener`."""

    def __init__(
        self,
        settings: GuardSettings,
        program: Program,
        *,
        tell: Callable[[LedgerFact], None],
        log_skipped: Callable[[], None],
        stop: Callable[[str], None],
    ) -> None:
        """Prepare to guard a program; nothing is guarded so far.

        `tell` writes a fact into the ledger, on rank 0. `log_skipped` counts the step in hand as
        skipped. `stop` lands what is being saved and leaves an outcome (`attempt.write_outcome`),
        "" for none; an error is raised after it.
        """
        self._settings = settings
        self._program = program
        self._tell = tell
        self._log_skipped = log_skipped
        self._stop = stop
        self._consumed: int | None = None
        self._watch: ReplicaWatch | None = None
        self._place: SavePlace | None = None
        self._nodes: list[str] = []
        self._own: OwnSteps | None = None
        self._is_said: set[tuple[int, ...]] = set()
        self._rewinds = Rewinds(program, tell=tell, stop=stop)
        self._goes_back = "rewind" in {settings.nonfinite, settings.spike}
        self._is_on = settings.nonfinite != "off" or settings.spike != "off"

    def guard(self, engine: Engine) -> None:
        """Have an engine's steps guarded as the settings say.

        Raises:
            UsageError: the engine cannot do what they ask for.
        """
        if self._settings.spike == "skip" and engine.decides_alone:
            raise UsageError(
                f"guard.spike skip: DeepSpeed ({engine.kind}) updates before anybody "
                "is asked; set guard.spike = tell, or engine.kind fsdp2"
            )
        if self._is_on:
            from hpctrain.train.engines.step_guard import StepGuard

            engine.guard = StepGuard(engine, self._settings, self)
            self._program.tracked[STATE] = engine.guard

    def prepare(self) -> None:
        """Before a checkpoint is restored: what is remembered of a loop without an engine."""
        if self._is_on and self._own is None and self._program.engine is None:
            self._own = OwnSteps(self._settings)
            self._program.tracked[STATE] = self._own

    def begin(self, world: World, place: SavePlace | None) -> None:
        """Begin training: weights that are copies are compared from here on. Collective.

        `place` is None outside of a run.

        Raises:
            UsageError: samples are to be left out, and the program's data cannot do that.
        """
        from hpctrain.train.runtime.replicas import ReplicaWatch, groups_of

        self._rewinds.begin(world, place, wanted=self._goes_back)
        groups = groups_of(self._program, world) if self._settings.replicas else []
        if not groups or self._program.model is None:
            return
        self._place = place
        self._nodes = gather(world, os.environ.get(HPCTRAIN_NODE) or os.uname().nodename)
        self._watch = ReplicaWatch(
            list(self._program.model.parameters()),
            groups,
            world,
            count=self._settings.replicas,
            differ=self._differ,
        )

    def step_done(self, step: int) -> None:
        """So many updates are applied, or left out.

        Raises:
            ReplicasDiverged: on rank 0, which ends the round.
            GuardStopped: the same, and no other follows.
        """
        if self._watch is not None:
            self._watch.look(step)

    def close(self, step: int) -> None:
        """The last step is done, and its checkpoint is not yet written; see `step_done`."""
        if self._watch is not None:
            self._watch.close(step)

    def step_begins(self) -> None:
        """The program is about to read the step's samples."""
        if self._is_on:
            self._consumed = self._program.consumed()
            self._rewinds.step_begins(self._consumed)

    # ---- a loop with a backward pass of its own

    def judge(self, world: World, step: int, loss: float, norm: float) -> bool:
        """See `Run.guard`."""
        if self._program.engine is not None:
            raise UsageError(
                "run.guard() is for a program without run.parallelize(): engine.step() asks the "
                "guards by itself"
            )
        if not self._is_on:
            return True
        if self._goes_back and not self._rewinds.has_begun:
            raise UsageError(
                "guard.spike or guard.nonfinite = rewind goes back to a checkpoint of run.steps(), "
                "and this program has a loop of its own; set skip"
            )
        self.prepare()
        assert self._own is not None, "made just now"  # noqa: S101 - our own bug
        node = os.environ.get(HPCTRAIN_NODE) or os.uname().nodename
        rows = [RankNumbers(*row) for row in gather(world, (loss, norm, node))]
        is_applied, event = self._own.judge(step, rows)
        if isinstance(event, BadStep):
            self.not_finite(event)
        elif event is not None:
            self.spiked(step, event, is_left_out=not is_applied)
        return is_applied

    # ---- what a step's guard finds

    def samples_of(self, microbatch: int) -> Sequence[int]:
        """See `GuardListener`; none where the program's data does not tell them."""
        taken = getattr(self._program.data, "taken", None)
        pieces = getattr(taken, "pieces", ())
        return pieces[microbatch].indices if microbatch < len(pieces) else []

    def not_finite(self, bad: BadStep) -> None:
        """See `GuardListener`.

        Raises:
            GuardStopped: on every rank.
            RewindNeeded: the same; training goes on from before.
        """
        self._tell(
            StepNotFinite(
                step=bad.step,
                loss=bad.loss,
                grad_norm=bad.norm,
                rank=bad.rank,
                ranks=bad.ranks,
                node=bad.node,
                parameter=bad.parameter,
                samples=bad.samples,
                in_weights=bad.in_weights,
                transient=bad.transient,
                left_out=bad.is_left_out,
            )
        )
        if bad.is_left_out:
            self._skipped(bad.step, "nonfinite")
        said = in_words(bad)
        log.warning("%s", said)
        if bad.ruling is Ruling.STOP:
            if self._settings.nonfinite == "rewind":
                self._rewinds.go_back(bad.step, "nonfinite", f"guard.nonfinite: {said}")
            self._stop("failed")
            raise GuardStopped(f"guard.nonfinite: {said}; nothing more is trained")

    def spiked(self, step: int, spike: Spike, *, is_left_out: bool) -> None:
        """See `GuardListener`.

        Raises:
            RewindNeeded: on every rank.
        """
        self._tell(
            StepSpiked(
                step=step,
                what=spike.what,
                value=spike.value,
                usual=spike.usual,
                deviations=round(spike.deviations, 1),
                left_out=is_left_out,
            )
        )
        if self._settings.spike == "rewind":
            said = f"{spike.what} {spike.value:.4g}, where {spike.usual:.4g} is usual"
            self._rewinds.go_back(step, "spike", f"guard.spike: step {step} has {said}")
        if is_left_out:
            self._skipped(step, "spike")

    def _differ(self, seen: Comparison) -> None:
        """Copies of weights differ. On rank 0; its error ends the round for all."""
        step, clean = seen.step, seen.clean
        for each in seen.wrong:
            if each.suspects in self._is_said:
                continue  # said once: they differ at every step after it
            self._is_said.add(each.suspects)
            nodes = tuple(dict.fromkeys(self._nodes[rank] for rank in each.suspects))
            fact = ReplicasDiffer(
                step=step,
                clean=clean,
                ranks=each.suspects,
                nodes=nodes,
                certain=each.is_certain,
                compared=len(each.compared),
            )
            self._tell(fact)
            log.warning("guard.replicas: %s", _whose(each, nodes))
        act, last = self._settings.diverged, seen.wrong[-1]
        if act == "tell" or not seen.were_same:
            return
        said = _whose(last, [self._nodes[rank] for rank in last.suspects])
        self._stop("failed" if act == "stop" else "")
        if act == "stop":
            raise GuardStopped(f"guard.replicas: {said}; right at step {clean}")
        self._rewind(said, step, clean)

    def _rewind(self, said: str, seen: int, clean: int) -> None:
        """End the round by an error; the next one resumes from before the flip.

        GuardStopped: every checkpoint is from after the flip. Else ReplicasDiverged, also without a
        run.
        """
        place = self._place
        if place is None:
            raise ReplicasDiverged(f"guard.replicas: {said}; right at step {clean}")
        steps = find.steps(place.run)
        newer = [step for step in steps if step > clean]
        if newer and len(newer) == len(steps):
            self._stop("failed")
            raise GuardStopped(
                f"guard.replicas: {said}; weights were surely right at step {clean}, and there is "
                f"no checkpoint from before: judge step {min(newer)} yourself, or begin anew"
            )
        why = f"{said}; weights were surely right up to step {clean}"
        try:
            set_aside_newer(place, clean, why, self._tell)
        except CheckpointError as error:
            raise ReplicasDiverged(f"guard.replicas: {said}; {error}") from error
        self._tell(TrainingRewound(step=seen, to=clean, why="replicas"))
        raise ReplicasDiverged(f"guard.replicas: {said}; goes back to before step {clean + 1}")

    def _skipped(self, step: int, why: str) -> None:
        last = self._program.consumed()
        self._log_skipped()
        self._tell(BatchSkipped(step=step, first=self._consumed, last=last, why=why))


def in_words(bad: BadStep) -> str:
    """What happened, in one line."""
    loss = "" if bad.loss is None or math.isfinite(bad.loss) else f"loss {bad.loss}, "
    what = f"step {bad.step} is not finite ({loss}gradient norm {bad.norm})"
    if bad.in_weights:
        return f"{what}: the weights themselves are not, first {bad.parameter}"
    whose = f"rank {bad.rank} on {bad.node} had it first" if bad.rank is not None else ""
    where = f"at {bad.parameter}" if bad.parameter else ""
    samples = f"samples {', '.join(map(str, bad.samples[:8]))}" if bad.samples else ""
    dots = ", ..." if len(bad.samples) > 8 else ""  # noqa: PLR2004
    named = ", ".join(filter(None, [whose, where, samples + dots])) or "nobody knows whose it is"
    again = {
        None: "",
        True: "; computed again it is finite: a fault of the machine",
        False: "; computed again it is the same",
    }[bad.transient]
    return f"{what}: {named}{again}{'; its update is left out' if bad.is_left_out else ''}"


def _whose(divergence: Divergence, nodes: Sequence[str]) -> str:
    """Whose weights are wrong, in words."""
    where = ", ".join(dict.fromkeys(nodes))
    who = f"{fold_ranks(divergence.suspects)} on {where}"
    if divergence.is_certain:
        return f"the weights of {who} are not those of the others"
    return f"the weights of {who} differ, and nobody knows whose are right"

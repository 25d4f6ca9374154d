"""What a run's guards look at, and what becomes of what they find: an event, a rewind, or a stop.

Every rank calls everything here alike; rank 0 looks at checkpoints and writes. A rewind ends the
round by an error, and ranks that start again restore a checkpoint from before the bad steps, whose
samples no later start takes.

A rank digests a slice of its weights at each step, and after a turn through all slices sends one
number to rank 0, in the background and beside the gradients' group.
tests/engines/test_guarded_runs.py, test_rewinds.py, test_replicas.py and
tests/unit/guards/test_replicas.py hold the promises.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import xxhash
from torch.nn.parallel import DistributedDataParallel

from hpctrain.checkpoint.store import find, verify
from hpctrain.checkpoint.tensors.boxes import bytes_of
from hpctrain.core.base.env import HPCTRAIN_NODE
from hpctrain.core.base.text import fold_ranks
from hpctrain.core.world import apart, gather, on_rank_0
from hpctrain.errors import (
    CheckpointError,
    GuardStopped,
    HpctrainError,
    ReplicasDiverged,
    RewindNeeded,
    UsageError,
)
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import event_types as facts
from hpctrain.ledger.run import events as ledger
from hpctrain.train.engines.norm import local
from hpctrain.train.guards.rules import OwnSteps
from hpctrain.train.joining_ranks import COLLECTIVE_TIMEOUT_S
from hpctrain.train.runtime.telemetry import Gathering

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.settings.schema import GuardSettings
    from hpctrain.core.world import World
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.train.engines.engine import Engine
    from hpctrain.train.guards.rules import Spike
    from hpctrain.train.runtime.program import Program


log = logging.getLogger("hpctrain.runtime")

STATE = "hpctrain.guard"
"""Under which a checkpoint holds what the guards remember."""
STEPS_BEFORE = 20
"""So far before a bad step the checkpoint lies, and so many steps' samples are left out."""
MOST, WITHIN = 3, 200
"""After so many times among so many steps the data is not to blame, and nothing is gone back."""


class Guarding:
    """One rank's side of the run's guards; see `GuardListener`."""

    def __init__(
        self,
        settings: GuardSettings,
        program: Program,
        *,
        record: Callable[[LedgerFact], None],
        log_skipped: Callable[[], None],
        stop: Callable[[str], None],
    ) -> None:
        """Prepare to guard a program; nothing is guarded so far.

        `record` writes a fact into the ledger, on rank 0. `log_skipped` counts the step in hand as
        skipped. `stop` lands what is being saved and leaves an outcome ("" for none), see
        `trackers.write_outcome`; an error is raised after it.
        """
        self._settings = settings
        self._program = program
        self._record_fact = record
        self._log_skipped = log_skipped
        self._stop = stop
        self._world: World | None = None
        self._place: SavePlace | None = None
        self._watch: ReplicaWatch | None = None
        self._nodes: list[str] = []
        self._own: OwnSteps | None = None
        self._is_said: set[tuple[int, ...]] = set()
        self._earlier: list[int] = []
        """Steps at which the run has gone back."""
        self._begins: deque[int | None] = deque(maxlen=STEPS_BEFORE)
        """Samples that were consumed before each of the last steps."""
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
        """Begin training: what earlier starts left out is left out here too. Collective.

        Weights that are copies are compared from here on. `place` is None outside of a run.

        Raises:
            UsageError: samples are to be left out, and the program's data cannot do that.
        """
        self._world, self._place = world, place
        self._leave_out(world, place)
        groups = groups_of(self._program, world) if self._settings.replicas else []
        if not groups or self._program.model is None:
            return
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

    def step_begins(self, consumed: int | None) -> None:
        """The program is about to read the step's samples; so many were consumed before."""
        self._begins.append(consumed)

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
        if self._goes_back and self._world is None:
            raise UsageError(
                "guard.spike or guard.nonfinite = rewind goes back to a checkpoint of run.steps(), "
                "and this program has a loop of its own; set skip"
            )
        self.prepare()
        assert self._own is not None, "made just now"  # noqa: S101 - our own bug
        node = os.environ.get(HPCTRAIN_NODE) or os.uname().nodename
        is_applied, event = self._own.judge(step, gather(world, (loss, norm, node)))
        if isinstance(event, facts.StepNotFinite):
            self.not_finite(event, must_stop=self._own.must_stop)
        elif event is not None:
            self.spiked(step, event, is_left_out=not is_applied)
        return is_applied

    # ---- what a step's guard finds

    def samples_of(self, microbatch: int) -> Sequence[int]:
        """See `GuardListener`; none where the program's data does not tell them."""
        taken = getattr(self._program.data, "taken", None)
        pieces = getattr(taken, "pieces", ())
        return pieces[microbatch].indices if microbatch < len(pieces) else []

    def not_finite(self, bad: facts.StepNotFinite, *, must_stop: bool) -> None:
        """See `GuardListener`.

        Raises:
            GuardStopped: on every rank.
            RewindNeeded: the same; training resumes from before.
        """
        self._record_fact(bad)
        step = bad.step or 0
        if bad.left_out:
            self._skipped(step, "nonfinite")
        said = in_words(bad)
        log.warning("%s", said)
        if must_stop:
            if self._settings.nonfinite == "rewind":
                self._go_back(step, "nonfinite", f"guard.nonfinite: {said}")
            self._stop("failed")
            raise GuardStopped(f"guard.nonfinite: {said}; nothing more is trained")

    def spiked(self, step: int, spike: Spike, *, is_left_out: bool) -> None:
        """See `GuardListener`.

        Raises:
            RewindNeeded: on every rank.
        """
        self._record_fact(
            facts.StepSpiked(
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
            self._go_back(step, "spike", f"guard.spike: step {step} has {said}")
        if is_left_out:
            self._skipped(step, "spike")

    def _differ(self, step: int, clean: int, wrong: list[Divergence], were_same: bool) -> None:
        """Copies of weights differ. On rank 0; its error ends the round for all.

        Weights were surely right at `clean`. All copies `were_same` before in this attempt: else it
        may be the program's own doing, or that of devices that round otherwise.
        """
        for each in wrong:
            if each.suspects in self._is_said:
                continue  # said once: they differ at every step after it
            self._is_said.add(each.suspects)
            nodes = tuple(dict.fromkeys(self._nodes[rank] for rank in each.suspects))
            fact = facts.ReplicasDiffer(
                step=step,
                clean=clean,
                ranks=each.suspects,
                nodes=nodes,
                certain=each.is_certain,
                compared=len(each.compared),
            )
            self._record_fact(fact)
            log.warning("guard.replicas: %s", _whose(each, nodes))
        act, last = self._settings.diverged, wrong[-1]
        if act == "tell" or not were_same:
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
            verify.set_newer_aside(place.run, clean, why, place.attempt, self._record_fact)
        except CheckpointError as error:
            raise ReplicasDiverged(f"guard.replicas: {said}; {error}") from error
        self._record_fact(facts.TrainingRewound(step=seen, to=clean, why="replicas"))
        raise ReplicasDiverged(f"guard.replicas: {said}; goes back to before step {clean + 1}")

    def _skipped(self, step: int, why: str) -> None:
        last = self._program.consumed()
        self._log_skipped()
        first = self._begins[-1] if self._begins else None
        self._record_fact(facts.BatchSkipped(step=step, first=first, last=last, why=why))

    # ---- going back

    def _leave_out(self, world: World, place: SavePlace | None) -> None:
        """Have the data leave out what guards have gone back from. Collective."""
        earlier = on_rank_0(world, lambda: [] if place is None else _reported_ranges(place))
        self._earlier = [step for step, _ in earlier]
        holes = [hole for _, hole in earlier]
        if not holes and not (self._goes_back and place is not None):
            return
        leave_out = getattr(self._program.data, "leave_out", None)
        if leave_out is None:
            what = type(self._program.data).__name__ if self._program.data is not None else "data"
            why = (
                "the run's ledger names" if holes else "guard.spike or guard.nonfinite = rewind has"
            )
            raise UsageError(
                f"{why} samples to be left out, which {what} cannot; use run.loader, or "
                "hpctrain.GlobalBatches with run.track(data=...), or set skip"
            )
        leave_out(holes)

    def _go_back(self, step: int, why: str, said: str) -> None:
        """End the round, if there is something to go back to; return otherwise. Collective.

        The update of the bad `step` is not applied yet, or matters no more. `why` is as
        `TrainingRewound.why`, `said` describes what was seen.

        Raises:
            RewindNeeded: on every rank.
        """
        world, place, limit = self._world, self._place, step - STEPS_BEFORE
        if world is None or place is None:
            return
        why_not = on_rank_0(world, lambda: self._why_not(place, step, limit))
        if why_not:
            log.warning("%s; %s, so training continues", said, why_not)
            return
        self._stop("")
        first, last = self._begins[0], self._program.consumed()

        def act() -> None:
            verify.set_newer_aside(place.run, limit, said, place.attempt, self._record_fact)
            self._record_fact(
                facts.TrainingRewound(step=step, to=limit, first=first, last=last, why=why)
            )

        on_rank_0(world, act)
        raise RewindNeeded(f"{said}; training goes back to step {limit} or before")

    def _why_not(self, place: SavePlace, step: int, limit: int) -> str:
        if sum(step - WITHIN < earlier <= step for earlier in self._earlier) >= MOST:
            return f"training has gone back {MOST} times within {WITHIN} steps"
        if not self._begins or self._begins[0] is None:
            return "nobody knows which samples these are"
        try:
            steps = find.steps(place.run)
            if any(find.glance(place.run, s).problem is None for s in steps if s <= limit):
                return ""
        except HpctrainError as error:
            return str(error)
        return f"there is no checkpoint of step {limit} or before"


def in_words(bad: facts.StepNotFinite) -> str:
    """What happened, in one line."""
    loss = "" if bad.loss is None or math.isfinite(bad.loss) else f"loss {bad.loss}, "
    what = f"step {bad.step} is not finite ({loss}gradient norm {bad.grad_norm})"
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
    return f"{what}: {named}{again}{'; its update is left out' if bad.left_out else ''}"


def _whose(divergence: Divergence, nodes: Sequence[str]) -> str:
    where = ", ".join(dict.fromkeys(nodes))
    who = f"{fold_ranks(divergence.suspects)} on {where}"
    if divergence.is_certain:
        return f"the weights of {who} are not those of the others"
    return f"the weights of {who} differ, and nobody knows whose are right"


def _reported_ranges(place: SavePlace) -> Sequence[tuple[int, tuple[int, int]]]:
    """The steps at which guards went back, and what is left out since."""
    events = ledger.read_marked(place.run, b'"rewound"', b'"attempt_started"')
    rewinds = RunHistory.of(events).rewinds
    return [(one.fact.step or 0, one.hole) for one in rewinds if one.hole is not None]


# ---- copies of the weights

EXACT_BITS = 53
"""Of a digest that a row of fp64 numbers carries whole."""


class ReplicaWatch:
    """One rank's side."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        groups: Sequence[Sequence[int]],
        world: World,
        *,
        count: int,
        differ: Callable[[int, int, list[Divergence], bool], None],
    ) -> None:
        """Prepare the comparison. Collective.

        Ranks in one of `groups` hold the same `weights`; `count` is the number of slices. On rank 0
        `differ` is called with what differs, see `Guarding`.
        """
        self._groups = groups
        self._differ = differ
        self._gathering = Gathering(apart(world, COLLECTIVE_TIMEOUT_S))
        self._is_first = world.rank == 0
        sizes = [local(weight).nbytes for weight in weights]
        self._slices = [[weights[n] for n in part] for part in slices(sizes, count)]
        self._window = window_of(count, world.world_size)
        self._looks = 0
        self._digest = xxhash.xxh3_64()
        self._on_device: list[torch.Tensor] = []
        self._said_at = 0
        self._were_same = False

    def look(self, step: int) -> None:
        """After a step's update. Collective by its count: every rank calls it equally often."""
        self._take_in(self._slices[self._looks % len(self._slices)])
        self._looks += 1
        if self._is_first:
            self._compare(wait=False)
        if self._looks % self._window == 0:
            self._compare(wait=True)
            self._said_at = step
            self._gathering.launch([float(self._number())])

    def close(self, step: int) -> None:
        """Look at all of the weights at once, and hear of them. Collective."""
        self._compare(wait=True)
        self._number()
        for weights in self._slices:
            self._take_in(weights)
        self._said_at = step
        self._gathering.launch([float(self._number())])
        self._compare(wait=True)

    def _take_in(self, weights: Sequence[torch.Tensor]) -> None:
        for weight in weights:
            part = local(weight).detach()
            if part.device.type == "cpu":
                self._digest.update(bytes_of(part.contiguous()))
            else:  # read at the end of the turn: no step waits for the device
                self._on_device.append(sum_of(part))

    def _number(self) -> int:
        if self._on_device:
            sums = torch.stack(self._on_device).tolist()
            self._digest.update(b"".join(s.to_bytes(8, "little", signed=True) for s in sums))
        number = self._digest.intdigest() >> (64 - EXACT_BITS)
        self._on_device.clear()
        self._digest.reset()
        return number

    def _compare(self, *, wait: bool) -> None:
        if not self._is_first:
            return
        rows = self._gathering.landed(wait=wait)
        if rows is None:
            return
        wrong = differing([row[0] for row in rows], self._groups)
        if wrong:
            clean = clean_step(self._said_at, self._window)
            self._differ(self._said_at, clean, wrong, self._were_same)
        self._were_same |= not wrong


def groups_of(program: Program, world: World) -> list[list[int]]:
    """Ranks that hold the same weights; none where that is not so, or nobody knows.

    Copies that DeepSpeed makes anew from their owners at each step say nothing of flipped bits.
    """
    ranks = range(world.world_size)
    if world.world_size == 1:
        return []
    engine = program.engine
    if engine is None:
        return [list(ranks)] if isinstance(program.model, DistributedDataParallel) else []
    if engine.kind not in {"ddp", "fsdp2"} or engine.mesh.dp_replicate == 1:
        return []
    by_part: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        place = engine.mesh.place(rank)
        by_part.setdefault((place["pp"], place["dp_shard"], place["tp"]), []).append(rank)
    return list(by_part.values())


def sum_of(part: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits as integers, on its device: one flipped bit changes it."""
    flat = part.contiguous().reshape(-1)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return flat.view(whole).sum(dtype=torch.int64)


# ---- what is compared, and who is wrong; pure

FEW_RANKS = 256
"""With more, each says its number after as many turns more: rank 0 hears so many a turn at most."""


@dataclass(frozen=True)
class Divergence:
    """Ranks that should hold the same weights, and do not.

    Attributes:
        suspects: Those that differ from most others; all of them where there is no majority.
        is_certain: There is one: a majority of three or more.
        compared: All ranks that should hold the same.
    """

    suspects: tuple[int, ...]
    is_certain: bool
    compared: tuple[int, ...]


def slices(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The numbers of tensors or files in `count` slices of about as many bytes, some of none."""
    cut: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        lightest = loads.index(min(loads))
        cut[lightest].append(number)
        loads[lightest] += sizes[number]
    return [sorted(numbers) for numbers in cut]


def window_of(count: int, world_size: int) -> int:
    """Steps after which each rank says its number: whole turns, so that every tensor was seen."""
    return count * max(1, -(-world_size // FEW_RANKS))


def differing(digests: Sequence[float], groups: Sequence[Sequence[int]]) -> list[Divergence]:
    """Whose weights are not those of the ranks that should hold the same, by each rank's digest.

    A rank is in one of `groups` at most.
    """
    wrong = []
    for ranks in groups:
        counts = Counter(digests[rank] for rank in ranks)
        if len(counts) == 1:
            continue
        usual, votes = counts.most_common(1)[0]
        is_certain = 2 * votes > len(ranks)
        suspects = tuple(rank for rank in ranks if not is_certain or digests[rank] != usual)
        wrong.append(Divergence(suspects, is_certain, tuple(ranks)))
    return wrong


def clean_step(said_at: int, window: int) -> int:
    """The last step whose weights were surely right, where a comparison is the first to differ.

    The ranks said their numbers after step `said_at`, every `window` steps. A flip may have come
    right behind the look at its slice, in the turn before: only what was there before that turn is
    known to be right.
    """
    return max(0, said_at - 2 * window)

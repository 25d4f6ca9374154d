"""The newest checkpoint that is whole, into this program's tensors, at whatever world size.

Collective: every rank calls `restore`. Rank 0 looks and the choice is broadcast, since ranks can
see a shared file system at different moments. Each rank reads just the boxes that it holds, and
proves each block while it reads it; what several ranks hold alike (all of them, or those along an
axis of copies of a device mesh) is read once and broadcast among them. On damage all agree, rank 0
sets the checkpoint aside, and the next older one is tried.

Nothing of value is touched before all ranks have agreed that all is whole: weights are read into
host memory first, and straight into place only what holds nothing yet (a new optimizer's moments).
"""

from __future__ import annotations

import bisect
import functools
import logging
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hpctrain.checkpoint.format.geometry import my_part
from hpctrain.checkpoint.format.reader import CheckpointSource, Target
from hpctrain.checkpoint.store import find, retention, verify
from hpctrain.checkpoint.store.find import refuse_to_forget
from hpctrain.checkpoint.tensors.arena import aligned
from hpctrain.checkpoint.tensors.boxes import Flat, bytes_of, held, sharers, view_of
from hpctrain.core.base import clock
from hpctrain.core.base.files import Patience
from hpctrain.core.base.records import Skipped
from hpctrain.core.base.text import Meter
from hpctrain.core.device import has_host_backend
from hpctrain.core.world import gather, on_rank_0, one_line
from hpctrain.errors import (
    CheckpointError,
    Fenced,
    FileSystemFault,
    HpctrainError,
    IncompleteCheckpoint,
    TornCheckpoint,
)
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import CheckpointSetAside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.checkpoint.format.shard import ShardPiece
    from hpctrain.checkpoint.store.find import FoundCheckpoint
    from hpctrain.checkpoint.tensors.arena import Arena
    from hpctrain.checkpoint.tensors.boxes import Held, State
    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.settings.schema import CheckpointSettings
    from hpctrain.core.world import World
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir

T = TypeVar("T")
Tensor = torch.Tensor | Flat

log = logging.getLogger("hpctrain.checkpoint")

BATCH_BYTES = 256 << 20
"""Host memory for what cannot be read straight into place, such as a device's memory."""
SMALL_BYTES = 1 << 20
"""Tensors below this are broadcast together."""
SMALL_TOGETHER_BYTES = 32 << 20
"""Of which there may be thousands: so much memory at a time."""
COMPARED_BYTES = 16 << 20
"""Of each of two names of one memory, read at a time."""
WEIGHTS = "model."
"""How the names of a model's tensors begin; see docs/development/checkpoint-format.md."""


@dataclass(frozen=True)
class Wanted:
    """What a program wants back from a checkpoint.

    Attributes:
        state: The tensors to fill.
        fresh: Names in it that hold nothing of value: read straight into place.
        left_out: Weights of the checkpoint that nobody asks for, which is allowed.
    """

    state: State
    fresh: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()


@dataclass
class Restored:
    """What has been loaded; without a path nothing was.

    Attributes:
        step: Updates in it.
        bytes_read: By this rank, from files or the nodes' memory.
        kept_by: See `CopiesInMemory.kept_by`; "" where it lay on disk.
        is_saved: Whether it lies on disk, too.
    """

    step: int = 0
    path: Path | None = None
    manifest: Manifest | None = None
    skipped: list[Skipped] = field(default_factory=list)
    bytes_read: int = 0
    seconds: float = 0.0
    kept_by: str = ""
    is_saved: bool = True


@dataclass(frozen=True)
class _Reading:
    """How a checkpoint is read: see `restore`, `checkpoint.patience_s`."""

    arena: Arena | None
    patience: Patience
    copies: CopiesInMemory | None = None
    """Where it lies, if that is no directory."""

    def source(self, candidate: FoundCheckpoint, manifest: Manifest) -> CheckpointSource:
        """To read from."""
        if self.copies is not None:
            return self.copies.source(candidate)
        return CheckpointSource.open(candidate.path, manifest, self.patience)


class CopiesInMemory(Protocol):
    """Checkpoints of this run that lie in the memory of the nodes; see `hpctrain.memory`.

    Attributes:
        kept_by: Where the newest that `find` has given lies, in a word for the ledger.
    """

    kept_by: str

    def find(self, least_step: int) -> Iterator[FoundCheckpoint]:
        """Those with at least so many updates, newest first; the next one is made when asked for.

        Collective: every rank takes equally many.
        """

    def source(self, candidate: FoundCheckpoint) -> CheckpointSource:
        """To read from one. Not collective."""


def has_checkpoints(place: SavePlace, world: World) -> bool:
    """Whether `restore` loads one, or raises: it does not begin anew unasked. Collective.

    Raises:
        FileSystemFault: the file system refused for longer than `checkpoint.patience_s`.
    """

    def look() -> bool:
        return RunHistory.read(place.run).asked_step != 0 and bool(find.steps(place.run))

    patience = Patience(place.settings.patience_s)
    return on_rank_0(world, lambda: patience(look))


def restore(
    place: SavePlace,
    world: World,
    wanted: Callable[[Manifest], Wanted],
    *,
    arena: Arena | None = None,
    copies: CopiesInMemory | None = None,
) -> Restored:
    """Load the newest checkpoint whose every byte is as its manifest says. Collective.

    Args:
        place: Whose checkpoints, and the right to set damaged ones aside.
        world: The ranks.
        wanted: What to fill, given the manifest of the checkpoint that is tried.
        arena: Host memory to read into before anything is touched; new memory where None.
        copies: Checkpoints in the nodes' memory, which are taken where none on disk is newer.

    Raises:
        CheckpointError: the checkpoint is whole but does not fit the program, or the step that
            `resume --from` asked for is damaged; on every rank.
        FileSystemFault: the file system refused for longer than `checkpoint.patience_s`, on one
            rank or all; nothing was quarantined. On every rank.
        OtherFormat: the newest checkpoint has another hpctrain's format; on every rank.
        NoCheckpoint: the run has saved, and nothing of it can be loaded; on every rank.
        Fenced: a newer attempt has taken the run over; on every rank.
    """
    run, attempt = place.run, place.attempt
    patience = Patience(place.settings.patience_s)
    asked, most = on_rank_0(world, lambda: patience(lambda: _bounds(run)))
    look = functools.partial(_staged_leftovers, run)
    is_needed = copies is None or asked is not None
    skipped = on_rank_0(world, lambda: patience(look) if is_needed else _or_nothing(look))
    on_rank_0(world, lambda: _bar(run, attempt))
    if copies is not None and asked is None:
        restored = _from_memory(copies, place, world, wanted, arena, most=most)
        skipped = restored.skipped = skipped + restored.skipped
        if restored.manifest is not None:
            return restored
    while True:
        choice = on_rank_0(world, lambda: patience(lambda: find.choose(run, at_step=asked)))
        candidate = choice.checkpoint
        if candidate is None or candidate.manifest is None:
            skipped = _unique(skipped + choice.skipped)
            on_rank_0(world, functools.partial(_begin_anew, run, attempt, asked, skipped))
            return Restored(skipped=skipped)
        started = clock.monotonic()
        reading = _Reading(arena, patience)
        bytes_read, damage = _try(candidate, world, wanted, reading)
        if not damage:
            if asked is not None:
                on_rank_0(world, lambda: _set_newer_aside(run, attempt, asked))
            seconds = clock.monotonic() - started
            skipped = _unique(skipped + choice.skipped)
            return Restored(
                candidate.step, candidate.path, candidate.manifest, skipped, bytes_read, seconds
            )
        if asked is not None:
            raise CheckpointError(
                f"step {asked}, which `resume --from` asked for, is damaged: {damage}; "
                "resume from another step"
            )
        damaged = Skipped(candidate.step, candidate.name, damage)
        skipped = [*skipped, damaged]
        on_rank_0(world, functools.partial(_give_up, run, attempt, damaged))


def _bounds(run: RunDir) -> tuple[int | None, int | None]:
    """The step of `resume --from`, and the one that a guard goes back to at least."""
    history = RunHistory.read(run)
    return history.asked_step, history.rewound_to


def _from_memory(
    copies: CopiesInMemory,
    place: SavePlace,
    world: World,
    wanted: Callable[[Manifest], Wanted],
    arena: Arena | None,
    *,
    most: int | None,
) -> Restored:
    """Load the newest complete checkpoint in memory, if none on disk is newer. Collective.

    The result has no manifest if there is none.
    """
    steps = functools.partial(find.steps, place.run)
    least_step = on_rank_0(world, lambda: max(_or_nothing(steps), default=0))
    reading = _Reading(arena, Patience(), copies)
    skipped: list[Skipped] = []
    for candidate in copies.find(least_step):
        if most is not None and candidate.step > most:
            continue  # a guard goes back behind it; of files such ones are quarantined
        started = clock.monotonic()
        try:
            bytes_read, damage = _try(candidate, world, wanted, reading)
        except FileSystemFault as error:  # on every rank
            bytes_read, damage = 0, str(error)
        if not damage:
            seconds = clock.monotonic() - started
            return Restored(
                candidate.step,
                candidate.path,
                candidate.manifest,
                skipped,
                bytes_read,
                seconds,
                kept_by=copies.kept_by,
                is_saved=candidate.step == least_step,
            )
        log.warning("the copy of step %d in memory is not taken: %s", candidate.step, damage)
        skipped.append(Skipped(candidate.step, candidate.name, damage))
    return Restored(skipped=skipped)


def _or_nothing(look: Callable[[], list[T]]) -> list[T]:
    """What is there; nothing where the file system refuses, which memory does not need."""
    try:
        return look()
    except (OSError, HpctrainError) as error:
        log.warning("a copy in memory is taken if there is one: %s", one_line(error))
        return []


def load_weights(
    checkpoint: FoundCheckpoint, world: World, state: State, settings: CheckpointSettings
) -> Manifest:
    """Load a checkpoint's weights, maybe another run's, into the model's `state`. Collective.

    Its run is not touched, and nothing is quarantined. After an error the tensors hold anything.
    `checkpoint` is what `find.look_at` found, the same on every rank.

    Raises:
        CheckpointError: it is damaged, or does not fit the program; on every rank.
        FileSystemFault: the file system refused for longer than `patience_s`; on every rank.
    """
    if checkpoint.problem is not None or checkpoint.manifest is None:
        raise TornCheckpoint(f"{checkpoint.path} is no whole checkpoint: {checkpoint.problem}")
    reading = _Reading(None, Patience(settings.patience_s))
    want = Wanted(state, frozenset(state.shared))
    _, damage = _try(checkpoint, world, lambda _: want, reading)
    if damage:
        raise TornCheckpoint(f"{checkpoint.path} is damaged: {damage}")
    return checkpoint.manifest


def _try(
    candidate: FoundCheckpoint,
    world: World,
    wanted: Callable[[Manifest], Wanted],
    reading: _Reading,
) -> tuple[int, str]:
    """Read one checkpoint; return this rank's bytes and the first damage of any rank, or "".

    Collective. On every rank, a CheckpointError means that it does not fit, a FileSystemFault that
    some rank could not read it.
    """
    filling, torn, misfit, fault, count = None, "", "", "", 0
    try:
        filling, count = _read(candidate, world, wanted, reading)
    except FileSystemFault as error:
        fault = f"rank {world.rank}: {error}"
    except IncompleteCheckpoint as error:
        # Rank 0 has just seen all files with their sizes: two nodes see different things.
        fault = f"rank {world.rank}: {error}; rank 0 saw it whole"
    except TornCheckpoint as error:
        torn = f"rank {world.rank}: {error}"
    except HpctrainError as error:
        misfit = str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, every rank must hear of it
        misfit = f"rank {world.rank}: {one_line(error)}"
    answers = gather(world, (torn, misfit, fault))
    torn, misfit, fault = (next(filter(None, texts), "") for texts in zip(*answers, strict=True))
    if fault:
        raise FileSystemFault(f"{candidate.path} cannot be read now, and stays: {fault}")
    if misfit and not torn:
        raise CheckpointError(f"{candidate.path} is whole but does not fit this program: {misfit}")
    if filling is not None and not torn:
        filling.finish()
        differ = next(filter(None, gather(world, filling.unlike)), "")
        if differ:
            raise CheckpointError(f"{candidate.path} does not fit this program: {differ}")
    return count, torn


def _read(
    candidate: FoundCheckpoint,
    world: World,
    wanted: Callable[[Manifest], Wanted],
    reading: _Reading,
) -> tuple[_Filling, int]:
    if candidate.manifest is None:
        raise TornCheckpoint("manifest is missing")
    # First, on every rank: it may be collective, and a damaged table is seen by one rank alone.
    want = wanted(candidate.manifest)
    source = reading.source(candidate, candidate.manifest)
    _require_all_weights(source, want)
    filling = _Filling(world, want, arena=reading.arena)
    return filling, filling.read(source)


def _require_all_weights(source: CheckpointSource, want: Wanted) -> None:
    """Refuse a weight that nobody asks for: another model's, it would be lost with the next save.

    Generators of other ranks, and moments of what is no longer trained, may be left out.
    """
    asked_for = want.state.shared.keys() | want.state.elsewhere | want.left_out
    left = [name for name in source.names if name.startswith(WEIGHTS) and name not in asked_for]
    if left:
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        raise CheckpointError(f"{left[0]}{more} is in the checkpoint and not in the model")


@dataclass(frozen=True)
class _Shared:
    """Boxes that the same ranks hold, each of which reads a part of them.

    `ranks` are numbers among all ranks, `group` is None for all. `boxes` have the same order on
    each.
    """

    ranks: tuple[int, ...]
    group: Any
    boxes: list[Held]

    def parts_of(self, rank: int) -> list[tuple[Held, ShardPiece]]:
        pieces = [box.piece for box in self.boxes]
        parts = my_part(pieces, self.ranks.index(rank), len(self.ranks))
        return [(self.boxes[number], piece) for number, piece in parts]


def _shared(boxes: Sequence[Held], state: State, world: World) -> list[_Shared]:
    """Return what this rank holds together with others that it can speak to, by who they are."""
    everyone = tuple(range(world.world_size))
    shared: dict[tuple[int, ...], _Shared] = {}
    for box in boxes:
        if box.replicas == world.world_size and box.piece.extent == box.piece.shape:
            ranks, group = everyone, None
        else:
            group = sharers(state.shared[box.piece.name]) if box.replicas > 1 else None
            if group is None:
                continue
            ranks = tuple(dist.get_process_group_ranks(group))
        shared.setdefault(ranks, _Shared(ranks, group, [])).boxes.append(box)
    return [shared[ranks] for ranks in sorted(shared)]


class _Filling:
    """Reads boxes from a checkpoint into a program's tensors, in two steps.

    `read` proves all that this rank reads and touches nothing of value. `finish` (collective, once
    all ranks have read) puts it into place and hands out what was read once.

    Attributes:
        unlike: Names of one memory that had different values in the checkpoint; "" for none.
    """

    def __init__(self, world: World, wanted: Wanted, *, arena: Arena | None) -> None:
        self._world = world
        self._fresh = wanted.fresh
        self._arena = arena
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        state, self._ties = _untied(wanted.state)
        self.unlike = ""
        boxes = [box for box in held(state, world) if box.piece.nbytes]
        shares = world.is_distributed and world.world_size > 1
        self._shared = _shared(boxes, state, world) if shares else []
        shared = {id(box) for among in self._shared for box in among.boxes}
        self._alone = [box for box in boxes if id(box) not in shared]

    def read(self, source: CheckpointSource) -> int:
        """Read and prove this rank's boxes; return the bytes read.

        Raises:
            TornCheckpoint: some bytes are not what the manifest says.
            CheckpointError: the checkpoint does not fit.
        """
        jobs = [(box, box.piece) for box in self._alone]
        jobs += [job for among in self._shared for job in among.parts_of(self._world.rank)]
        straight, later, through = [], [], []
        for box, piece in jobs:
            view = view_of(box, piece)
            if box.piece.name not in self._fresh:
                later.append((view, piece))
            elif view.device.type == "cpu" and view.is_contiguous():
                straight.append(Target(piece, bytes_of(view)))
            else:
                through.append((view, piece))
        targets = self._stage(later)
        total = sum(piece.nbytes for _, piece in jobs)
        on_bytes = None if self._world.rank else _progress(source.path.name, total)
        count = source.read(straight + targets, on_bytes=on_bytes)
        for batch in _batches(through):
            count += _read_through(source, batch, on_bytes)
        for name, first in self._ties.items():
            pieces = [piece for _, piece in jobs if piece.name == first]
            count += self._compare(source, name, pieces)
        return count

    def _compare(self, source: CheckpointSource, name: str, pieces: Sequence[ShardPiece]) -> int:
        """Read another name of a memory beside the first one; return the bytes read.

        It goes part by part: both as a whole would be a second copy of maybe the largest weight.
        """
        count = 0
        for piece in (part for one in pieces for part in _slices(one)):
            both = [torch.empty(piece.nbytes, dtype=torch.uint8) for _ in range(2)]
            named = [piece, replace(piece, name=name)]
            count += source.read([Target(p, bytes_of(b)) for p, b in zip(named, both, strict=True)])
            if not torch.equal(*both):
                self.unlike = (
                    f"{name} and {piece.name} are one tensor in the program and have different "
                    "values in the checkpoint; resume with a program in which they are not tied"
                )
        return count

    def finish(self) -> None:
        for live, host in self._staged:
            live.copy_(host)
        self._staged.clear()
        for among in self._shared:
            for rank in among.ranks:
                views = [view_of(box, piece) for box, piece in among.parts_of(rank)]
                _broadcast_views(views, rank, self._world, among.group)

    def _stage(self, jobs: Sequence[tuple[torch.Tensor, ShardPiece]]) -> list[Target]:
        """Host memory to read into: of the arena while it lasts, whose pages are warm, else new."""
        sizes = [aligned(piece.nbytes) for _, piece in jobs]
        room = 0 if self._arena is None else self._arena.size
        count = bisect.bisect_right(list(accumulate(sizes)), room)
        hosts: list[torch.Tensor] = []
        if self._arena is not None and count:
            memory = self._arena.view(0, sum(sizes[:count]))
            # All in one call: one for each part takes milliseconds.
            hosts += torch.split(torch.frombuffer(memory, dtype=torch.uint8), sizes[:count])
        if count < len(jobs):
            rest = torch.empty(sum(sizes[count:]), dtype=torch.uint8)
            hosts += torch.split(rest, sizes[count:])
        targets = []
        for (view, piece), host in zip(jobs, hosts, strict=True):
            own = host[: piece.nbytes]
            self._staged.append((view, own.view(view.dtype).view(view.shape)))
            targets.append(Target(piece, own.numpy().data))
        return targets


def _untied(state: State) -> tuple[State, dict[str, str]]:
    """Leave out further names of a weight's memory; return the state, and each one's first name."""
    ties: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.shared.items():
        if not name.startswith(WEIGHTS):
            continue
        elements = _elements(tensor)
        if not elements.numel():
            continue
        place = (elements.data_ptr(), elements.dtype, elements.shape, elements.stride())
        first_name = first.setdefault(place, name)
        if first_name != name:
            ties[name] = first_name
    shared = {name: tensor for name, tensor in state.shared.items() if name not in ties}
    return replace(state, shared=shared), ties


def _elements(tensor: Tensor) -> torch.Tensor:
    if isinstance(tensor, Flat):
        return tensor.local.detach()
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _slices(piece: ShardPiece) -> Iterator[ShardPiece]:
    """Cut a piece along its first dimension into parts of `COMPARED_BYTES`, if rows are smaller."""
    if not piece.extent:
        yield piece
        return
    rows, begin = piece.extent[0], piece.begin[0]
    step = max(1, COMPARED_BYTES * rows // piece.nbytes)
    for low in range(0, rows, step):
        extent = (min(step, rows - low), *piece.extent[1:])
        yield replace(piece, begin=(begin + low, *piece.begin[1:]), extent=extent)


def _progress(name: str, total: int) -> Callable[[int], None]:
    """Says in the log how far a long reading is; one rank stands for all, whose parts are alike."""
    meter = Meter(f"restoring {name}: this rank has read", total, clock.monotonic())

    def tell(count: int) -> None:
        meter.done += count
        now = clock.monotonic()
        if meter.due(now):
            log.info("%s", meter.text(now))

    return tell


def _batches(
    through: Sequence[tuple[torch.Tensor, ShardPiece]],
) -> Iterator[list[tuple[torch.Tensor, ShardPiece]]]:
    batch: list[tuple[torch.Tensor, ShardPiece]] = []
    for view, piece in through:
        if batch and sum(earlier.nbytes for _, earlier in batch) + piece.nbytes > BATCH_BYTES:
            yield batch
            batch = []
        batch.append((view, piece))
    if batch:
        yield batch


def _read_through(
    source: CheckpointSource,
    batch: Sequence[tuple[torch.Tensor, ShardPiece]],
    on_bytes: Callable[[int], None] | None,
) -> int:
    """Read into host memory first: a device's memory cannot be read into."""
    hosts = [torch.empty(view.shape, dtype=view.dtype) for view, _ in batch]
    pieces = [piece for _, piece in batch]
    targets = [Target(piece, bytes_of(host)) for piece, host in zip(pieces, hosts, strict=True)]
    count = source.read(targets, on_bytes=on_bytes)
    for (view, _), host in zip(batch, hosts, strict=True):
        view.copy_(host)
    return count


def _broadcast_views(
    views: Sequence[torch.Tensor], rank: int, world: World, group: Any = None
) -> None:
    """From one rank to all of a group; small ones travel together. Collective in the group."""
    small: list[torch.Tensor] = []
    nbytes = 0
    for view in views:
        if view.nbytes >= SMALL_BYTES or view.device.type != "cpu":
            whole = view.contiguous()
            _broadcast(whole, rank, world, group)
            if whole is not view:
                view.copy_(whole)
            continue
        small.append(view)
        nbytes += view.nbytes
        if nbytes >= SMALL_TOGETHER_BYTES:
            _broadcast_together(small, rank, world, group)
            small, nbytes = [], 0
    if small:
        _broadcast_together(small, rank, world, group)


def _broadcast_together(views: Sequence[torch.Tensor], rank: int, world: World, group: Any) -> None:
    together = torch.cat([view.contiguous().reshape(-1).view(torch.uint8) for view in views])
    _broadcast(together, rank, world, group)
    parts = torch.split(together, [view.nbytes for view in views])
    for view, part in zip(views, parts, strict=True):
        view.copy_(part.clone().view(view.dtype).view(view.shape))


def _broadcast(tensor: torch.Tensor, rank: int, world: World, group: Any) -> None:
    """Bytes of a checkpoint are data, and go through the ranks' own groups."""
    flat = tensor.view(-1).view(torch.uint8)
    if flat.device.type == "cpu" and not has_host_backend():
        staged = flat.to(world.device)
        dist.broadcast(staged, src=rank, group=group)
        flat.copy_(staged)
    else:
        dist.broadcast(flat, src=rank, group=group)


def _begin_anew(run: RunDir, attempt: Attempt, asked: int | None, skipped: list[Skipped]) -> None:
    if asked is None:
        refuse_to_forget(run, skipped)
    else:
        _set_newer_aside(run, attempt, asked)


def _bar(run: RunDir, attempt: Attempt) -> None:
    """Keep older attempts from committing what would not be chosen any more."""
    try:
        retention.bar(run, attempt)
    except Fenced:
        raise
    except CheckpointError as error:
        log.warning("%s; older attempts are kept out by the run's lock alone", error)


def _staged_leftovers(run: RunDir) -> list[Skipped]:
    return [Skipped(left.step, left.path.name, left.reason) for left in find.staged(run)]


def _unique(rows: list[Skipped]) -> list[Skipped]:
    by_name: dict[str, Skipped] = {}
    for row in rows:
        by_name.setdefault(row.name, row)
    return list(by_name.values())


def _give_up(run: RunDir, attempt: Attempt, damaged: Skipped) -> None:
    verify.set_aside(run, damaged.step, damaged.reason, attempt)
    ledger.append(run, CheckpointSetAside(**asdict(damaged)), attempt=attempt.number)


def _set_newer_aside(run: RunDir, attempt: Attempt, step: int) -> None:
    append = functools.partial(ledger.append, run, attempt=attempt.number)
    verify.set_newer_aside(run, step, f"newer than `resume --from {step}`", attempt, append)

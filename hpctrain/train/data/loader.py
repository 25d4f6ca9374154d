"""torch's DataLoader over a dataset with a length, in an order that no restart and no rank changes.

What is read is said here (which sample, in which batch, by which rank); how it is read (workers,
prefetching, pinning, collating) is torch's own DataLoader, given lists of indices. The promises are
held by tests/unit/data/test_loader.py and tests/e2e/test_loader_run.py.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from hpctrain.core.base.mesh import ANY_PASSES, MicrobatchRules
from hpctrain.errors import UsageError
from hpctrain.train.data.batches import (
    Holes,
    MicrobatchSamples,
    StepBatch,
    cut_step,
    holes_of,
    mean_weight,
)
from hpctrain.train.data.order import (
    FileOrder,
    Mixture,
    MixtureOrder,
    SampleOrder,
    count_in,
    require_order,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    import numpy as np
    import numpy.typing as npt

    from hpctrain.train.data.order import WalkOrder

log = logging.getLogger("hpctrain.data")

AHEAD_SAMPLES, AHEAD_STEPS = 16384, 256
"""Of a rank, planned at once: numpy draws many indices 20 times faster. The first are few."""
OURS = {
    "batch_sampler": "global_batch",
    "batch_size": "global_batch",
    "generator": "seed",
    "multiprocessing_context": "start_method",
    "num_workers": "workers",
    "prefetch_factor": "prefetch",
    "sampler": "seed or shuffle",
}
"""Options of torch's DataLoader that have another name here."""


class LoaderOptions(TypedDict, total=False):
    """How a loader reads; none of it changes which samples are in which batch."""

    workers: int
    """Processes of each rank that read; with 0, the default, the rank reads by itself."""
    start_method: str | None
    """Of the workers: "fork", "spawn" or "forkserver"; Python's own where None."""
    prefetch: int
    """Batches that each worker reads ahead; 2."""
    collate_fn: Callable[[list[Any]], Any] | None
    """Makes a batch of a list of samples; torch's own where None."""
    pin_memory: bool
    """Whether batches are copied into pinned memory; where there is a GPU they are."""
    worker_init_fn: Callable[[int], None] | None
    """Called in each worker with its number."""
    timeout: float
    """Seconds to wait for a batch of the workers, then an error; 0, the default, waits for ever."""


class DataPlace(NamedTuple):
    """Which part of every batch this process reads."""

    rank: int
    """Its number among the ranks that read different samples."""
    ranks: int
    """How many of those there are."""
    passes: MicrobatchRules = ANY_PASSES
    """What the engine asks of micro-batches."""


class BatchRules(NamedTuple):
    """What a loader's batches are; see `Run.loader`."""

    global_batch: int
    micro_batch: int | None = None
    """Samples of a pass at most, 0 for any number; None where a rank's part is one batch."""
    drop_last: bool = False
    seed: int | None = None
    """None where nothing is shuffled."""


class Loader:
    """A rank's batches of a dataset, as `Run.loader` makes them.

    ``for batch in loader`` gives the batches of one epoch, and those of the next epoch when it is
    iterated again; after a restart, or a ``break``, it gives what is left of the epoch.
    ``next(loader)`` gives one batch and continues over the ends of epochs for ever.

    Its state is a few numbers, the same on every rank. A batch counts as consumed from the moment
    it is handed to the program; what workers have read ahead does not.

    Attributes:
        dataset: What is read.
        consumed: Samples consumed so far, by all ranks together, over all epochs; those that a
            guard has had left out are counted with them.
        taken: The batch that was handed out last: its samples, weights, and place in the order.
    """

    taken: StepBatch

    def __init__(
        self,
        dataset: Any,
        rules: BatchRules,
        options: LoaderOptions,
        *,
        place: Callable[[], DataPlace],
        watch: AbstractContextManager[None],
    ) -> None:
        """Use `Run.loader`.

        Raises:
            UsageError: the dataset has no length or no samples, or a number makes no sense.
        """
        size = length_of(dataset)
        check_batch(rules.global_batch, rules.micro_batch, "run.loader")
        if rules.drop_last and size < rules.global_batch:
            raise UsageError(
                f"run.loader: drop_last leaves nothing of a dataset of {size} samples with "
                f"global_batch={rules.global_batch}; take a smaller batch, or drop_last=False"
            )
        self.dataset = dataset
        self.consumed = 0
        self._order: WalkOrder
        if isinstance(dataset, Mixture):
            self._order = dataset.sample_order(rules.seed)
        else:
            self._order = FileOrder(size) if rules.seed is None else SampleOrder(size, rules.seed)
        self._rules = rules
        self._place = place
        self._watch = watch
        self._options = torch_options(options, "run.loader")
        self._at = _EpochPlace(0, 0)
        self._planned: deque[tuple[_EpochPlace, int, StepBatch]] = deque()
        self._holes = Holes()
        self._stream: Iterator[Any] | None = None
        self._has_warned = False

    # ---- what a program calls

    @property
    def epoch(self) -> int:
        """Of the next batch, counted from 0.

        ``for epoch in range(loader.epoch, epochs)`` continues where a restart has interrupted.
        """
        return self._next_batch(self._at, self.consumed)[0].epoch

    @property
    def weight(self) -> float:
        """What this rank's mean loss of its batch counts, where the ranks' means are averaged.

        DDP and FSDP average over ranks. Where a batch is not a multiple of the ranks, some have a
        sample more, so that this average is not the mean over the samples: multiply the loss by
        this. 1.0 where all ranks have equally many; 0.0 on a rank that got a sample only to keep
        step with the others. For a batch that is cut into micro-batches see `taken`.
        """
        return mean_weight(self.taken, self._place().ranks)

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        whole, rest = divmod(self._order.size, self._rules.global_batch)
        return whole + (rest > 0 and not self._rules.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """What is left of the epoch; a whole one if nothing of it was consumed."""
        epoch = self.epoch
        while self.epoch == epoch:
            yield next(self)

    def __next__(self) -> Any:
        """This rank's part of the next batch; with micro-batches a list of them."""
        with self._watch:
            if self._stream is None:
                self._stream = self._read()
            try:
                pieces = [next(self._stream)]
                after, consumed, step = self._planned[0]
                pieces += [next(self._stream) for _ in step.pieces[1:]]
            except BaseException:
                # Else a program that catches the error would continue behind the batch it did not
                # get.
                self.close()
                raise
        self._planned.popleft()
        self._at, self.taken = after, step
        self.consumed = consumed
        return pieces[0] if self._rules.micro_batch is None else pieces

    def close(self) -> None:
        """End the workers; the next batch starts new ones. What they have read ahead is dropped."""
        self._stream = None
        self._planned.clear()

    def leave_out(self, holes: Iterable[tuple[int, int]]) -> None:
        """Come by these ranges of `consumed` without reading them; the same on every rank.

        A batch that would run into one ends there.
        """
        self.close()
        self._holes.add(holes)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: equal on all ranks. `global_batch` is for the reader only."""
        mixture = {}
        if isinstance(self._order, MixtureOrder):
            mixture = {"mixture": self._order.state_dict()}
        return {
            "samples_consumed": self.consumed,
            "epoch": self._at.epoch,
            "epoch_samples": self._at.offset,
            "seed": self._order.seed,
            "size": self._order.size,
            "global_batch": self._rules.global_batch,
            **mixture,
            **self._holes.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken, with any ranks, workers and batch size.

        Raises:
            CheckpointError: the state is of another order: samples would be skipped or seen twice.
        """
        self.close()
        require_order(state, self._order)
        consumed = count_in(state, "samples_consumed")
        epoch, offset = divmod(consumed, self._order.size)
        if "epoch" in state:  # GlobalBatches has none: it leaves nothing out at an epoch's end
            epoch, offset = count_in(state, "epoch"), count_in(state, "epoch_samples")
        if isinstance(self._order, MixtureOrder):
            position = epoch * self._order.size + offset
            self._order.load_state_dict(state.get("mixture"), position)
        self._holes.add(holes_of(state))
        self._at, self.consumed = _EpochPlace(epoch, offset), consumed

    # ---- the walk

    def _next_place(self, at: _EpochPlace) -> _EpochPlace:
        """Where the next batch begins: here, or at the next epoch where this one has none left."""
        needed = self._rules.global_batch if self._rules.drop_last else 1
        return at if at.offset + needed <= self._order.size else _EpochPlace(at.epoch + 1, 0)

    def _next_batch(self, at: _EpochPlace, consumed: int) -> tuple[_EpochPlace, int, int]:
        """The next batch behind holes: where it begins, consumed before it, its samples."""
        batch, at = self._rules.global_batch, self._next_place(at)
        while left_out := self._holes.end_at(consumed) - consumed:
            rest = self._order.size - at.offset
            if self._rules.drop_last:  # what is dropped at the end of an epoch counts nowhere
                rest -= rest % batch
            passed = min(left_out, rest)
            consumed += passed
            at = self._next_place(at._replace(offset=at.offset + passed))
        size = min(batch, self._order.size - at.offset)
        hole = self._holes.begin_after(consumed)
        return at, consumed, size if hole is None else min(size, hole - consumed)

    def _walk(self) -> Iterator[list[int]]:
        """Lists of samples for torch's DataLoader, one for each pass; notes each batch's plan."""
        import numpy as np

        place, at, consumed = self._place(), self._at, self.consumed
        per_rank = max(1, self._rules.global_batch // place.ranks)
        most, count = min(AHEAD_STEPS, max(1, AHEAD_SAMPLES // per_rank)), 1
        cuts: dict[int, StepBatch] = {}  # of so many samples, with offsets for indices
        offsets: dict[int, npt.NDArray[np.int64]] = {}  # the same, one after another
        while True:
            count = min(4 * count, most)
            spans = []
            for _ in range(count):
                at, consumed, size = self._next_batch(at, consumed)
                if size not in cuts:
                    cuts[size] = self._cut(size, place)
                    pieces = cuts[size].pieces
                    flat = [n for piece in pieces for n in piece.indices]
                    offsets[size] = np.array(flat, np.int64)
                consumed += size
                spans.append((at, size, consumed))
                at = at._replace(offset=at.offset + size)
            starts = [
                offsets[size] + (before.epoch * self._order.size + before.offset)
                for before, size, _ in spans
            ]
            positions: Any = np.concatenate(starts)  # an array of numpy's will do for a sequence
            samples, first = self._order.take(positions), 0
            for before, size, come_to in spans:
                pieces = []
                for piece in cuts[size].pieces:
                    last = first + len(piece.indices)
                    pieces.append(MicrobatchSamples(samples[first:last], piece.weights, piece.leaf))
                    first = last
                start = before.epoch * self._order.size + before.offset
                after = before._replace(offset=before.offset + size)
                self._planned.append((after, come_to, StepBatch(start, start + size, pieces)))
                for piece in pieces:
                    yield piece.indices

    def _cut(self, size: int, place: DataPlace) -> StepBatch:
        """This rank's part of any batch of so many samples: offsets in the place of samples."""
        if size < place.ranks and not self._has_warned:
            self._has_warned = True
            log.warning(
                "a batch of %d samples has none for some of %d ranks: they get one that the batch "
                "holds already; multiply the loss by loader.weight, which is 0 there, or set "
                "drop_last",
                size,
                place.ranks,
            )
        micro_batch = self._rules.micro_batch
        return cut_step(
            range(size),
            place.rank,
            place.ranks,
            micro_batch or 0,
            index=int,
            passes=ANY_PASSES if micro_batch is None else place.passes,
        )

    def _read(self) -> Iterator[Any]:
        import torch
        from torch.utils.data import DataLoader

        # A generator of its own: torch would draw the workers' seed from the program's generator,
        # whose state would then depend on how often a run was interrupted.
        generator = torch.Generator()
        seed = (self._order.seed or 0) * 1_000_003 + self.consumed
        generator.manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)
        reader: Any = DataLoader(
            self.dataset,
            batch_sampler=self._walk(),
            generator=generator,
            **self._options,
        )
        return iter(reader)


class _EpochPlace(NamedTuple):
    """A place in the order: so many samples of an epoch have been handed out or left out."""

    epoch: int
    offset: int


def length_of(dataset: Any) -> int:
    """Samples of a dataset.

    Raises:
        UsageError: it has no length, or no samples.
    """
    name = type(dataset).__name__
    try:
        size = len(dataset)
    except (TypeError, NotImplementedError):
        size = None
    if size is None or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"run.loader: a {name} has no length or cannot be asked for its n-th sample; "
            "an order over all samples needs a map-style dataset, with __len__ and __getitem__; "
            "run.stream_loader takes iterables"
        )
    if size < 1:
        raise UsageError(f"run.loader: this {name} has no samples; look at the path it reads from")
    return size


def torch_options(options: LoaderOptions, caller: str) -> dict[str, Any]:
    """The options as torch's DataLoader has them.

    Raises:
        UsageError: there is no such option, or its number makes no sense.
    """
    for name in options.keys() - LoaderOptions.__annotations__.keys():
        instead = (
            f"set {OURS[name]}"
            if name in OURS
            else f"there are {', '.join(LoaderOptions.__annotations__)}"
        )
        raise UsageError(f"{caller}: {name} is not an option of the loader; {instead}")
    others: dict[str, Any] = dict(options)
    workers, prefetch = others.pop("workers", 0), others.pop("prefetch", 2)
    start_method = others.pop("start_method", None)
    if workers < 0:
        raise UsageError(f"{caller}: workers={workers} is less than 0")
    if prefetch < 1:
        raise UsageError(f"{caller}: prefetch={prefetch} is not a number of batches; 1 or more")
    if workers:
        others |= {"multiprocessing_context": start_method, "prefetch_factor": prefetch}
    return {**others, "num_workers": workers}


def check_batch(global_batch: int, micro_batch: int | None, caller: str) -> None:
    """Refuse what is no number of samples.

    Raises:
        UsageError: naming the caller and the value.
    """
    if type(global_batch) is not int or global_batch < 1:
        raise UsageError(f"{caller}: global_batch={global_batch!r} is not a number of samples")
    if micro_batch is not None and (type(micro_batch) is not int or micro_batch < 0):
        raise UsageError(f"{caller}: micro_batch={micro_batch!r} is not a number from 0 on")

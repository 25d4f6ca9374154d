"""torch's DataLoader over an iterable dataset that is divided among readers.

Each rank, and in it each worker, owns some of the readers, and draws the next sample from that
which has given the fewest: so the order is a function of the readers' own places, and a run that
comes back on as many ranks continues as if it had not stopped.

Nobody knows beforehand how many samples there are. So before a batch is handed out all ranks say
how many samples they have for it, and all continue, or end the epoch, or raise, together. The
promises are held by tests/unit/data/test_stream_loader.py and tests/engines/test_streams.py.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_workers

from hpctrain.core.base.mesh import ANY_PASSES, count_leaves
from hpctrain.core.world import one_line
from hpctrain.errors import CheckpointError, HpctrainError, UsageError
from hpctrain.train.data.batches import (
    MicrobatchSamples,
    StepBatch,
    cut_step,
    mean_weight,
)
from hpctrain.train.data.loader import check_batch, torch_options
from hpctrain.train.data.order import is_count
from hpctrain.train.data.readers import (
    MOST_READERS,
    OpenReader,
    ReaderPlace,
    Source,
    check_first,
    source_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from hpctrain.train.data.loader import DataPlace, LoaderOptions

log = logging.getLogger("hpctrain.data")

VERSION = 1
"""Of the state's shape."""
READERS_PER_WORKER = 3
"""Of a new run: with them as many ranks, a half, three quarters and twice as many deal evenly."""
FAILED = -1
"""In the place of a number of samples: this rank could not read."""


class StreamRules(NamedTuple):
    """What a stream loader's batches are; see `Run.stream_loader`."""

    global_batch: int
    micro_batch: int | None = None
    drop_last: bool = False
    readers: int | None = None
    replay: bool = False


class StreamLoader:
    """A rank's batches of an iterable dataset, as `Run.stream_loader` makes them.

    ``for batch in loader`` gives the batches of one epoch, and those of the next when it is
    iterated again; after a restart, or a ``break``, it gives what is left of the epoch.
    ``next(loader)`` gives one batch and continues over the ends of epochs for ever. Both are
    collective: every rank takes equally many.

    Attributes:
        consumed: Samples consumed so far, by all ranks together, over all epochs.
        epoch: Of the next batch, counted from 0.
        taken: The batch that was handed out last: its weights, and how many samples all ranks took.
    """

    taken: StepBatch

    def __init__(
        self,
        dataset: Any,
        rules: StreamRules,
        options: LoaderOptions,
        *,
        place: Callable[[], DataPlace],
        gather: Callable[[Any], list[Any]],
        watch: AbstractContextManager[None],
    ) -> None:
        """Use `Run.stream_loader`; `gather` returns a value of every rank, on every rank.

        Raises:
            UsageError: nobody says how the dataset is divided, or where a reader stands; or a
                number makes no sense.
        """
        caller, readers = "run.stream_loader", rules.readers
        check_batch(rules.global_batch, rules.micro_batch, caller)
        if readers is not None and (type(readers) is not int or not 1 <= readers <= MOST_READERS):
            raise UsageError(f"{caller}: readers={readers!r} is not a number of readers")
        self.consumed = 0
        self.epoch = 0
        self._options = torch_options(options, caller)
        self._source = source_of(dataset, replay=rules.replay)
        self._rules = rules
        self._place, self._gather = place, gather
        self._watch = watch
        self._collate = self._options.pop("collate_fn", None) or default_collate
        self._places: list[ReaderPlace] = []
        """Of all readers; those of other ranks are as they were when the state was loaded."""
        self._epoch_samples = 0
        self._turn = 0
        """The worker whose batch is the next."""
        self._turns: dict[str, Any] | None = None
        self._stream: Iterator[_Part] | None = None
        self._is_dry = False
        self._spare: list[Any] = []
        check_first(self._source, self._first_readers())

    # ---- what a program calls

    @property
    def readers(self) -> int:
        """How many readers the dataset is divided into."""
        if not self._places:
            self._places = [ReaderPlace()] * self._first_readers()
        return len(self._places)

    @property
    def weight(self) -> float:
        """What this rank's mean loss of its batch counts, where the ranks' means are averaged.

        As `Loader.weight`; 0.0 on a rank whose readers have no more, which gets a sample only to
        keep step with the others.
        """
        return mean_weight(self.taken, self._place().ranks)

    def __iter__(self) -> Iterator[Any]:
        """What is left of the epoch; a whole one if nothing of it was consumed. Collective."""
        while True:
            with self._watch:
                batch = self._next_of_epoch()
            if batch is None:
                return
            yield self._handed(*batch)

    def __next__(self) -> Any:
        """This rank's part of the next batch; with micro-batches a list of them. Collective."""
        with self._watch:
            batch = None
            while batch is None:  # not for ever: an epoch without a batch is refused
                batch = self._next_of_epoch()
        return self._handed(*batch)

    def close(self) -> None:
        """End the workers; the next batch starts new ones. What they have read ahead is dropped."""
        self._stream = None
        self._is_dry = False

    def state_dict(self) -> dict[str, Any]:
        """Where all readers stand: equal on all ranks, and JSON. Collective."""
        place = self._place()
        own = {n: self._places[n] for n in range(place.rank, self.readers, place.ranks)}
        places, turns = list(self._places), [0] * place.ranks
        for rank, turn, theirs in self._gather((place.rank, self._turn, own)):
            turns[rank] = turn
            for number, reader_place in theirs.items():
                places[number] = reader_place
        return {
            "stream": VERSION,
            "samples_consumed": self.consumed,
            "epoch": self.epoch,
            "global_batch": self._rules.global_batch,
            "shards": self._source.shards,
            "replay": self._source.replay,
            "turns": {"workers": self._options["num_workers"], "of_ranks": turns},
            "readers": [
                [one.samples, one.is_done, json.loads(one.state or "null")] for one in places
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken, with any ranks, workers and batch size.

        Raises:
            CheckpointError: the state is of another dataset, or not of a stream loader.
        """
        self.close()
        places = _places_of(state)
        wanted = self._rules.readers
        if wanted is not None and wanted != len(places):
            raise _refused(f"is of {len(places)} readers, and this run has readers={wanted}")
        if state.get("shards") != self._source.shards:
            raise _refused(
                f"is of a dataset of {state.get('shards')!r} shards, this one has "
                f"{self._source.shards}"
            )
        used = [one for one in places if one.samples and not one.is_done]
        if not self._source.replay and any(one.state is None for one in used):
            raise _refused("has no states of readers, it was written with replay=True")
        self._places = places
        self._epoch_samples = sum(one.samples for one in places)
        self.consumed, self.epoch = state["samples_consumed"], state["epoch"]
        self._turns = state.get("turns")

    # ---- one batch

    def _next_of_epoch(self) -> tuple[_Part | None, int, DataPlace] | None:
        """The next batch, the same one on all ranks; None at the end of an epoch."""
        part, trouble = self._read_part()
        place = self._place()
        count = FAILED if trouble else part.samples if part else 0
        counts = self._exchange(place, count)
        if FAILED in counts:
            self.close()
            lines = self._gather(None if trouble is None else one_line(trouble))
            if trouble is not None:
                raise trouble
            rank, why = next((rank, why) for rank, why in enumerate(lines) if why)
            raise HpctrainError(f"run.stream_loader: rank {rank} could not read its batch: {why}")
        total = sum(counts)
        if total and (total == self._rules.global_batch or not self._rules.drop_last):
            return part, total, place
        if not self._epoch_samples:
            raise UsageError(
                f"run.stream_loader: {self.readers} readers together have {total} samples for a "
                f"batch of {self._rules.global_batch}: look at what they read"
                + ", or set drop_last=False"
                * bool(total)
            )
        self.close()
        self.epoch += 1
        self._places = [ReaderPlace()] * self.readers
        self._epoch_samples, self._turn, self._turns, self._spare = 0, 0, None, []
        return None

    def _read_part(self) -> tuple[_Part | None, Exception | None]:
        if self._is_dry:
            return None, None
        try:
            if self._stream is None:
                self._stream = self._start()
            part = next(self._stream, None)
            if part is not None and part.refusal is not None:
                return None, part.refusal
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait
            return None, error
        self._is_dry = part is None
        return part, None

    def _exchange(self, place: DataPlace, count: int) -> list[int]:
        """The samples that each of the ranks has that read different ones."""
        rows = {(rank, theirs) for rank, theirs in self._gather([place.rank, count])}
        counts = [theirs for _, theirs in rows]
        if len(rows) != place.ranks and FAILED not in counts:
            raise HpctrainError(
                "run.stream_loader: ranks that read the same samples (along tp and pp) have read "
                f"differently (rank and samples: {sorted(rows)}); a reader must depend on nothing "
                "but its number"
            )
        return counts

    def _handed(self, part: _Part | None, total: int, place: DataPlace) -> Any:
        """A batch of `total` samples from here on counts as consumed."""
        first, template = self.consumed, _template(self._rules, place)
        if part is not None:
            collated, weights = part.pieces, part.weights
            for number, samples, is_done, state in part.places:
                self._places[number] = ReaderPlace(samples, is_done, state)
            self._turn = (part.worker + 1) % max(1, self._options["num_workers"])
        else:
            is_full = _needs_shape(place)
            weights = [[0.0] * (len(piece.weights) if is_full else 1) for piece in template]
            collated = [self._spare_piece(len(own)) for own in weights]
        self.consumed += total
        self._epoch_samples += total
        pieces = [
            MicrobatchSamples([], own, piece.leaf if any(own) else None)
            for own, piece in zip(weights, template, strict=True)
        ]
        self.taken = StepBatch(first, self.consumed, pieces)
        return collated[0] if self._rules.micro_batch is None else collated

    def _spare_piece(self, size: int) -> Any:
        """What a rank without samples computes on, lest the others wait for it."""
        if not self._spare:
            for number in range(self.readers):
                reader = OpenReader(self._source, number, self.readers, self.epoch, ReaderPlace())
                with contextlib.suppress(StopIteration):
                    self._spare = [reader.take()]
                    break
        return self._collate(self._spare * size)

    # ---- what the workers get

    def _start(self) -> Iterator[_Part]:
        import torch

        place, workers = self._place(), self._options["num_workers"]
        own = range(place.rank, self.readers, place.ranks)
        if self.readers % place.ranks:
            log.warning(
                "%d readers are not dealt evenly to %d ranks: those with fewer end their epoch "
                "earlier, and wait with weight 0; take a number of ranks that divides the readers",
                self.readers,
                place.ranks,
            )
        groups = [list(own[n :: max(1, workers)]) for n in range(max(1, workers))]
        self._turn = self._first_turn(place, workers)
        turned = [*range(self._turn, len(groups)), *range(self._turn)]
        share = _Share(
            source=self._source,
            readers=self.readers,
            epoch=self.epoch,
            places=[
                {reader: self._places[reader] for reader in groups[worker]} for worker in turned
            ],
            workers=turned,
            template=_template(self._rules, place),
            equal=_needs_shape(place),
            collate=self._collate,
        )
        generator = torch.Generator()  # of its own, lest the program's depend on restarts
        generator.manual_seed(self.consumed)
        reader: Any = DataLoader(
            share,
            batch_size=None,
            collate_fn=_as_it_is,
            generator=generator,
            **self._options,
        )
        return iter(reader)

    def _first_readers(self) -> int:
        """How many a new run has."""
        ranks, workers = self._place().ranks, max(1, self._options["num_workers"])
        return self._rules.readers or default_readers(self._source, ranks, workers)

    def _first_turn(self, place: DataPlace, workers: int) -> int:
        turns, self._turns = self._turns, None
        if turns is None:
            return self._turn
        of_ranks = turns["of_ranks"]
        if turns["workers"] != workers or len(of_ranks) != place.ranks:
            return 0
        return int(of_ranks[place.rank]) % max(1, workers)


class _Part(NamedTuple):
    """What a worker has read for one batch of its rank; plain, so that torch can pin it."""

    worker: int
    samples: int
    pieces: list[Any]
    weights: list[list[float]]
    places: list[tuple[int, int, bool, str | None]]
    """Of the readers that were drawn from, behind this batch."""
    refusal: HpctrainError | None = None


@dataclass(frozen=True)
class _Share(IterableDataset[_Part]):
    """What one rank reads, for torch's DataLoader; each worker iterates its own part."""

    source: Source
    readers: int
    epoch: int
    places: list[dict[int, ReaderPlace]]
    """Of each worker's readers."""
    workers: list[int]
    """Their numbers; the first is the one whose turn it is."""
    template: list[MicrobatchSamples]
    equal: bool
    collate: Callable[[list[Any]], Any]

    def __iter__(self) -> Iterator[_Part]:
        info = get_worker_info()
        at = info.id if info is not None else 0
        # Lest a dataset divide its share once more by torch's workers.
        torch_workers._worker_info = None  # noqa: SLF001 - torch has no other way
        worker = self.workers[at]
        wanted = sum(sum(map(int, piece.weights)) for piece in self.template)
        try:
            draw = _Draw(self, self.places[at])
            while samples := draw.take(wanted):
                pieces, weights = self._filled(samples)
                yield _Part(worker, len(samples), pieces, weights, draw.moved())
        except HpctrainError as refusal:  # as it is: torch would put its own lines around it
            yield _Part(worker, 0, [], [], [], refusal)

    def _filled(self, samples: list[Any]) -> tuple[list[Any], list[list[float]]]:
        """The passes of a batch with these samples in them, and what each sample counts."""
        left = iter(samples)
        pieces, weights = [], []
        for piece in self.template:
            taken = list(islice(left, int(sum(piece.weights))))
            size = len(piece.weights) if self.equal else max(1, len(taken))
            missing = size - len(taken)
            weights.append([1.0] * len(taken) + [0.0] * missing)
            pieces.append(self.collate(taken + [samples[0]] * missing))
        return pieces, weights


class _Draw:
    """Samples of several readers, the next always from that which has given the fewest."""

    def __init__(self, share: _Share, places: dict[int, ReaderPlace]) -> None:
        self._share = share
        self._open: dict[int, OpenReader] = {}
        self._places = places
        self._next = [(one.samples, number) for number, one in places.items() if not one.is_done]
        heapq.heapify(self._next)
        self._moved: dict[int, OpenReader] = {}

    def take(self, count: int) -> list[Any]:
        """So many samples; fewer, or none, where the readers have no more."""
        samples: list[Any] = []
        while len(samples) < count and self._next:
            number = self._next[0][1]
            reader = self._moved[number] = self._reader(number)
            try:
                samples.append(reader.take())
            except StopIteration:
                heapq.heappop(self._next)
                continue
            except Exception as error:
                error.add_note(
                    f"run.stream_loader: reader {number} of {self._share.readers}, after "
                    f"{reader.samples} samples of epoch {self._share.epoch}"
                )
                raise
            heapq.heapreplace(self._next, (reader.samples, number))
        return samples

    def moved(self) -> list[tuple[int, int, bool, str | None]]:
        """The places of the readers that were drawn from since this was last asked."""
        moved, self._moved = self._moved, {}
        rows = []
        for number, reader in moved.items():
            state = None if reader.is_done else reader.state()
            rows.append((number, reader.samples, reader.is_done, state))
            if reader.is_done:
                del self._open[number]
        return rows

    def _reader(self, number: int) -> OpenReader:
        if number not in self._open:
            share = self._share
            place = self._places[number]
            self._open[number] = OpenReader(share.source, number, share.readers, share.epoch, place)
        return self._open[number]


@lru_cache(maxsize=2)
def _template(rules: StreamRules, place: DataPlace) -> list[MicrobatchSamples]:
    """Return a rank's passes of a full batch.

    Refuse a batch of which a rank would have no sample: it would never read its readers.
    """
    micro_batch = rules.micro_batch or 0
    passes = ANY_PASSES if rules.micro_batch is None else place.passes
    whole = range(rules.global_batch)
    cut = cut_step(whole, place.rank, place.ranks, micro_batch, index=int, passes=passes)
    dealt = count_leaves(len(whole), micro_batch) if passes.leaves else len(whole)
    if dealt < place.ranks:
        raise UsageError(
            f"run.stream_loader: global_batch={rules.global_batch} has no sample for some of "
            f"{place.ranks} ranks; take one that has"
        )
    return cut.pieces


def _needs_shape(place: DataPlace) -> bool:
    """Whether every pass must have as many samples as in a full batch."""
    return place.passes.equal or place.passes.leaves


def _as_it_is(part: Any) -> Any:
    return part


# ---- the state


def default_readers(source: Source, ranks: int, workers: int) -> int:
    """Of a run that begins on so many ranks with so many workers each."""
    least = ranks * workers
    shards = least * READERS_PER_WORKER if source.shards is None else source.shards
    step = least if shards >= least else ranks
    return min(shards // step, READERS_PER_WORKER) * step or ranks


def _places_of(state: Mapping[str, Any]) -> list[ReaderPlace]:
    """Return the readers of a `StreamLoader.state_dict`, each value checked."""
    version = state.get("stream")
    if version is None:
        raise _refused("is not of run.stream_loader")
    if type(version) is not int or version != VERSION:
        raise _refused(f"is of version {version!r}, and version {VERSION} is read")
    for key in ("samples_consumed", "epoch"):
        if not is_count(state.get(key)):
            raise _refused(f"has {key} {state.get(key)!r}, not a count")
    rows = state.get("readers")
    if not isinstance(rows, list) or not 1 <= len(rows) <= MOST_READERS:
        raise _refused("has no list of readers")
    places = [_place_of(number, row) for number, row in enumerate(rows)]
    if sum(place.samples for place in places) > state["samples_consumed"]:
        raise _refused("has more samples of its epoch than of all epochs")
    turns = state.get("turns")
    if turns is not None and not _are_turns(turns):
        raise _refused(f"has turns {turns!r}")
    return places


def _place_of(number: int, row: Any) -> ReaderPlace:
    if not isinstance(row, list) or len(row) != len(ReaderPlace._fields):
        raise _refused(f"has no place of reader {number}")
    samples, is_done, state = row
    if not is_count(samples) or type(is_done) is not bool:
        raise _refused(f"has {samples!r} samples of reader {number}, done: {is_done!r}")
    return ReaderPlace(samples, is_done, None if state is None else json.dumps(state))


def _are_turns(turns: Any) -> bool:
    return (
        isinstance(turns, dict)
        and is_count(turns.get("workers"))
        and isinstance(turns.get("of_ranks"), list)
        and all(map(is_count, turns["of_ranks"]))
    )


def _refused(why: str) -> CheckpointError:
    return CheckpointError(
        f"data state of the checkpoint {why}: samples would be skipped or seen twice; "
        "set the loader and its dataset back, or start a new run"
    )

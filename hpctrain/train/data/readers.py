"""What an iterable dataset is divided into: readers, numbered, each with a share and a state.

How many there are is settled when a run first starts. A reader's state is what its dataset's own
`state_dict` says, as JSON, or, replayed, the number of its samples. The promises are held by
tests/unit/data/test_readers.py.
"""

from __future__ import annotations

import base64
import json
import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_READERS = 1 << 20
TAG = "__kind__"
"""Marks what JSON has no word for."""
_DIVIDE = (
    "pass a function of (reader, readers) that returns the iterable of that share, "
    "as lambda reader, readers: Stream(files[reader::readers])"
)
_STRANGE = (KeyError, TypeError, ValueError, IndexError, AttributeError, AssertionError)
"""What a library raises that does not understand a state."""


class ReaderPlace(NamedTuple):
    """Where a reader stands in its epoch."""

    samples: int = 0
    """That the program was given."""
    is_done: bool = False
    """It has no more."""
    state: str | None = None
    """Of its dataset, as JSON text; None at the beginning, and where it is replayed."""


@dataclass(frozen=True)
class Source:
    """A dataset, and how it is divided.

    Attributes:
        make: The dataset of one reader, given its number and how many there are.
        shards: Files or the like that the dataset says it has; None where it does not.
        replay: Continue by reading again what was used, and dropping it.
    """

    make: Callable[[int, int], Any]
    shards: int | None = None
    replay: bool = False


@dataclass(frozen=True)
class Divided:
    """Hugging Face's IterableDataset by its shards; by samples where it has too few of them."""

    dataset: Any

    def __call__(self, reader: int, readers: int) -> Any:
        """The share of one reader."""
        if readers <= self.dataset.num_shards:
            return self.dataset.shard(readers, reader, contiguous=False)
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(self.dataset, reader, readers, strategy="examples")


def source_of(dataset: Any, *, replay: bool) -> Source:
    """How a dataset is divided.

    Raises:
        UsageError: nobody has said how, or it is a map-style one.
    """
    name = type(dataset).__name__
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        raise UsageError(
            f"run.stream_loader: a {name} gives its n-th sample when asked; take run.loader, "
            "which needs no readers and shuffles"
        )
    if hasattr(dataset, "shard") and hasattr(dataset, "num_shards"):
        if not replay and _has_shuffle_buffer(dataset):
            raise UsageError(
                f"run.stream_loader: this {name} has a shuffle buffer, whose contents its state "
                "leaves out, so that a stop would lose samples and double others; set replay=True"
            )
        return Source(Divided(dataset), dataset.num_shards, replay)
    if callable(dataset) and (isinstance(dataset, type) or not hasattr(dataset, "__iter__")):
        return Source(dataset, None, replay)
    raise UsageError(f"run.stream_loader: nobody says how a {name} is divided; {_DIVIDE}")


def check_first(source: Source, readers: int) -> None:
    """Open one reader, so that what cannot be read or resumed is said at once.

    Raises:
        UsageError: it is no iterable, or has no state.
    """
    dataset = source.make(0, readers)
    if not hasattr(dataset, "__iter__"):
        name = type(dataset).__name__
        raise UsageError(f"run.stream_loader: reader 0 is a {name}, which is no iterable")
    if not source.replay and not _has_state(dataset):
        _refuse_stateless(dataset, iter(dataset))


def _has_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _refuse_stateless(dataset: Any, iterator: Any) -> None:
    is_empty = isinstance(dataset, list | tuple) and not dataset
    if not is_empty and not _has_state(iterator):
        raise UsageError(
            f"run.stream_loader: a {type(dataset).__name__} has no state_dict and load_state_dict, "
            "so nobody knows what was read of it; set replay=True to read again and drop what was "
            "used"
        )


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Whether one of the iterables that Hugging Face has put around each other shuffles samples."""
    left: list[Any] = [getattr(dataset, "_ex_iterable", None)]
    while left:
        inner = left.pop()
        if getattr(inner, "buffer_size", 1) > 1:
            return True
        left += [inner.ex_iterable] if hasattr(inner, "ex_iterable") else []
        left += list(getattr(inner, "ex_iterables", []))
    return False


class OpenReader:
    """One reader that is open."""

    def __init__(
        self, source: Source, number: int, readers: int, epoch: int, place: ReaderPlace
    ) -> None:
        """Open it where it stands.

        Raises:
            CheckpointError: it cannot resume from there.
        """
        self.number = number
        self.samples = place.samples
        self.is_done = False
        self._replays = source.replay
        self._epoch = epoch if isinstance(source.make, Divided) else None
        self._name = f"reader {number} of {readers}"
        dataset = source.make(number, readers)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        self._holder: Any = dataset if _has_state(dataset) else None
        resumed = place.state is not None and not source.replay
        if self._holder is not None and resumed:
            self._load(place.state)
        self._iterator: Iterator[Any] = iter(dataset)
        if self._holder is None and not source.replay:
            _refuse_stateless(dataset, self._iterator)
            self._holder = self._iterator
            if resumed:
                self._load(place.state)
        self._is_fresh = resumed
        if source.replay and place.samples:
            dropped = sum(1 for _ in islice(self._iterator, place.samples))
            if dropped < place.samples:
                raise CheckpointError(
                    f"{self._name} has {dropped} samples, and {place.samples} were used before the "
                    "stop: the dataset is another; set it back, or start a new run"
                )

    def take(self) -> Any:
        """The next sample.

        Raises:
            StopIteration: there is none.
        """
        try:
            sample = next(self._iterator)
        except StopIteration:
            self.is_done = True
            raise
        except _STRANGE as error:
            if self._is_fresh:
                raise self._unknown_state(error) from None
            raise
        self._is_fresh = False
        self.samples += 1
        return sample

    def state(self) -> str | None:
        """Of the dataset now, as JSON text; None where it is replayed."""
        if self._replays:
            return None
        return json.dumps(to_plain(self._holder.state_dict(), self._name))

    def _load(self, text: str | None) -> None:
        try:
            state = from_plain(json.loads(text or "null"))
            if self._epoch is not None and state["epoch"] != self._epoch:
                # Hugging Face would begin the epoch anew without a word.
                raise ValueError(f"it is of epoch {state['epoch']!r}, not {self._epoch}")
            self._holder.load_state_dict(state)
        except _STRANGE as error:
            raise self._unknown_state(error) from None

    def _unknown_state(self, error: Exception) -> CheckpointError:
        why = (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:200]
        return CheckpointError(
            f"{self._name} cannot go on from its state in the checkpoint ({why}); set the dataset "
            "and its library back, or start a new run"
        )


# ---- a library's state as JSON


def to_plain(value: Any, where: str) -> Any:
    """A state as JSON has it; tensors and arrays by their bytes.

    Raises:
        UsageError: something in it has no such form.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list):
        return [to_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict) and TAG not in value and all(isinstance(k, str) for k in value):
        return {key: to_plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, float) and math.isfinite(value):
        return value
    for kind, (is_kind, take_apart, _) in _KINDS.items():
        if is_kind(value):
            return {TAG: kind, "value": to_plain(take_apart(value), where)}
    raise UsageError(
        f"run.stream_loader: the state of {where} is a {type(value).__name__}, which no checkpoint "
        "holds; let state_dict() return numbers, strings, lists, dicts and tensors, or set "
        "replay=True"
    )


def from_plain(value: Any) -> Any:
    """The state as it was; raises what Python raises where it is none of `to_plain`."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if isinstance(value, dict):
        if TAG in value:
            return _KINDS[value[TAG]][2](from_plain(value["value"]))
        return {key: from_plain(item) for key, item in value.items()}
    return value


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array)


def _array(parts: list[Any]) -> Any:
    import numpy as np

    dtype, shape, raw = parts
    # Without dimensions it is a number: an array could be no key and no member of a set.
    return np.frombuffer(raw, np.dtype(dtype)).reshape(shape).copy()[()]


def _is_array(value: Any) -> bool:
    return hasattr(value, "tobytes") and getattr(getattr(value, "dtype", None), "kind", "") in _PODS


_PODS = set("biuf")
"""Numpy's kinds of plain numbers."""
_KINDS: dict[str, tuple[Callable[[Any], bool], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (lambda value: isinstance(value, float), repr, float),
    "tuple": (lambda value: isinstance(value, tuple), list, tuple),
    "dict": (
        lambda value: isinstance(value, dict),
        lambda value: [[key, item] for key, item in value.items()],
        lambda rows: {key: item for key, item in rows},  # noqa: C416
    ),
    "bytes": (
        lambda value: isinstance(value, bytes),
        lambda value: base64.b64encode(value).decode(),
        base64.b64decode,
    ),
    "tensor": (
        lambda value: hasattr(value, "detach") and hasattr(value, "numpy"),
        lambda value: value.detach().cpu().numpy(),
        _tensor,
    ),
    "array": (
        _is_array,
        lambda value: [value.dtype.str, list(value.shape), value.tobytes()],
        _array,
    ),
}
"""What JSON has no word for: how it is known, taken apart, and put together."""

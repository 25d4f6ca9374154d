"""Readers for torch's files that anybody may have written: nothing that such a file says is run.

A pickle is a program. `.metadata` of a torch DCP checkpoint, which torch itself reads with plain
pickle, is read here with a list of the names that it may use, each of which becomes an inert record
of ours.
"""

from __future__ import annotations

import io
import pickle  # only its Unpickler, with a list of what it may name
import pickletools
import re
import warnings
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import torch

from hpctrain.checkpoint.exchange.contents import Contents, NestedValue, Tensor, carried
from hpctrain.checkpoint.tensors.boxes import DTYPES
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.checkpoint.exchange.contents import Bytes


_GLOBAL = re.compile(r"(?:GLOBAL|[Uu]nsupported class:?) ([A-Za-z_][\w.]*)")
DTYPE_NAMES = {str(dtype).removeprefix("torch."): word for dtype, word in DTYPES.items()}


class Inert:
    """Stands for a class of another program: holds its fields, does nothing."""

    def __new__(cls, *_: object, **__: object) -> Self:
        """An empty one, whatever the pickle would give its constructor."""
        return object.__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        """Take nothing."""

    def __setstate__(self, state: object) -> None:
        """Keep fields that come as a dictionary."""
        if isinstance(state, dict):
            self.__dict__.update({str(key): value for key, value in state.items()})


class Unpickler(pickle.Unpickler):
    """Takes only names that are in its table, and gives the table's records for them."""

    def __init__(self, file: IO[bytes], names: dict[tuple[str, str], Any]) -> None:
        super().__init__(file)
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        """The record for a name; anything else is refused before it is even looked up."""
        try:
            return self._names[module, name]
        except KeyError:
            raise Refused(f"{module}.{name}") from None


class Refused(Exception):
    """A name that no checkpoint needs; the message is the name."""


def unpickled(path: Path, names: dict[tuple[str, str], Any]) -> Any:
    """What a pickle holds, with nothing in it but plain data and the records of `names`.

    Raises:
        CheckpointError: it names something else, or is no pickle.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        _require_small_memo(content)
        return Unpickler(io.BytesIO(content), names).load()
    except Refused as error:
        raise CheckpointError(refusal(path, str(error))) from None
    except Exception as error:
        raise CheckpointError(
            f"{path} is cut or damaged: {type(error).__name__}: {_line(error)}"
        ) from error


def _require_small_memo(content: bytes) -> None:
    """Refuse a memo that no pickle of this length can need.

    Python's unpickler makes room for any index that a pickle names: one flipped bit took 22 GB.
    """
    for opcode, argument, _ in pickletools.genops(content):
        if "PUT" in opcode.name and isinstance(argument, int) and argument > len(content):
            raise pickle.UnpicklingError(f"memo index {argument} of {len(content)} bytes")


def refusal(where: object, what: str) -> str:
    """The one line for a pickle that wants more than it may."""
    return (
        f"{where} asks for {what} while being read, which a checkpoint need not: refused, and "
        "nothing of it was run"
    )


def load(
    file: Path | IO[bytes],
    *,
    where: object = None,
    allowed: Sequence[tuple[type, str]] = (),
) -> Any:
    """Load the tensors and plain data of a torch.save file; its tensors stay on disk (mmap).

    `where` names the file in errors. `allowed` are inert classes, each with the full name that it
    stands for.

    Raises:
        CheckpointError: it wants to run something, is cut, damaged, or no such file.
    """
    where = where or file
    try:
        mapped = isinstance(file, Path) and zipfile.is_zipfile(file)
        with warnings.catch_warnings(), torch.serialization.safe_globals(list(allowed)):
            warnings.simplefilter("ignore")  # of old files: nothing that a user could act on
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        named = _GLOBAL.search(str(error))
        if named:
            raise CheckpointError(refusal(where, named[1])) from None
        raise CheckpointError(f"{where} is no torch.save file: {_line(error)}") from None
    except Exception as error:
        raise CheckpointError(
            f"{where} is cut, damaged, or no torch.save file: {_line(error)}"
        ) from error


def leaves_of(tree: Any, where: object) -> list[NestedValue]:
    """Every value in nested dictionaries; lists stay whole.

    Raises:
        CheckpointError: a tensor is of a kind that cannot be stored.
    """
    return [
        NestedValue(path, as_tensor(".".join(map(str, path)), value, where))
        if isinstance(value, torch.Tensor)
        else NestedValue(path, None, lambda value=value: value)  # type: ignore[misc]
        for path, value in _walk(tree, ())
    ]


def as_tensor(name: str, tensor: torch.Tensor, where: object) -> Tensor:
    """One tensor of torch's.

    Raises:
        CheckpointError: it is of a kind that cannot be stored.
    """
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        kind = f"{tensor.dtype} {tensor.layout} on {tensor.device}"
        raise CheckpointError(f"{where}: {name} is {kind}, which cannot be stored")
    return Tensor(name, dtype, tuple(tensor.shape), lambda: raw(tensor))


def raw(tensor: torch.Tensor) -> Bytes:
    """A tensor's bytes, row-major; shared memory where it lies so already."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    content: Bytes = flat.view(torch.uint8).numpy()
    return content


def _walk(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, dict) and value and all(isinstance(k, str | int) for k in value):
        for key, inner in value.items():
            yield from _walk(inner, (*path, key))
    else:
        yield path, value


def _line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return text[:200] or type(error).__name__


STEPS = ("step", "global_step", "iteration")
LAYOUT_KEY, LAYOUT = "format", "hpctrain-export-1"


def read(source: Path) -> Contents:
    """What the file holds; its tensors stay on disk until they are asked for.

    Raises:
        CheckpointError: it is not such a file, or wants to run something.
    """
    tree = load(source)
    if not isinstance(tree, dict):
        raise CheckpointError(
            f"{source} holds a {type(tree).__name__}, not a dictionary of tensors by name"
        )
    contents = Contents("torch", source, leaves_of(tree, source))
    contents.shared = _shared(tree)
    step = next((tree[key] for key in STEPS if isinstance(tree.get(key), int)), None)
    contents.step = None if isinstance(step, bool) else step
    if tree.get(LAYOUT_KEY) == LAYOUT:
        try:
            contents.leaves = leaves_of(_flat(tree), source)
            contents.state = carried(tree.get("state", {}), str(source))
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{source} is not hpctrain's own export: {error}") from error
        contents.full_names = True
    return contents


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    """Our own export by full names."""
    flat = {f"model.{name}": tensor for name, tensor in tree["model"].items()}
    for name, values in tree["optimizer"].items():
        flat |= {f"optim.{name}.{key}": value for key, value in values.items()}
    flat |= tree.get("others", {})
    return flat


def _shared(tree: dict[str, Any]) -> frozenset[str]:
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    again = set()
    for path, tensor in _walk(tree, ()):
        # Only tensors that `as_tensor` takes get here: strided ones in host memory.
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            continue
        leaf = ".".join(map(str, path))
        first = seen.setdefault((tensor.data_ptr(), tuple(tensor.shape)), leaf)
        if first != leaf:
            again.add(leaf)
    return frozenset(again)

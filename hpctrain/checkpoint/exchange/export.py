"""What an export has in it, how it is verified, and how its files get their names.

A file has a temporary name in its directory until all are flushed and verified. An interrupted or
failed export removes them; a killed one leaves them under names that nobody takes for real ones.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.exchange import contents
from hpctrain.checkpoint.exchange.contents import CARRIED, same, to_dtype
from hpctrain.core.base.files import flush_directory
from hpctrain.core.base.text import size
from hpctrain.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from hpctrain.checkpoint.exchange.contents import Tensor
    from hpctrain.checkpoint.format.manifest import Manifest

    OnBytes = Callable[[int], object]


_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


@contextlib.contextmanager
def placing(
    directory: Path, names: Sequence[str], need_bytes: int
) -> Iterator[Callable[[str], Path]]:
    """Give the path to write each of these new files to; at the end all of them get their names.

    After an error none of them is there. The directory is made if it is missing; the files take
    `need_bytes` together.

    Raises:
        UsageError: one of them is there, or was put there meanwhile.
        CheckpointError: there is no room, or the disk refused.
    """

    def temporary(name: str) -> Path:
        return directory / f".{name}.partial-{os.getpid()}"

    written = [temporary(name) for name in names]
    with _errors_named(directory):
        made = not directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        try:
            for name in names:
                _require_free(directory / name)
            _require_room(directory, need_bytes)
            yield temporary
            for name in names:
                _name(temporary(name), directory / name)
                written.append(directory / name)
            flush_directory(directory)
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            if made:
                with contextlib.suppress(OSError):  # somebody else has put something there
                    directory.rmdir()
            raise


@contextlib.contextmanager
def _errors_named(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        named = error.filename or where
        raise CheckpointError(
            f"{named} cannot be written: {error.strerror or error}; nothing was left of it"
        ) from error


def flush(path: Path) -> None:
    """To disk, and out of memory, so that what is read back comes from the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _require_room(directory: Path, need: int) -> None:
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    # Some FUSE and network file systems report no blocks at all: that is no full disk.
    if stat.f_blocks and free < need:
        raise CheckpointError(
            f"{directory} has {size(free)} free and the export takes {size(need)}; choose another "
            "place, or --dtype bf16"
        )


def _name(temporary: Path, final: Path) -> None:
    """Rename, never onto something: a plain rename would replace a file without a word."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        raise _taken(final) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _require_free(final)
        temporary.rename(final)
        return
    temporary.unlink()


def _require_free(final: Path) -> None:
    if os.path.lexists(final):
        raise _taken(final)


def _taken(final: Path) -> UsageError:
    return UsageError(f"{final} exists and is left as it is; choose another")


@dataclass(frozen=True)
class Written:
    """What an export wrote; `verified` counts tensors that were read back and compared."""

    files: list[tuple[Path, int]]
    tensors: int
    nbytes: int
    verified: int


def chosen(
    path: Path, manifest: Manifest, *, everything: bool, dtype: str | None, strip: str
) -> list[Tensor]:
    """Return the tensors to export, under the names that they will have.

    Weights lose ``model.`` and the beginning `strip`; `dtype` converts floating weights only. With
    `everything`, the optimizer's state and all else come too, under full names.

    Raises:
        CheckpointError: there are no weights, or a name is not free after the stripping.
    """
    taken: list[Tensor] = []
    hits = 0
    objects = contents.parts_of_objects(entry.name for entry in manifest.tensors)
    for tensor in contents.tensors(path, manifest):
        is_weight = tensor.name.startswith(contents.MODEL) and tensor.name not in objects
        if not is_weight and not everything:
            continue
        name = tensor.name
        if is_weight:
            name = name.removeprefix(contents.MODEL)
            hits += bool(strip) and name.startswith(strip)
            name = name.removeprefix(strip)
            name = contents.MODEL + name if everything else name
        converted = to_dtype(tensor, dtype) if is_weight and dtype else tensor
        taken.append(replace(converted, name=name))
    if not taken:
        raise CheckpointError(f"{path} holds no weights, whose names start with {contents.MODEL}")
    if strip and not hits:
        raise UsageError(
            f"--strip-prefix {strip}: no weight's name starts so, e.g. {taken[0].name}"
        )
    names = [tensor.name for tensor in taken]
    for name in names:
        if not name or names.count(name) > 1:
            raise UsageError(f"--strip-prefix {strip}: several weights would be called {name!r}")
    return taken


def state_of(manifest: Manifest) -> dict[str, Any]:
    """The rest of a checkpoint, as JSON has it."""
    return {name: getattr(manifest, name) for name in CARRIED} | {"step": manifest.step}


def compare(wanted: Iterable[Tensor], got: Mapping[str, Tensor], on_bytes: OnBytes) -> int:
    """Read both and compare every bit; returns how many tensors.

    Raises:
        CheckpointError: which tensor is not the same.
    """
    count = 0
    for tensor in wanted:
        other = got.get(tensor.name)
        if other is None or (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            there = "missing" if other is None else other.text
            raise CheckpointError(
                f"{tensor.name} was written as {tensor.text} and is {there} when read back"
            )
        if not same(tensor.read(), other.read()):
            raise CheckpointError(
                f"{tensor.name} is not what it was when read back: the disk, or the source, has "
                "changed it"
            )
        on_bytes(tensor.nbytes)
        count += 1
    if count != len(got):
        raise CheckpointError(f"{count} tensors were written and {len(got)} are there")
    return count

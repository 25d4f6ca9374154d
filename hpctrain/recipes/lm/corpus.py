"""Any folder of text files as one file of byte tokens, with a part kept aside for validation.

A token is a byte, 0 to 255, or END after each file: no tokenizer to fetch or to train. The default
text is the source of the Python standard library, which every machine has. Standard library only,
so that a login node can look before a job is queued. tests/unit/recipes/test_corpus.py holds the
promises.
"""

from __future__ import annotations

import math
import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import locks
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.train.data.tokens import TokenFile, sidecar, write_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

END = 256
VOCABULARY = 257
STANDARD_LIBRARY = "python-standard-library"
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
LOCK_TIMEOUT_S = 1800.0
SUFFIXES = (".py", ".txt", ".md")
"""Which files of `train.data` are read."""
_MEGABYTE = 1_000_000
_HEAD_BYTES = 8192


def build(folder: str, limit_mb: float, out: Path) -> Path:
    """Make the token file `out` from a folder of text, or find it made; many processes may call.

    A run keeps the tokens that it began with: once `out` is there, the folder is not looked at
    again.

    Args:
        folder: `train.data`; empty for the Python standard library's own source.
        limit_mb: `train.data_limit_mb`: megabytes (1e6 bytes) of text at most; 0 for all.
        out: Where the token file lies afterwards; `out.json` and `out.lock` lie beside it.

    Raises:
        UsageError: no such folder, no matching file, or `out` was made from something else.
        HpctrainError: another process builds the file and does not get done.
    """
    name = str(Path(folder).absolute()) if folder else STANDARD_LIBRARY
    source = {"folder": name, "limit_mb": limit_mb}
    if _is_built(out, source):
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with locks.held(out.with_name(out.name + ".lock"), LOCK_TIMEOUT_S):
            if not _is_built(out, source):
                chunks = _text_tokens(folder, limit_mb)
                write_tokens(out, chunks, dtype="uint16", vocabulary=VOCABULARY, source=source)
    except TimeoutError:
        raise HpctrainError(
            f"another process has held {out}.lock for {LOCK_TIMEOUT_S:.0f} s to build the tokens; "
            "end it, or lower train.data_limit_mb"
        ) from None
    return out


def text_folder(folder: str) -> Path:
    """The folder that `train.data` means.

    Raises:
        UsageError: it is not a folder.
    """
    root = Path(folder) if folder else Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise UsageError(f"{str(root)!r} (train.data) is not a folder; name one with text files")
    return root


def find_files(
    folder: Path,
    limit_bytes: int,
    *,
    skip_folders: frozenset[str] = frozenset(),
) -> list[Path]:
    """The text files below a folder, in the same order everywhere: that of their relative paths.

    Files that cannot be read, hold a zero byte in their first 8 KiB or lie in a hidden folder are
    left out.

    Args:
        folder: Where to look; links to folders are not followed.
        limit_bytes: The list ends with the file that reaches this many bytes; 0 for no limit.
        skip_folders: Names of folders that are left out at any depth.
    """
    files = {path.relative_to(folder).as_posix(): path for path in _walk(folder, skip_folders)}
    chosen: list[Path] = []
    size = 0
    for relative in sorted(files):
        if limit_bytes and size >= limit_bytes:
            break
        if relative.endswith(SUFFIXES) and _is_text(files[relative]):
            chosen.append(files[relative])
            size += files[relative].stat().st_size
    return chosen


def split(n_sequences: int, *, global_batch: int = 1) -> tuple[int, range]:
    """How many sequences, from the first on, are trained on; which, the last 5 %, validate.

    No target of the one part is a target of the other.

    Raises:
        UsageError: less than one global batch is left to train on.
    """
    validation = max(1, n_sequences // 20)
    train = n_sequences - validation
    if train < max(1, global_batch):
        raise UsageError(
            f"too little text: {max(0, train)} sequences to train on, a global batch needs "
            f"{global_batch} (train.global_batch, train.seq_len); give more text in train.data, "
            "or lower one of the two"
        )
    return train, range(train, n_sequences)


def _text_tokens(folder: str, limit_mb: float) -> Iterator[bytes]:
    """The tokens of a folder's text, file by file; what is wrong is found before the first."""
    if limit_mb < 0:
        raise UsageError(f"train.data_limit_mb is {limit_mb:g}; give megabytes, or 0 for all text")
    root = text_folder(folder)
    limit_bytes = math.ceil(limit_mb * _MEGABYTE)
    skip = frozenset() if folder else NOT_LIBRARY
    files = find_files(root, limit_bytes, skip_folders=skip)
    if not files:
        raise UsageError(
            f"no file in {root} (train.data) is text ({', '.join(SUFFIXES)}); name another folder"
        )
    return _documents(files, limit_bytes)


def _is_built(out: Path, source: dict[str, Any]) -> bool:
    if not sidecar(out).exists():
        return False
    made_from = TokenFile(out).source
    changed = {key: made_from.get(key) for key in source if made_from.get(key) != source[key]}
    if changed:
        raise UsageError(
            f"the tokens in {out} were made with {changed} (train.data, train.data_limit_mb); "
            "set that back, or start a new run for the new text"
        )
    return True


def _walk(folder: Path, skip_folders: frozenset[str]) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [
            name for name in folders if name not in skip_folders and not name.startswith(".")
        ]
        yield from (Path(parent, name) for name in names)


def _is_text(path: Path) -> bool:
    # A named pipe would block the open for ever.
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(_HEAD_BYTES)
    except OSError:  # unreadable: left out, as promised
        return False


def _documents(files: Sequence[Path], limit_bytes: int) -> Iterator[bytes]:
    left = limit_bytes
    for path in files:
        text = path.read_bytes()
        if limit_bytes:
            text = text[:left]
            left -= len(text)
        tokens = bytearray(2 * len(text))
        tokens[::2] = text
        yield bytes(tokens) + END.to_bytes(2, "little")

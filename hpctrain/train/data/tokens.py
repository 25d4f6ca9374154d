"""Token files: little-endian integers, and beside them a JSON file that proves them whole.

The JSON file is written last, so a token file without it is unfinished. The promises are held by
tests/unit/data/test_tokens.py.
"""

from __future__ import annotations

import json
import os
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.files import is_plain, read_plain, replace_text
from hpctrain.errors import NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

FORMAT = 1
ITEM_BYTES = {"uint16": 2, "uint32": 4}
_READ_BYTES = 1 << 22
_DIGEST = re.compile(r"xxh3_64:[0-9a-f]{16}")
_FIELDS = {"dtype": str, "length": int, "vocabulary": int, "digest": str, "source": dict}


class MappedTokens:
    """A row of numbers that is mapped when it is first used, in each process anew."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path = path
        self.dtype = dtype
        """Of a token."""
        self.length = 0
        """Tokens."""

    def __getstate__(self) -> dict[str, Any]:
        # A memory map is pickled by its bytes: a spawned worker would be sent the whole file.
        return {name: value for name, value in vars(self).items() if name != "_tokens"}

    def read(self, first: int, last: int) -> npt.NDArray[np.integer]:
        """The tokens [first, last), as a view of the mapped file."""
        return self._tokens[first:last]

    def document_ends(self) -> npt.NDArray[np.int64] | None:
        """After which token each document ends; None where the file does not say."""
        return None

    @cached_property
    def _tokens(self) -> npt.NDArray[np.integer]:
        import numpy as np

        item = np.dtype(self.dtype).newbyteorder("<")
        return np.memmap(self.path, dtype=item, mode="r", shape=(self.length,))


class TokenFile(MappedTokens):
    """A finished token file, cut into sequences for next-token prediction.

    Opening it checks its description and its size; `verify` reads it all and checks its digest.

    Raises:
        NotFound: there is no such file.
        UsageError: the file is unfinished or torn, or a newer hpctrain has written it.
    """

    def __init__(self, path: Path) -> None:
        described = _read_sidecar(path)
        super().__init__(path, described["dtype"])
        self.length = described["length"]
        self.vocabulary: int = described["vocabulary"]
        """Tokens are below this."""
        self.digest: str = described["digest"]
        """xxh3_64 of the file's bytes: two files with the same digest hold the same tokens."""
        self.source: dict[str, Any] = described["source"]
        """What the file was made from."""
        expected = self.length * ITEM_BYTES[self.dtype]
        size = path.stat().st_size
        if size != expected:
            raise _torn(path, f"it has {size} bytes, its description says {expected}")

    def len_sequences(self, seq_len: int) -> int:
        """How many sequences there are: of `seq_len` + 1 tokens, the last shared with the next."""
        return max(0, self.length - 1) // seq_len

    def sequence(self, i: int, seq_len: int) -> npt.NDArray[np.int64]:
        """Sequence `i`: all tokens but the last are the input, all but the first the targets."""
        import numpy as np

        if not 0 <= i < self.len_sequences(seq_len):
            raise IndexError(
                f"sequence {i} is not one of {self.len_sequences(seq_len)} in {self.path}"
            )
        return np.array(self.read(i * seq_len, (i + 1) * seq_len + 1), dtype=np.int64)

    def batch(self, indices: Sequence[int], seq_len: int) -> npt.NDArray[np.int64]:
        """The sequences of these indices, of shape [len(indices), seq_len + 1]."""
        import numpy as np

        return np.stack([self.sequence(i, seq_len) for i in indices])

    def verify(self) -> None:
        """Read the whole file and compare its digest.

        Raises:
            UsageError: the bytes are not those that were written.
        """
        import xxhash

        digest = xxhash.xxh3_64()
        with self.path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
        if _named(digest.hexdigest()) != self.digest:
            raise _torn(self.path, f"its digest is {_named(digest.hexdigest())}, not {self.digest}")


def write_tokens(
    path: Path,
    chunks: Iterable[bytes],
    *,
    dtype: str,
    vocabulary: int,
    source: Mapping[str, Any],
) -> TokenFile:
    """Write a token file so that it is either there and complete, or not there.

    Two writers of one path must not run at once: callers hold a lock.

    Args:
        path: The file; its folder is made where it is missing.
        chunks: The tokens' little-endian bytes, in pieces of any size.
        dtype: "uint16" or "uint32".
        vocabulary: Every token is below this.
        source: What the tokens were made from, for the reader; anything that JSON holds.
    """
    import xxhash

    path.parent.mkdir(parents=True, exist_ok=True)
    # While the two do not belong together, the file must count as unfinished.
    sidecar(path).unlink(missing_ok=True)
    digest, size = xxhash.xxh3_64(), 0
    staged = path.with_name(path.name + ".new")
    with staged.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    if size % ITEM_BYTES[dtype]:
        raise ValueError(f"{size} bytes are not a whole number of {dtype} tokens")
    staged.replace(path)
    described = {
        "format": FORMAT,
        "dtype": dtype,
        "length": size // ITEM_BYTES[dtype],
        "vocabulary": vocabulary,
        "digest": _named(digest.hexdigest()),
        "source": dict(source),
    }
    replace_text(sidecar(path), json.dumps(described, indent=1) + "\n", durable=True)
    return TokenFile(path)


def sidecar(path: Path) -> Path:
    """The JSON file that describes a token file."""
    return path.with_name(path.name + ".json")


def _read_sidecar(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise NotFound(f"there is no token file {path}; build it first")
    if not is_plain(path):
        raise UsageError(f"token file {path} cannot be used: it is not an ordinary file")
    try:
        described = json.loads(read_plain(sidecar(path)))
    except FileNotFoundError:
        raise _torn(path, f"{sidecar(path).name}, which is written last, is not there") from None
    except OSError as error:
        raise UsageError(f"token file {path} cannot be used: {error}") from None
    except (ValueError, RecursionError) as error:
        raise _torn(path, f"{sidecar(path).name} is not JSON: {error}") from None
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise _torn(path, f"{sidecar(path).name} is not of format {FORMAT}")
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(described.get(name), kind)]
    if not wrong:  # a message must not hold escape sequences of a foreign file
        wrong += [] if described["dtype"] in ITEM_BYTES else ["dtype"]
        wrong += [] if _DIGEST.fullmatch(described["digest"]) else ["digest"]
    if wrong:
        raise _torn(path, f"{sidecar(path).name} has a bad value for {', '.join(wrong)}")
    return described


def _torn(path: Path, why: str) -> UsageError:
    return UsageError(
        f"token file {path} cannot be used: {why}; delete both files and build them again"
    )


def _named(hexadecimal: str) -> str:
    return f"xxh3_64:{hexadecimal}"

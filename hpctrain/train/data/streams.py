"""Token files of other programs, read as they are: one long row of tokens, mapped into memory.

nanoGPT's `.bin` (bare numbers), Megatron's `.bin` with its `.idx`, a folder that Hugging Face's
datasets has saved, and our own token files. Others' files are read with distrust: every length is
compared with the file before anything is mapped or counted with. The promises are held by
tests/unit/data/test_streams.py and test_packing.py.
"""

from __future__ import annotations

import struct
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hpctrain.core.base.files import is_plain, open_plain
from hpctrain.errors import NotFound, UsageError
from hpctrain.train.data.tokens import ITEM_BYTES, MappedTokens, TokenFile, sidecar

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt
    import torch

    Tokens = npt.NDArray[np.integer]
    TokenStream: TypeAlias = "MappedTokens | ArrowTokens"
    """All tokens of a data set in one row, and where its documents end."""


MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Of tokens; its codes 6 and 7 are floating-point numbers."""
_ROWS_AT_ONCE = 1 << 18
_LLM_C_MAGIC = 20240520
_INTEGERS = {"int8", "int16", "int32", "int64"}
_LISTS = ("list<", "large_list<", "fixed_size_list<")


class TokenSequences:
    """A token file or folder as a dataset of sequences of one length, for `Run.loader`.

    Sequence `i` has the tokens [i * seq_len, (i + 1) * seq_len] of the whole row, documents one
    after the other: `seq_len` + 1 numbers (int64), the last shared with the next sequence. All but
    the last are the input, all but the first the targets. What is left at the end is not used.

    Nothing is copied or converted beforehand: the file is mapped, and only what is read is read.

    Attributes:
        stream: The row of tokens.
        seq_len: Tokens of the input.
    """

    def __init__(
        self,
        path: str | Path,
        seq_len: int,
        *,
        dtype: str | None = None,
        column: str = "input_ids",
    ) -> None:
        """Open what lies there.

        Args:
            path: A `.bin` of nanoGPT, of Megatron (an `.idx` beside it) or of ours (a `.bin.json`
                beside it), or a folder that ``Dataset.save_to_disk`` has written.
            seq_len: Tokens of the input.
            dtype: Of a bare `.bin`: "uint16", nanoGPT's and the default, or "uint32".
            column: Of the folder: the one with lists of tokens.

        Raises:
            NotFound: there is nothing.
            UsageError: it is damaged, of another kind, or has not one sequence.
        """
        if seq_len < 1:
            raise UsageError(f"seq_len={seq_len} is not a number of tokens; 1 or more")
        self.stream = open_stream(path, dtype=dtype, column=column)
        self.seq_len = seq_len
        if len(self) < 1:
            raise UsageError(
                f"{path} has {self.stream.length} tokens, too few for one sequence of "
                f"{seq_len} + 1; take a smaller seq_len"
            )

    def __len__(self) -> int:
        return max(0, self.stream.length - 1) // self.seq_len

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        import numpy as np

        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} is not one of {len(self)}")
        first = index * self.seq_len
        return self.stream.read(first, first + self.seq_len + 1).astype(np.int64)


def open_stream(
    path: str | Path, *, dtype: str | None = None, column: str = "input_ids"
) -> TokenStream:
    """What lies at a path; see `TokenSequences`.

    Raises:
        NotFound: there is nothing.
        UsageError: it is damaged, or of a kind that is not known.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return ArrowTokens(path, column)
        if path.suffix == ".idx":
            path = path.with_suffix(".bin")
        elif not path.exists() and path.with_name(path.name + ".bin").exists():
            path = path.with_name(path.name + ".bin")  # Megatron's own programs name the prefix
        if not path.exists():
            raise NotFound(f"there is no token file or folder {path}")
        if not is_plain(path):
            raise _refused(path, "it is not an ordinary file")
        if path.with_suffix(".idx").exists():
            return MegatronTokens(path)
        if sidecar(path).exists():
            return TokenFile(path)
        return FlatTokens(path, dtype or "uint16")
    except OSError as error:
        raise _refused(path, f"{error.strerror or error}") from None


class FlatTokens(MappedTokens):
    """A file of bare numbers, as nanoGPT's."""

    def __init__(self, path: Path, dtype: str) -> None:
        super().__init__(path, dtype)
        if dtype not in ITEM_BYTES:
            raise UsageError(f"dtype={dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        size = path.stat().st_size
        if size % ITEM_BYTES[dtype]:
            raise _refused(
                path, f"its {size} bytes are not a whole number of {dtype} tokens; is it cut off?"
            )
        self.length = size // ITEM_BYTES[dtype]
        with open_plain(path) as file:
            if file.read(4) == struct.pack("<i", _LLM_C_MAGIC):
                raise _refused(
                    path, "it has the header of llm.c, which is not read; leave its 1,024 bytes out"
                )


class MegatronTokens(MappedTokens):
    """Megatron's `.bin`, as the `.idx` beside it says (MMapIndexedDataset, version 1)."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "uint16")
        self.index = path.with_suffix(".idx")
        self.sequences, self.documents = self._read_header()
        """How many the index has; a document is one or more sequences."""
        self._check_sequences()
        self._check_documents()

    def document_ends(self) -> npt.NDArray[np.int64]:
        """After which token each document ends."""
        import numpy as np

        ends = np.concatenate([[0], np.cumsum(self._sizes, dtype=np.int64)])
        return np.asarray(ends[self._document_indices[1:]], np.int64)

    def _read_header(self) -> tuple[int, int]:
        if not is_plain(self.index):
            raise _refused(self.index, "it is not an ordinary file")
        size = self.index.stat().st_size
        with open_plain(self.index) as file:
            head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(MEGATRON_MAGIC):
            raise _refused(self.index, "it does not begin as an index of Megatron's does")
        _, version, code, sequences, documents = _HEADER.unpack(head)
        if version != 1:
            raise _refused(self.index, f"it is of version {version}; version 1 is read")
        if code not in _MEGATRON_DTYPES:
            raise _refused(self.index, f"its dtype has the code {code}, which is none of tokens")
        self.dtype = _MEGATRON_DTYPES[code]
        expected = _HEADER.size + 12 * sequences + 8 * documents
        if size not in {expected, expected + sequences}:  # one byte each more: modes of multimodal
            raise _refused(
                self.index,
                f"it has {size} bytes, and {sequences} sequences in {documents} documents take "
                f"{expected}; is it cut off?",
            )
        if not sequences or not documents:
            raise _refused(self.index, "it has no sequences")
        return sequences, documents

    def _check_sequences(self) -> None:
        """That they lie one behind the other and fill the file, as all programs write them."""
        import numpy as np

        item, tokens = np.dtype(self.dtype).itemsize, 0
        size = self.path.stat().st_size
        for first in range(0, self.sequences, _ROWS_AT_ONCE):
            sizes = self._sizes[first : first + _ROWS_AT_ONCE].astype(np.int64)
            if sizes.min() < 0:
                raise _refused(self.index, "a sequence has a negative length")
            ends = tokens + np.cumsum(sizes)
            starts = self._pointers[first : first + _ROWS_AT_ONCE]
            if (starts != (ends - sizes) * item).any():
                raise _refused(
                    self.index, "its sequences do not lie one behind the other in the file"
                )
            tokens = int(ends[-1])
        if tokens * item != size:
            raise _refused(
                self.path, f"it has {size} bytes, its index says {tokens * item}; is it cut off?"
            )
        self.length = tokens

    def _check_documents(self) -> None:
        before = 0
        for first in range(0, self.documents, _ROWS_AT_ONCE):
            rows = self._document_indices[first : first + _ROWS_AT_ONCE]
            if rows[0] < before or (rows[1:] < rows[:-1]).any():
                raise _refused(self.index, "its documents are not in order")
            before = int(rows[-1])
        if self._document_indices[0] != 0 or before != self.sequences:
            raise _refused(
                self.index, f"its documents end at sequence {before} of {self.sequences}"
            )

    @property
    def _sizes(self) -> npt.NDArray[np.int32]:
        return self._part("<i4", 0, self.sequences)

    @property
    def _pointers(self) -> npt.NDArray[np.int64]:
        return self._part("<i8", 4 * self.sequences, self.sequences)

    @property
    def _document_indices(self) -> npt.NDArray[np.int64]:
        return self._part("<i8", 12 * self.sequences, self.documents)

    def _part(self, kind: str, after: int, count: int) -> npt.NDArray[Any]:
        import numpy as np

        offset = _HEADER.size + after
        return np.memmap(self.index, dtype=kind, mode="r", offset=offset, shape=(count,))


class ArrowTokens:
    """A column of lists of tokens in a folder that Hugging Face's datasets has saved."""

    def __init__(self, folder: Path, column: str) -> None:
        self.folder = folder
        self.column = column
        if (folder / "dataset_dict.json").exists():
            raise _refused(folder, "it holds several datasets; name the folder of one, as train")
        if not (folder / "state.json").exists():
            raise _refused(folder, "it has no state.json, as folders of Dataset.save_to_disk have")
        self.length = sum(len(part) for part in self._parts)
        """Tokens."""

    def __getstate__(self) -> dict[str, Any]:
        # Arrow pickles a table by its bytes: a spawned worker would be sent all of it.
        return {k: v for k, v in vars(self).items() if k not in {"_parts", "_ends", "_lists"}}

    def read(self, first: int, last: int) -> Tokens:
        """The tokens [first, last); a view where they lie in one file, else a copy."""
        import numpy as np

        pieces = []
        at = int(np.searchsorted(self._ends, first, side="right"))
        while first < last:
            begin = int(self._ends[at - 1]) if at else 0
            end = min(last, int(self._ends[at]))
            pieces.append(self._parts[at][first - begin : end - begin])
            first, at = end, at + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def document_ends(self) -> npt.NDArray[np.int64]:
        """After which token each row ends."""
        import numpy as np

        lengths = [np.asarray(chunk.value_lengths(), np.int64) for chunk in self._lists]
        return np.cumsum(np.concatenate(lengths))

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        import numpy as np

        return np.cumsum([len(part) for part in self._parts])

    @cached_property
    def _parts(self) -> list[Tokens]:
        """The tokens of each file, as they lie in it."""
        return [chunk.flatten().to_numpy(zero_copy_only=True) for chunk in self._lists]

    @cached_property
    def _lists(self) -> list[Any]:
        try:
            from datasets import load_from_disk
        except ImportError:
            raise UsageError(
                f"to read {self.folder}, install Hugging Face's datasets (pip install datasets)"
            ) from None
        try:
            table = load_from_disk(str(self.folder))
        except Exception as error:  # noqa: BLE001 - foreign files may raise anything
            why = (str(error).splitlines() or [""])[0]
            raise _refused(
                self.folder, f"datasets cannot load it ({type(error).__name__}: {why[:200]})"
            ) from None
        if self.column not in table.column_names:
            there = ", ".join(table.column_names)
            raise _refused(self.folder, f"it has no column {self.column!r}; there are {there}")
        if table._indices is not None:  # noqa: SLF001 - nothing public says so
            raise _refused(
                self.folder, "its rows are a selection; save it again after flatten_indices()"
            )
        return list(self._checked(table.data.column(self.column)))

    def _checked(self, column: Any) -> Iterator[Any]:
        kind = column.type
        is_lists = str(kind).startswith(_LISTS)
        if not is_lists or str(kind.value_type).removeprefix("u") not in _INTEGERS:
            raise _refused(
                self.folder, f"column {self.column!r} is of {kind}, not of lists of whole numbers"
            )
        for chunk in column.chunks:
            if chunk.null_count or chunk.flatten().null_count:
                raise _refused(self.folder, f"column {self.column!r} has rows without a value")
            if len(chunk):
                yield chunk


def _refused(path: Path, why: str) -> UsageError:
    return UsageError(f"token data {path} cannot be used: {why}")


IGNORED = -100
"""What torch's cross_entropy leaves out."""
_AT_ONCE = 1 << 22


class PackedDocuments(TokenSequences):
    """A token file or folder as packed sequences of `seq_len` tokens, for `Run.loader`.

    A sample is a dictionary of rows of `seq_len` numbers (int64): "tokens"; "targets", the token
    after each, -100 (which torch's cross_entropy leaves out) where that is another document's;
    "position_ids", counted from 0 in each document, and from 0 where a document continues from the
    sequence before; "document_ids", 0, 1, ... in each sequence. A mask of attention is
    ``document_ids[:, :, None] == document_ids[:, None, :]`` (and causal); `cu_seqlens` gives what
    variable-length attention takes.

    Attributes:
        seq_len: Tokens of a sequence.
    """

    def __init__(
        self,
        path: str | Path,
        seq_len: int,
        *,
        end_token: int | None = None,
        dtype: str | None = None,
        column: str = "input_ids",
    ) -> None:
        """Open what lies there; what of it is read is as in `TokenSequences`.

        Args:
            path: As of `TokenSequences`.
            seq_len: Tokens of a sequence.
            end_token: With which each document ends, for files that do not say where documents end
                (50256 in nanoGPT's of GPT-2). The file is read once to find them.
            dtype: As of `TokenSequences`.
            column: As of `TokenSequences`.

        Raises:
            NotFound: there is nothing.
            UsageError: as of `TokenSequences`; or nothing says where documents end.
        """
        super().__init__(path, seq_len, dtype=dtype, column=column)
        self._end_token = end_token
        if end_token is None and self.stream.document_ends() is None:
            raise UsageError(
                f"{path} does not say where its documents end; name the token that ends each, "
                "end_token=50256 for GPT-2's"
            )

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[np.int64]]:  # type: ignore[override]
        import numpy as np

        tokens = super().__getitem__(index)
        first = index * self.seq_len
        places = np.arange(first, first + self.seq_len + 1)
        among = slice(*np.searchsorted(self._ends, [first, first + self.seq_len], side="right"))
        ends = self._ends[among]
        documents = np.searchsorted(ends, places, side="right")
        starts = np.concatenate([[first], ends])[documents]
        targets = np.where(documents[1:] == documents[:-1], tokens[1:], IGNORED)
        return {
            "tokens": tokens[:-1],
            "targets": targets,
            "position_ids": (places - starts)[:-1],
            "document_ids": documents[:-1],
        }

    def __getstate__(self) -> dict[str, Any]:
        # 8 bytes for each document: a spawned worker finds them again, instead of being sent them.
        return {name: value for name, value in vars(self).items() if name != "_ends"}

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        """After which token each document ends; one without tokens is none."""
        import numpy as np

        stream = self.stream
        if self._end_token is None:
            return np.unique(np.asarray(stream.document_ends(), np.int64))
        found_at = []
        for first in range(0, stream.length, _AT_ONCE):
            piece = stream.read(first, min(first + _AT_ONCE, stream.length))
            found_at.append(np.flatnonzero(piece == self._end_token) + first + 1)
        return np.concatenate(found_at).astype(np.int64)


def cu_seqlens(document_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What variable-length attention takes for a batch of packed sequences laid end to end.

    Args:
        document_ids: Of the batch, [sequences, seq_len], as `PackedDocuments` gives them.

    Returns:
        Where each document begins in the row of all tokens of the batch, and behind the last one
        its length (int32, on the device of `document_ids`); and the longest document's length.
    """
    import torch

    rows, width = document_ids.shape
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    at = begins.flatten().nonzero().flatten().to(torch.int32)
    ends = torch.cat([at, at.new_tensor([rows * width])])
    return ends, int((ends[1:] - ends[:-1]).max())

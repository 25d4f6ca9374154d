"""Documents packed into sequences of one length, with what keeps them apart in attention.

Sequence `i` is a piece of the row of all documents, so that it can be had without those before it,
no token is left out, and a document that does not fit goes on in the next sequence. The promises
are held by tests/unit/data/test_packing.py.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from hpctrain.errors import UsageError
from hpctrain.train.data.streams import TokenSequences

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    import torch

IGNORED = -100
"""What torch's cross_entropy leaves out."""
_AT_ONCE = 1 << 22


class PackedDocuments:
    """A token file or folder as packed sequences of `seq_len` tokens, for `Run.loader`.

    A sample is a dictionary of rows of `seq_len` numbers (int64): "tokens"; "targets", the token
    after each, -100 (which torch's cross_entropy leaves out) where that is another document's;
    "position_ids", counted from 0 in each document, and from 0 where a document goes on from the
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
        self.seq_len = seq_len
        self._sequences = TokenSequences(path, seq_len, dtype=dtype, column=column)
        self._end_token = end_token
        if end_token is None and self._sequences.stream.document_ends() is None:
            raise UsageError(
                f"{path} does not say where its documents end; name the token that ends each, "
                "end_token=50256 for GPT-2's"
            )

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[np.int64]]:
        import numpy as np

        tokens = self._sequences[index]
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

        stream = self._sequences.stream
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

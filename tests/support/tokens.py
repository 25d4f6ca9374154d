"""Token files as other programs write them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

DOCUMENTS = [[5, 6, 7], [], [8], [9, 10, 11, 12, 13], [14, 15]]
MEGATRON_CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def megatron(
    path: Path,
    *,
    dtype: str = "uint16",
    sequences: list[list[int]] = DOCUMENTS,
    documents: list[int] | None = None,
    modes: bool = False,
) -> Path:
    """As Megatron-LM's IndexedDatasetBuilder writes it (core/datasets/indexed_dataset.py)."""
    kind = np.dtype(dtype).newbyteorder("<")
    sizes = [len(sequence) for sequence in sequences]
    pointers = np.concatenate([[0], np.cumsum(sizes)])[:-1] * kind.itemsize
    documents = documents if documents is not None else list(range(len(sequences) + 1))
    head = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", MEGATRON_CODES[dtype])
    head += struct.pack("<Q", len(sizes)) + struct.pack("<Q", len(documents))
    body = np.array(sizes, "<i4").tobytes() + pointers.astype("<i8").tobytes()
    body += np.array(documents, "<i8").tobytes() + bytes(len(sizes) if modes else 0)
    path.with_suffix(".idx").write_bytes(head + body)
    path.write_bytes(np.array([t for s in sequences for t in s], kind).tobytes())
    return path

"""A second reader of checkpoints of format 2, written from docs/checkpoint-format.md alone.

It imports nothing of hpctrain: a mistake that writer and reader share would not be seen otherwise.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

if TYPE_CHECKING:
    from pathlib import Path

WORDS: dict[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1",
    "C64": "<c8", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4",
    "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
"""BF16 and the two of 8 bits stay the bits that they are."""


def manifest_of(directory: Path) -> dict[str, Any]:
    """The manifest, proved by its own digest."""
    content = (directory / "MANIFEST.json").read_bytes()
    manifest: dict[str, Any] = json.loads(content)
    body, last = content[:-47], content[-47:]
    assert last == f',\n "self_digest": "xxh3_64:{xxhash.xxh3_64_hexdigest(body)}"\n}}\n'.encode()
    assert (manifest["format"], directory.name) == (2, f"step-{manifest['step']:010d}")
    return manifest


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor, each of its bytes proved."""
    manifest = manifest_of(directory)
    files = [(directory / entry["name"]).read_bytes() for entry in manifest["files"]]
    assert [len(content) for content in files] == [entry["size"] for entry in manifest["files"]]
    names = [entry["name"] for entry in manifest["files"]]
    table_at = names.index("chunks.table")
    proof = f"xxh3_64:{xxhash.xxh3_64_hexdigest(files[table_at])}"
    assert manifest["files"][table_at]["digest"] == proof
    found: dict[str, np.ndarray] = {}
    for name, text in manifest["tensors"].items():
        word, sizes = text.rstrip("]").split("[")
        shape = [int(size) for size in sizes.split(",") if size]
        found[name] = np.zeros(shape, WORDS[word])
    covered = {name: np.zeros(tensor.shape, int) for name, tensor in found.items()}
    ends: dict[int, int] = {}
    numbers: dict[int, list[int]] = {}
    for file, offset, name, flat, begin, extent, digests in _rows(files[table_at], manifest, found):
        head = numbers.setdefault(file, [xxhash.xxh3_64_intdigest(files[file][:offset])])
        assert ends.get(file, offset) == offset
        nbytes = math.prod(extent) * found[name].itemsize
        ends[file] = offset + nbytes
        chunk = files[file][offset : offset + nbytes]
        blocks = range(0, nbytes, manifest["block_bytes"])
        found_digests = [
            xxhash.xxh3_64_intdigest(chunk[at : at + manifest["block_bytes"]]) for at in blocks
        ]
        assert found_digests == digests
        head += digests
        place = tuple(slice(b, b + e) for b, e in zip(begin, extent, strict=True))
        values = np.frombuffer(chunk, found[name].dtype).reshape(extent)
        (found[name].reshape(-1) if flat else found[name])[place] = values
        (covered[name].reshape(-1) if flat else covered[name])[place] += 1
    for file, row in numbers.items():
        digest = xxhash.xxh3_64_hexdigest(struct.pack(f"<{len(row)}Q", *row))
        assert manifest["files"][file]["digest"] == f"xxh3_64-blocks:{digest}"
        assert ends[file] == len(files[file])
    assert sorted([*numbers, table_at]) == list(range(len(files)))
    assert all((count == 1).all() for count in covered.values())
    return found


def _rows(content: bytes, manifest: dict[str, Any], found: dict[str, np.ndarray]) -> Any:
    length = int.from_bytes(content[:8], "little")
    columns = {}
    for name, about in json.loads(content[8 : 8 + length]).items():
        low, high = about["data_offsets"]
        data = content[8 + length + low : 8 + length + high]
        columns[name] = np.frombuffer(data, WORDS[about["dtype"]]).tolist()
    pairs = blocks = 0
    for row, tensor in enumerate(columns["tensor"]):
        name = list(found)[tensor]
        dims = columns["dims"][row]
        begin, extent = (columns[key][pairs : pairs + dims] for key in ("begin", "extent"))
        count = math.ceil(math.prod(extent) * found[name].itemsize / manifest["block_bytes"])
        digests = columns["digests"][blocks : blocks + count]
        pairs, blocks = pairs + dims, blocks + count
        place = columns["file"][row], columns["offset"][row]
        yield *place, name, columns["flat"][row], begin, extent, digests

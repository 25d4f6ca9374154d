"""A second reader of checkpoints of formats 3 and 4, written from checkpoint-format.md alone.

It imports nothing of hpctrain: a mistake that writer and reader share would not be seen otherwise.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORDS: dict[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1",
    "C64": "<c8", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4",
    "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
"""BF16 and the two of 8 bits stay the bits that they are."""


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor, each of its bytes proved."""
    content = (directory / "MANIFEST.json").read_bytes()
    manifest: dict[str, Any] = json.loads(content)
    body, last = content[:-47], content[-47:]
    assert last == f',\n "self_digest": "xxh3_64:{xxhash.xxh3_64_hexdigest(body)}"\n}}\n'.encode()
    assert manifest["format"] in {3, 4}
    assert directory.name == f"step-{manifest['step']:010d}"
    entries = _entries(manifest["files"])
    files = [(directory / entry["name"]).read_bytes() for entry in entries]
    assert [len(content) for content in files] == [entry["size"] for entry in entries]
    table_at = [entry["name"] for entry in entries].index("chunks.table")
    proof = f"xxh3_64:{xxhash.xxh3_64_hexdigest(files[table_at])}"
    assert entries[table_at]["digest"] == proof
    found: dict[str, np.ndarray] = {}
    for name, text in _texts(manifest):
        word, sizes = text.rstrip("]").split("[")
        found[name] = np.zeros([int(size) for size in sizes.split(",") if size], WORDS[word])
    covered = {name: np.zeros(tensor.shape, int) for name, tensor in found.items()}
    names, seen = list(found), [table_at]
    for file, head, chunks in _files(_columns(files[table_at])):
        seen.append(file)
        at, digests, whole = head, [xxhash.xxh3_64_intdigest(files[file][:head])], files[file]
        for number, flat, begin, extent in chunks:
            tensor = found[names[number]]
            chunk = whole[at : at + math.prod(extent) * tensor.itemsize]
            at += len(chunk)
            size = manifest["block_bytes"]
            digests += [
                xxhash.xxh3_64_intdigest(chunk[low : low + size])
                for low in range(0, len(chunk), size)
            ]
            place = tuple(slice(b, b + e) for b, e in zip(begin, extent, strict=True))
            values = np.frombuffer(chunk, tensor.dtype).reshape(extent)
            (tensor.reshape(-1) if flat else tensor)[place] = values
            counts = covered[names[number]]
            (counts.reshape(-1) if flat else counts)[place] += 1
        assert np.frombuffer(whole[at:], "<u8").tolist() == digests
        digest = f"xxh3_64-blocks:{xxhash.xxh3_64_hexdigest(whole[at:])}"
        assert entries[file]["digest"] == digest
    assert sorted(seen) == list(range(len(files)))
    assert all((count == 1).all() for count in covered.values())
    return found


def _entries(files: Any) -> list[dict[str, Any]]:
    """The list of files, or what an object stands for."""
    if isinstance(files, list):
        return files
    pairs = zip(files["sizes"][::2], files["sizes"][1::2], strict=True)
    sizes = [size for size, count in pairs for _ in range(count)]
    return [
        {
            "name": f"shard-{rank:05d}.safetensors",
            "size": size,
            "digest": "xxh3_64-blocks:" + files["digests"][16 * at : 16 * at + 16],
        }
        for at, (rank, size) in enumerate(zip(_ranks(files["ranks"]), sizes, strict=True))
    ] + files["others"]


def _texts(manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Tensors as they are counted."""
    yield from manifest["tensors"].items()
    for rule in manifest.get("own", []):
        for rank in _ranks(rule["ranks"]):
            for name, text in rule["tensors"].items():
                yield name.replace("*", f"{rank:05d}", 1), text


def _ranks(numbers: list[int]) -> list[int]:
    triples = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    return [first + step * n for first, step, count in triples for n in range(count)]


def _columns(content: bytes) -> dict[str, list[int]]:
    length = int.from_bytes(content[:8], "little")
    columns = {}
    for name, about in json.loads(content[8 : 8 + length]).items():
        low, high = about["data_offsets"]
        data = content[8 + length + low : 8 + length + high]
        columns[name] = np.frombuffer(data, WORDS[about["dtype"]]).tolist()
    return columns


def _files(columns: dict[str, list[int]]) -> Iterator[tuple[int, int, list[Any]]]:
    """Each file, the byte of its first chunk, and its chunks: tensor, flat, begin, extent."""
    piece = pair = file = number = 0
    for pieces, files, width in zip(
        columns["pieces"], columns["files"], columns["numbers"], strict=True
    ):
        dims = columns["dims"][piece : piece + pieces]
        for place in range(files):
            numbers = [0, *columns["number"][number : number + width]]
            chunks, at = [], pair
            for row, count in enumerate(dims, piece):
                extent = columns["extent"][at : at + count]
                begin = [
                    numbers[source] * (size if unit else 1)
                    for source, size, unit in zip(
                        columns["source"][at : at + count],
                        extent,
                        columns["unit"][at : at + count],
                        strict=True,
                    )
                ]
                tensor = columns["tensor"][row] + place * columns["own"][row]
                chunks.append((tensor, columns["flat"][row], begin, extent))
                at += count
            yield columns["file"][file], columns["head"][file], chunks
            file, number = file + 1, number + width
        piece, pair = piece + pieces, pair + sum(dims)

"""How a copy in memory lies in its slot, and what it says. Pure.

What is whole is known from the copy's digest, which its replica server has sent over a connection
with codes: it proves the proof at the copy's end, and that proves the header and each block.
tests/unit/memory/test_in_memory_copies.py and tests/unit/memory/test_whole.py hold the promises.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.checkpoint.format import manifest as manifests
from hpctrain.checkpoint.format import shard
from hpctrain.checkpoint.format.layout import FileLayout, RankPart, assemble, placed
from hpctrain.checkpoint.format.manifest import FileEntry, block_digest
from hpctrain.checkpoint.format.shard import file_name
from hpctrain.checkpoint.format.table import entry_of
from hpctrain.errors import TornCheckpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.checkpoint.format.shard import ShardPiece


@dataclass(frozen=True)
class CopyPlan:
    """How a copy lies in its slot, as the rank says it.

    Attributes:
        world_size: Ranks that make copies of this step.
        sizes: Bytes of each part, one behind the other behind the header.
        block_bytes: That one digest covers.
        facts: What the readers need beside the bytes: JSON.
    """

    world_size: int
    rank: int
    head: int
    sizes: tuple[int, ...]
    block_bytes: int
    facts: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of the whole."""
        blocks = sum(shard.blocks_of(size, self.block_bytes) for size in self.sizes)
        return self.head + sum(self.sizes) + shard.proof_bytes(blocks)

    def dump(self) -> bytes:
        """As JSON."""
        return json.dumps(vars(self), separators=(",", ":")).encode()

    @classmethod
    def parse(cls, content: bytes) -> CopyPlan:
        """What `dump` gave.

        Raises:
            ValueError: it is anything else.
        """
        raw = json.loads(content)
        try:
            plan = cls(**raw | {"sizes": tuple(raw["sizes"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"no plan of a copy: {error}") from error
        numbers = (plan.world_size, plan.rank, plan.head, plan.block_bytes, *plan.sizes)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("a plan of a copy with odd numbers")
        if not plan.block_bytes or not isinstance(plan.facts, dict):
            raise ValueError("a plan of a copy without blocks or facts")
        return plan


Range = tuple[int, int]
"""Bytes of a copy: the first, and the one behind the last."""


def blocks(plan: CopyPlan) -> Iterator[Range]:
    """The header of a copy, and each of its blocks."""
    yield 0, plan.head
    ends = plan.head + np.cumsum([0, *plan.sizes], dtype=np.int64)
    for low, high in pairwise(ends.tolist()):
        for begin in range(low, high, plan.block_bytes):
            yield begin, min(begin + plan.block_bytes, high)


def is_whole(view: memoryview, plan: CopyPlan, digest: str) -> bool:
    """Return whether every byte of a copy is as it was proved.

    `view` has `plan.size` bytes; `digest` is of the whole copy, as in a manifest.
    """
    ranges = list(blocks(plan))
    proof = bytes(view[plan.size - shard.proof_bytes(len(ranges) - 1) : plan.size])
    if shard.proof_digest(proof) != digest:
        return False
    said = zip(ranges, np.frombuffer(proof, "<u8").tolist(), strict=True)
    return all(block_digest(view[begin:end]) == awaited for (begin, end), awaited in said)


def pieces(size: int, most_bytes: int) -> Iterator[Range]:
    """A copy's bytes in ranges of at most `most_bytes`."""
    for begin in range(0, size, most_bytes):
        yield begin, min(begin + most_bytes, size)


_NARROW = frozenset({"own", "dtype", "ranks", "dims", "flat", "unit"})


def part_facts(pieces: Sequence[ShardPiece], rank: int) -> dict[str, Any]:
    """Where a rank's parts lie in their tensors."""
    where = placed(pieces, rank)
    if where.layout is None:
        return {}
    columns = {
        field.name: getattr(where.layout, field.name).tolist()
        for field in fields(FileLayout)
        if field.name != "names"
    }
    layout = {"names": list(where.layout.names), **columns}
    return {"layout": layout, "numbers": where.numbers.tolist()}


def part_of(rank: int, answer: Sequence[Any]) -> RankPart:
    """Return a rank's part of a checkpoint.

    `answer` has size, digest and header bytes of its copy, and its facts.

    Raises:
        TornCheckpoint: it is something else.
    """
    try:
        size, digest, head, facts = answer
        part = facts["part"]
        if not part:
            return RankPart(None)
        columns: dict[str, Any] = {
            name: np.array(column, np.uint8 if name in _NARROW else np.int64)
            for name, column in part["layout"].items()
            if name != "names"
        }
        layout = FileLayout(names=tuple(part["layout"]["names"]), **columns)
        return RankPart(
            file=FileEntry(file_name(rank), int(size), str(digest)),
            head=int(head),
            key=layout.key,
            numbers=np.array(part["numbers"], np.int64),
            layout=layout,
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TornCheckpoint(f"what rank {rank} says of its copy is not whole: {error}") from error


def parts_of(answers: Mapping[int, Sequence[Any]]) -> tuple[Manifest, list[RankPart]]:
    """The manifest of a checkpoint without files and tensors, and the parts that fill them in.

    Raises:
        CheckpointError: what the copies say is not whole.
    """
    parts = [part_of(rank, answers[rank]) for rank in sorted(answers)]
    return manifests.of_plain(answers[0][3].get("manifest") or {}), parts


def joined(answers: Mapping[int, Sequence[Any]]) -> tuple[Manifest, bytes]:
    """The manifest of a checkpoint and its chunk table, from what all ranks' copies say.

    Raises:
        CheckpointError: the copies do not make up the tensors.
    """
    manifest, parts = parts_of(answers)
    files, manifest.tensors, chunks = assemble(parts, manifest.block_bytes)
    content = chunks.dump()
    manifest.files = [*files, entry_of(content)]
    return manifest, content

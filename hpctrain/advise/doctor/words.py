"""A diagnosis in words: its one line with the numbers that were read, and what to do. Pure.

tests/unit/doctor/test_words.py holds the promises.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpctrain.advise.doctor.faults import KNOWLEDGE, TABLE, FaultKind
from hpctrain.advise.doctor.signature import Role
from hpctrain.core.base.text import fold_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpctrain.advise.doctor.sighting import Sighting

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "bytes": 1}
_SIZE = r"(?<![\d.])([\d.]+) ([KMGT]iB|bytes)"
_ASKED = re.compile(rf"Tried to allocate {_SIZE}")
_CAPACITY = re.compile(rf"total capaci?ty of {_SIZE}|; {_SIZE} total capacity")
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_RESERVED = re.compile(rf"{_SIZE} reserved in total by PyTorch")
_OF_OTHERS = re.compile(rf"Process \d+ has {_SIZE} memory in use")
FRAGMENTED = 0.1
"""Of the GPU's memory that is reserved and not in use: worth another allocator setting."""
GIB = 2**30


def headline(first: Sighting, kind: FaultKind, sightings: Sequence[Sighting]) -> str:
    """One line: what, on which rank, with its numbers."""
    ranks = sorted({s.rank for s in sightings if s.kind is first.kind and s.rank is not None})
    who = f" on {fold_ranks(ranks)}" if ranks else ""
    node = f" (node {first.node})" if first.node else ""
    if first.role is Role.DEATH and kind is FaultKind.HOST_OOM:
        how = "died at once" if "SYSTEM_ERROR" in first.text else "was killed by SIGKILL"
        return f"a process {how}{who}{node}: most often a node's memory is out"
    detail = _detail(first, kind)
    return f"{KNOWLEDGE[kind].title}{who}{node}{': ' if detail else ''}{detail}"


def advice(first: Sighting, kind: FaultKind, sightings: Iterable[Sighting]) -> tuple[str, ...]:
    """What to do, what fits this case best first."""
    do = first.advice or KNOWLEDGE[kind].do
    if kind is FaultKind.GPU_OOM:
        memory = next((m for s in sightings if (m := GpuMemory.read(s.text)) is not None), None)
        return (*(memory.advice() if memory is not None else ()), *do)
    if kind is FaultKind.CHECKPOINT and first.details.get("was") and first.details.get("now"):
        return do[:1]
    return do


class GpuMemory:
    """What torch's allocator says when it is out of memory, in bytes; 0 for what it leaves out."""

    def __init__(self, text: str) -> None:
        self.asked = _bytes(_ASKED, text)
        self.capacity = _bytes(_CAPACITY, text)
        self.allocated = _bytes(_ALLOCATED, text)
        reserved = _bytes(_RESERVED, text)
        self.unallocated = _bytes(_UNALLOCATED, text) or max(0, reserved - self.allocated)
        self.others = sum(_amount(*found) for found in _OF_OTHERS.findall(text))

    @classmethod
    def read(cls, text: str) -> GpuMemory | None:
        """None where the line tells no sizes."""
        memory = cls(text)
        return memory if memory.asked and memory.capacity else None

    @property
    def is_fragmented(self) -> bool:
        """Whether what was asked for would have fitted into what is reserved and not in use."""
        return self.unallocated >= self.asked and self.unallocated > FRAGMENTED * self.capacity

    def words(self) -> str:
        """The numbers that matter."""
        text = f"asked for {_gib(self.asked)} of {_gib(self.capacity)}"
        if self.allocated:
            text += f", {_gib(self.allocated)} in use"
        if self.unallocated:
            text += f", {_gib(self.unallocated)} reserved but not in use"
        if self.others:
            text += f", {_gib(self.others)} held by other processes"
        if self.is_fragmented:
            text += ": fragmentation, not capacity"
        return text

    def advice(self) -> tuple[str, ...]:
        """What these numbers call for before anything else."""
        if self.is_fragmented:
            return (
                (
                    "the memory is there but in pieces: "
                    "PYTORCH_ALLOC_CONF=expandable_segments:True "
                    "(PYTORCH_CUDA_ALLOC_CONF before torch 2.9)"
                ),
            )
        if self.others > self.capacity / 4:
            return (
                (
                    "other processes hold much of that GPU: look with `nvidia-smi` for ranks that "
                    "share it or are left over"
                ),
            )
        if self.asked > self.capacity / 4:
            return (
                (
                    "one block is a large part of the GPU: often logits (sequence x "
                    "vocabulary), or "
                    "one gathered unit of a sharded model; wrap it in smaller units, or "
                    "chunk the loss"
                ),
            )
        return ()


def _bytes(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    if match is None:
        return 0
    number, unit = [group for group in match.groups() if group][:2]
    return _amount(number, unit)


def _amount(number: str, unit: str) -> int:
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, OverflowError):
        return 0


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"


def _detail(first: Sighting, kind: FaultKind) -> str:
    """What was read of the line, in the words of faults.toml; else the line itself."""
    parts_read = {key: value.strip() for key, value in first.details.items()}
    parts_read |= {"peer": parts_read.get("peer", "").strip("[]()").rstrip(".")}
    memory = GpuMemory.read(first.text) if kind is FaultKind.GPU_OOM else None
    parts_read |= {"message": _shortened(first.text), "place": first.place}
    parts_read |= {"memory": memory.words() if memory is not None else ""}
    parts_read |= {
        "meaning": TABLE["xids"].get(parts_read.get("xid", ""), "see NVIDIA's list of Xid errors")
    }
    about = KNOWLEDGE[kind]
    parts = ", ".join(
        text for each in about.all_of if (text := _filled(each, parts_read)) is not None
    )
    filled = (text for each in about.first_of if (text := _filled(each, parts_read)) is not None)
    return parts or next(filled, parts_read["message"])


def _filled(template: str, parts_read: Mapping[str, str]) -> str | None:
    """A text with its parts filled in; None where one of them is not known."""
    names = _PART.findall(template)
    if not all(parts_read.get(name) for name in names):
        return None
    return _PART.sub(lambda match: parts_read[match[1]], template)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


_PART = re.compile(r"\{(\w+)\}")
_LONGEST = 200

"""A diagnosis in words: its one line with the numbers that were read, and what to do. Pure.

tests/unit/doctor/test_words.py holds the promises.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpctrain.base.text import fold_ranks
from hpctrain.doctor.faults import KNOWLEDGE, XIDS, FaultKind
from hpctrain.doctor.signature import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hpctrain.doctor.sighting import Sighting

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
    words = _WORDS.get(kind)
    detail = words(first) if words is not None else ""
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


def _of_memory(first: Sighting) -> str:
    memory = GpuMemory.read(first.text)
    return memory.words() if memory is not None else ""


def _of_gpu(first: Sighting) -> str:
    details = first.details
    if "xid" in details:
        number = int(details["xid"])
        meaning = XIDS.get(number, "see NVIDIA's list of Xid errors")
        return f"Xid {number} on {details.get('gpu', 'a GPU')}: {meaning}"
    return _message(first)


def _of_meeting(first: Sighting) -> str:
    details = first.details
    port = details.get("port") or details.get("port2")
    if port:
        return f"port {port}"
    peer = details.get("peer")
    if peer:
        waited = f" after {details['waited']}" if "waited" in details else ""
        return f"no answer from {peer.strip('[]()')}{waited}"
    return _message(first)


def _of_link(first: Sighting) -> str:
    details = first.details
    parts = [f"peer {details['peer'].rstrip('.')}"] if details.get("peer") else []
    parts += [f"{name} {details[name]}" for name in ("card", "status", "call") if name in details]
    if details.get("vendor"):
        parts.append(f"vendor error {details['vendor']}")
    return ", ".join(parts) or _message(first)


def _of_storage(first: Sighting) -> str:
    path = first.details.get("path")
    return f"at {path}" if path else _message(first)


def _of_checkpoint(first: Sighting) -> str:
    details = first.details
    if "was" in details and "now" in details:
        key = f" for {details['key']}" if "key" in details else ""
        return f"written with {details['was']}, read with {details['now']}{key}"
    return _message(first)


def _of_difference(first: Sighting) -> str:
    details = first.details
    if "operation" in details and "first" in details:
        text = f"rank {details['first']} called {details['operation']}"
        if "other" in details and "second" in details:
            text += f", rank {details['second']} {details['other']}"
        return text
    if "missing" in details:
        return f"rank {details['missing'].strip()} did not come to a barrier"
    return _message(first)


def _of_code(first: Sighting) -> str:
    where = f" at {first.place}" if first.place else ""
    return f"{_message(first)}{where}"


def _message(first: Sighting) -> str:
    text = first.text
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


_LONGEST = 200
_WORDS: Mapping[FaultKind, Callable[[Sighting], str]] = {
    FaultKind.GPU_OOM: _of_memory,
    FaultKind.GPU_ERROR: _of_gpu,
    FaultKind.GPU_ASSERT: _message,
    FaultKind.GPU_SETUP: _message,
    FaultKind.HOST_OOM: _message,
    FaultKind.SHARED_MEMORY: _message,
    FaultKind.DATA_WORKER: _message,
    FaultKind.STORAGE_FULL: _of_storage,
    FaultKind.STORAGE_ERROR: _of_storage,
    FaultKind.HANG: _message,
    FaultKind.DESYNC: _of_difference,
    FaultKind.TRANSPORT: _of_link,
    FaultKind.INTERFACE: _of_meeting,
    FaultKind.PORT_IN_USE: _of_meeting,
    FaultKind.RENDEZVOUS: _of_meeting,
    FaultKind.LAUNCH: _message,
    FaultKind.VERSIONS: _message,
    FaultKind.COMPILER: _message,
    FaultKind.DOWNLOAD: _message,
    FaultKind.STALE_SHARED_MEMORY: _message,
    FaultKind.CHECKPOINT: _of_checkpoint,
    FaultKind.FP16_OVERFLOW: _message,
    FaultKind.NAN: _message,
    FaultKind.LOSS_SPIKE: _message,
    FaultKind.CODE: _of_code,
    FaultKind.NATIVE: _of_code,
    FaultKind.KILLED: _message,
    FaultKind.WALLTIME: _message,
    FaultKind.PREEMPTED: _message,
    FaultKind.CANCELLED: _message,
    FaultKind.NODE_FAIL: _message,
}

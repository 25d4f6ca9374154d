"""What evaluations have found as curves for TensorBoard: `eval/NAME` at each checkpoint's step.

They lie in a folder of their own, below that of the attempts: another run to TensorBoard, `eval`,
which no attempt that begins again makes forget a point, and whose writers disturb no attempt's. Who
evaluates is not rank 0, and may come long after the training, so the file follows from the ledger
alone: it is what it must be, or is made so, whoever dies in between. TensorBoard wants steps that
rise, and evaluations come in any order (the newest first, when behind): a point that goes before
others makes a new file, which tells TensorBoard to forget the one before it.

The format is protobuf events in checksummed records, written here by hand: the batch script's side
does not wait for TensorBoard's import. Standard library only.
tests/unit/run/test_evaluation_curves.py and tests/unit/runtime/test_event_file.py read it with
TensorBoard's own readers.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from typing import TYPE_CHECKING

from hpctrain.base.files import plain_descriptor, read_plain
from hpctrain.run import events as ledger
from hpctrain.run.event_types import Evaluated

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.run.events import Event
    from hpctrain.run.layout import RunDir

PREFIX = "eval/"
KEPT = 8
"""Files, of which the newest counts: a TensorBoard that is open fails where the one is gone that it
was reading."""
_NAME = re.compile(r"events\.out\.tfevents\.evaluations-\d{10}")
"""Of our own files; others that lie beside them are none of our business."""
_STAGED = "staged"
"""TensorBoard reads whatever has `tfevents` in its name."""
_POLYNOMIAL = 0x82F63B78  # CRC-32C, as TFRecord has it
_MASK = 0xA282EAD8
# A field's number in its message, and the kind of its value.
_WALL_TIME, _STEP, _VERSION, _SUMMARY, _SESSION = b"\x09", b"\x10", b"\x1a", b"\x2a", b"\x3a"
_VALUE, _TAG, _SIMPLE_VALUE = b"\x0a", b"\x0a", b"\x15"
_START = b"\x08\x01"


def write_curves(run: RunDir) -> None:
    """Make the curves what the run's ledger says; one process at a time calls it.

    Raises:
        OSError: the ledger cannot be read, or the file not written; the next call makes it good.
    """
    wanted = _wanted(ledger.read_marked(run, b'"evaluated"'))
    if not wanted:
        return
    folder = run.evaluation_curves
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    there = read_plain(files[-1]) if files else None
    if there is not None and wanted.startswith(there):
        _append(files[-1], wanted[len(there) :])
        return
    newest = int(files[-1].name.rpartition("-")[2]) if files else 0
    staged = folder / _STAGED
    staged.unlink(missing_ok=True)
    _append(staged, wanted)
    staged.replace(folder / f"events.out.tfevents.evaluations-{newest + 1:010d}")
    for path in files[: 1 - KEPT]:
        path.unlink(missing_ok=True)


def record(content: bytes) -> bytes:
    """An event as it stands in a file, between its length and its checksums."""
    length = struct.pack("<Q", len(content))
    return length + masked_crc(length) + content + masked_crc(content)


def masked_crc(content: bytes) -> bytes:
    """The checksum of a record's parts."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def _wanted(events: list[Event]) -> bytes:
    """The whole file, steps rising; nothing before the first point."""
    by_step: dict[int, tuple[float, Evaluated]] = {}
    for event in events:
        if isinstance(event.fact, Evaluated):
            by_step[event.fact.step] = (event.t, event.fact)
    points = [(step, *by_step[step]) for step in sorted(by_step) if by_step[step][1].metrics]
    if not points:
        return b""
    begin = _WALL_TIME + struct.pack("<d", points[0][1])
    head = [record(begin + _VERSION + _sized(b"brain.Event:2"))]
    head.append(record(begin + _SESSION + _sized(_START)))
    return b"".join([*head, *(record(_point(*point)) for point in points)])


def _point(step: int, t: float, fact: Evaluated) -> bytes:
    values = b"".join(
        _VALUE
        + _sized(
            _TAG + _sized((PREFIX + name).encode(errors="replace")) + _SIMPLE_VALUE + _single(value)
        )
        for name, value in fact.metrics.items()
    )
    return _WALL_TIME + struct.pack("<d", t) + _STEP + _varint(step) + _SUMMARY + _sized(values)


def _single(value: float) -> bytes:
    """In single precision, as TensorBoard has it; what is beyond it is infinite."""
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _sized(content: bytes) -> bytes:
    return _varint(len(content)) + content


def _varint(number: int) -> bytes:
    groups = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits a byte
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])


def _append(path: Path, content: bytes) -> None:
    descriptor = plain_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with contextlib.closing(os.fdopen(descriptor, "ab", buffering=0)) as file:
        while content:
            content = content[file.write(content) :]


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _crc_table()

"""What evaluations measured: the JSON file of each, and the TensorBoard curves of all.

Any program may write the JSON file: `read_results` always returns, and says what is wrong. A number
that is not finite is refused, because NaN could pass for the best value.

The file of curves follows from the ledger alone, so a writer that dies is made good by the next
one. The records are written by hand, here and for the run's own curves, because the batch script's
side cannot wait for TensorBoard's import. tests/unit/run/test_results.py, test_evaluation_curves.py
and tests/unit/runtime/test_event_file.py hold the promises.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.files import plain_descriptor, read_plain, replace_text
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import Evaluated

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hpctrain.ledger.run.events import Event
    from hpctrain.ledger.run.layout import RunDir


MOST_BYTES = 256 << 10
MOST_METRICS = 256
LONGEST_NAME = 128
SHOWN = 3
"""Problems that are listed one by one."""


@dataclass(frozen=True)
class Results:
    """What was read of an evaluation's results.

    Attributes:
        metrics: Names and finite numbers, in the file's order.
        why: What is wrong with the file, or with some of it; "" where all is well.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    why: str = ""


def is_name(name: object) -> bool:
    """Whether a metric can have this name: one line, that no terminal obeys, of some characters."""
    if not isinstance(name, str):
        return False
    return 0 < len(name) <= LONGEST_NAME and name.isprintable() and name == name.strip()


def write_results(path: Path, metrics: Mapping[str, float]) -> None:
    """Put the results there, whole or not at all; a number that is not finite as null.

    Raises:
        OSError: they could not be written; names the file.
    """
    rows = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    replace_text(path, json.dumps(rows, indent=1) + "\n")


def read_results(path: Path) -> Results:
    """What an evaluation has left there; never an error, whatever it is."""
    try:
        raw = json.loads(read_plain(path, MOST_BYTES))
    except FileNotFoundError:
        return Results(why=f"{path.name} is not there: the program has reported nothing")
    except OSError as error:
        return Results(why=f"{path.name} cannot be read: {error.strerror or error}")
    except (ValueError, RecursionError) as error:
        words = " ".join(str(error).split())[:LONGEST_NAME]
        return Results(why=f"{path.name} is no JSON: {words}")
    if not isinstance(raw, dict):
        return Results(why=f"{path.name} is no object of names and numbers")
    return _checked(path.name, raw)


def _checked(file: str, raw: dict[Any, Any]) -> Results:
    metrics: dict[str, float] = {}
    wrong: list[str] = []
    for name, value in raw.items():
        if not is_name(name):
            wrong.append(f"{ascii(name)[:LONGEST_NAME]} is no name of a metric")
        elif (number := _number(value)) is None:
            wrong.append(f"{name} is no number")
        elif not math.isfinite(number):
            wrong.append(f"{name} is not finite")
        elif len(metrics) == MOST_METRICS:
            wrong.append(f"{name} is beyond {MOST_METRICS} metrics")
        else:
            metrics[name] = number
    if not raw:
        wrong.append("it names no metric")
    more = f" (and {len(wrong) - SHOWN} more)" if len(wrong) > SHOWN else ""
    return Results(metrics, f"{file}: {'; '.join(wrong[:SHOWN])}{more}" if wrong else "")


def _number(value: object) -> float | None:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf


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
_SUMMARY, _SESSION_LOG = 5, 7
"""Fields of TensorBoard's `Event`, beside its time, its step and its version."""


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


def _wanted(events: list[Event]) -> bytes:
    """The whole file, steps rising; nothing before the first point."""
    by_step: dict[int, tuple[float, Evaluated]] = {}
    for event in events:
        if isinstance(event.fact, Evaluated):
            by_step[event.fact.step] = (event.t, event.fact)
    points = [(step, *by_step[step]) for step in sorted(by_step) if by_step[step][1].metrics]
    if not points:
        return b""
    curves = [
        scalars_record(t, step, {PREFIX + name: value for name, value in fact.metrics.items()})
        for step, t, fact in points
    ]
    return b"".join([*file_head(points[0][1], 0), *curves])


def _append(path: Path, records: bytes) -> None:
    descriptor = plain_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with contextlib.closing(os.fdopen(descriptor, "ab", buffering=0)) as file:
        while records:
            records = records[file.write(records) :]


# ---- records of TensorBoard's files: protobuf events, written by hand


def file_head(t: float, purge_step: int) -> list[bytes]:
    """The records that begin a file; steps of earlier files from `purge_step` on count no more."""
    version = record(double(1, t) + content(3, "brain.Event:2"))
    return [version, event_record(t, purge_step, content(_SESSION_LOG, varint(1, 1)))]


def scalars_record(t: float, step: int, values: Mapping[str, float]) -> bytes:
    """Scalars of one step (may be NaN); `t` is seconds since the epoch."""
    points = (content(1, content(1, name) + single(2, value)) for name, value in values.items())
    return event_record(t, step, content(_SUMMARY, b"".join(points)))


def event_record(t: float, step: int, what: bytes) -> bytes:
    """An event with one field beside its time and its step."""
    return record(double(1, t) + varint(2, step) + what)


def record(event: bytes) -> bytes:
    """An event as it stands in a file, between its length and its checksums."""
    length = struct.pack("<Q", len(event))
    return length + masked_crc(length) + event + masked_crc(event)


def masked_crc(part: bytes) -> bytes:
    """The checksum of a record's parts."""
    crc = 0xFFFFFFFF
    for byte in part:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def varint(field: int, number: int) -> bytes:
    """A field of a message: a whole number from 0 on."""
    return _varint(field << 3) + _varint(number)


def double(field: int, value: float) -> bytes:
    """A field of a message: a number in double precision."""
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def single(field: int, value: float) -> bytes:
    """A field of a message: a number in single precision; what is beyond it is infinite."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", math.inf if value > 0 else -math.inf)
    return _varint(field << 3 | 5) + packed


def content(field: int, value: bytes | str) -> bytes:
    """A field of a message: text, bytes, or another message."""
    value = value.encode(errors="replace") if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    groups = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits a byte
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _crc_table()

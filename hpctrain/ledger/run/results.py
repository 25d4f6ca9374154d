"""What evaluations measured: the JSON file of each, and the TensorBoard curves of all.

Any program may write the JSON file: `read_results` always returns, and says what is wrong. A number
that is not finite is refused, because NaN could pass for the best value.

`write_curves` writes `eval/NAME` below the run's attempts. The file follows from the ledger alone,
so a writer that dies is made good by the next one. TensorBoard needs rising steps: an older step
makes a new file. The records are written here by hand, because the batch script's side cannot wait
for TensorBoard's import. Standard library only. tests/unit/run/test_results.py,
test_evaluation_curves.py and tests/unit/runtime/test_event_file.py hold the promises.
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
"""Problems that are told one by one."""


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
        content = json.loads(read_plain(path, MOST_BYTES))
    except FileNotFoundError:
        return Results(why=f"{path.name} is not there: the program has reported nothing")
    except OSError as error:
        return Results(why=f"{path.name} cannot be read: {error.strerror or error}")
    except (ValueError, RecursionError) as error:
        words = " ".join(str(error).split())[:LONGEST_NAME]
        return Results(why=f"{path.name} is no JSON: {words}")
    if not isinstance(content, dict):
        return Results(why=f"{path.name} is no object of names and numbers")
    return _checked(path.name, content)


def _checked(file: str, content: dict[Any, Any]) -> Results:
    metrics: dict[str, float] = {}
    wrong: list[str] = []
    for name, value in content.items():
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
    if not content:
        wrong.append("it names no metric")
    more = f" (and {len(wrong) - SHOWN} more)" if len(wrong) > SHOWN else ""
    return Results(metrics, f"{file}: {'; '.join(wrong[:SHOWN])}{more}" if wrong else "")


def _number(value: object) -> float | None:
    """A JSON number, and null for one that is not finite; None of what is neither."""
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

"""TensorBoard's file format: protobuf events in checksummed records. Written by rank 0's Board.

torch's SummaryWriter names its files by the node's clock, and TensorBoard reads files in the order
of their names: a node whose clock is behind would be read before the attempt that it follows. It
also takes seconds to import. So the file is ours: named by the attempt, one record for all scalars
of a step. tests/unit/test_event_file.py reads it with TensorBoard's own readers.
"""

from __future__ import annotations

import os
import struct
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_POLYNOMIAL = 0x82F63B78  # CRC-32C, as TFRecord has it
_MASK = 0xA282EAD8


def file_name(attempt: int) -> str:
    """A name that sorts after those of earlier attempts, and after all that begin with a time."""
    return f"events.out.tfevents.attempt-{attempt:010d}"


class EventFile:
    """One attempt's event file.

    Nothing is kept in a buffer that a forked child could write a second time: records are collected
    in a list and handed to the kernel by `flush`.

    Raises:
        OSError: from any method, where the file cannot be written.
    """

    def __init__(self, path: Path, *, purge_step: int) -> None:
        """Begin the file.

        Args:
            path: Where; its folder is made.
            purge_step: Steps from here on, as earlier files have them, count no longer.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._new_event: Any = Event
        self._records: list[bytes] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=time.time(), step=purge_step, session_log=start))

    def scalars(self, step: int, t: float, values: Mapping[str, float]) -> None:
        """Scalars of one step, as one record.

        Args:
            step: The step.
            t: When they were told, seconds since the epoch.
            values: Name to value; NaN is one.
        """
        event = self._new_event(wall_time=t, step=step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._add(event)

    def text(self, step: int, tag: str, markdown: str) -> None:
        """A page of TensorBoard's Text tab; the newest of a tag is shown first."""
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        tensor = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()])
        tensor.tensor_shape.dim.add(size=1)
        event = self._new_event(wall_time=time.time(), step=step)
        value = event.summary.value.add(tag=f"{tag}/text_summary", tensor=tensor)
        value.metadata.plugin_data.plugin_name = "text"
        value.metadata.plugin_data.content = b""
        self._add(event)

    def plugin_data(self, step: int, tag: str, plugin: str, content: bytes) -> None:
        """What a plugin reads from a tag's metadata, with an empty tensor as its value."""
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_FLOAT

        tensor = TensorProto(dtype=DT_FLOAT)
        tensor.tensor_shape.dim.add(size=0)
        event = self._new_event(wall_time=time.time(), step=step)
        value = event.summary.value.add(tag=tag, tensor=tensor)
        value.metadata.plugin_data.plugin_name = plugin
        value.metadata.plugin_data.content = content
        self._add(event)

    def flush(self) -> None:
        """Hand everything to the kernel: it outlives this process, though not its node."""
        if self._records:
            text = b"".join(self._records)
            self._records.clear()
            while text:
                text = text[os.write(self._descriptor, text) :]

    def close(self) -> None:
        """Flush, and close the file, which sends it to the server where it lies on NFS."""
        self.flush()
        os.close(self._descriptor)

    def _add(self, event: Any) -> None:
        content = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        self._records.append(length + _masked_crc(length) + content + _masked_crc(content))


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _crc_table()


def _masked_crc(content: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)

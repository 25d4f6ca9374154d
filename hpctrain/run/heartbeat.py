"""The heartbeat of an attempt: one short line with its step, rewritten by rank 0 every few seconds.

Step marks come up to a minute apart in a long run; of an attempt that is killed without a word the
heartbeat tells the rest. It is written over in place, always of one length: nothing is truncated or
renamed, so a reader on another node never finds it empty or gone, opening it shows what was written
last (NFS asks the server then), and a full disk has room for it once it is there.
tests/unit/runtime/test_step_log.py holds the promises.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.base.files import read_plain

if TYPE_CHECKING:
    from hpctrain.run.layout import RunDir

LENGTH = 64
"""Of the line in bytes, padded with spaces."""


@dataclass(frozen=True)
class Heartbeat:
    """What was last heard of an attempt.

    Attributes:
        t: When its last step was done, seconds since the epoch by rank 0's clock.
        step: That step.
    """

    t: float
    step: int


def write_heartbeat(run: RunDir, attempt: int, beat: Heartbeat) -> None:
    """Replace the attempt's heartbeat. Rank 0 alone calls it.

    Raises:
        OSError: it could not be written.
    """
    line = json.dumps({"t": round(beat.t, 3), "step": beat.step}).ljust(LENGTH - 1) + "\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(run.heartbeat(attempt), flags, 0o666)
    try:
        os.pwrite(descriptor, line.encode(), 0)
    finally:
        os.close(descriptor)  # which hands it to the server


def read_heartbeat(run: RunDir, attempt: int) -> Heartbeat | None:
    """The attempt's last heartbeat; None without one, or where half of one is seen."""
    try:
        raw = json.loads(read_plain(run.heartbeat(attempt)))
        t, step = float(raw["t"]), int(raw["step"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return Heartbeat(t, step) if math.isfinite(t) else None

"""A rank's memory in numbers, as it was at the end of a profile, and what to do about it. Pure.

Reserved less allocated is what the caching allocator holds and no tensor uses. Between two steps
that is much in a healthy run too, since activations are gone: so the advice looks at what was not
used even at the peak, and at allocations that had to be retried. tests/unit/cli/test_profile.py and
tests/engines/test_profile_run.py hold the promises.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.base.files import read_plain

if TYPE_CHECKING:
    from pathlib import Path

LARGE = 0.25
"""Of what is reserved: from here on fragmentation is worth a line."""
LARGE_BYTES = 1 << 30
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True)
class RankMemory:
    """One rank's memory; None where the device does not tell.

    Attributes:
        device: "cuda" or "cpu".
        allocated_bytes: In tensors, at the end of the profile.
        allocated_peak_bytes: Most since the attempt began; on a CPU of the whole process.
        reserved_bytes: Held by the allocator.
        inactive_split_bytes: Of that, in pieces of blocks that are in use otherwise.
        alloc_retries: How often it had to give everything back and try again.
        ooms: How often that did not help.
    """

    device: str
    allocated_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_bytes: int | None = None
    inactive_split_bytes: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None

    @property
    def fragmentation_bytes(self) -> int | None:
        """Reserved less allocated, at the end of the profile."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return self.reserved_bytes - self.allocated_bytes

    @property
    def never_used_bytes(self) -> int | None:
        """Reserved less the most that was ever allocated: memory that is in pieces."""
        if self.reserved_bytes is None or self.allocated_peak_bytes is None:
            return None
        return max(0, self.reserved_bytes - self.allocated_peak_bytes)


def read_memory(path: Path) -> RankMemory | None:
    """What a rank wrote; None where it is torn."""
    try:
        raw = json.loads(read_plain(path))
        values = {key: raw.get(key) for key in RankMemory.__dataclass_fields__}
    except (OSError, ValueError, AttributeError):
        return None
    return RankMemory(**values) if isinstance(values["device"], str) else None


def advice(memory: RankMemory) -> str | None:
    """One line where memory is in pieces; None where it is well."""
    loose, reserved = memory.never_used_bytes, memory.reserved_bytes
    if loose is None or not reserved:
        return None
    retries = memory.alloc_retries or 0
    if retries == 0 and (loose < LARGE * reserved or loose < LARGE_BYTES):
        return None
    again = f", allocations were retried {retries} times" if retries else ""
    return (
        f"{loose / 2**30:.1f} of {reserved / 2**30:.1f} GiB are reserved and were never in use"
        f"{again}: try --env {EXPANDABLE}"
    )

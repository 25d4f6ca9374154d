"""Lines of an attempt's ranks.jsonl: where each rank's time and memory went. Pure.

tests/unit/test_speed.py holds the promises.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from hpctrain.run.values import finite, whole


@dataclass(frozen=True)
class RankSample:
    """Where the ranks' time went in a window of steps; seconds are sums over the window.

    Attributes:
        t: End of the window.
        attempt: Whose.
        step: Last step.
        steps: How many.
        wall_s: Per rank: all of the window.
        data_s: Per rank: waiting for data.
        own_s: Per rank: its work before it first waits for others; None where nobody can tell.
        peak_bytes: Per rank: memory in use at most.
        reserved_bytes: Per rank: memory taken from the device.
        retries: Per rank: allocations that needed the cache to be emptied first.
    """

    t: float
    attempt: int
    step: int
    steps: int
    wall_s: tuple[float, ...]
    data_s: tuple[float, ...] | None = None
    own_s: tuple[float, ...] | None = None
    peak_bytes: tuple[float, ...] | None = None
    reserved_bytes: tuple[float, ...] | None = None
    retries: tuple[float, ...] | None = None

    @property
    def busy_s(self) -> tuple[float, ...]:
        """What tells the slow rank from those that wait for it; the whole time where unknown."""
        return self.wall_s if self.own_s is None else self.own_s


def rank_sample(line: bytes, attempt: int) -> RankSample | None:
    """One line of an attempt's ranks.jsonl; None for what is no whole sample."""
    try:
        raw = json.loads(line)
    except ValueError:  # torn, or not UTF-8
        return None
    if not isinstance(raw, dict):
        return None
    t, steps, wall_s = finite(raw.get("t")), whole(raw.get("steps")), _each(raw.get("wall_s"))
    if t is None or not steps or steps < 0 or not wall_s:
        return None
    names = ("data_s", "own_s", "mem_peak_bytes", "mem_reserved_bytes", "mem_retries")
    told = [_each(raw.get(name), len(wall_s)) for name in names]
    return RankSample(t, attempt, whole(raw.get("step")) or 0, steps, wall_s, *told)


def newest_sample(content: bytes, attempt: int) -> RankSample | None:
    """The last whole sample at the end of a ranks.jsonl; None where there is none."""
    lines = reversed(content.split(b"\n"))
    return next((found for line in lines if (found := rank_sample(line, attempt))), None)


def _each(value: object, ranks: int = 0) -> tuple[float, ...] | None:
    """A number per rank, else None."""
    if not isinstance(value, list) or (ranks and len(value) != ranks):
        return None
    found = [finite(one) for one in value]
    return None if None in found else tuple(one for one in found if one is not None)

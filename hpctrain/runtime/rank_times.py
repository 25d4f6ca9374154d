"""All ranks' times and memory on rank 0, gathered behind the steps; who is the slowest.

Ranks agree on the tick at which they tell (`Wish.tell`), and a few numbers of each travel over the
control group while training goes on, never over the gradients' group.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import statistics
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpctrain.runtime.step_log import mark_every_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.run.layout import RunDir
    from hpctrain.world import World

SECONDS = ("wall_s", "data_s", "own_s")
WHOLE = ("mem_peak_bytes", "mem_reserved_bytes", "mem_retries")
STRETCH = 10
"""A sample for each so-manieth of the run's age, until the file's budget says less often."""
MONTH_S = 30 * 86400.0
BUDGET_BYTES = 20e6
"""Of a month's samples, roughly: a line grows with the ranks, so lines come less often."""
LINE_BYTES, RANK_BYTES = 140, 52
LOOK_BACK = 20
"""Attempts: those that died before their first sample left no file."""


def sample_every_s(run_age_s: float, log_every_s: float, world_size: int) -> float:
    """Seconds between samples of all ranks in a run of this age."""
    least = mark_every_s(run_age_s, log_every_s)
    most = MONTH_S * (LINE_BYTES + RANK_BYTES * world_size) / BUDGET_BYTES
    return max(least, min(run_age_s / STRETCH, most))


def memory(device: torch.device) -> dict[str, float]:
    """This rank's memory, by its names in a sample; what is not known is left out."""
    if device.type != "cuda":
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"mem_peak_bytes": kib * 1024.0}
    return {
        "mem_peak_bytes": float(torch.cuda.max_memory_allocated(device)),
        "mem_reserved_bytes": float(torch.cuda.max_memory_reserved(device)),
        "mem_retries": float(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)),
    }


class Gathering:
    """One gather at a time, of a row of numbers for each rank, to rank 0."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._row: torch.Tensor | None = None
        self._rows: list[torch.Tensor] = []
        self._work: dist.Work | None = None

    @property
    def in_flight(self) -> bool:
        """Rank 0: whether rows are on their way."""
        return self._row is not None

    def launch(self, row: Sequence[float]) -> None:
        """Send this rank's row; collective, and all ranks send equally many numbers."""
        if self._work is not None:
            self._work.wait()
        self._row = torch.tensor(row, dtype=torch.float64)
        self._rows, self._work = [self._row], None
        if self._world.control is not None:
            first = self._world.rank == 0
            self._rows = [torch.empty_like(self._row) for _ in range(self._world.world_size)]
            self._work = dist.gather(
                self._row,
                self._rows if first else None,
                dst=0,
                group=self._world.control,
                async_op=True,
            )

    def landed(self, *, wait: bool = False) -> list[list[float]] | None:
        """Rank 0: every rank's row once they are all there; None before, and with nothing sent."""
        if self._row is None:
            return None
        if self._work is not None:
            if not wait and not self._work.is_completed():
                return None
            self._work.wait()
        rows = [row.tolist() for row in self._rows]
        self._row, self._work = None, None
        return rows


def row_of(values: dict[str, float]) -> list[float]:
    """A rank's numbers in their order on the wire; what it does not know is no number."""
    return [values.get(name, math.nan) for name in (*SECONDS, *WHOLE)]


def sample_of(t: float, step: int, steps: int, rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """All ranks' rows as one sample; what one rank does not know is told of none."""
    sample: dict[str, Any] = {"t": round(t, 3), "step": step, "steps": steps}
    for position, name in enumerate((*SECONDS, *WHOLE)):
        values = [row[position] for row in rows]
        known = not any(math.isnan(value) for value in values)
        one = int if name in WHOLE else _short
        sample[name] = [one(value) for value in values] if known else None
    return sample


def append_sample(run: RunDir, attempt: int, sample: dict[str, Any]) -> None:
    """Add a sample to the attempt's file, which `history.rank_samples` reads. Rank 0 alone calls it.

    Raises:
        OSError: it could not be written.
    """
    line = json.dumps(sample, separators=(",", ":"))
    with run.rank_times(attempt).open("a") as file:
        file.write(line + "\n")


def sampled_before(run: RunDir, attempt: int) -> float | None:
    """When an earlier attempt's last sample was written, seconds since the epoch."""
    for number in range(attempt - 1, max(0, attempt - 1 - LOOK_BACK), -1):
        with contextlib.suppress(OSError):
            return run.rank_times(number).stat().st_mtime
    return None


def slowest(sample: dict[str, Any]) -> dict[str, float]:
    """The rank with the most work of its own, and how far it is above the median of all ranks.

    As fields of a step mark; empty where nobody can tell, or with one rank.
    """
    own: list[float] = sample["own_s"] or []
    usual = statistics.median_low(own) if len(own) > 1 else 0.0
    if usual <= 0:
        return {}
    rank = max(range(len(own)), key=own.__getitem__)
    return {"slow_rank": rank, "slow_by": round(own[rank] / usual - 1, 3)}


def _short(seconds: float) -> float:
    return round(seconds, 4)

"""How far work is that moves many bytes, in a line: done of total, rate, what is left. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.base.text import duration, size

SPARSE_S = 10.0
"""Between two lines in a log; shorter work is told by its result alone."""


@dataclass
class Meter:
    """Counts bytes; whoever shows them says what time it is (seconds of any one clock).

    Attributes:
        label: What is done, e.g. "reading".
        total: Bytes to come, or about so many; a reader of whole blocks may read some more.
        started: When the work began.
        done: Bytes so far.
        told: When a line was last due; work counts as told when it begins.
    """

    label: str
    total: int
    started: float
    done: int = 0
    told: float | None = None

    def due(self, now: float, every_s: float = SPARSE_S) -> bool:
        """Whether the next line is due; it counts as told from then on."""
        if now - (self.started if self.told is None else self.told) < every_s:
            return False
        self.told = now
        return True

    def text(self, now: float) -> str:
        """E.g. "reading 1.5 GiB of 6.0 GiB (25 %), 310.0 MiB/s, 15 s left"."""
        done = min(self.done, self.total)
        share = f" ({100 * done // self.total} %)" if self.total else ""
        far = f"{self.label} {size(done)} of {size(self.total)}{share}"
        rate = done / (now - self.started) if now > self.started else 0.0
        if not rate:
            return far
        return f"{far}, {size(round(rate))}/s, {duration((self.total - done) / rate)} left"

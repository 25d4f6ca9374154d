"""The share of a GPU's peak that training reaches, by GPU and by what is computed again.

utilization.toml has a range for each kind of run, fitted to published runs; it counts all
operations, those of a recomputation too (hardware FLOP utilisation). Pure.
tests/unit/strategy/test_published.py holds the file to the runs.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.advise.strategy.memory import Spread

ANY = "any"
"""Family of the rows for GPUs without published runs: the lowest of all families counts."""
ALIKE = {"h200": "h100", "gh200": "h100"}
"""GPUs with the compute of another one."""
MOST_OPERATIONS = 4 / 3
"""Of a step that computes each block again, to one that does not: it takes no less time, though
published runs with recomputation may come from better tuned programs than those without."""


@dataclass(frozen=True)
class Share:
    """Of the peak: 0 to 1.

    Attributes:
        low: The lowest of the published runs.
        typical: What a plan takes.
        high: The highest.
        runs: Published runs that it was fitted to.
        family: Of GPU; "any" where none of this family was published.
    """

    low: float
    typical: float
    high: float
    runs: int
    family: str

    @property
    def basis(self) -> str:
        """What a reader should know of it."""
        whose = " on other GPUs" if self.family == ANY else ""
        many = "1 published run" if self.runs == 1 else f"{self.runs} published runs"
        return f"{self.typical:.0%} ({self.low:.0%} to {self.high:.0%} in {many}{whose})"


def kind_of(layout: Spread | None) -> str:
    """Return the kind of run: "plain", "half", "full", or "tp" where matrices are cut."""
    if layout is None:
        return "plain"
    if layout.tp > 1:
        return "tp"
    return "full" if layout.recompute else "half" if layout.selective == "half" else "plain"


def share_of(family: str, layout: Spread | None) -> Share:
    """Return the share of the peak for a kind of run on a family of GPUs.

    Where no such run was published, that of the GPU with the same compute counts, else `any`.
    """
    kind = kind_of(layout)
    share = _of_kind(family, kind)
    if kind == "full":
        most = MOST_OPERATIONS * _of_kind(family, "plain").typical
        share = replace(share, typical=min(share.typical, most))
    return share


def _of_kind(family: str, kind: str) -> Share:
    table = _read()
    for key in (family, ALIKE.get(family, ""), ANY):
        if kind in table.get(key, {}):
            return Share(**table[key][kind], family=key)
    raise AssertionError(kind)


@functools.cache
def _read() -> dict[str, dict[str, dict[str, Any]]]:
    path = Path(__file__).with_name("utilization.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))

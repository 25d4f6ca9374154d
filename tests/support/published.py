"""Published training runs beside what `hpctrain plan` says of them; tests/data has the runs."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.strategy import choice
from hpctrain.strategy.facts import of_config
from hpctrain.strategy.hardware import gpu_of
from hpctrain.strategy.strategies import Machines
from hpctrain.strategy.timing import Links

if TYPE_CHECKING:
    from hpctrain.strategy.choice import PlanRequest, Row

DATA = Path(__file__).parents[1] / "data" / "published-runs.toml"
GB = 1e9


@dataclass(frozen=True)
class Published:
    """A run and the plan's row for it.

    Attributes:
        said: What was published.
        asked: The question for a plan that has the same set-up.
        row: Its answer.
    """

    said: dict[str, Any]
    asked: PlanRequest
    row: Row

    @property
    def name(self) -> str:
        """In the data file."""
        return str(self.said["name"])

    @property
    def is_held_out(self) -> bool:
        """Return whether the constants were not fitted to this run."""
        return bool(self.said["use"] == "held-out")

    @property
    def step_s(self) -> float | None:
        """Published seconds of a step; None where only memory was published."""
        layout, said = self.row.way.layout, self.said
        if "tokens" not in said:
            return None
        samples = said["micro"] * said["passes"]
        return float(samples * said["seq"] / said["tokens"] / layout.tp / layout.pp)

    @property
    def step_ratio(self) -> float | None:
        """Planned over published time of a step."""
        seconds = self.row.time.seconds if self.row.time else None
        return seconds / self.step_s if seconds and self.step_s else None

    @property
    def memory_ratio(self) -> float | None:
        """Planned need, with its allowance, over the published memory."""
        if "memory_gb" not in self.said or self.row.peak is None:
            return None
        return float(self.row.peak.needed / GB / self.said["memory_gb"])


@cache
def table() -> dict[str, Any]:
    """Return the data file."""
    return tomllib.loads(DATA.read_text())


@cache
def runs() -> tuple[Published, ...]:
    """Return every published run, planned."""
    return tuple(planned(said) for said in table()["runs"])


def planned(said: dict[str, Any]) -> Published:
    """Return what the plan says of one run."""
    model = of_config(table()["models"][said["model"]], said["model"])
    gpu = gpu_of(said["gpu"], said.get("gpu_gb"), "--gpu")
    cluster = Machines(said["nodes"], said["gpus"])
    net = said["net_gbs"] * GB if "net_gbs" in said else None
    way = said["row"]
    tp = int(way[2 : way.index("+")]) if way.startswith("tp") else 1
    asked = choice.PlanRequest(
        model=model,
        cluster=cluster,
        gpu=gpu,
        links=Links(gpu.link, net),
        seq=said["seq"],
        global_batch=said["micro"] * said["passes"] * (cluster.ranks // tp),
        micro=said["micro"],
        lora=16 if way.startswith("lora") else 0,
    )
    rows = {row.way.key: row for row in choice.rows_of(asked)}
    assert way in rows, (said["name"], way, list(rows))
    return Published(said, asked, rows[way])

"""Published training runs beside what `hpctrain plan` says of them; tests/data has the runs."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from math import ceil, floor, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.advise.strategy import choice, timing
from hpctrain.advise.strategy.choice import PlanRequest
from hpctrain.advise.strategy.facts import of_config
from hpctrain.advise.strategy.hardware import gpu_of
from hpctrain.advise.strategy.strategies import Machines
from hpctrain.advise.strategy.timing import ANY, Links, kind_of, work_of_step

if TYPE_CHECKING:
    from hpctrain.advise.strategy.choice import Row

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
        """Planned tensors over published ones; planned need over what was reserved."""
        if "memory_gb" not in self.said or self.row.peak is None:
            return None
        return float(self.comparable / self.said["memory_gb"])

    @property
    def comparable(self) -> float:
        """GB of the plan that stand beside the published memory."""
        assert self.row.peak is not None
        tensors = self.said.get("reading") == "allocated"
        return (self.row.peak.nbytes if tensors else self.row.peak.needed) / GB


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
    tp = int(way.partition("+")[0][2:]) if way.startswith("tp") else 1
    asked = PlanRequest(
        model=model,
        cluster=cluster,
        gpu=gpu,
        links=Links(gpu.link, net),
        seq=said["seq"],
        global_batch=said["micro"] * said["passes"] * (cluster.ranks // tp),
        micro=said["micro"],
        lora=said.get("lora", 16) if way.startswith("lora") else 0,
    )
    rows = {row.way.key: row for row in choice.rows_of(asked)}
    assert way in rows, (said["name"], way, list(rows))
    return Published(said, asked, rows[way])


def within_a_quarter_at_best() -> int:
    """Return how many steps the best share for each GPU and kind, chosen afterwards, comes near.

    Near is within 25 %, as planned over published time.
    """
    reached = dict[tuple[str, str], list[float]]()
    for run in runs():
        if ratio := run.step_ratio:
            kind = (run.asked.gpu.family, kind_of(run.row.way.layout))
            share = timing.share_of(kind[0], run.row.way.layout)[0]
            reached.setdefault(kind, []).append(share * ratio)
    return sum(
        max(sum(0.75 <= each / share <= 1.25 for each in of_kind) for share in tried)
        for of_kind in reached.values()
        for tried in [[each / edge for each in of_kind for edge in (0.75, 1.25)]]
    )


# ---- what follows from the runs: utilization.toml, and the table of tests/data/plan-published.md


def shares() -> dict[tuple[str, str], list[float]]:
    """Return the shares of the peak that calibration runs reached, by GPU's family and kind."""
    found: dict[tuple[str, str], list[float]] = {}
    for run in runs():
        gpu, batch, seconds = run.asked.gpu, run.row.batch, run.step_s
        if seconds and batch and gpu.flops and not run.is_held_out:
            share = work_of_step(run.asked.model, batch, run.row.way) / seconds / gpu.flops
            found.setdefault((gpu.family, kind_of(run.row.way.layout)), []).append(share)
    return found


def fitted() -> dict[str, dict[str, float]]:
    """Return what utilization.toml has to hold.

    A share is the geometric mean of the lowest and the highest calibration run. A GPU without runs
    gets the lowest of all families. The spread is that of all published runs around their plan.
    """
    table = dict[str, dict[str, float]]()
    for (family, kind), used in shares().items():
        table.setdefault(family, {})[kind] = round(sqrt(min(used) * max(used)), 3)
    kinds = {kind for row in table.values() for kind in row}
    table[ANY] = {kind: min(row.get(kind, 1) for row in table.values()) for kind in kinds}
    around = [1 / run.step_ratio for run in runs() if run.step_ratio]
    least, most = floor(min(around) * 100) / 100, ceil(max(around) * 100) / 100
    return table | {"spread": {"least": least, "most": most, "runs": len(around)}}


def utilization_toml() -> str:
    """Return the text of hpctrain/advise/strategy/utilization.toml."""
    lines = [
        "# Shares of a GPU's peak that tuned training programs reached, with the operations of a",
        "# recomputation counted. Written by `python -m tests.support.published utilization` from",
        "# tests/data/published-runs.toml; add a run there. plain: no recomputation; half:",
        "# torchtitan's selective one; full: each block; tp: with tensor parallelism. spread: what",
        "# all published runs took, as a multiple of what is planned for them.",
    ]
    for family, rows in sorted(fitted().items()):
        lines += ["", f"[{family}]"]
        lines += [f"{kind} = {value}" for kind, value in sorted(rows.items())]
    return "\n".join(lines) + "\n"


def page_rows() -> list[str]:
    """Return the rows of tests/data/plan-published.md."""
    rows = []
    for run in runs():
        said, peak = run.said, run.row.peak
        assert peak is not None
        cluster = f"{run.asked.cluster.ranks} x {run.asked.gpu.name}"
        batch = f"{said['seq']:,} x {said['micro']} x {said['passes']}"
        memory = f"{peak.needed / GB:.1f}"
        if "memory_gb" in said:
            memory += f"; {run.comparable:.1f} for {said['memory_gb']:g} {said['reading']}"
        fits = "yes" if run.row.is_held else "may" if run.row.may_fit else "**no**"
        tokens = f"{said['tokens']:,}" if "tokens" in said else ""
        ratio = f"{run.step_ratio:.2f}" if run.step_ratio else ""
        source = f"[{said['source']}]({table()['sources'][said['source']]})"
        cells = (said["name"], said["model"], cluster, batch, f"`{said['row']}`", memory, fits)
        rows.append(f"| {' | '.join((*cells, tokens, ratio, source))} |")
    return rows


if __name__ == "__main__":
    print(utilization_toml() if sys.argv[1:] == ["utilization"] else "\n".join(page_rows()), end="")

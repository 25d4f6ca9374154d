"""Time to result in a simulated queue: the product's choice of shapes against fixed habits.

Training runs of 40 to 200 node-hours come at random times to a cluster of 128 nodes that other
users fill to 60, 80 and 95 % (Lublin and Feitelson's model, or a recorded log with `--swf`). Each
run is played once with each policy, from the same moment of the same queue. A run takes 1 to 16
nodes; its scaling, 0.5 to 4 % lost for each further node, is not known to the product but for what
it measures. The cluster's rules are SLURM's, calibrated in tests/slurm/test_queue_sim.py.

    python benchmarks/time_to_result.py [--runs 200] [--json FILE] [--swf LOG]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.queue_sim.chooser import HABITS
from tests.support.queue_sim.experiment import DAYS, MAX_TIME_S, NODES, PREFERENCES, Played, play
from tests.support.queue_sim.training import HOUR_S
from tests.support.queue_sim.workload import DAY_S, lublin, read_swf, scaled_to_load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.queue_sim.controller import Request

LOADS = (0.6, 0.8, 0.95)
WORKLOADS = 4
DRAWS = 1000
"""Of the bootstrap."""


def mean_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval by bootstrap."""
    return ratio_with_interval(values, [1.0] * len(values))


def ratio_with_interval(
    values: Sequence[float], others: Sequence[float]
) -> tuple[float, float, float]:
    """Return the ratio of two means over the same runs, and its 95 % interval by bootstrap."""
    rng, pairs = random.Random(1), list(zip(values, others, strict=True))  # noqa: S311 - a bootstrap
    ratios = []
    for _ in range(DRAWS):
        drawn = rng.choices(pairs, k=len(pairs))
        ratios.append(sum(value for value, _ in drawn) / sum(other for _, other in drawn))
    ratios.sort()
    return sum(values) / sum(others), ratios[DRAWS // 40], ratios[-DRAWS // 40]


def summary(played: dict[str, Played]) -> dict[str, Any]:
    """Means, intervals and ratios to the best habit, of each policy."""
    hours = {n: [o.result_s / HOUR_S for o in seen.outcomes] for n, seen in played.items()}
    best = min((name for name in HABITS if name in hours), key=lambda name: sum(hours[name]))
    spent = {n: statistics.fmean(o.node_hours for o in s.outcomes) for n, s in played.items()}
    rows = {}
    for name, seen in played.items():
        mean, ratio = mean_with_interval(hours[name]), ratio_with_interval(hours[name], hours[best])
        rows[name] = {
            "hours": [round(one, 2) for one in mean],
            "median_hours": round(statistics.median(hours[name]), 2),
            "against_best_habit": [round(one, 3) for one in ratio],
            "node_hours": round(spent[name], 1),
            "node_hours_against": round(spent[name] / spent[best], 3),
            "jobs": round(statistics.fmean(len(o.parts) for o in seen.outcomes), 2),
            "interval": _shares(seen.intervals),
            "interval_later": _shares(seen.later),
        }
    return {"best_habit": best, "runs": len(hours[best]), "policies": rows}


def _shares(places: Sequence[int]) -> dict[str, float] | None:
    """How often the truth lay before, in and after what was forecast."""
    if not places:
        return None
    names = {"before": -1, "within": 0, "after": 1}
    shares = {name: round(places.count(at) / len(places), 3) for name, at in names.items()}
    return shares | {"of": len(places)}


def show(load: float, result: dict[str, Any]) -> None:
    """Print a table."""
    print(f"\nload {load}, {result['runs']} runs; best habit: {result['best_habit']}")
    head = f"{'policy':18} {'hours (95 %)':>22} {'median':>7} {'ratio (95 %)':>20} {'node-h':>7}"
    print(f"{head} {'ratio':>6} {'jobs':>5}  80 % interval: before / in / after; after requeues")
    for name, row in result["policies"].items():
        text = "{:7.1f} ({:5.1f}-{:5.1f})".format(*row["hours"])
        ratio = "{:6.2f} ({:4.2f}-{:4.2f})".format(*row["against_best_habit"])
        intervals = [
            "{before:.2f} / {within:.2f} / {after:.2f} of {of}".format(**row[key])
            for key in ("interval", "interval_later")
            if row[key]
        ]
        print(
            f"{name:18} {text:>22} {row['median_hours']:7.1f} {ratio:>20} {row['node_hours']:7.1f}"
            f" {row['node_hours_against']:6.2f} {row['jobs']:5.1f}  {'; '.join(intervals)}"
        )


def workload(asked: argparse.Namespace, load: float, seed: int) -> list[Request]:
    """The other users' jobs: of the model, or those of a log, from another week for each seed.

    A log is played three times in a row. Jobs below a whole node are left out.
    """
    if asked.swf is None:
        return lublin(NODES, load, DAYS, seed=seed)
    whole = asked.processors_per_node
    jobs = [job for job in read_swf(asked.swf.read_text().splitlines()) if job.nodes >= whole]
    jobs = [
        replace(j, nodes=-(-j.nodes // whole), limit_s=min(j.limit_s, MAX_TIME_S)) for j in jobs
    ]
    jobs = scaled_to_load(jobs, NODES, load)
    span_s, first_s = jobs[-1].submit_s + HOUR_S, seed % WORKLOADS * 7 * DAY_S
    thrice = (
        replace(j, submit_s=j.submit_s + at * span_s - first_s) for at in range(3) for j in jobs
    )
    return [job for job in thrice if 0 <= job.submit_s < DAYS * DAY_S]


def main() -> None:
    """Play all loads, print a table for each, and write all numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="runs at each load")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--policies", nargs="+", default=[*HABITS, *PREFERENCES])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--swf", type=Path, help="a recorded log instead of the model")
    parser.add_argument("--processors-per-node", type=int, default=1, help="of that log's nodes")
    asked = parser.parse_args()
    found = {}
    for load in asked.loads:
        began = time.monotonic()
        total: dict[str, Played] = {name: Played() for name in asked.policies}
        for number in range(WORKLOADS):
            seed = asked.seed * 100 + number
            part = play(workload(asked, load, seed), asked.runs // WORKLOADS, seed, asked.policies)
            for name, seen in part.items():
                total[name].add(seen)
        found[str(load)] = summary(total)
        show(load, found[str(load)])
        print(f"({time.monotonic() - began:.0f} s)", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

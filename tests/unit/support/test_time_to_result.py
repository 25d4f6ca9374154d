"""A small form of benchmarks/time_to_result.py: which policy is sooner, not by how much."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import pytest

from tests.support.queue_sim.chooser import HABITS, Product, always
from tests.support.queue_sim.controller import Controller, Request, Settings
from tests.support.queue_sim.experiment import play
from tests.support.queue_sim.training import HOUR_S, Shape, Training, train
from tests.support.queue_sim.workload import lublin

if TYPE_CHECKING:
    from hpctrain.ledger.shapes.choose import Prefer


@pytest.mark.check
def test_on_a_busy_cluster_chosen_shapes_end_sooner_than_any_habit() -> None:
    played = play(
        lublin(32, 0.75, 36, seed=11), 20, 11, [*HABITS, "time", "balanced"], nodes=32
    )  # fmt: skip
    hours = {n: statistics.fmean(o.result_s for o in p.outcomes) for n, p in played.items()}
    spent = {n: statistics.fmean(o.node_hours for o in p.outcomes) for n, p in played.items()}
    habits = [hours[name] for name in HABITS]

    assert max(hours["time"], hours["balanced"]) < min(habits)
    assert hours["time"] <= hours["balanced"]
    assert spent["balanced"] <= spent["time"]
    assert len(played["time"].intervals) == 20


def test_an_empty_cluster_gives_the_largest_shape_at_once() -> None:
    chosen = train(
        Controller(Settings(16)), Training(64), Product("time", (1, 2, 4, 8, 16), 48 * HOUR_S)
    )

    assert [part.shape.nodes for part in chosen.parts] == [16]
    assert chosen.parts[0].wait_s == 0


@pytest.mark.parametrize("prefer", ["time", "balanced"])
def test_a_hole_is_filled_while_the_rest_waits(prefer: Prefer) -> None:
    """Three of four nodes are free for two hours, before a job that takes all of them for a day."""
    queue = Controller(Settings(4))
    queue.submit(Request(0, 1, 2 * HOUR_S, 2 * HOUR_S))
    queue.submit(Request(0, 4, 24 * HOUR_S, 24 * HOUR_S))
    training = Training(9, restart_s=60)

    fixed = train(queue.fork(), training, always(Shape(3, 24 * HOUR_S)))
    chosen = train(queue.fork(), training, Product(prefer, (1, 2, 3), 24 * HOUR_S))

    first = chosen.parts[0]
    assert first.wait_s <= 60
    assert first.ended_s <= 2 * HOUR_S
    assert fixed.parts[0].wait_s == 26 * HOUR_S
    assert chosen.result_s < fixed.result_s - 1.5 * HOUR_S

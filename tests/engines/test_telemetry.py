"""What a run tells of its steps, on real gloo ranks: marks, heartbeat, and who is slow because of
what."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

import pytest

from hpctrain.ledger.history.progress import rank_sample
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.attempt_files import read_heartbeat
from hpctrain.ledger.run.fence import take_attempt
from tests.support.gloo import launch
from tests.support.ledger_runs import all_fields
from tests.support.recipe import make_run, train

STEPS = 5
LATE_S = 10.0
"""What the slow rank loses in each step, by a clock that no load of the machine moves."""
READING_S = 0.001
"""How far that clock goes on by each look at it."""


def _slow(kind: str, victim: int) -> None:
    """The recipe, with one rank that loses time in each step's own work, or over its data."""
    from hpctrain.core.base.clock import SystemClock
    from hpctrain.recipes.lm import train as recipe
    from hpctrain.train.data.batches import GlobalBatches
    from hpctrain.train.runtime import telemetry

    now = 0.0

    class Reading(SystemClock):
        def monotonic(self) -> float:  # type: ignore[override]
            nonlocal now
            now += READING_S
            return now

    def slowed(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now += LATE_S
            return real(*args, **kwargs)

        return call

    telemetry.clock = Reading()  # type: ignore[assignment]
    if int(os.environ["RANK"]) == victim:
        if kind == "work":
            recipe.lr_at = slowed(recipe.lr_at)
        else:
            GlobalBatches.next_step = slowed(GlobalBatches.next_step)  # type: ignore[method-assign]
    recipe.main()


@pytest.fixture
def slow_run(tmp_path, monkeypatch):
    """Trains on two ranks, one of them slow; gives the run and its samples."""

    def make(kind, victim, **ranks):
        run = make_run(tmp_path / kind, train__steps=STEPS)
        attempt = take_attempt(run, job_id="test", restarts=0)
        run.attempt(attempt.number).mkdir(parents=True)
        monkeypatch.setenv("HPCTRAIN_RUN_DIR", str(run.root))
        monkeypatch.setenv("HPCTRAIN_ATTEMPT", json.dumps(asdict(attempt)))
        launch(_slow, 2, kind=kind, victim=victim, **ranks)
        lines = run.rank_times(attempt.number).read_bytes().splitlines()
        return run, [rank_sample(line, attempt.number) for line in lines]

    return make


def total(samples, name):
    return [sum(getattr(sample, name)[rank] for sample in samples) for rank in (0, 1)]


def test_the_rank_that_is_slow_in_its_own_work_is_named(slow_run):
    run, samples = slow_run("work", 1, tree=2)  # as an agent's ranks, by a control plane

    assert sum(sample.steps for sample in samples) == STEPS
    own = total(samples, "own_s")
    assert own[1] == pytest.approx(STEPS * LATE_S, rel=0.1)
    assert own[1] > 100 * own[0] > 0
    assert max(total(samples, "data_s")) < LATE_S  # nobody takes it for waiting for data
    marks = [event.fact for event in ledger.read(run) if event.kind == "steps"]
    named = [mark.slow_rank for mark in marks if (mark.slow_by or 0) > 10]
    assert named
    assert set(named) == {1}


def test_the_rank_that_waits_for_data_is_not_slow_in_its_own_work(slow_run):
    run, samples = slow_run("data", 0)

    data = total(samples, "data_s")
    assert data[0] == pytest.approx(STEPS * LATE_S, rel=0.1)
    assert data[0] > 100 * data[1] > 0
    assert max(total(samples, "own_s")) < LATE_S
    marks = [all_fields(event) for event in ledger.read(run) if event.kind == "steps"]
    assert marks[-1]["data_s"] == pytest.approx(STEPS * LATE_S, rel=0.1)
    assert marks[-1]["seconds"] >= LATE_S


def test_a_stopped_run_tells_how_far_it_came_and_what_its_steps_were(tmp_path):
    run = make_run(tmp_path / "run", engine__kind="fsdp2")
    train(run, 2, stop_at=6, tree=1)
    train(run, 2)

    events = ledger.read(run)
    marks = [event for event in events if event.kind == "steps"]
    tokens = 24 * 16
    assert [all_fields(mark)["last"] for mark in marks] == list(range(1, 13))
    assert {all_fields(mark)["tokens"] for mark in marks} == {tokens}
    assert all(all_fields(mark)["flops"] > 6 * tokens for mark in marks)
    assert all(mark.fact.grad_norm > 0 and mark.fact.p50_s > 0 for mark in marks)
    # The ledger's account of a checkpoint's step is the last of a mark, and says so.
    saved = [all_fields(event)["step"] for event in events if event.kind == "saved"]
    assert saved == [all_fields(mark)["last"] for mark in marks if all_fields(mark).get("at_save")]
    assert [read_heartbeat(run, attempt).step for attempt in (1, 2)] == [saved[0], 12]
    phases = [all_fields(event) for event in events if event.kind == "phase"]
    assert [p.get("device") for p in phases if p["name"] == "initialised"] == ["cpu", "cpu"]
    samples = [rank_sample(line, 2) for line in run.rank_times(2).read_bytes().splitlines()]
    assert samples[-1].step == 12
    # A sharded model's ranks wait for each other all along the way: nothing is claimed.
    assert all(sample.own_s is None and len(sample.peak_bytes) == 2 for sample in samples)

"""A loader with spawned workers through preemptions: each sample once, from both records."""

from __future__ import annotations

import json
import runpy

import pytest

from hpctrain.train.data.order import SampleOrder
from tests.support import local_runs, patience

SCRIPT = local_runs.SCRIPTS / "loader.py"


@pytest.mark.story(proved_by=("tests/engines/test_resume.py", "tests/unit/data/test_loader.py"))
@pytest.mark.timeout(900)  # up to 32 workers import torch
@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([4, 2, 3], id="two"),
        pytest.param([4, 2, 3, 2, 3, 2], id="five", marks=pytest.mark.soak),
    ],
)
def test_each_sample_is_trained_on_once_through_preemptions_over_4_2_and_3_ranks(
    tmp_path, monkeypatch, ranks
):
    """Workers read ahead, and what they read in vain they read again after a restart.

    So the promise is about what steps trained on: each of those samples is one that a worker has
    delivered, and all of them together are each sample once per epoch.
    """
    monkeypatch.setenv("LOADER_STOPS", str(len(ranks) - 1))
    run = local_runs.start(tmp_path, "loader", "2-4", 1, "--", str(SCRIPT))
    for attempt, left in enumerate(ranks[1:], start=1):
        await_file(tmp_path / f"waits-{attempt}", run, attempt)
        local_runs.hpctrain(tmp_path, "local", "preempt", "loader", f"--leave={left}", "--grace=60")
    local_runs.await_end(run, attempts=len(ranks))

    script = runpy.run_path(str(SCRIPT))
    starts = local_runs.events(run, "attempt_started")
    assert [start["world_size"] for start in starts] == ranks
    workers = {
        int(path.stem.removeprefix("worker-")): dict(
            tuple(map(int, line.split())) for line in path.read_text().splitlines()
        )
        for path in tmp_path.glob("worker-*.txt")
    }
    steps = {}
    for path in tmp_path.glob("steps-*.txt"):
        rank = int(path.stem.split("-")[2])
        for step, first, samples in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(step, {})[rank] = (first, samples)
    trained = [
        sample
        for step in sorted(steps)
        for _, (_, own) in sorted(steps[step].items())
        for sample in own
    ]
    assert sorted(steps) == list(range(script["STEPS"]))
    assert all(workers[pid][reading] == index for pid, reading, index in trained)
    assert len({(pid, reading) for pid, reading, _ in trained}) == len(trained)
    used = {pid for pid, _, _ in trained}
    assert len(used) > sum(ranks)  # both of some ranks
    order = SampleOrder(script["SIZE"], seed=1234)
    assert [index for _, _, index in trained] == order.indices(0, 2 * script["SIZE"])
    ended = local_runs.events(run, "attempt_ended")
    assert [end.get("steps_lost", 0) for end in ended] == [0] * len(ranks)


def test_an_iterable_dataset_is_used_once_through_stops_over_4_2_and_3_ranks(tmp_path):
    """The readers' states travel in the checkpoints, and the ledger's count is that of samples."""
    script = local_runs.SCRIPTS / "stream_loader.py"
    run = local_runs.start(tmp_path, "stream", "2-4", 1, "--", str(script))
    for attempt, ranks in enumerate([2, 3], start=1):
        await_file(tmp_path / f"waits-{attempt}", run, attempt)
        local_runs.hpctrain(
            tmp_path, "local", "preempt", "stream", f"--leave={ranks}", "--grace=60"
        )
    local_runs.await_end(run, attempts=3)

    rows = [
        json.loads(line)
        for path in tmp_path.glob("steps-*.txt")
        for line in path.read_text().splitlines()
    ]
    size = runpy.run_path(str(script))["SIZE"]
    used = [number for epoch, numbers in rows if epoch == 0 for number in numbers]
    assert sorted(used) == list(range(size))
    assert max(epoch for epoch, _ in rows) == 1
    starts = local_runs.events(run, "attempt_started")
    assert [start["world_size"] for start in starts] == [4, 2, 3]
    ended = local_runs.events(run, "attempt_ended")
    assert [end.get("steps_lost", 0) for end in ended] == [0] * 3


def await_file(path, run, attempt):
    """Wait for a file of this attempt; its end without the file is a failure at once."""
    patience.until(
        path.exists,
        lambda: {log.name: log.read_text() for log in sorted(run.glob("attempts/*/rank-*.log"))},
        alive=lambda: len(local_runs.events(run, "attempt_ended")) < attempt,
    )

"""How often a run saves: learnt from its saves and its deaths, and told once."""

from __future__ import annotations

import pytest
import torch

from hpctrain.checkpoint.tensors.save import Saved, SavePlace
from hpctrain.core.settings.schema import CheckpointSettings
from hpctrain.core.world import World
from hpctrain.ledger.plan import interval
from hpctrain.ledger.run.event_types import IntervalSet
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.train.runtime.saves import SavePolicy
from hpctrain.train.runtime.stops import JobClock
from tests.support.ledger_runs import Story

DAY = 86400.0
FAR = 1e9


@pytest.fixture(autouse=True)
def _one_node(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.fixture
def story(tmp_path):
    return Story(tmp_path / "gpt-a").submitted()


@pytest.fixture
def pace_of(hands, story):
    """Makes the pace of the story's run."""

    def make(*, ranks=1, end_time=None, **settings) -> SavePolicy:
        attempt = take_attempt(story.run, job_id="17", restarts=0)
        place = SavePlace(story.run, attempt, CheckpointSettings(**settings))
        world = World(0, 0, ranks, torch.device("cpu"))
        return SavePolicy(place, world, JobClock(end_time, margin_s=60.0))

    return make


def saved(stall_s, seconds, step=100) -> Saved:
    return Saved(step, f"step-{step:010d}", 1, seconds, stall_s, "")


@pytest.mark.parametrize("settings", [{}, {"interval_s": 60.0}, {"interval_steps": 5}])
def test_the_jobs_clock_hears_what_earlier_attempts_saves_took(story, hands, settings):
    story.started(1).add("saved", 1, step=5, seconds=40.0, stall_s=0.1)
    attempt = take_attempt(story.run, job_id="17", restarts=0)
    place = SavePlace(story.run, attempt, CheckpointSettings(**settings))
    job = JobClock(None, margin_s=60.0)

    SavePolicy(place, World(0, 0, 2, torch.device("cpu")), job)

    assert job.earlier_s == 80.0, "by half as many ranks"


def test_before_anything_was_saved_the_interval_is_a_guess(pace_of):
    pace = pace_of(max_loss_s=1200.0)

    assert pace.now == interval.choose(None, 30 * DAY, max_loss_s=1200.0)
    assert pace.now.seconds == 300
    assert "guess" in pace.now.why


def test_each_save_teaches_what_one_costs(pace_of):
    pace = pace_of(max_loss_s=FAR)

    pace.saved(saved(0.5, 20.0))

    assert pace.now == interval.choose(0.5, 30 * DAY, max_loss_s=FAR, write_s=20.0)


def test_of_the_newest_five_saves_the_median_counts(pace_of):
    pace = pace_of(max_loss_s=FAR)
    for stall_s, seconds in [(50, 900), (50, 900), (1, 10), (2, 20), (3, 30), (400, 4000), (2, 20)]:
        pace.saved(saved(stall_s, seconds))

    assert pace.now == interval.choose(2, 30 * DAY, max_loss_s=FAR, write_s=20)


def test_an_earlier_attempts_saves_spare_the_guess_and_its_deaths_shorten_the_interval(
    pace_of, story
):
    calm = pace_of(max_loss_s=FAR)
    calm.saved(saved(3.0, 3.0))
    for attempt in range(1, 6):
        story.started(attempt).restored(attempt).steps(attempt, 1, 100)
        story.add("saved", attempt, step=100, seconds=3.0, stall_s=3.0)
        story.ended(attempt, "node_failed", "requeue")

    pace = pace_of(max_loss_s=FAR)

    assert "guess" not in pace.now.why
    assert pace.now.seconds < calm.now.seconds / 2


def test_calm_hours_of_this_attempt_lengthen_the_interval_at_the_next_save(pace_of, hands):
    pace = pace_of(max_loss_s=FAR)
    pace.saved(saved(3.0, 3.0))
    before = pace.now.seconds

    hands.advance(60 * DAY)
    pace.saved(saved(3.0, 3.0))

    assert pace.now == interval.choose(3.0, 90 * DAY, max_loss_s=FAR, write_s=3.0)
    assert pace.now.seconds > before


@pytest.mark.parametrize(("ranks", "local", "nodes"), [(64, "8", 8), (4, None, 4), (1, "8", 1)])
def test_more_nodes_fail_more_often(pace_of, monkeypatch, ranks, local, nodes):
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    pace = pace_of(ranks=ranks, max_loss_s=FAR)
    pace.saved(saved(3.0, 3.0))

    assert pace.now == interval.choose(3.0, 30 * DAY / nodes, max_loss_s=FAR, write_s=3.0)


def test_every_job_saves_within_a_quarter_of_its_whole_time_also_when_most_of_it_is_over(
    pace_of, hands
):
    pace = pace_of(max_loss_s=FAR, end_time=hands.now() + 4000)
    pace.saved(saved(30.0, 30.0))
    assert pace.now.seconds == 1000

    hands.advance(3900)
    pace.saved(saved(30.0, 30.0))
    assert pace.now.seconds == 1000


def test_what_the_user_has_set_stays_whatever_saves_cost(pace_of):
    pace = pace_of(interval_s=77.0)
    pace.saved(saved(500.0, 5000.0))

    assert pace.now == interval.Interval(77.0, "checkpoint.interval_s")


# ---- what the ledger hears ----------------------------------------------------------------------


def test_the_ledger_hears_of_the_first_interval_and_of_what_decided(pace_of):
    pace = pace_of(max_loss_s=1200.0)

    assert pace.news() == IntervalSet(seconds=300, why="a first guess, no save was measured")
    assert pace.news() is None


def test_the_ledger_hears_of_each_change_once_and_of_none_below_a_fifth(pace_of):
    pace = pace_of(max_loss_s=FAR)
    pace.news()

    pace.saved(saved(3.0, 3.0))
    told = pace.news()
    assert told == IntervalSet(
        seconds=round(pace.now.seconds, 1), why=pace.now.why, cost_s=3.0, mtbf_s=30 * DAY
    )
    assert pace.news() is None

    for _ in range(5):
        pace.saved(saved(3.3, 3.3))  # a root of 1.1 longer
    assert pace.news() is None

    for _ in range(5):
        pace.saved(saved(6.0, 6.0))
    assert pace.news().cost_s == 6.0
    assert pace.news() is None


def test_small_changes_that_add_up_are_told(pace_of):
    pace = pace_of(max_loss_s=FAR)
    pace.saved(saved(1.0, 1.0))
    pace.news()

    heard = []
    for cost in (1.15, 1.3, 1.5, 1.7):  # each a root of it, a few hundredths
        for _ in range(5):
            pace.saved(saved(cost, cost))
        heard.append(pace.news() is not None)

    assert heard == [False, False, True, False]


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"interval_steps": 50}, {"seconds": 0.0, "why": "checkpoint.interval_steps", "steps": 50}),
        ({"interval_s": 77.0}, {"seconds": 77.0, "why": "checkpoint.interval_s"}),
    ],
)
def test_what_the_user_has_set_is_told_once_and_not_after_each_save(pace_of, settings, facts):
    pace = pace_of(**settings)

    assert pace.news() == IntervalSet(**facts)
    for _ in range(3):
        pace.saved(saved(500.0, 5000.0))
        assert pace.news() is None

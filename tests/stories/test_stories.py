"""What a scheduler or a user does to a run, and what comes of it; each on both schedulers."""

from __future__ import annotations

import pytest

from tests.support.stories import EVERY, HELD_AT, LEAD_S, MARGIN_S, Story, on_both

pytestmark = pytest.mark.timeout(400)


@on_both(every_slurm=True)
@pytest.mark.parametrize("grace", [False, True], ids=["no grace", "grace"])
def test_a_preempted_run_comes_back_and_loses_nothing(cluster, tmp_path, grace):
    story = Story(cluster, tmp_path, grace=grace)
    story.wait_held()

    story.preempt()
    story.wait_heard()
    story.open_gate()
    story.back()
    story.wait_over("done", restarts=1)

    story.assert_attempts("preempted", "completed")
    assert story.run.restored()[1] >= HELD_AT
    story.assert_same_bits()


@on_both()
def test_a_node_that_dies_costs_the_steps_since_the_last_save(cluster, tmp_path):
    story = Story(cluster, tmp_path, nodes="1-2")
    story.wait_held(ranks=2 * cluster.ranks_per_node)

    story.kill_node(1)
    story.wait_heard()
    story.open_gate()
    story.wait_over("done", restarts=1)

    first = story.run.restored()[1]
    assert first % EVERY == 0
    story.assert_attempts("node_failed", "completed", lost=[HELD_AT - first])
    assert HELD_AT - first <= 2 * EVERY
    story.assert_same_bits()


@on_both()
def test_a_run_that_nears_its_time_limit_saves_and_comes_back(cluster, tmp_path):
    limit = {"slurm__signal_lead_s": LEAD_S, "run__stop_margin_s": MARGIN_S}
    story = Story(cluster, tmp_path, **limit)
    story.wait_held()

    story.reach_time_limit()
    story.wait_heard()
    story.open_gate()
    story.wait_over("done", restarts=1)

    assert story.ends()[0] == ("timed_out", "requeue")
    story.assert_attempts("timed_out", "completed")
    story.assert_same_bits()


@on_both(every_slurm=True)
def test_a_cancelled_run_ends_for_good(cluster, tmp_path):
    story = Story(cluster, tmp_path)
    story.wait_held()

    story.cancel()
    story.wait_heard()
    story.open_gate()
    story.wait_over("cancelled", restarts=0)

    assert story.ends() == [("cancelled", "stop")]
    assert not story.run.events("requeued")


@on_both()
def test_a_run_that_was_asked_to_save_goes_on_where_it_left(cluster, tmp_path):
    story = Story(cluster, tmp_path)
    story.wait_held()

    story.cancel_save()
    story.open_gate()
    story.wait_over("stopped", restarts=0)
    story.resume()
    story.wait_over("done", restarts=0)

    assert story.ends() == [("stopped", "stop"), ("completed", "stop")]
    story.assert_attempts("stopped", "completed")
    assert story.run.restored()[1] >= HELD_AT
    story.assert_same_bits()


@on_both()
def test_a_torn_checkpoint_is_passed_over(cluster, tmp_path):
    story = Story(cluster, tmp_path)
    story.wait_held()

    story.wait_event("saved", count=2)
    torn = story.tear_checkpoint()
    story.kill_rank()
    story.open_gate()
    story.wait_over("done", restarts=0)

    restored = story.wait_event("restored", count=2)
    assert [one["name"] for one in restored["skipped"]] == [torn]
    assert restored["step"] == int(torn.removeprefix("step-")) - EVERY
    assert story.ends()[0] == ("crashed", "restart")
    story.assert_same_bits()


@on_both(quick=False)
def test_a_rank_that_hangs_is_named_and_costs_a_restart(cluster, tmp_path):
    story = Story(cluster, tmp_path, nodes="2", held="1", alive__hang_s=20)
    story.wait_held(ranks=1)

    hang = story.wait_event("hang")
    story.open_gate()
    story.wait_over("done", restarts=0)

    assert hang["ranks"] == [1]
    assert [following for _, following in story.ends()] == ["restart", "stop"]
    story.assert_same_bits()

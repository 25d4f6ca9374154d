"""What a scheduler or a user does to a run, and what comes of it; each on both schedulers."""

from __future__ import annotations

import json

import pytest

from tests.support.ledger_runs import all_fields
from tests.support.scenario import cli
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
    """Held ranks end, too; the agent may end them before they have told of the signal."""
    story = Story(cluster, tmp_path)
    story.wait_held()
    story.wait_saved()

    story.cancel()
    story.wait_over("cancelled", restarts=0)
    story.wait_gone()

    assert story.ends() == [("cancelled", "stop")]
    assert not story.run.events("requeued")
    name = "hpct" if cluster.slurm else ""
    for kind in ("submit_intent", "attempt_started"):
        assert all_fields(story.run.events(kind)[0])["slurm_cluster"] == name
    assert f"takes {story.newest()}" in story.run.cli("resume", "run", "--dry-run")


@on_both()
def test_a_run_that_was_asked_to_save_goes_on_where_it_left(cluster, tmp_path):
    story = Story(cluster, tmp_path)
    story.wait_held()

    early = cli(cluster.slurm, tmp_path, "resume", "run")
    story.cancel_save()
    story.open_gate()
    story.wait_over("stopped", restarts=0)
    first = story.run.job_id
    story.resume()
    story.wait_over("done", restarts=0)

    assert early.returncode == 5
    assert early.stderr.count("\n") == 1
    assert f"job {first} (running)" in early.stderr
    assert story.ends() == [("stopped", "stop"), ("completed", "stop")]
    story.assert_attempts("stopped", "completed")
    assert story.run.restored()[1] >= HELD_AT
    story.assert_same_bits()


@on_both()
def test_a_torn_checkpoint_is_passed_over(cluster, tmp_path):
    story = Story(cluster, tmp_path)
    story.wait_held()

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
@pytest.mark.realtime(
    proved_by="tests/unit/agent/test_simulated_stories.py::test_a_hang_is_named_ended_and_started_again"
)
def test_a_rank_that_hangs_is_named_while_it_stands_and_costs_a_restart(cluster, tmp_path):
    """Its stack changes until somebody has looked: so long the hang is a suspicion."""
    tell = {"notify__on": ["incident"], "notify__command": "tee -a heard"}
    story = Story(cluster, tmp_path, nodes="2", held="1", alive__hang_s=6, **tell)
    story.wait_held(ranks=1)

    story.wait_event("hang_suspected")
    status = " ".join(story.run.cli("status", "run").split())
    stacks = story.run.cli("stacks", "run")
    (tmp_path / "looked").touch()
    hang = story.wait_event("hang")
    story.open_gate()
    story.wait_over("done", restarts=0)

    ranks = 2 * cluster.ranks_per_node
    waits = f"{ranks - 1} {'rank waits' if ranks == 2 else 'ranks wait'} for rank 1"
    assert f"rest (step {HELD_AT}, in step)" in stacks
    assert f"it may hang: {waits}" in stacks
    assert "it may hang" in status or "it hangs" in status
    assert hang["summary"].startswith(waits)
    assert (hang["ranks"], hang["ended"]) == ([1], True)
    assert [all_fields(e)["kind_of"] for e in story.run.events("failure")] == ["hang"]
    assert [following for _, following in story.ends()] == ["restart", "stop"]
    assert story.run.restored()[1] >= EVERY
    assert story.run.status()["attempts"][0]["cause"] == "hang"
    heard = json.loads((tmp_path / "heard").read_text())
    assert (heard["what"], heard["reason"], heard["attempt"]) == ("incident", "hang", 1)
    assert heard["why"].startswith(f"it hangs: {waits}")
    assert f"hangs; ended: {waits}" in story.run.cli("events", "run")
    story.assert_same_bits()

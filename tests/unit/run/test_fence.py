"""Only the newest attempt may write, and nobody takes the run back from its successor."""

from __future__ import annotations

import pytest

from hpctrain.errors import Fenced
from hpctrain.ledger.run.fence import publishing, read_fence, take_attempt


def test_attempts_are_counted_from_one_and_each_has_a_token_of_its_own(run):
    first = take_attempt(run, job_id="7", restarts=0)
    second = take_attempt(run, job_id="7", restarts=0, follows=1)
    third = take_attempt(run, job_id="7", restarts=1)
    fourth = take_attempt(run, job_id="8", restarts=0)

    assert [a.number for a in (first, second, third, fourth)] == [1, 2, 3, 4]
    assert len({a.token for a in (first, second, third, fourth)}) == 4
    assert read_fence(run) == fourth


def test_an_older_attempt_may_not_publish(run):
    old = take_attempt(run, job_id="7", restarts=0)
    new = take_attempt(run, job_id="7", restarts=1)

    with pytest.raises(Fenced, match=r"attempt 1 .*may not write any more: attempt 2"):
        publishing(run, old).__enter__()
    with publishing(run, new):
        pass


def test_an_agent_of_a_dead_node_cannot_restart_its_ranks_into_its_successors_run(run):
    old = take_attempt(run, job_id="7", restarts=0)
    new = take_attempt(run, job_id="7", restarts=1)

    with pytest.raises(Fenced, match=r"job 7 \(start 0\) may not continue: attempt 2"):
        take_attempt(run, job_id="7", restarts=0, follows=old.number)

    assert read_fence(run) == new


def test_an_older_start_of_a_job_that_was_slow_to_begin_comes_too_late(run):
    new = take_attempt(run, job_id="7", restarts=1)

    with pytest.raises(Fenced):
        take_attempt(run, job_id="7", restarts=0)

    assert read_fence(run) == new


def test_an_older_job_cannot_restart_its_ranks_after_a_resume(run):
    old = take_attempt(run, job_id="7", restarts=0)
    new = take_attempt(run, job_id="8", restarts=0)

    with pytest.raises(Fenced):
        take_attempt(run, job_id="7", restarts=0, follows=old.number)

    assert read_fence(run) == new


def test_an_attempt_begins_where_nothing_can_lie_under_checkpoints(run, caplog):
    """The nodes' memory may hold its state; a read or a save from disk says so by itself."""
    run.checkpoints.symlink_to(run.checkpoints)

    assert take_attempt(run, job_id="7", restarts=0).number == 1
    assert "no checkpoint can be read or saved for now" in caplog.text

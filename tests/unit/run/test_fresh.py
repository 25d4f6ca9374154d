"""What one node has written another one acts upon at once, although its client caches for long."""

from __future__ import annotations

import pytest

from hpctrain.checkpoint.store import find, retention
from hpctrain.cluster.preflight import bounded as exchanges
from hpctrain.errors import Fenced
from hpctrain.ledger.run.events import read
from hpctrain.ledger.run.fence import (
    left_text,
    look_anew,
    publishing,
    read_fence,
    run_lock,
    take_attempt,
)
from hpctrain.ledger.run.layout import RunDir
from tests.support import checkpoints as support
from tests.support import client_disk
from tests.support.ledger_runs import fields_of, write_event

pytestmark = pytest.mark.fuse
FOREVER_S = 600


@pytest.fixture
def nodes(tmp_path):
    """The same run, as each of two nodes sees it."""
    behind = tmp_path / "behind"
    behind.mkdir()
    one, other = tmp_path / "one", tmp_path / "other"
    with (
        client_disk.mounted(behind, one, cache_s=FOREVER_S),
        client_disk.mounted(behind, other, cache_s=FOREVER_S),
    ):
        (one / "run").mkdir()
        yield RunDir(one / "run"), RunDir(other / "run")


def test_a_start_on_a_node_that_was_here_before_finds_what_was_saved_elsewhere(nodes):
    here, there = nodes
    support.save(here, take_attempt(here, job_id="7", restarts=0), 1000)
    assert find.choose(here).checkpoint.step == 1000
    support.save(there, take_attempt(there, job_id="7", restarts=1), 2000)
    assert find.choose(here).checkpoint.step == 1000, "nothing is cached here: this shows nothing"

    take_attempt(here, job_id="7", restarts=2)

    assert find.choose(here).checkpoint.step == 2000


def test_a_node_whose_ranks_only_read_looks_anew(nodes):
    here, there = nodes
    assert find.steps(here) == []
    support.save(there, take_attempt(there, job_id="7", restarts=0), 1000)
    assert find.steps(here) == []

    look_anew(here.root, here.checkpoints)

    assert find.steps(here) == [1000]
    assert find.look(here, 1000).problem is None
    assert [path.name for path in here.checkpoints.iterdir()] == ["step-0000001000"]


def test_a_pin_from_the_login_node_holds_from_the_moment_it_is_made(nodes):
    here, login = nodes
    attempt = take_attempt(here, job_id="7", restarts=0)
    for step in (1000, 2000, 3000):
        support.save(here, attempt, step)
    assert retention.pinned(here) == {}
    retention.pin(login, 1000)
    assert retention.pinned(here) == {}, "nothing is cached here: this shows nothing"

    assert retention.prune(here, retention.Rules(1), attempt=attempt) == [2000]

    assert find.steps(here) == [3000, 1000]


def test_a_newer_attempt_elsewhere_fences_at_once(nodes):
    here, there = nodes
    old = take_attempt(here, job_id="7", restarts=0)
    with publishing(here, old):
        pass
    new = take_attempt(there, job_id="7", restarts=1)

    with pytest.raises(Fenced):
        publishing(here, old).__enter__()

    assert read_fence(here) == new


def test_a_lock_is_one_lock_for_all_nodes_also_where_it_was_not_there_before(nodes):
    here, there = nodes
    assert not here.lock.exists()
    with run_lock(there):
        assert take_would_wait(here)
    with run_lock(here):
        assert take_would_wait(there)


def take_would_wait(run):
    with pytest.raises(Exception, match="held by another process"), run_lock(run, timeout_s=0.1):
        pass
    return True


def test_facts_of_two_nodes_are_all_there_for_both_in_their_order(nodes):
    here, there = nodes
    for number in range(20):
        write_event(here, "one", number=number)
        assert len(read(there)) == 2 * number + 1
        write_event(there, "other", number=number)
        assert len(read(here)) == 2 * number + 2

    told = [(event.kind, fields_of(event)["number"]) for event in read(here)]
    assert told == [(kind, number) for number in range(20) for kind in ("one", "other")]
    assert len(here.events.read_bytes().splitlines()) == 40


def test_a_request_is_heard_by_who_was_told_that_there_is_none(nodes):
    here, login = nodes
    assert [left_text(here.stop_request) for _ in range(3)] == ["", "", ""]

    login.stop_request.with_suffix(".new").write_text("stop")
    login.stop_request.with_suffix(".new").replace(login.stop_request)

    assert left_text(here.stop_request) == "stop"
    login.stop_request.unlink()
    assert left_text(here.stop_request) == ""
    login.stop_request.write_text("again")
    assert left_text(here.stop_request) == "again"


def test_a_preflight_sees_a_file_that_came_after_its_first_look(nodes):
    """Else a healthy cluster with long caches would be taken for one without a shared directory."""
    here, there = nodes
    assert [path.name for path in here.root.iterdir()] == []
    assert exchanges.leave_file(there.root, "n2", "nonce") == ""
    assert [path.name for path in here.root.iterdir()] == [], "nothing is cached here"

    assert exchanges.unseen_files(here.root, {"n2": "nonce"}, wait_s=5) == []

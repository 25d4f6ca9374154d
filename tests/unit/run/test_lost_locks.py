"""Two nodes of which neither sees the other's locks: what is saved stays right all the same.

As with Lustre's `localflock`, or NFS with `local_lock=flock`: a lock holds on its own node, which
is all that a look from the login node can tell. One node is held up at the worst moment, and the
other does then what the lock would have kept it from.
"""

from __future__ import annotations

import threading

import pytest

from hpctrain.checkpoint.store import commit, find, retention, verify
from hpctrain.core.testing import points
from hpctrain.errors import CheckpointError, Fenced
from hpctrain.launch.checks import check_disk
from hpctrain.ledger.run.events import read
from hpctrain.ledger.run.fence import publishing, read_fence, run_lock, take_attempt
from hpctrain.ledger.run.layout import RunDir
from tests.support import checkpoints as support
from tests.support import client_disk
from tests.support.ledger_runs import fields_of, write_event
from tests.support.slurm_boot import wait_for

pytestmark = pytest.mark.fuse
LOCAL = {"op": "flock", "path": "*", "do": "local"}


@pytest.fixture
def nodes(tmp_path):
    """The same run, as each of two nodes sees it, and the faults of the first one's mount."""
    behind = tmp_path / "behind"
    behind.mkdir()
    one, other = tmp_path / "one", tmp_path / "other"
    with (
        client_disk.mounted(behind, one, cache_s=600) as faults,
        client_disk.mounted(behind, other, cache_s=600) as of_other,
    ):
        faults.set(LOCAL)
        of_other.set(LOCAL)
        (one / "run").mkdir()
        yield RunDir(one / "run"), RunDir(other / "run"), faults


@pytest.fixture
def at(monkeypatch):
    """Do something when a point is reached for the first time."""

    def when(point, act):
        def reached(here):
            if here.point == point:
                monkeypatch.setattr(points, "handler", None)
                act()

        monkeypatch.setattr(points, "handler", reached)

    return when


def test_a_look_from_one_node_cannot_tell(nodes):
    here, there, _ = nodes
    check_disk(here.root)
    with run_lock(here), run_lock(there):
        pass


def test_a_save_that_was_held_up_before_its_rename_is_there_for_nobody(nodes, at):
    here, there, _ = nodes
    old = take_attempt(here, job_id="7", restarts=0)
    support.save(here, old, 1)
    staged, listed = support.stage(here, old, 2)
    begun = {}

    def begin():
        begun["attempt"] = take_attempt(there, job_id="7", restarts=1)
        retention.bar(there, begun["attempt"])
        begun["step"] = find.choose(there).checkpoint.step

    at("publish.rename", begin)
    with pytest.raises(CheckpointError):
        commit.publish(here, staged, listed, old)

    assert begun["step"] == 1
    (path,) = support.save(there, begun["attempt"], 2)
    newest = find.choose(there).checkpoint
    assert (newest.path, newest.manifest.attempt) == (path, 2)
    assert verify.verify(newest) == []


def test_what_is_staged_after_the_newer_attempt_looked_is_never_published(nodes, at):
    here, there, _ = nodes
    old = take_attempt(here, job_id="7", restarts=0)
    support.save(here, old, 1)
    new = {}

    def begin():
        new["attempt"] = take_attempt(there, job_id="7", restarts=1)

    at("stage.made", begin)
    staged, listed = support.stage(here, old, 2)

    with pytest.raises(Fenced):
        commit.publish(here, staged, listed, old)
    assert retention.bar(there, new["attempt"]) == [staged.name]
    assert find.choose(there).checkpoint.step == 1


def test_a_save_that_came_just_before_is_chosen(nodes):
    here, there, _ = nodes
    old = take_attempt(here, job_id="7", restarts=0)
    staged, listed = support.stage(here, old, 2)
    new = take_attempt(there, job_id="7", restarts=1)
    staged.rename(find.step_path(here, 2))  # the fence was looked at before

    assert retention.bar(there, new) == []
    assert find.steps(there) == [2]
    assert listed.step == 2


def test_a_pin_that_comes_just_before_its_checkpoint_would_go_keeps_it(nodes, at):
    here, login, _ = nodes
    attempt = take_attempt(here, job_id="7", restarts=0)
    support.save(here, attempt, 1, 2, 3)

    at("prune.rename", lambda: retention.pin(login, 1, "kept"))
    gone = retention.prune(here, retention.Rules(1), attempt=attempt)

    assert gone == [2]
    assert retention.pinned(login) == {1: "kept"}
    assert verify.verify(find.look(here, 1)) == []
    assert support.names_in(here) == ["step-0000000001", "step-0000000003"]


def test_of_two_starts_at_once_one_has_the_run_and_the_other_is_told_so(nodes):
    here, there, faults = nodes
    taken = {}
    held = {"op": "fsync", "path": "run/attempt.json*", "do": "delay 0.5", "count": 1}
    faults.set(held, LOCAL)

    def begin():
        taken["slow"] = take_attempt(here, job_id="7", restarts=0)

    slow = threading.Thread(target=begin)
    slow.start()
    wait_for(lambda: any("fsync" in hit for hit in faults.hits()), "the slow one")
    taken["fast"] = take_attempt(there, job_id="8", restarts=0)
    slow.join()

    newest = read_fence(there)
    assert newest in taken.values()
    for attempt in taken.values():
        if attempt == newest:
            support.save(there, attempt, 1)
        else:
            with pytest.raises(Fenced):
                publishing(here, attempt).__enter__()
    assert sorted(path.name for path in here.root.glob("attempt.json*")) == ["attempt.json"]


def test_facts_of_two_nodes_are_all_there(nodes):
    """Where an append goes to the file's true end, as on Lustre. NFS needs the lock for it."""
    here, there, _ = nodes

    def write(run, kind):
        for number in range(50):
            write_event(run, kind, number=number)

    other = threading.Thread(target=write, args=(there, "other"))
    other.start()
    write(here, "one")
    other.join()

    told = [(event.kind, fields_of(event)["number"]) for event in read(here)]
    assert sorted(told) == sorted((k, n) for k in ("one", "other") for n in range(50))

"""Copies in the memory of living nodes become a checkpoint, before their job is gone."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from hpctrain.checkpoint.format.shard import file_name
from hpctrain.checkpoint.store import find
from hpctrain.checkpoint.store.verify import verify
from hpctrain.node.agent import copies_to_disk
from hpctrain.node.agent.copies_to_disk import CopySaver
from hpctrain.node.agent.rendezvous import SignedStore
from tests.support import checkpoints
from tests.support.replica_servers import (
    BLOCK_BYTES,
    ReplicaServers,
    plan_of,
    ready,
    until,
    values_of,
    write_copy,
)
from tests.unit.agent.test_signed_store import Store

NODES, EACH, STEP = 3, 2, 7
WORLD = NODES * EACH


@pytest.fixture
def job(tmp_path):
    replica_servers = ReplicaServers(tmp_path / "replica_servers", NODES, EACH, to_peer=True)
    yield replica_servers
    replica_servers.close()


@pytest.fixture
def held(run, attempt, job):
    """All ranks have copied a step, and all nodes have it."""
    lines = ready(job)
    copied(lines, STEP)
    return SimpleNamespace(run=run, attempt=attempt, lines=list(lines))


def copied(lines, step):
    plain = {
        "run_id": "id",
        "name": "run",
        "step": step,
        "world_size": WORLD,
        "mesh": {"dp_replicate": WORLD},
        "engine": "ddp",
        "block_bytes": BLOCK_BYTES,
        "data": {"samples_consumed": 10 * step},
    }
    for rank, line in enumerate(lines):
        until(lambda line=line: line._words[line._at], f"rank {rank} has no slot free")
        assert write_copy(line, step, rank, WORLD, {"manifest": plain}) is not None
    for line in lines:
        until(lambda line=line: line.covered == step, f"step {step} is not covered")


def saved(held, living, why_not=lambda: ""):
    """What the agents of the living nodes have come to, each on a thread of its own; node 0's."""
    store, results = Store(), {}

    def act(place):
        saver = CopySaver(
            held.run,
            held.attempt,
            place,
            living,
            held.lines[place * EACH],
            SignedStore(store, "secret"),
            lambda name: f"round/0/{name}",
            why_not,
        )
        results[place] = saver.save()

    threads = [threading.Thread(target=act, args=(place,)) for place in living]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(results) == set(living)
    assert all(results[place] is None for place in living if place)
    return results[0]


def assert_committed(run, step):
    (newest,) = find.steps(run)
    assert newest == step
    found = find.look(run, step)
    assert (found.problem, verify(found)) == (None, [])
    for rank in range(WORLD):
        plan, _ = plan_of(rank, WORLD)
        content = (found.path / file_name(rank)).read_bytes()
        assert len(content) == plan.size
        values = content[plan.head : plan.head + sum(plan.sizes)]
        assert values == values_of(step, rank, sum(plan.sizes))
    return found


@pytest.mark.parametrize("dead", [None, 1, 2])
def test_the_newest_step_that_all_have_is_committed_by_those_that_are_left(held, dead):
    living = [place for place in range(NODES) if place != dead]
    fact = saved(held, living)

    assert (fact.step, fact.mode, fact.checkpoint) == (STEP, "memory", f"step-{STEP:010d}")
    found = assert_committed(held.run, STEP)
    assert fact.bytes == found.manifest.size
    assert (found.manifest.attempt, found.manifest.data["samples_consumed"]) == (
        held.attempt.number,
        10 * STEP,
    )


def test_two_that_are_gone_with_each_others_copies_leave_nothing_to_write(held):
    assert saved(held, [0]) is None
    assert checkpoints.names_in(held.run) == []


def test_what_the_disk_has_already_is_not_written_again(held, capsys):
    checkpoints.save(held.run, held.attempt, STEP)

    assert saved(held, [0, 1]) is None
    assert (find.steps(held.run), capsys.readouterr().err) == ([STEP], "")


def test_an_older_checkpoint_on_disk_is_no_reason_to_lose_steps(held):
    checkpoints.save(held.run, held.attempt, STEP - 1)

    assert saved(held, [0, 2]).step == STEP
    assert find.steps(held.run) == [STEP, STEP - 1]


def test_a_newer_attempt_keeps_the_older_ones_copies_out(held, capsys):
    checkpoints.next_attempt(held.run)

    assert saved(held, [0, 1, 2]) is None
    assert find.steps(held.run) == []
    assert "copies in memory were not written to disk" in capsys.readouterr().err


@pytest.mark.parametrize("place", [0, 1])
def test_a_share_that_cannot_be_written_leaves_nothing(held, place, monkeypatch, capsys):
    write = CopySaver._write_one

    def refuse(saver, *args):
        if saver.place == place:
            raise OSError(28, "No space left on device")
        write(saver, *args)

    monkeypatch.setattr(CopySaver, "_write_one", refuse)

    assert saved(held, [0, 1]) is None
    assert checkpoints.names_in(held.run) == []
    assert "No space left on device" in capsys.readouterr().err


def test_an_agent_whose_replica_server_is_gone_takes_part_without_it(held):
    held.lines[4] = None
    assert saved(held, [0, 1, 2]).step == STEP
    assert_committed(held.run, STEP)


def test_it_is_given_up_where_the_job_has_no_time_left(held, monkeypatch, capsys):
    looks = []

    def why_not():
        looks.append(None)
        return "the job is to end" if len(looks) > 3 else ""

    write = CopySaver._write_one

    def slow(saver, *args):
        if saver.place:  # node 0 gives up while the other one writes
            until(lambda: len(looks) > 3, "it was not given up")
        write(saver, *args)

    monkeypatch.setattr(
        CopySaver, "_write_one", lambda saver, *args: (slow if saver.place else write)(saver, *args)
    )
    monkeypatch.setattr(copies_to_disk, "POLL_S", 0.01)

    assert saved(held, [0, 1], why_not) is None
    assert "the job is to end" in capsys.readouterr().err
    assert find.steps(held.run) == []


def test_agents_that_never_hear_of_an_order_leave(held, hands, capsys):
    saver = CopySaver(
        *(held.run, held.attempt, 1, [0, 1], held.lines[2]),
        *(SignedStore(Store(), "secret"), lambda name: name),
    )
    assert saver.save() is None
    assert "no agent said copies/order" in capsys.readouterr().err
    assert hands.passed_s == pytest.approx(copies_to_disk.ORDER_S, abs=1.0)


def test_one_that_says_nothing_is_not_waited_for_long(held, hands):
    store = Store()
    own = SignedStore(store, "secret")
    first = CopySaver(
        *(held.run, held.attempt, 0, [0, 1, 2], held.lines[0], own, lambda name: name)
    )
    own.set("copies/held/0", first._held())
    last = held.lines[4].held()
    own.set("copies/held/2", [last.own, last.guests])

    order = first._order()

    assert order["shares"] == {"0": [0, 1], "2": [2, 3, 4, 5]}
    assert hands.passed_s == pytest.approx(copies_to_disk.HELD_S, abs=copies_to_disk.POLL_S)

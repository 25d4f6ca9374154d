"""Nodes are asked for one at a time, and a round ends for one that came right behind a save."""

from __future__ import annotations

import itertools
import logging

import pytest

from hpctrain.agent.growth import (
    AGAIN_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    LOOK_S,
    Growth,
    Joining,
    growth_of,
    joining_of,
)
from hpctrain.base.records import JobContext
from hpctrain.errors import ClusterError
from hpctrain.run.layout import RunDir
from hpctrain.scheduler.base import RequestEnd
from hpctrain.settings.schema import AliveSettings


class Request:
    """One that waits, until a test says otherwise."""

    def __init__(self, pid):
        self.pid, self.end, self.is_taken_back = pid, None, False

    def ended(self):
        return self.end

    def take_back(self, timeout_s):
        assert timeout_s > 0
        self.is_taken_back = True


class Job:
    def __init__(self, *, saves=True):
        self.now, self.saved, self.may, self.refuses = 0.0, 10, True, ""
        self.requests, self.joined, self.whys = {}, [], []
        self.numbers = itertools.count(4)
        self.growth = Growth(
            self._ask,
            (lambda: self.saved) if saves else None,
            joined=lambda name, waited_s: self.joined.append((name, waited_s)),
            may_grow=self._may_grow,
            clock=lambda: self.now,
        )

    def _ask(self, number):
        if self.refuses:
            raise ClusterError(self.refuses)
        self.requests[number] = Request(100 + number)
        return self.requests[number]

    def _may_grow(self, why):
        self.whys.append(why)
        return self.may

    def look(self, missing=1):
        self.now += LOOK_S
        self.growth.look(missing, lambda: next(self.numbers))

    def due(self, *, can_grow=True):
        self.now += LOOK_S
        return self.growth.is_due(can_grow=can_grow)


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


@pytest.fixture
def job():
    return Job()


def test_nothing_is_asked_for_while_no_node_is_missing(job):
    job.look(0)
    assert (job.requests, job.growth.pids) == ({}, [])


def test_nodes_are_asked_for_one_at_a_time(job):
    job.look(2)
    job.look(2)
    assert list(job.requests) == [4]
    job.growth.came(4, "n9")
    job.look(1)
    assert list(job.requests) == [4, 5]
    assert job.joined == [("n9", pytest.approx(LOOK_S))]
    assert job.growth.pids == [104, 105]  # the first one stays with the agent that it has started


def test_a_node_that_comes_unasked_is_told_without_a_time(job):
    job.growth.came(4, "n9")
    assert job.joined == [("n9", None)]


def test_what_is_asked_for_is_taken_back_where_nobody_is_missing_any_more(job):
    job.look(1)
    job.look(0)
    assert job.requests[4].is_taken_back
    assert job.growth.pids == []
    job.look(1)
    assert list(job.requests) == [4, 5]


def test_a_request_that_fails_is_made_again_after_ever_longer_pauses(job, caplog):
    for expected_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S):
        job.look()
        newest = max(job.requests)
        job.requests[newest].end = RequestEnd("SLURM gave no node: error: no")
        job.look()
        job.now += expected_s - 2 * LOOK_S
        job.look()
        assert max(job.requests) == newest
        job.look()
        assert max(job.requests) == newest + 1
    assert warnings(caplog) == [
        "no node was added to the job: SLURM gave no node: error: no; asks again in 30 s",
        "no node was added to the job: SLURM gave no node: error: no; asks again in 1m00s",
    ]


def test_pauses_have_an_end_and_begin_anew_once_a_node_came(job):
    for _ in range(12):
        job.look()
        job.requests[max(job.requests)].end = RequestEnd("no")
        job.look()
        job.now += LONGEST_PAUSE_S
    job.look()
    newest = max(job.requests)
    assert newest == 4 + 12
    job.growth.came(newest, "n9")
    job.look()
    job.requests[newest + 1].end = RequestEnd("no")
    job.look()
    job.now += FIRST_PAUSE_S
    job.look()
    assert max(job.requests) == newest + 2


def test_where_no_node_is_ever_added_none_is_asked_for_again(job, caplog):
    job.look()
    job.requests[4].end = RequestEnd("the site permits none", is_final=True)
    job.look()
    job.now += 10 * LONGEST_PAUSE_S
    job.look()
    assert list(job.requests) == [4]
    assert warnings(caplog) == ["no node was added to the job: the site permits none"]


def test_a_scheduler_that_adds_none_is_asked_once(job, caplog):
    job.refuses = "a local cluster adds no nodes"
    for _ in range(3):
        job.look()
    assert caplog.messages == ["no node is added to the job: a local cluster adds no nodes"]


def test_an_added_node_that_was_lost_is_forgotten(job):
    job.look(1)
    job.growth.came(4, "n9")
    job.requests[4].end = RequestEnd("srun: error: n9: task 0: Killed")
    job.look(1)
    assert job.growth.pids == [105]


def test_a_round_ends_right_behind_the_next_save(job):
    assert [job.due() for _ in range(4)] == [False] * 4
    job.saved = 15
    assert job.due()


def test_the_first_save_of_a_run_is_one_too(job):
    job.saved = None
    assert not job.due()
    job.saved = 5
    assert job.due()


def test_saves_are_looked_for_now_and_then(job):
    job.due()
    job.saved = 15
    assert not job.growth.is_due(can_grow=True)
    assert job.due()


def test_a_round_that_has_all_its_nodes_goes_on(job):
    job.due()
    job.saved = 15
    assert not job.due(can_grow=False)


def test_where_memory_has_copies_no_save_is_waited_for():
    assert Job(saves=False).due()
    assert not Job(saves=False).due(can_grow=False)


def test_a_round_that_may_not_end_is_looked_at_again_later(job):
    job.due()
    job.saved, job.may = 15, False
    assert job.due()
    assert not job.growth.may_end("n9 joined the job")
    job.saved = 20
    assert not job.due()
    job.now += AGAIN_S
    assert not job.due()  # a save is waited for anew
    job.saved = 25
    assert job.due()
    assert job.whys == ["n9 joined the job"]


def test_at_the_end_the_request_is_taken_back_and_started_agents_are_left(job):
    job.look(2)
    job.growth.came(4, "n9")
    job.look(1)
    job.growth.stop()
    job.growth.stop()
    assert [request.is_taken_back for request in job.requests.values()] == [False, True]


CONTEXT = JobContext("7", 0, 0, ["n1", "n2", ""], "10.0.0.1", 20000, "tok")


def test_a_joining_agent_finds_its_place_in_its_environment():
    joining = Joining(3, tuple(CONTEXT.nodes), "10.0.0.1", 20000)
    assert joining_of(joining.variables()) == joining
    assert joining_of({}) is None

    of_task = JobContext("7", 0, 0, ["n9"], "n9", 1, "tok")
    place = joining.context(of_task)

    assert (place.nodes, place.node_rank) == (["n1", "n2", "", "n9"], 3)
    assert (place.master_addr, place.port, place.job_id) == ("10.0.0.1", 20000, "7")
    assert joining.name(place) == "tok-joins-3"


@pytest.mark.parametrize(("memory", "waits"), [("no", True), ("auto", False)])
def test_a_run_asks_as_its_settings_say(tmp_path, memory, waits, caplog):
    caplog.set_level(logging.INFO)
    asked = []

    def add_node(joining):
        asked.append(joining)
        return Request(1)

    def growth(grow):
        alive = AliveSettings(shrink="auto", grow=grow, memory=memory)
        callbacks = {"joined": lambda *_: None, "may_grow": lambda _why: True}
        return growth_of(RunDir(tmp_path), alive, CONTEXT, add_node, **callbacks)

    assert growth("no") is None
    own = growth("auto")
    own.look(1, lambda: 3)
    assert asked == [Joining(3, ("n1", "n2", ""), "10.0.0.1", 20000)]
    assert own.is_due(can_grow=True) is not waits

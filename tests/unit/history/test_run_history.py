"""One history of a run, built in one pass: the same at once and as the ledger grows."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.base.records import EndReason
from hpctrain.launch.live_job import newest_submission
from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.goodput import goodput
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import event_fields
from hpctrain.ledger.run.events import read
from tests.support.ledger_runs import Story, event_of

KINDS = [*event_fields.KINDS, "meteor"]
NUMBERS = st.one_of(st.none(), st.integers(0, 40), st.sampled_from(["x", [], {}, True]))
DATA = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("step", "first", "last", "seconds", "stall_s", "heard"), NUMBERS),
        **dict.fromkeys(("from_step", "restarts", "world_size", "job_started"), NUMBERS),
        "token": st.sampled_from(["a", "b", None]),
        "job_id": st.sampled_from(["17", "18", None]),
        "by": st.sampled_from(["start", "restart", "batch", "agent", "successor", 3]),
        "name": st.sampled_from(["first_step", "initialised", 7]),
        "reason": st.sampled_from(["preempted", "completed", "crashed", "meteor"]),
        "next": st.sampled_from(["requeue", "leave", "restart", "stop", "ask_batch", "pray"]),
        "nodes": st.sampled_from([["n1"], ["n1", "n2"], "2-4", None]),
    },
)
NUMBER = st.one_of(st.none(), st.integers(0, 4))
EVENT = st.builds(event_of, st.floats(0, 1000), st.sampled_from(KINDS), NUMBER, DATA)
EVENTS = st.lists(EVENT.filter(bool), max_size=40)


@given(EVENTS, st.lists(st.integers(0, 40), max_size=4))
@settings(max_examples=100)
def test_it_is_the_same_at_once_and_in_any_pieces(events, cuts):
    grown = RunHistory()
    for begin, end in pairwise([0, *sorted(min(cut, len(events)) for cut in cuts), len(events)]):
        grown.extend(events[begin:end])
        attempts(grown)  # whoever looks in between changes nothing
        goodput(grown, now=500.0)
    assert grown == RunHistory.of(events)


def test_of_what_an_old_attempt_says_beside_a_newer_one_only_its_end_counts(tmp_path):
    story = Story(tmp_path / "lm").submitted().started(1).restored(1).steps(1, 1, 10)
    story.started(2).saved(1, 10).steps(1, 11, 20).add("failure", 1, summary="x")
    story.add("excluded", 1, nodes=["n9"]).add("notified", 1, what="attempt", ok=True)
    story.ended(1, "node_failed", "leave")
    history = RunHistory.read(story.run)
    old = history.attempt(1)
    assert (old.last_step, old.last_saved_step, old.failure) == (10, None, None)
    assert (history.saves, history.newest_saved) == ([], None)
    assert (history.excluded, history.notified) == ([], set())
    assert (old.reason, history.ends_since_resume) == (
        EndReason.NODE_FAILED,
        [(1, EndReason.NODE_FAILED)],
    )


def test_an_end_that_was_written_twice_counts_once_as_it_was_written_last(tmp_path):
    story = Story(tmp_path / "lm").submitted().started(1).ended(1, "crashed", "ask_batch")
    story.ended(1, "node_failed", "restart").ended(1, "node_failed", "requeue").started(2)
    story.ended(None, "unknown", "requeue").ended(None, "unknown", "requeue")
    assert RunHistory.read(story.run).ends_since_resume == [
        (1, EndReason.NODE_FAILED),
        *[(None, EndReason.UNKNOWN)] * 2,
    ]


@pytest.mark.parametrize("marks", ["all", "few"])
def test_it_tells_how_many_events_it_has_and_when_the_last_was_written(tmp_path, marks):
    story = Story(tmp_path / "lm").submitted().started(1)
    history = RunHistory.read(story.run, marks=marks)
    assert (history.count, history.last_t) == (len(read(story.run)), story.t)
    assert RunHistory().last_t is None


def test_an_attempt_that_restores_again_goes_on_from_there_and_has_still_been_further(tmp_path):
    story = Story(tmp_path / "lm").submitted().started(1).restored(1).steps(1, 1, 20)
    record = RunHistory.read(story.restored(1, 10).run).attempt(1)
    assert (record.restored_step, record.last_step, record.highest_step) == (10, 10, 20)


def test_a_job_is_known_by_its_answer_where_its_intent_is_torn(tmp_path):
    story = Story(tmp_path / "lm").add("submitted", token="tok-1", job_id="17")
    history = RunHistory.read(story.run)
    assert newest_submission(history) == ("tok-1", "17")
    assert history.jobs == {"17": set()}

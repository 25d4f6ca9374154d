"""What passes for a fact's field, and what is left out as if it had not been told."""

from __future__ import annotations

import json

import pytest

from hpctrain.ledger.run.events import parse
from tests.support import ledger_runs


def told(kind, **fields):
    """What readers are given of a fact, None where they are given none."""
    event = parse(json.dumps({"t": 1.0, "kind": kind, **fields}).encode())
    return None if event is None else ledger_runs.fields_of(event)


@pytest.mark.parametrize("step", [None, "7", -1, 2**70, 1.5, True, [], {}])
def test_a_step_is_a_whole_number_from_0_on(step):
    assert told("stopped", step=step).get("step") is None
    assert told("stopped", step=7) == {"step": 7}


@pytest.mark.parametrize(
    "job_id", ["--all", "-u", "../x", "a b", "a;b", "a=b", "", "x" * 400, "\n"]
)
def test_a_jobs_id_is_no_option_and_no_path(job_id):
    assert told("requeued", job_id=job_id) == {}
    assert told("submitted", token="t-1", job_id=job_id) is None
    assert told("submit_intent", token=job_id) is None


@pytest.mark.parametrize("job_id", ["4711", "4711_3", "4711_[1-4]", "local-3", "pid-17", "7+0"])
def test_every_id_that_a_scheduler_gives_is_one(job_id):
    assert told("requeued", job_id=job_id) == {"job_id": job_id}
    assert told("requeued", job_id=4711) == {"job_id": "4711"}


def test_an_end_always_has_a_reason_and_what_follows():
    unknown = {"reason": "unknown", "next": "ask_batch"}
    assert told("attempt_ended", attempt=1) == unknown
    assert told("attempt_ended", attempt=1, reason="meteor", next=["x"]) == unknown
    known = {"reason": "crashed", "next": "stop"}
    assert told("attempt_ended", attempt=1, **known) == known


@pytest.mark.parametrize("t", [-1, 2.6e11, 1e300, 2**70, "5", None, True])
def test_a_fact_is_of_a_time_that_a_clock_can_show(t):
    assert told("done", t=t) is None
    assert "heard" not in told("attempt_ended", heard=t) or t is None


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_what_cannot_be_written_becomes_a_question_mark(text):
    data = told("x", why=text, more={text: [text]})
    assert json.dumps(data, ensure_ascii=False).encode().count(b"?") == 3


def test_lists_in_lists_without_an_end_are_no_fact():
    deep = "[" * 500 + "]" * 500
    assert parse(f'{{"t": 1.0, "kind": "x", "y": {deep}}}'.encode()) is None
    assert told("failure", traceback="[" * 5000) == {"traceback": "[" * 5000}


def test_lists_keep_what_is_right():
    assert told("failure", others=[1, "2", None, 3]) == {"others": [1, 3]}
    assert told("attempt_started", nodes=["n1", None, 2]) == {"nodes": ["n1", "2"]}
    skipped = [{"step": 4, "name": "x", "reason": "torn", "more": 1}, "step-3", {"step": "x"}]
    assert told("restored", skipped=skipped)["skipped"] == [
        {"step": 4, "name": "x", "reason": "torn"}, {"step": 0, "name": "", "reason": ""},
    ]  # fmt: skip


def test_what_this_version_does_not_know_passes_as_it_is():
    assert told("new_kind", step="x", y=[{"z": -1}]) == {"step": "x", "y": [{"z": -1}]}
    assert told("done", step=1, later={"x": [1]}) == {"step": 1, "later": {"x": [1]}}


def test_old_names_of_fields_and_values_are_read_and_never_written():
    assert told("attempt_started", buddies=["n2", "n1"])["peers"] == ["n2", "n1"]
    assert told("attempt_started", buddies=["n2"], peers=["n3"])["peers"] == ["n3"]
    assert told("restored", read_from="buddy") == {"read_from": "peer"}
    assert told("restored", read_from="memory") == {"read_from": "memory"}


def test_a_loss_may_be_no_number():
    assert told("steps", last=1, loss="nan", grad_norm="x") == {
        "last": 1,
        "loss": pytest.approx(float("nan"), nan_ok=True),
    }

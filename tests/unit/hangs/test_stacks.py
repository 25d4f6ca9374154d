"""A request is heard by its own job alone; the answer says what the look has found."""

from __future__ import annotations

import json
import math
import time

import pytest

from hpctrain.node.hangs import stacks
from hpctrain.node.hangs.evidence import Frame, Front, RankEvidence, Recorded
from hpctrain.node.hangs.standing import Stand
from hpctrain.node.hangs.verdict import HangVerdict, JobLook

FRAMES = (Frame("/env/lib/python3.11/threading.py", 3, "wait"), Frame("/home/me/train.py", 7, "f"))


def test_a_request_is_heard_by_its_own_job(tmp_path):
    path = tmp_path / "request"
    assert stacks.asked(path, "7") == ""
    stacks.ask(path, "7", "abc")
    assert stacks.asked(path, "7") == "abc"
    assert stacks.asked(path, "8") == ""


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"job_id": "7"}', '{"job_id": 7}'])
def test_what_is_no_request_is_none(tmp_path, text):
    (tmp_path / "request").write_text(text)
    assert stacks.asked(tmp_path / "request", "7") == ""


def test_an_old_request_is_none(tmp_path):
    path = tmp_path / "request"
    stacks.ask(path, "7", "abc")
    old = json.loads(path.read_text()) | {"t": time.time() - stacks.REQUEST_HOLDS_S - 1}
    path.write_text(json.dumps(old))
    assert stacks.asked(path, "7") == ""


def found():
    evidence = [
        RankEvidence(1, "n0", "T", step=4, phase="data"),
        RankEvidence(0, "n0", "S", Recorded({"0": Front(3, 2)}, ()), {}, FRAMES),
    ]
    stands = [Stand(1, 4, "data", 70.04, 60.0), Stand(0, 0, "", 500.0, math.inf)]
    return JobLook(0, stands, evidence, silent=[2])


def test_the_answer_says_where_each_rank_is(tmp_path):
    told = stacks.document_of(found(), token="abc", t=5.0, hang=None)
    path = stacks.path_of(tmp_path)
    path.write_text(json.dumps(told))

    assert stacks.answer(path, "other") is None
    answer = stacks.answer(path, "abc")
    first, second = answer["ranks"]
    assert (first["rank"], first["at"]) == (0, "/home/me/train.py:7 f")
    assert (first["stood_s"], first["limit_s"]) == (None, None), "it says nothing about itself"
    assert first["collectives"] == {"0": [3, 2]}
    assert (second["step"], second["stood_s"], second["limit_s"]) == (4, 70.0, 60.0)
    assert stacks.state_in_words(second) == "stopped (by a signal)"
    assert (answer["is_suspected"], answer["silent"]) == (False, [2])
    assert answer["verdict"]["summary"] == "rank 1 is stopped (by a signal)"


def test_a_suspicion_is_told_as_it_is():
    hang = HangVerdict("behind", (1,), "rank 1 it is")
    told = stacks.document_of(found(), token="", t=5.0, hang=hang)
    assert (told["is_suspected"], told["verdict"]["summary"]) == (True, "rank 1 it is")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}"])
def test_half_an_answer_is_none(tmp_path, text):
    (tmp_path / "stacks.json").write_text(text)
    assert stacks.answer(tmp_path / "stacks.json", "abc") is None

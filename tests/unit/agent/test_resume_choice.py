"""What ranks go on from is looked for, and a stop is heard meanwhile."""

from __future__ import annotations

import threading

import pytest

from hpctrain.node.agent import resume
from hpctrain.node.agent.resume import StopHeard, choose


def test_what_was_chosen_is_returned_and_no_thread_is_left():
    assert choose(lambda _: "ckpt.pt", lambda: "") == "ckpt.pt"
    assert "resume" not in {thread.name for thread in threading.enumerate()}


def test_an_error_is_the_callers_also_one_that_looks_like_a_wait():
    def fails(_):
        raise TimeoutError(110, "Connection timed out")

    with pytest.raises(TimeoutError, match="timed out"):
        choose(fails, lambda: "")


def test_a_reason_to_leave_ends_the_reading():
    began, ended = threading.Event(), threading.Event()

    def reads(on_bytes):
        try:
            while True:
                on_bytes(1)
                began.set()
        finally:
            ended.set()

    with pytest.raises(StopHeard, match="preempted"):
        choose(reads, lambda: "preempted" if began.is_set() else "")
    assert ended.is_set()


def test_a_disk_that_does_not_answer_is_left_behind(monkeypatch):
    monkeypatch.setattr(resume, "LEAVE_S", 0.01)
    answers = threading.Event()

    with pytest.raises(StopHeard, match="preempted"):
        choose(lambda _: answers.wait(), lambda: "preempted")
    answers.set()

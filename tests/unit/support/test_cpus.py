"""Tokens for CPUs: never more than there are, none lost, and nobody waits for himself."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading

import pytest

from tests.support import cpus
from tests.support.cpus import Tokens

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cpus"


def _hold(folder, count, wanted, line):
    """Take tokens in a process of its own, say so, and release them when told to."""
    tokens = Tokens(folder, count)
    tokens.take(wanted, lambda: line.send("waits"))
    line.send(tokens.held)
    line.recv()
    tokens.release()
    line.send("released")
    line.recv()


class Other:
    """Another process that takes tokens."""

    def __init__(self, folder, count, wanted):
        self.line, theirs = FORK.Pipe()
        self.process = FORK.Process(target=_hold, args=(folder, count, wanted, theirs))
        self.process.start()
        theirs.close()

    def says(self):
        return self.line.recv()

    def kill(self):
        self.process.kill()
        self.process.join()


@pytest.fixture
def other(folder):
    others = []

    def start(count, wanted):
        others.append(Other(folder, count, wanted))
        return others[-1]

    yield start
    for one in others:
        one.kill()


def test_who_wants_more_than_are_free_waits_until_they_are(folder, other):
    first, second = other(2, 1), other(2, 1)
    assert (first.says(), second.says()) == (1, 1)

    third = other(2, 2)
    assert third.says() == "waits"
    first.line.send("release")
    assert first.says() == "released"
    assert not third.line.poll(0.2), "one is not enough"
    second.line.send("release")

    assert third.says() == 2


def test_who_wants_more_than_there_are_takes_all(other):
    first = other(2, 8)
    assert first.says() == 2

    second = other(2, 1)

    assert second.says() == "waits"
    first.line.send("release")
    assert second.says() == 1


def test_tokens_are_free_again_when_their_process_is_killed(folder, other):
    first = other(2, 2)
    assert first.says() == 2
    second = other(2, 2)
    assert second.says() == "waits"

    os.kill(first.process.pid, signal.SIGKILL)

    assert second.says() == 2


def test_who_holds_some_takes_no_more_and_gives_back_what_was_taken_first(folder):
    tokens, others = Tokens(folder, 2), []

    assert tokens.take(1)
    assert not tokens.take(2)
    assert tokens.held == 1
    tokens.release()
    tokens.release()
    assert tokens.take(2, lambda: others.append("waits"))
    assert (tokens.held, others) == (2, [])


def test_a_forked_rank_neither_holds_nor_releases_its_parents(folder, other):
    tokens = Tokens(folder, 1)
    tokens.take(1)

    child = FORK.Process(target=lambda: (tokens.release(), os._exit(tokens.held)))
    child.start()
    child.join()
    second = other(1, 1)

    assert child.exitcode == 0
    assert second.says() == "waits"
    orphan = FORK.Process(target=threading.Event().wait)
    orphan.start()
    tokens.release()
    assert second.says() == 1, "a child that lives on keeps none"
    orphan.kill()
    orphan.join()


def _take_many(folder, seed, used):
    rng, tokens = random.Random(seed), Tokens(folder, 3)
    for _ in range(30):
        wanted = rng.randint(1, 4)
        tokens.take(wanted)
        with used.get_lock():
            used[0] += tokens.held
            used[1] = max(used[0], used[1])
        with used.get_lock():
            used[0] -= tokens.held
        tokens.release()


def test_many_processes_never_hold_more_than_there_are_and_all_come_to_their_end(folder):
    used = FORK.Array("i", [0, 0])
    takers = [FORK.Process(target=_take_many, args=(folder, seed, used)) for seed in range(5)]
    for one in takers:
        one.start()
    for one in takers:
        one.join()

    assert [one.exitcode for one in takers] == [0] * 5
    assert used[0] == 0
    assert 1 <= used[1] <= 3


def test_a_test_keeps_what_it_took_and_a_launch_within_it_takes_none(folder, monkeypatch):
    tokens = Tokens(folder, 2)
    monkeypatch.setattr(cpus, "_TOKENS", tokens)
    monkeypatch.setattr(cpus, "_running", None)

    with cpus.taken(1):
        assert tokens.held == 1
    assert tokens.held == 0
    with cpus.of_test(None):
        cpus.take(2)
        with cpus.taken(1):
            assert tokens.held == 2
        assert tokens.held == 2
    assert tokens.held == 0


@pytest.mark.timeout(30)
def test_a_wait_for_tokens_does_not_count_for_the_tests_limit(folder, other, monkeypatch, request):
    tokens, told = Tokens(folder, 1), []
    monkeypatch.setattr(cpus, "_TOKENS", tokens)
    monkeypatch.setattr(cpus, "_running", request.node)
    first = other(1, 1)
    assert first.says() == 1
    cancel = type(request.node.ihook.pytest_timeout_cancel_timer)
    real = cancel.__call__

    def called(hook, **named):
        told.append(hook.name)
        if hook.name.endswith("cancel_timer"):
            first.line.send("release")
        return real(hook, **named)

    monkeypatch.setattr(cancel, "__call__", called)
    cpus.take(1)
    monkeypatch.undo()

    assert told == ["pytest_timeout_cancel_timer", "pytest_timeout_set_timer"]
    assert tokens.held == 1

"""The process's clock, and the clock that tests give it."""

from __future__ import annotations

import os
import threading
import time

import pytest

from hpctrain.core.base import clock
from tests.support.clocks import WALL_S, ManualClock, NothingIsDueError, jumping

HOUR_S = 3600.0


@pytest.fixture
def thread():
    """Start a function on a thread; each of them must end with the test."""
    begun = []

    def start(call):
        begun.append(threading.Thread(target=call))
        begun[-1].start()
        return begun[-1]

    yield start
    for each in begun:
        each.join(60)
        assert not each.is_alive()


@pytest.mark.parametrize(
    ("ours", "systems"),
    [
        (clock.now, time.time),
        (clock.monotonic, time.monotonic),
        (clock.now_ns, time.time_ns),
        (clock.monotonic_ns, time.monotonic_ns),
        (clock.boottime, lambda: time.clock_gettime(time.CLOCK_BOOTTIME)),
    ],
)
def test_without_another_clock_it_is_the_systems(ours, systems):
    before, between, after = systems(), ours(), systems()

    assert before <= between <= after


def test_the_systems_clock_sleeps_and_waits_in_real_time():
    began, event = time.monotonic(), threading.Event()

    clock.sleep(0.01)
    assert clock.wait(event, 0.01) is False
    assert time.monotonic() - began >= 0.02

    event.set()
    assert clock.wait(event, HOUR_S) is True


def test_another_clock_is_there_for_all_threads_until_the_block_ends(thread):
    seen = []
    with clock.use(ManualClock(wall_s=5.0)):
        with clock.use(ManualClock(wall_s=7.0)):
            thread(lambda: seen.append(clock.now())).join()
        seen.append(clock.now())
        with pytest.raises(ZeroDivisionError), clock.use(ManualClock(wall_s=9.0)):
            _ = 1 // 0
        seen.append(clock.now_ns())

    assert seen == [7.0, 5.0, 5_000_000_000]
    assert clock.now() > WALL_S / 2
    assert clock.monotonic_ns() <= time.monotonic_ns()


def test_a_forked_child_keeps_the_systems_clock():
    child = os.fork()
    if child == 0:
        clock.sleep(0.0)
        os._exit(0 if abs(clock.monotonic() - time.monotonic()) < HOUR_S else 1)

    assert os.waitpid(child, 0) == (child, 0)


def test_a_lone_thread_moves_the_time_by_its_sleeps():
    with jumping() as hands:
        began = (clock.now(), clock.monotonic(), clock.boottime(), clock.monotonic_ns())
        clock.sleep(HOUR_S)
        late = clock.wait(threading.Event(), 2 * HOUR_S)

        assert clock.boottime() == hands.boottime() != clock.monotonic()

    assert not late
    assert (hands.passed_s, hands.slept) == (3 * HOUR_S, [HOUR_S, 2 * HOUR_S])
    assert (hands.now() - began[0], hands.monotonic() - began[1]) == (3 * HOUR_S, 3 * HOUR_S)
    assert (hands.boottime() - began[2], hands.monotonic_ns() - began[3]) == (10800, 10800 * 10**9)


def test_a_loop_to_a_deadline_ends_however_the_numbers_round():
    with jumping() as hands:
        until = clock.monotonic() + 8.1
        while clock.monotonic() < until:
            clock.sleep(min(0.1, until - clock.monotonic()))

    assert hands.passed_s == pytest.approx(8.1)


def test_what_a_test_planned_happens_at_its_moment():
    told, event = [], threading.Event()
    with jumping() as hands:
        hands.after(7.0, event.set)
        hands.after(3.0, lambda: told.append(hands.passed_s))
        assert clock.wait(event, HOUR_S)

    assert (told, hands.passed_s) == ([3.0], 7.0)


def test_a_condition_that_a_plan_notifies_is_heard():
    condition, things = threading.Condition(), []

    def put():
        with condition:
            things.append(1)
            condition.notify()

    with jumping() as hands, condition:
        hands.after(7.0, put)
        while not things:
            assert clock.wait(condition, HOUR_S)
        assert not clock.wait(condition, 1.0)

    assert hands.passed_s == 8.0


def test_a_thread_is_held_until_the_test_moves_the_time(thread):
    hands, passed = ManualClock(), []
    with clock.use(hands):
        sleeper = thread(lambda: (clock.sleep(5.0), passed.append(hands.passed_s)))
        hands.until_waiting()
        hands.advance(4.5)
        hands.until_waiting()
        assert passed == []

        hands.advance(0.5)
        sleeper.join(60)

    assert passed == [5.0]


def test_an_event_ends_a_wait_while_the_time_stands(thread):
    hands, event, answers = ManualClock(), threading.Event(), []
    with clock.use(hands):
        waiter = thread(lambda: answers.append(clock.wait(event, 5.0)))
        hands.until_waiting()
        event.set()
        waiter.join(60)

    assert (answers, hands.passed_s) == ([True], 0.0)


def test_of_two_threads_none_moves_the_time_while_the_other_is_busy(thread):
    """One sets an event and waits on: the other one's turn comes first, at the same moment."""
    ping, pong, moments = threading.Event(), threading.Event(), []
    with jumping(threads=2) as hands:

        def answer():
            assert clock.wait(ping, HOUR_S)
            moments.append(("ping", hands.passed_s))
            clock.sleep(2.0)
            pong.set()

        thread(answer)
        clock.sleep(1.0)
        ping.set()
        assert clock.wait(pong, HOUR_S)
        moments.append(("pong", hands.passed_s))

    assert moments == [("ping", 1.0), ("pong", 3.0)]


def test_waiting_for_what_never_comes_is_an_error_and_no_hang():
    with jumping(), pytest.raises(NothingIsDueError):
        clock.wait(threading.Event(), float("inf"))


def test_the_wall_clock_can_be_set_back_and_the_monotonic_one_goes_on():
    with jumping() as hands:
        clock.sleep(10.0)
        hands.set_wall(WALL_S - HOUR_S)
        clock.sleep(1.0)

    assert (hands.now(), hands.passed_s) == (WALL_S - HOUR_S + 1, 11.0)


def test_a_negative_sleep_is_refused_as_by_the_system():
    for hands in (clock.SystemClock(), ManualClock()):
        with clock.use(hands), pytest.raises(ValueError, match="non-negative"):
            clock.sleep(-1.0)


def test_a_thread_that_was_there_before_moves_nobodys_time(thread):
    """What an earlier test left running went on sleeping, and 35 s passed in a job of 300 s."""
    made, ended = threading.Event(), threading.Event()

    def sleeps():
        made.wait()
        clock.sleep(0.001)
        clock.wait(threading.Event(), 0.001)
        ended.set()

    thread(sleeps)
    with jumping() as hands:
        made.set()
        ended.wait()

        assert hands.passed_s == 0
        assert hands.slept == []

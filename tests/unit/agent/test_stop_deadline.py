"""The agent's stop deadline, with time and the scheduler's answers as inputs."""

from __future__ import annotations

import errno
import signal

import pytest

from hpctrain.core.base import clock
from hpctrain.core.base.records import JobContext, JobFacts, StopCause
from hpctrain.errors import ClusterUnreachable
from hpctrain.node.agent.signals import Arrival
from hpctrain.node.agent.stop_deadline import DISK_LOOK_S, LEAVE_S, StopDeadline
from tests.support.clocks import jumping

LATE = "the ranks did not leave in time"


@pytest.fixture(autouse=True)
def hands():
    with jumping(wall_s=1000.0) as hands:
        yield hands


def deadline(*, arrivals, facts, end_time=None, kill_wait_s=30.0, on_suspended=lambda _: None):
    context = JobContext("7", 0, 0, ["n1"], "n1", 1, "t", end_time, kill_wait_s)

    def ask():
        if isinstance(facts, Exception):
            raise facts
        return facts

    return StopDeadline(
        context,
        arrivals=lambda: arrivals,
        ask=ask,
        stop_margin_s=10.0,
        on_suspended=on_suspended,
    )


def test_without_a_signal_the_scheduler_is_never_asked(hands):
    looked = deadline(arrivals=[], facts=AssertionError("asked")).look()

    assert not looked


def test_a_cancelled_job_is_given_up_at_once(hands):
    stop = deadline(
        arrivals=[Arrival(signal.SIGTERM, 1000.0)], facts=JobFacts("COMPLETING", restarts=0)
    )

    looked = stop.look()

    assert looked == "cancelled"


def test_ranks_may_save_until_shortly_before_killwait_ends(hands):
    stop = deadline(
        arrivals=[Arrival(signal.SIGTERM, 1000.0)], facts=JobFacts("COMPLETING", restarts=1)
    )

    hands.move_to(1000.0 + 30.0 - LEAVE_S - 0.1)
    early = stop.look()
    hands.move_to(1000.0 + 30.0 - LEAVE_S + 0.1)
    late = stop.look()

    assert (early, late) == ("", LATE)


@pytest.mark.parametrize("end_time", [998.0, 1002.0, 1010.0])
def test_sigterm_at_the_limit_leaves_the_ranks_all_of_killwait(hands, end_time):
    facts = JobFacts("RUNNING", restarts=0, end_time=end_time)
    stop = deadline(arrivals=[Arrival(signal.SIGTERM, 1000.0)], facts=facts, end_time=end_time)

    at_once = stop.look()
    hands.move_to(1000.0 + 30.0 - LEAVE_S - 0.1)
    early = stop.look()
    hands.move_to(1000.0 + 30.0 - LEAVE_S + 0.1)
    late = stop.look()

    assert (at_once, early, late) == ("", "", LATE)


def test_in_the_grace_time_the_moved_end_counts_not_killwait(hands):
    facts = JobFacts("RUNNING", restarts=0, preempt_time=1000.0, end_time=1100.0)
    stop = deadline(arrivals=[Arrival(signal.SIGTERM, 1000.0)], facts=facts)

    hands.move_to(1050.0)
    inside = stop.look()
    hands.move_to(1096.0)
    after = stop.look()

    assert (inside, after) == ("", LATE)


def test_a_silent_scheduler_leaves_killwait_as_the_deadline(hands):
    stop = deadline(arrivals=[Arrival(signal.SIGTERM, 1000.0)], facts=ClusterUnreachable("silent"))

    hands.move_to(1028.0)

    assert stop.look()


def test_a_warning_alone_is_no_term_and_kills_nobody(hands):
    facts = JobFacts("RUNNING", restarts=0, end_time=2000.0)
    stop = deadline(arrivals=[Arrival(signal.SIGUSR2, 1000.0)], facts=facts, end_time=2000.0)

    hands.move_to(1100.0)
    looked = stop.look()

    assert (looked, stop.cause) == ("", StopCause.WARNING)


def test_the_jobs_end_kills_ranks_that_no_signal_reached(hands):
    stop = deadline(arrivals=[], facts=JobFacts("RUNNING"), end_time=1100.0)

    hands.move_to(1100.0 + 30.0 - LEAVE_S - 0.1)
    early = stop.look()
    hands.move_to(1100.0 + 30.0 - LEAVE_S + 0.1)
    late = stop.look()

    assert (early, late) == ("", LATE)


@pytest.mark.parametrize(("kill_wait_s", "until"), [(30.0, 1031.0), (2.0, 1003.0), (0.0, 1001.0)])
def test_a_limit_that_was_moved_near_leaves_time_for_a_save(hands, kill_wait_s, until):
    facts = JobFacts("RUNNING", restarts=0, end_time=1004.0)
    signals = [Arrival(signal.SIGUSR2, 1000.0)]
    stop = deadline(arrivals=signals, facts=facts, end_time=5000.0, kill_wait_s=kill_wait_s)

    hands.move_to(until - 0.1)
    early = stop.look()
    hands.move_to(until + 0.1)
    late = stop.look()

    assert (early, late) == ("", LATE)


@pytest.mark.parametrize(("ran_s", "told"), [(10.0, False), (90.0, True)])
def test_a_warning_in_the_first_half_of_a_job_does_not_explain_a_return(hands, ran_s, told):
    facts = JobFacts("RUNNING", restarts=0, end_time=1100.0)
    arrivals = [Arrival(signal.SIGUSR2, 1000.0)]
    stop = deadline(arrivals=arrivals, facts=facts, end_time=1100.0)
    stop.look()

    hands.move_to(1000.0 + ran_s)

    assert stop.is_stop_requested() is told


def test_a_user_signal_of_a_preemption_explains_a_return(hands):
    facts = JobFacts("RUNNING", restarts=0, preempt_time=1000.0, end_time=1100.0)
    arrivals = [Arrival(signal.SIGUSR2, 1000.0)]
    stop = deadline(arrivals=arrivals, facts=facts, end_time=5000.0)

    stop.look()

    assert stop.is_stop_requested()


@pytest.mark.parametrize("preempt_time", [None, 990.0])
def test_what_a_job_on_its_way_out_says_of_its_end_is_not_the_ranks_time(hands, preempt_time):
    """SLURM sets the end of a job that it requeues to now, and kills after KillWait."""
    facts = JobFacts("COMPLETING", restarts=1, preempt_time=preempt_time, end_time=1000.0)
    stop = deadline(arrivals=[Arrival(signal.SIGTERM, 1000.0)], facts=facts, end_time=9000.0)

    assert not stop.look()
    assert stop.seconds_left() == 30.0 - LEAVE_S


@pytest.mark.parametrize(("stop_at", "ends"), [(None, 8.0), (3.0, 3.0)])
def test_a_pause_ends_at_once_where_the_job_is_asked_to_stop(hands, stop_at, ends):
    arrivals = []
    if stop_at is not None:
        hands.after(stop_at, lambda: arrivals.append(Arrival(signal.SIGTERM, 1000.0 + stop_at)))

    context = JobContext("1", 0, 0, ["n0"], "n0", 1, "")
    StopDeadline(context, arrivals=lambda: arrivals, ask=None).wait(8.0)

    assert hands.passed_s == pytest.approx(ends, abs=0.2)


def suspended(hands, *, facts, stood_s=90.0, end_time=1050.0):
    """A look, a time in which this process stood still, and the next look."""
    told: list[float] = []
    stop = deadline(arrivals=[], facts=facts, end_time=end_time, on_suspended=told.append)
    stop.look()
    hands.move_to(1000.0 + stood_s)
    return stop, stop.look(), told


def test_a_suspension_is_told_and_moves_the_end_by_which_ranks_must_be_gone(hands):
    """By the end that the job had before, the ranks would be killed in the middle of a step."""
    facts = JobFacts("RUNNING", restarts=0, end_time=1140.0, resumed_at=1089.0)

    stop, looked, told = suspended(hands, facts=facts)

    assert told == [90.0]
    assert (looked, stop.end_time, stop.cause) == ("", 1140.0, None)
    assert (stop.look(), told) == ("", [90.0])


@pytest.mark.parametrize(
    "facts",
    [
        JobFacts("RUNNING", restarts=0, end_time=9000.0),
        JobFacts("RUNNING", restarts=0, end_time=9000.0, resumed_at=900.0),  # an older one
        ClusterUnreachable("silent"),
    ],
)
def test_a_process_that_stood_still_for_another_reason_was_not_suspended(hands, facts):
    _, looked, told = suspended(hands, facts=facts, end_time=9000.0)

    assert (looked, told) == ("", [])


def test_looks_at_their_usual_pace_ask_nobody(hands):
    _, looked, told = suspended(hands, facts=AssertionError("asked"), stood_s=4.0, end_time=None)

    assert (looked, told) == ("", [])


def test_a_scheduler_that_is_slow_to_answer_is_not_asked_for_that(hands):
    asked = []

    def ask():
        asked.append(1)
        hands.move_to(1000.0 + 100.0 * len(asked))
        raise ClusterUnreachable("silent")

    context = JobContext("7", 0, 0, ["n1"], "n1", 1, "t", None, 30.0)
    stop = StopDeadline(context, arrivals=list, ask=ask)
    stop.look()
    hands.move_to(1090.0)
    for _ in range(3):
        stop.look()

    assert asked == [1]


def refusing(times, number=errno.ENOSPC):
    """What the disk refuses so often, and then does."""
    left = [None] * times

    def act():
        if left:
            left.pop()
            raise OSError(number, "refused")
        return "done"

    return act


def test_a_disk_that_is_full_for_a_while_is_waited_for(hands, caplog):
    stop = deadline(arrivals=[], facts=AssertionError("asked"))
    began_s = hands.passed_s

    assert stop.patiently(refusing(3), 120.0) == "done"

    assert hands.passed_s - began_s == pytest.approx(3 * DISK_LOOK_S)
    assert caplog.messages == ["waits up to 120 s for the run's disk: refused"]


def test_a_disk_that_stays_full_is_waited_for_as_long_as_was_said(hands):
    stop = deadline(arrivals=[], facts=AssertionError("asked"))
    began_s = hands.passed_s

    with pytest.raises(OSError, match="refused"):
        stop.patiently(refusing(1000), 120.0)

    assert hands.passed_s - began_s == pytest.approx(120.0)


def test_a_stop_or_another_error_ends_the_wait_for_a_disk(hands):
    arrivals = []
    stop = deadline(arrivals=arrivals, facts=JobFacts("RUNNING", restarts=0))
    hands.after(5.0, lambda: arrivals.append(Arrival(signal.SIGTERM, clock.monotonic())))
    began_s = hands.passed_s

    with pytest.raises(OSError, match="refused"):
        stop.patiently(refusing(1000), 120.0)
    assert hands.passed_s - began_s < 5.0 + 2 * DISK_LOOK_S
    with pytest.raises(OSError, match="refused"):
        deadline(arrivals=[], facts=None).patiently(refusing(1, errno.EPERM), 120.0)

"""The job's clock: as late as is safe, and never so early that a job does nothing."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace

import pytest

from hpctrain.core.base.records import StopCause
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.plan import interval
from hpctrain.ledger.run import events as ledger
from hpctrain.train.runtime.agreement import STOP_CLOCK, STOP_TERM, STOP_USER, WARNED, StopRequest
from hpctrain.train.runtime.program import Program
from hpctrain.train.runtime.stops import LEAVE_S, JobClock, RankSignals, Stops
from tests.support.gloo import launch
from tests.support.ledger_runs import Story

END = 100_000.0
MARGIN_S = 10.0
MB = 10**6


def clock(**fields) -> JobClock:
    return JobClock(END, MARGIN_S, has_stepped=True, **fields)


def due_at(one: JobClock) -> float:
    """Seconds before the end at which it says stop; to a tenth."""
    lead = next(tenth / 10 for tenth in range(10**6) if not one.is_due(END - tenth / 10 - 0.05))
    assert one.is_due(END - lead + 0.01)
    return lead


def test_a_stop_leaves_time_for_the_save_the_margin_and_two_steps():
    one = clock(save_s=40.0, step_s=3.0)

    assert due_at(one) == pytest.approx(10.0 + 1.5 * 40.0 + 2 * 3.0, abs=0.1)


def test_a_longer_save_means_an_earlier_stop():
    leads = [due_at(clock(save_s=seconds)) for seconds in (1.0, 10.0, 100.0)]

    assert leads == pytest.approx([11.5, 25.0, 160.0], abs=0.1)


def test_the_longest_save_of_this_attempt_counts():
    one = clock(earlier_s=500.0)
    one.saved(30.0)
    one.saved(20.0)

    assert one.expected_save_s() == 30.0


def test_what_earlier_attempts_measured_beats_a_guess():
    assert clock(earlier_s=20.0, state_bytes=10**12).expected_save_s() == 20.0


def test_before_any_save_the_share_of_this_rank_tells_what_one_may_take():
    assert clock(state_bytes=0).expected_save_s() == 1.0
    assert clock(state_bytes=2000 * MB).expected_save_s() == pytest.approx(11.0)
    assert due_at(clock(state_bytes=2000 * MB)) == pytest.approx(10.0 + 1.5 * 11.0, abs=0.1)


def test_a_guess_keeps_no_job_from_training():
    one = clock(state_bytes=10**12, job_s=3600.0)

    assert one.expected_save_s() == pytest.approx(450.0)
    assert one.lead_s() < 3600.0 / 4
    assert clock(save_s=3000.0, job_s=3600.0).lead_s() > 3600.0, "what was measured is no guess"


def test_before_its_first_step_an_attempt_is_late_but_does_not_leave():
    one = JobClock(END, MARGIN_S, save_s=500.0)

    assert (one.is_late(END - 100), one.is_due(END - 100)) == (True, False)
    one.stepped(2.0)
    assert one.is_due(END - 100)


def test_without_an_end_nothing_is_due():
    assert not JobClock(None, MARGIN_S, has_stepped=True).is_due(END)


def test_step_times_follow_slowly():
    one = clock()
    one.stepped(10.0)
    one.stepped(20.0)

    assert one.step_s == pytest.approx(13.0)


@pytest.mark.parametrize(
    ("cause", "facts", "expected"),
    [
        # A preemption with a grace time of 300 s: SIGTERM came 2 s ago, KillWait says nothing.
        (StopCause.TERM, {"term_at": 998.0, "kill_wait_s": 30.0, "grace_end": 1298.0}, 293.0),
        (StopCause.TERM, {"term_at": 998.0, "kill_wait_s": 30.0}, 28.0 - LEAVE_S),
        (StopCause.TERM, {"term_at": None, "kill_wait_s": 30.0}, 30.0 - LEAVE_S),
        (StopCause.TERM, {"term_at": 900.0, "kill_wait_s": 30.0}, 0.0),
        (StopCause.TERM, {}, None),
        (StopCause.CLOCK, {"kill_wait_s": 30.0}, END - 1000.0 + 30.0 - LEAVE_S),
        (StopCause.WARNING, {"kill_wait_s": 30.0}, END - 1000.0 + 30.0 - LEAVE_S),
        (StopCause.WARNING, {"kill_wait_s": 0.0}, END - 1000.0 - LEAVE_S),
        (StopCause.WARNING, {}, END - 1000.0 - 5.0),
        (StopCause.USER, {}, END - 1000.0 - 5.0),
    ],
)
def test_the_time_left_for_a_last_save(cause, facts, expected):
    assert clock().left_s(cause, 1000.0, **facts) == expected


def test_without_an_end_nobody_says_what_time_is_left():
    assert JobClock(None, MARGIN_S).left_s(StopCause.USER, 1000.0) is None
    assert JobClock(990.0, 0.0).left_s(StopCause.CLOCK, 1000.0) == 0.0


@pytest.fixture
def job_clock(monkeypatch):
    monkeypatch.setenv("HPCTRAIN_KILL_WAIT_S", "30")
    return JobClock(time.time() + 3600.0, MARGIN_S)


def stops_of(clock, *, grace=True, signals=None, requests=None, agreement=None):
    """Rank 0's, which heard SIGTERM 2 s ago, in a preemption's grace time of 300 s."""
    now = time.time()
    if grace:
        requests = SimpleNamespace(grace_end=lambda patience_s: now + 298.0 if patience_s else 0)
    signals = signals or SimpleNamespace(term_at=now - 2.0, interrupted=False, term=False)
    return Stops(SimpleNamespace(rank=0, control=None), signals, requests, clock, agreement)


def test_a_graceful_stop_has_the_grace_time_and_not_killwait(job_clock):
    stops = stops_of(job_clock)

    assert stops.left_s(StopCause.TERM) == pytest.approx(293.0, abs=1.0)
    assert stops.left_s(StopCause.CLOCK) == pytest.approx(3627.0, abs=1.0)


def test_without_a_grace_time_killwait_counts(job_clock):
    assert stops_of(job_clock, grace=False).left_s(StopCause.TERM) == pytest.approx(25.0, abs=1.0)


def test_a_job_that_is_too_short_is_told_so_once_and_tries(job_clock, capsys):
    job_clock.save_s = 4000.0
    signals = SimpleNamespace(interrupted=False, term=False, warned=False)
    stops = stops_of(job_clock, grace=False, signals=signals)

    assert stops.exchange(save=False, tell=False).cause is None
    assert stops.exchange(save=False, tell=False).cause is None
    said = capsys.readouterr().err
    assert said.startswith("hpctrain: the job ends in 3600 s, and a stop with a save")
    assert "6010 s before that" in said
    assert said.count("\n") == 1
    job_clock.stepped(1.0)
    assert stops.exchange(save=False, tell=False).cause is StopCause.CLOCK


@pytest.mark.parametrize(
    ("agreed", "heard", "asked"), [(WARNED, False, 1), (STOP_TERM, False, 0), (0, True, 0)]
)
def test_a_warning_is_kept_until_all_ranks_have_heard_it(job_clock, agreed, heard, asked):
    """Most ticks of short steps exchange nothing."""
    warnings = []
    signals = SimpleNamespace(interrupted=False, term=False, warned=True)
    requests = SimpleNamespace(stop=0, profile=0, warn=lambda: warnings.append(1))
    agreement = SimpleNamespace(
        steps_ahead=0, tick=lambda wish: StopRequest(agreed if wish.stop else 99)
    )
    stops = stops_of(
        job_clock, grace=False, signals=signals, requests=requests, agreement=agreement
    )

    stops.exchange(save=False, tell=False)

    assert (signals.warned, len(warnings)) == (heard, asked)


def recorded(steps_ahead=0):
    """An agreement by which nothing holds, and what it was told."""
    said = []
    tick = lambda request: said.append(request.stop) or StopRequest()  # noqa: E731
    return SimpleNamespace(steps_ahead=steps_ahead, tick=tick, wish=said.append), said


def test_what_a_thread_hears_is_said_at_once_and_not_only_at_the_next_step(job_clock):
    """Where ranks are granted steps ahead, the step after a long one would begin before."""
    signals, requests = RankSignals(), SimpleNamespace(stop=0, profile=0)
    agreement, said = recorded()
    stops_of(job_clock, grace=False, signals=signals, requests=requests, agreement=agreement)

    requests.stop = STOP_USER
    requests.on_stop()
    signals.note(signal.SIGTERM)
    signals.on_heard()

    assert said == [STOP_USER, STOP_TERM]


@pytest.mark.parametrize(("steps_ahead", "said"), [(0, 0), (1, STOP_CLOCK)])
def test_what_holds_only_steps_later_is_said_as_much_earlier(job_clock, steps_ahead, said):
    job_clock.save_s = 0.0
    job_clock.stepped(1000.0)
    job_clock.end_time = time.time() + job_clock.lead_s() + 500.0
    agreement, stops_said = recorded(steps_ahead)
    signals = SimpleNamespace(interrupted=False, term=False, warned=False)
    stops = stops_of(job_clock, grace=False, signals=signals, agreement=agreement)

    stops.exchange(save=False, tell=False)

    assert stops_said == [said]


def _share(kind):
    import torch
    from torch import nn

    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.parallelize import parallelize
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    program = Program(world)
    if kind == "own":
        program.model = model
    else:
        optimizer = torch.optim.AdamW(model.parameters())
        program.use(parallelize(model, optimizer, EngineSettings(kind=kind), world))
    return program.state_bytes


@pytest.mark.parametrize("kind", ["fsdp2", "ddp", "own"])
def test_a_ranks_share_is_its_part_of_the_whole(kind):
    whole = 3 * 2 * 256 * 256 * 4

    assert launch(_share, 2, kind=kind) == [whole // 2] * 2


def test_earlier_attempts_tell_what_a_save_takes(tmp_path):
    story = Story(tmp_path / "r").started(1)
    for step, seconds in enumerate([90.0, 7.0, 8.0, 9.0, 5.0, 6.0]):
        story.add("saved", 1, step=step, seconds=seconds, stall_s=0.1)
    events = ledger.read(story.run)

    history = RunHistory.of(events)
    assert interval.longest_save_s(history, 4) == 9.0, "the newest five"
    assert interval.longest_save_s(history, 2) == 18.0, "half the ranks, twice the share"
    assert interval.longest_save_s(history, 8) == 9.0, "no promise of speed"
    assert interval.longest_save_s(RunHistory(), 4) is None


def test_a_save_on_the_way_out_counts_and_nonsense_does_not(tmp_path):
    story = Story(tmp_path / "r").started(1).add("stop_requested", 1, cause="term")
    story.add("saved", 1, step=3, seconds=12.0)
    for seconds in (-3.0, "soon", None):
        story.add("saved", 1, step=4, seconds=seconds)

    assert interval.longest_save_s(RunHistory.read(story.run), 4) == 12.0


@pytest.mark.parametrize(("later_s", "cause", "asked"), [(3600.0, None, 2), (0.0, STOP_CLOCK, 1)])
def test_the_end_is_asked_for_once_more_before_ranks_leave_by_it(job_clock, later_s, cause, asked):
    """A suspension moves it, and the main thread may look before the one that hears of that."""
    job_clock.save_s, job_clock.end_time = 0.0, time.time()
    job_clock.stepped(1.0)
    questions = []

    def renew_end(patience_s):
        questions.append(patience_s)
        job_clock.end_time += later_s

    requests = SimpleNamespace(stop=0, profile=0, renew_end=renew_end)
    signals = SimpleNamespace(interrupted=False, term=False, warned=False)
    agreement, said = recorded()
    stops = stops_of(
        job_clock, grace=False, signals=signals, requests=requests, agreement=agreement
    )

    stops.exchange(save=False, tell=False)
    job_clock.end_time = time.time()  # and again, as the new end has come
    stops.exchange(save=False, tell=False)

    assert said == [cause or 0] * 2
    assert len(questions) == asked

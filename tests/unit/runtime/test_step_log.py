"""Step marks, heartbeat and rank samples: what is told of a run's steps, and how little of it."""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass

import pytest
import torch

from hpctrain.checkpoint.tensors.save import SavePlace
from hpctrain.core.base import clock as base_clock
from hpctrain.core.settings.schema import CheckpointSettings
from hpctrain.core.world import World
from hpctrain.errors import UsageError
from hpctrain.ledger.history.progress import rank_sample
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.attempt_files import Heartbeat, read_heartbeat, write_heartbeat
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.train.runtime import telemetry as module
from hpctrain.train.runtime.telemetry import (
    KEPT,
    StepLog,
    StepTimes,
    Telemetry,
    mark_every_s,
    run_age_s,
    sample_every_s,
    sample_of,
    slowest,
)
from tests.support.ledger_runs import fields_of, write_event

DAY = 86400.0
MB = 1e6


@dataclass
class Clock:
    """Time that passes when a test says so; the wall clock is the process's."""

    passed: float = 1e9

    def monotonic(self) -> float:
        return self.passed

    def now(self) -> float:
        return base_clock.now()

    def passes(self, seconds: float) -> None:
        self.passed += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "clock", clock)
    return clock


@pytest.fixture
def attempt(run):
    attempt = take_attempt(run, job_id="17", restarts=0)
    run.attempt(attempt.number).mkdir(parents=True)
    return attempt


class Program:
    """A loop whose steps take as long as a test says."""

    def __init__(self, run, attempt, clock, *, log_every_s=0.0, rank=0, ranks=1):
        self.clock = clock
        self.samples = 0
        self.step = 0
        self.telemetry = Telemetry(World(rank, rank, ranks, torch.device("cpu")))
        place = SavePlace(run, attempt, CheckpointSettings()) if run is not None else None
        self.telemetry.open(place, log_every_s=log_every_s, model=None)

    def does(self, seconds, *, data=0.0, save=0.0, **told):
        """One step of so many seconds, of which some go to data; a save within it comes on top."""
        self.telemetry.step_began(self.samples)
        with self.telemetry.timed("data"):
            self.clock.passes(data)
        self.samples += 8
        self.clock.passes(seconds - data)
        with self.telemetry.saving:
            self.clock.passes(save)
        self.telemetry.log(told)
        self.step += 1
        return self.telemetry.step_done(self.step, self.samples)


@pytest.fixture
def program(run, attempt, clock):
    return Program(run, attempt, clock, log_every_s=60.0)


def marks(run):
    return [fields_of(event) for event in ledger.read(run) if event.kind == "steps"]


def samples(run, attempt):
    lines = run.rank_times(attempt.number).read_bytes().splitlines()
    return [rank_sample(line, attempt.number) for line in lines]


def test_a_mark_tells_what_its_steps_took_and_what_the_program_said(program, run):
    for seconds in (1.0, 1.0, 1.0, 3.0):
        program.does(seconds, data=0.25, loss=2.0, tokens=1024, flops=5e18, grad_norm=0.5)
    program.does(1.0, loss=1.5, tokens=1024, flops=5e18, grad_norm=0.25, skipped=1, lr=0.1)
    program.telemetry.flush()

    assert marks(run) == [
        {
            "first": 1,
            "last": 5,
            "sample_first": 0,
            "sample_last": 40,
            "loss": 1.5,
            "seconds": 7.0,
            "p50_s": 1.0,
            "p95_s": 3.0,
            "tokens": 5 * 1024,
            "flops": 2.5e19,
            "skipped": 1,
            "grad_norm": 0.25,
            "data_s": 1.0,
            "save_s": 0.0,
        }
    ]


def test_what_nobody_told_is_left_out(program, run):
    program.does(1.0)
    program.telemetry.flush()

    assert not marks(run)[0].keys() & {"tokens", "flops", "grad_norm", "skipped", "at_save"}


def test_sums_and_times_begin_anew_with_each_mark_and_waiting_goes_on(program, run):
    program.does(4.0, data=1.0, tokens=10)
    program.telemetry.flush()
    program.does(2.0, data=0.5, tokens=10)
    program.telemetry.flush()

    second = marks(run)[1]
    assert (second["tokens"], second["p95_s"], second["data_s"]) == (10, 2.0, 1.5)
    assert (second["first"], second["sample_first"], second["sample_last"]) == (2, 8, 16)


def test_a_save_is_no_part_of_a_steps_time_and_is_counted_as_such(program, run):
    assert program.does(1.0, save=30.0) == 1.0
    with program.telemetry.saving:
        program.clock.passes(5.0)
    program.telemetry.flush()

    assert marks(run)[0]["p95_s"] == 1.0
    assert marks(run)[0]["save_s"] == 35.0


def test_what_went_before_the_first_step_is_no_steps_time(program, run, clock):
    with program.telemetry.timed("data"):
        clock.passes(100.0)
    program.does(2.0)
    program.telemetry.flush()

    assert (marks(run)[0]["seconds"], marks(run)[0]["data_s"]) == (2.0, 0.0)


def test_the_mark_before_a_save_ends_at_its_step_even_if_one_was_due(program, run):
    program.does(61.0)  # due by the clock, and a save follows
    program.telemetry.flush(at_save=True)
    program.does(61.0)
    program.does(61.0)

    assert [(mark["last"], mark.get("at_save")) for mark in marks(run)] == [(1, True), (2, None)]


def test_an_older_run_is_marked_less_often_and_never_more_than_a_minute_apart():
    assert mark_every_s(0, 5.0) == 5.0
    assert mark_every_s(3600, 5.0) == 18.0
    assert mark_every_s(30 * DAY, 5.0) == 60.0
    assert mark_every_s(30 * DAY, 300.0) == 300.0  # as the person has set it
    assert mark_every_s(30 * DAY, 0.0) == 0.0  # every step, as the person has set it


def test_a_new_attempt_of_an_old_run_goes_on_at_the_old_runs_pace(run, attempt, clock, hands):
    run.events.write_text("torn\n")
    write_event(run, "submitted", token="t-1", job_id="17")
    hands.advance(DAY)
    assert run_age_s(run, hands.now()) == DAY
    program = Program(run, attempt, clock, log_every_s=5.0)
    for _ in range(121):
        program.does(1.0)

    assert [(mark["first"], mark["last"]) for mark in marks(run)] == [(1, 60), (61, 120)]


@pytest.mark.parametrize("attempts", [1, 1000])
@pytest.mark.parametrize("ranks", [1, 8, 64, 1024])
def test_a_month_costs_less_than_50_mb(run, attempt, clock, ranks, attempts):
    """With a save every quarter of an hour, each with a mark of its own, and the longest lines."""
    mark, sample = _longest_lines(run, attempt, clock, ranks)
    written, age, saved, marked, sampled, started = 0, 0.0, 0.0, 0.0, 0.0, 0.0
    while age < 30 * DAY:
        age += mark_every_s(age, 5.0)
        written += mark
        if age - sampled >= sample_every_s(age, 5.0, ranks):
            sampled, written = age, written + sample
        if age - saved >= DAY / 96:
            saved, written = age, written + mark
        if age - started >= 30 * DAY / attempts:
            started, written = age, written + 2 * mark
        marked += 1

    assert 40_000 < marked < 60_000
    assert written < 50 * MB


def _longest_lines(run, attempt, clock, ranks):
    marks_ = StepLog(run, attempt.number, lambda _: 60.0)
    clock.passes(59.123)
    told = {"loss": 1 / 3, "tokens": 1e14 - 1, "flops": 1e23 / 7, "grad_norm": 1 / 7, "skipped": 12}
    marks_.add(12_345_678, (3_456_789_012, 3_456_799_012), 1 / 7, told)
    far = {"data_s": 123456.789, "save_s": 123456.789, "slow_rank": 1023, "slow_by": 0.123}
    marks_.flush(at_save=True, **far)
    row = [6000.1234, 123.4567, 5000.1234, 79e9, 80e9, 123]
    sample = sample_of(1763700000.123, 12_345_678, 12_345, [row] * ranks)
    return run.events.stat().st_size, len(json.dumps(sample, separators=(",", ":"))) + 1


def test_quantiles_stay_right_when_steps_are_forgotten():
    times = StepTimes()
    for number in range(10 * KEPT):
        times.add(number % 100)
        assert len(times._kept) <= KEPT

    assert times.quantile(0.5) == pytest.approx(50, abs=4)
    assert times.quantile(0.95) == pytest.approx(95, abs=4)


def test_time_is_taken_of_data_only(program):
    with pytest.raises(UsageError, match=r"run\.timed\('dataa'\).*run\.timed\('data'\)"):
        program.telemetry.timed("dataa")


def test_a_watch_inside_itself_counts_once(program, clock, run):
    program.does(1.0)
    with program.telemetry.timed("data"), program.telemetry.timed("data"):
        clock.passes(3.0)
    program.does(1.0)
    program.telemetry.flush()

    assert marks(run)[0]["data_s"] == 3.0


def test_the_heartbeat_is_the_last_step_at_most_so_often(program, run, attempt):
    beats = []
    for _ in range(5):
        program.does(25.0)
        beats.append(read_heartbeat(run, attempt.number).step)

    assert beats == [1, 1, 1, 4, 4]


def test_other_ranks_write_nothing(run, attempt, clock):
    program = Program(run, attempt, clock, rank=1)
    program.does(100.0)
    program.telemetry.flush()
    program.telemetry.tell(at_end=True)

    assert marks(run) == []
    assert list(run.attempt(attempt.number).iterdir()) == []


def test_without_a_run_nothing_is_written_and_all_goes_on(clock):
    program = Program(None, None, clock)
    program.does(100.0, loss=1.0)
    program.telemetry.flush()

    assert not program.telemetry.is_report_due()


def test_a_full_disk_costs_the_facts_and_says_so_once(program, monkeypatch, capsys):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_heartbeat", full)
    monkeypatch.setattr(module, "append_sample", full)
    for _ in range(3):
        program.does(100.0)
    program.telemetry.tell(at_end=True)

    assert capsys.readouterr().err.count("No space left on device") == 1


@pytest.mark.parametrize("content", [b"", b"{", b'{"t": 1}', b"null", b'{"t": NaN, "step": 3}'])
def test_half_a_heartbeat_is_none(run, attempt, content):
    run.heartbeat(attempt.number).write_bytes(content)

    assert read_heartbeat(run, attempt.number) is None
    assert read_heartbeat(run, 99) is None


def test_a_shorter_heartbeat_leaves_nothing_of_a_longer_one(run, attempt):
    write_heartbeat(run, attempt.number, Heartbeat(1763700000.123, 123_456_789))
    write_heartbeat(run, attempt.number, Heartbeat(1.0, 2))

    assert read_heartbeat(run, attempt.number) == Heartbeat(1.0, 2)


def test_ranks_are_sampled_from_time_to_time_and_at_the_end(program, run, attempt, clock):
    program.does(50.0, data=20.0)
    assert not program.telemetry.is_report_due()
    program.does(50.0)
    assert program.telemetry.is_report_due()
    program.telemetry.tell()
    program.does(30.0, data=5.0)
    program.telemetry.tell(at_end=True)

    first, second = samples(run, attempt)
    assert (first.step, first.steps, first.wall_s, first.data_s) == (2, 2, (100.0,), (20.0,))
    assert (second.step, second.steps, second.wall_s, second.data_s) == (3, 1, (30.0,), (5.0,))
    assert first.own_s is None
    assert first.peak_bytes[0] > 1e6
    assert first.reserved_bytes is None


def test_short_attempts_share_the_samples_of_a_long_run(run, attempt, clock, monkeypatch):
    """Each telling of itself would cost more than the run's budget; none of them, say nothing."""
    monkeypatch.setattr(module, "run_age_s", lambda *_: 10 * DAY)
    first = Program(run, attempt, clock, log_every_s=5.0, ranks=64)
    first.does(61.0)
    assert first.telemetry.is_report_due()
    first.telemetry.tell(at_end=True)

    later = take_attempt(run, job_id="17", restarts=1)
    run.attempt(later.number).mkdir()
    second = Program(run, later, clock, log_every_s=5.0, ranks=64)
    second.does(300.0)
    assert not second.telemetry.is_report_due()
    second.does(300.0)
    assert second.telemetry.is_report_due()


def test_the_slowest_is_told_by_own_work_against_the_median():
    def sample(own):
        return {"own_s": own}

    assert slowest(sample([1.0, 1.0, 1.04, 1.0])) == {"slow_rank": 2, "slow_by": 0.04}
    assert slowest(sample([1.0, 3.0])) == {"slow_rank": 1, "slow_by": 2.0}
    assert slowest(sample(None)) == slowest(sample([1.0])) == slowest(sample([0.0, 0.0])) == {}


def test_what_one_rank_does_not_know_is_told_of_none():
    known = [1.0, 0.5, 0.25, 100.0, 200.0, 3.0]
    unknown = [1.0, 0.5, float("nan"), 100.0, 200.0, 3.0]

    sample = sample_of(5.0, 7, 2, [known, unknown])

    assert sample["own_s"] is None
    assert sample["mem_retries"] == [3, 3]

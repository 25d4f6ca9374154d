"""What the end of an attempt reads of a long ledger: it has 3 s, its requeue included."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpctrain.core.base.records import FailureReport, JobContext, JobFacts, StopCause
from hpctrain.core.settings.schema import replaced
from hpctrain.core.settings.spec import load_spec
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.node.agent.batch_side import BatchScriptSide, JobStartFacts
from hpctrain.node.agent.ending import AttemptEnding
from hpctrain.node.agent.rounds import RoundEnd
from tests.support.ledger_runs import Story, all_fields, write_event

MARKS = 4_000
CRASH = FailureReport(0, "n1", "signal", "killed by SIGKILL")


class Scheduler:
    """A job in its grace time that is requeued."""

    def __init__(self, preempt_time=1.0):
        self.preempt_time = preempt_time

    def facts(self):
        return JobFacts("RUNNING", restarts=0, preempt_time=self.preempt_time)

    def requeue(self):
        pass

    forbid_requeue = requeue


@pytest.fixture
def long_run(tmp_path):
    """Attempt 1 in job 7, of which the ledger has 4,000 step marks."""
    story = Story(tmp_path / "gpt", cluster="slurm").submitted("7")
    number = take_attempt(story.run, job_id="7", restarts=0).number
    story.run.attempt(number).mkdir(parents=True)
    story.started(number, "7").restored(number)
    mark = ledger.read(story.steps(number, 1, 10).run)[-1]
    row = [
        f'{{"t": {mark.t}, "kind": "steps", "attempt": 1, "first": {step}, "last": {step + 9}}}\n'
        for step in range(11, MARKS * 10, 10)
    ]
    with story.run.events.open("a") as file:
        file.write("".join(row))
    return story.run


def ending(run, **scheduler):
    context = JobContext("7", 0, 0, ["n1"], "n1", 20000, "tok-1")
    return AttemptEnding(run, load_spec(run.spec), context, Scheduler(**scheduler))


def lost(run):
    mine = ending(run)
    mine.record_lost_attempt()
    assert "has ended" not in mine.is_over()


def preempted(run):
    deadline = SimpleNamespace(cause=StopCause.TERM, is_stop_requested=lambda: True)
    assert ending(run).conclude(1, RoundEnd("left"), deadline) == 0


def crashed(run):
    spec = load_spec(run.spec)
    limits = {"run.restarts_in_job": 20, "budget.crashes": 1}
    spec.settings = replaced(spec.settings, limits)
    spec.dump(run.spec)
    write_event(run, "attempt_ended", attempt=0, reason="crashed", next="requeue")
    mine, deadline = (
        ending(run, preempt_time=None),
        SimpleNamespace(cause=None, is_stop_requested=lambda: False),
    )
    end = RoundEnd("failed", failure=CRASH)
    assert not mine.after_crash(1, CRASH)
    assert mine.conclude(1, end, deadline) == 93


def agents_died(run):
    start = JobStartFacts("7", 0, "tok-1", ["n1"], 137, term=True)
    assert BatchScriptSide(run, start, Scheduler()).finish() == 0


@pytest.mark.parametrize("end", [lost, preempted, crashed, agents_died])
def test_the_ledger_is_read_once_and_hardly_parsed(long_run, monkeypatch, end):
    lines, sizes = [], []
    parse, block = ledger.parse, ledger.LineReader.block

    def read_block(reader, *limit):
        before = reader._file.tell()
        taken = block(reader, *limit)
        sizes.append(reader._file.tell() - before)
        return taken

    monkeypatch.setattr(ledger, "parse", lambda line: lines.append(line) or parse(line))
    monkeypatch.setattr(ledger.LineReader, "block", read_block)

    end(long_run)

    assert sum(sizes) < 1.1 * long_run.events.stat().st_size
    assert len(lines) < MARKS / 3
    end_event = [event for event in ledger.read(long_run) if event.kind == "attempt_ended"][-1]
    assert all_fields(end_event)["step"] == MARKS * 10

"""A ledger may hold anything: no reader of it fails, on the login node or in a job."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from hpctrain.checkpoint.store.retention import in_use
from hpctrain.cli.main import main
from hpctrain.core.base.records import EndReason, FailureReport, JobContext, JobFacts
from hpctrain.core.settings.spec import load_spec
from hpctrain.errors import NotFound
from hpctrain.launch.live_job import live_job
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.plan import interval
from hpctrain.ledger.plan.decide import attempts_without_progress, over_budget
from hpctrain.ledger.run.events import Tail
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.ledger.run.find_run import find_run, look_into
from hpctrain.node.agent.batch_side import BatchScriptSide, JobStartFacts
from hpctrain.node.agent.end_writer import read_outcome
from hpctrain.node.agent.ending import AttemptEnding
from hpctrain.node.agent.notify import notification_of
from hpctrain.observe.logs.follow import EndWatch
from hpctrain.train.runtime.telemetry import run_age_s
from tests.support.fuzzing import Faults, cases, chances, mutated
from tests.support.ledger_runs import Story

SHORT, LONG = 20, 10_000


class Scheduler:
    """Knows the job, and does as it is asked."""

    def __init__(self, **facts):
        self._facts = JobFacts(**{"state": "RUNNING", "restarts": 1} | facts)

    def facts(self):
        return self._facts

    def previous_end(self):
        return EndReason.NODE_FAILED

    def previous_stop(self):
        return 1_763_700_500.0

    def requeue(self):
        pass

    def forbid_requeue(self):
        pass

    def exclude(self, nodes):
        pass

    def job(self, job_id):
        assert job_id
        assert not job_id.startswith("-")

    def find_job(self, token):
        assert token


@pytest.fixture(scope="module")
def tale(tmp_path_factory):
    """A run with every kind of fact, and its ledger's lines."""
    story = Story(tmp_path_factory.mktemp("tale") / "gpt").submitted("7")
    run = story.run
    for restarts in (0, 1):
        number = take_attempt(run, job_id="7", restarts=restarts).number
        run.attempt(number).mkdir(parents=True)
        story.log(number, 0, "hello\n")
        story.started(number, "7", restarts=restarts, job_started=story.t, agent_started=story.t)
        story.add("environment", number, site="x", nodes=2, versions={"torch": "2.13"}, notes=["n"])
        story.add("preflight", bad={"n3": "no GPU"}, leave=True, no_answer="", collective="")
        story.add("phase", number, name="initialised", device="H200")
        story.add("mesh", number, engine="fsdp2", ranks_per_node=2, dp_shard=4, tp=1)
        story.restored(number, 0 if number == 1 else 8, [{"step": 9, "name": "x", "reason": "y"}])
        story.add("phase", number, name="first_step", data_s=0.1, save_s=0.0)
        story.add("interval", number, seconds=30.0, why="set", steps=4, cost_s=0.1, mtbf_s=9.0)
        story.add("save_mode", number, mode="sync", why="no memory")
        first = 1 if number == 1 else 9
        story.add(
            "steps", number, first=first, last=first + 7, sample_first=8, sample_last=64, loss=2.5,
            grad_norm=0.1, seconds=4.0, p50_s=0.5, p95_s=0.6, tokens=99, flops=1e12, skipped=1,
            slow_rank=1, slow_by=0.2, data_s=0.1, save_s=0.2, at_save=True,
        )  # fmt: skip
        story.saved(number, first + 7)
        story.add("save_failed", number, step=first + 7, why="full")
        story.add("profile_requested", number, first=3, last=5, ranks=[0], folder="f")
        story.add("profiled", number, first=3, last=5, ranks=[0], folder="f")
        story.add("stop_requested", number, cause="sigterm")
        story.add("stopped", number, step=first + 7)
        story.add("failure", number, rank=1, node="n2", kind_of="exception", summary="bad",
                  traceback="a\n b", others=[2, 3])  # fmt: skip
        if number == 1:
            story.ended(1, "preempted", "requeue", step=8, heard=story.t, ended_at=story.t)
            story.add("requeued", 1, by="agent").add("excluded", 1, nodes=["n3"])
    story.add("cancel_requested", save=True, job_id="6").add("verified", step=8, name="step-8")
    story.add("checkpoint_set_aside", 2, name="step-9", step=9, reason="torn")
    story.add("notified", 2, what="attempt", ok=True, why="")
    return run, run.events.read_bytes().splitlines()


def _ends(run, number):
    """An attempt of the job in hand, for those who only deal with their own."""
    context = JobContext("7", 1, 0, ["n1", "n2"], "n1", 20000, "tok-1")
    return AttemptEnding(run, load_spec(run.spec), context, Scheduler())


WATCH = SimpleNamespace(cause=None, is_stop_requested=lambda: False)


def _start(run):
    assert isinstance(_ends(run, 2).is_over(), str)
    _ends(run, 2).record_lost_attempt()


def _conclude(run):
    end = SimpleNamespace(ending="killed", failure=None, why="", silent_nodes=[])
    _ends(run, 2).conclude(2, end, WATCH)


def _crash(run):
    _ends(run, 2).after_crash(2, FailureReport(0, "n1", "exception", "ValueError: x"))


def _batch(run):
    start = JobStartFacts("7", 1, "tok-1", ["n1", "n2"], 1, term=False)
    assert BatchScriptSide(run, start, Scheduler(preempt_time=5.0)).finish() in {0, 1, 75, 93}


def _news(run):
    history = RunHistory.read(run)
    for attempt in (1, 2):
        news = notification_of(run, history, attempt)
        if news is not None:
            json.dumps(asdict(news), allow_nan=False).encode()


def _login(run):
    live_job(run, Scheduler())
    history = RunHistory.read(run)
    in_use(history)
    interval.costs(history)
    interval.failures(history)
    attempts_without_progress(history)
    for reason in EndReason:
        over_budget(history, reason)
    run_age_s(run, 1e9)
    read_outcome(run, 2)
    look_into(run.root.parent)
    with contextlib.suppress(NotFound):
        find_run("7", runs=run.root.parent)


def _follow(run):
    watch = EndWatch(run, None, lambda _text: None)
    watch.add(Tail(run.events, "few").new())
    watch.is_over()


JOB = (_start, _conclude, _crash, _batch)
LOGIN = (_news, _login, _follow)
COMMANDS = (
    "status RUN", "status RUN --json --ranks", "events RUN", "events RUN --json", "logs RUN",
    "report RUN -o PAGE", "report RUN --text", "logs RUN --tail 3 --rank all", "cancel RUN --save",
    "resume RUN --dry-run", "cancel RUN", "checkpoints list RUN", "checkpoints prune RUN --dry-run",
)  # fmt: skip


class Round:
    """Lets every reader read one ledger, and keeps what they raise."""

    def __init__(self, run, page):
        self.run, self.page = run, page
        self.fence = run.fence.read_bytes()
        self.faults = Faults()

    def read(self, number, text):
        for reader in (*JOB, *LOGIN):
            self._try(f"{number} {reader.__name__}", text, lambda reader=reader: reader(self.run))
        for words in COMMANDS:
            put = {"RUN": str(self.run.root), "PAGE": self.page}
            command = [put.get(word, word) for word in words.split()]
            self._try(f"{number} {words}", text, lambda command=command: main(command))

    def _try(self, what, text, reader):
        self.run.events.write_bytes(text)
        self.run.fence.write_bytes(self.fence)
        self.faults.of(what, reader)


@cases(SHORT, LONG)
def test_no_reader_fails(tale, begin, end, tmp_path, monkeypatch, capfd):  # noqa: PLR0917
    run, lines = tale
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    monkeypatch.setattr("hpctrain.observe.report.page._plotly", lambda: "")
    for side in ("ending", "batch_side"):
        monkeypatch.setattr(f"hpctrain.node.agent.{side}.notify", lambda *_: None)
    readers = Round(run, str(tmp_path / "page.html"))
    for number, chance in chances(begin, end):
        readers.read(number, b"\n".join(mutated(lines, chance)) + chance.choice((b"\n", b"")))
        capfd.readouterr()
    assert readers.faults.found == []

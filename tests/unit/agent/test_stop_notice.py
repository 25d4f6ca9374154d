"""Programs that ask nobody are told of a stop: when, why, and by what."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from hpctrain.core.base.records import JobContext, JobFacts, JobState, StopCause
from hpctrain.ledger.run.layout import RunDir
from hpctrain.node.agent.stop_deadline import StopDeadline
from hpctrain.node.agent.stop_notice import StopFile, StopNotice, catches_term, listens, send_term
from tests.support import patience
from tests.support.clocks import jumping
from tests.support.patience import PATIENCE_S

CATCHES = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))"
INIT = (
    "signal.signal(signal.SIGTERM, lambda *_: None);"
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])"
)
BORN = (
    "signal.signal(signal.SIGTERM, lambda *_: None);"
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])"
)


@pytest.fixture
def hands():
    with jumping(wall_s=1000.0) as hands:
        yield hands


@pytest.fixture
def process():
    """A process that has done something about its signals, and waits."""
    begun = []

    def begin(what):
        code = f"import signal, sys; {what}; print('ready', flush=True); signal.pause()"
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        begun.append(child)
        assert child.stdout.readline() == "ready\n"
        return child

    yield begin
    for child in begun:
        child.kill()
        child.communicate()


@pytest.fixture
def notice(tmp_path, hands):
    return partial(_notice, tmp_path)


def _notice(tmp_path, *, signals=(), facts=None, end_time=None, lead_s=90.0):
    context = JobContext("7", 0, 0, ["a"], "a", 1, "", end_time=end_time)
    arrivals = [SimpleNamespace(signum=signum, at_monotonic_s=0.0) for signum in signals]

    def ask():
        return facts

    deadline = StopDeadline(context, arrivals=lambda: arrivals, ask=ask if facts else None)
    deadline.look()
    made = StopNotice(RunDir(tmp_path), context, deadline, lead_s=lead_s)
    return made, deadline


def request(tmp_path, job_id):
    (tmp_path / "stop-request.json").write_text(json.dumps({"job_id": job_id}))


def test_nothing_is_told_while_nothing_asks(notice):
    made, deadline = notice(end_time=5000.0)

    assert made.look(lambda: False) is None
    assert deadline.cause is None


def test_sigterm_is_told_at_once(notice):
    made, _ = notice(signals=[signal.SIGTERM])

    assert made.look(lambda: False) is StopCause.TERM


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (JobFacts(JobState.RUNNING, end_time=5000.0), None),
        (JobFacts(JobState.RUNNING, end_time=5000.0, preempt_time=990.0), StopCause.WARNING),
        (JobFacts(JobState.COMPLETING, end_time=5000.0), StopCause.WARNING),
    ],
)
def test_sigusr2_is_told_where_it_means_a_preemption(facts, told, notice):
    made, _ = notice(signals=[signal.SIGUSR2], facts=facts, end_time=5000.0)

    assert made.look(lambda: False) is told


def test_a_request_for_this_job_is_told_and_is_the_reason_of_the_end(tmp_path, notice, hands):
    made, deadline = notice()
    request(tmp_path, "6")
    assert made.look(lambda: False) is None
    request(tmp_path, "7")
    hands.advance(2)

    assert made.look(lambda: False) is StopCause.USER
    assert deadline.is_stop_requested()
    assert deadline.cause is StopCause.USER


def test_a_program_that_listens_gives_its_own_reason(tmp_path, notice):
    made, deadline = notice()
    request(tmp_path, "7")

    assert made.look(lambda: True) is StopCause.USER
    assert deadline.cause is None


def test_what_cannot_be_read_is_said_once(tmp_path, caplog, notice, hands):
    made, _ = notice()
    (tmp_path / "stop-request.json").mkdir()
    for _ in range(3):
        assert made.look(lambda: False) is None
        hands.advance(2)

    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("length_s", "lead_s", "comes_s"),
    [(3600.0, 90.0, 90.0), (80.0, 90.0, 10.0), (3600.0, 10.0, 10.0)],
)
def test_the_clock_tells_in_the_last_eighth_at_the_earliest(
    length_s, lead_s, comes_s, notice, hands
):
    made, deadline = notice(end_time=1000.0 + length_s, lead_s=lead_s)
    hands.move_to(1000.0 + length_s - comes_s - 0.5)
    assert made.look(lambda: False) is None
    hands.advance(1)

    assert made.look(lambda: True) is None
    assert made.look(lambda: False) is StopCause.CLOCK
    assert deadline.cause is StopCause.CLOCK


def test_the_file_has_the_cause_and_is_gone_for_the_next_ranks():
    file = StopFile()
    assert not file.path.exists()
    file.write(StopCause.USER)
    file.write(StopCause.TERM)

    assert file.path.read_text() == "user\n"
    assert file.path.parent.stat().st_mode & 0o777 == 0o700
    file.renew()
    assert (file.path.exists(), file.cause) == (False, None)
    file.remove()
    file.remove()
    assert not file.path.parent.exists()


def test_only_who_catches_sigterm_gets_it(process):
    default, catches, init, born = map(process, ("pass", CATCHES, INIT, BORN))
    children = [default, catches, init, born]

    assert [catches_term(child.pid) for child in children] == [False, True, False, False]
    assert [listens(child.pid) for child in children] == [False, False, True, False]
    left = {child.pid for child in children}
    send_term(left)
    assert left == {default.pid, init.pid, born.pid}
    assert catches.wait(PATIENCE_S) == 5
    assert not catches_term(2**22 + 1)


def test_a_handler_that_comes_later_is_not_missed(process):
    late = process("print('ready', flush=True); sys.stdin.readline(); " + CATCHES)
    left = {late.pid}
    send_term(left)
    assert left == {late.pid}
    late.stdin.write("\n")
    late.stdin.flush()
    patience.until(lambda: send_term(left) or not left)

    assert late.wait(PATIENCE_S) == 5


def test_an_agent_hears_signals_that_whoever_started_it_had_blocked():
    code = (
        "import os, signal;"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2]);"
        "from hpctrain.node.agent import signals; signals.install();"
        "os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGUSR2);"
        "print(*sorted(one.signum for one in signals.arrivals()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == [f"{signal.SIGUSR2:d}", f"{signal.SIGTERM:d}"]

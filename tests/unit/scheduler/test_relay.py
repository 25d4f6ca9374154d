"""An agent without SLURM's commands asks the process beside the batch script."""

from __future__ import annotations

import json
import os
import socket
import threading

import pytest

from hpctrain.cluster.scheduler.base import get_control
from hpctrain.cluster.scheduler.slurm import control as relay
from hpctrain.cluster.scheduler.slurm.control import RelayedControl, control_of_agent, serve
from hpctrain.core.base.env import HPCTRAIN_RELAY, HPCTRAIN_RUN_DIR
from hpctrain.core.base.records import EndReason, JobFacts, JobState
from hpctrain.core.base.secret import sign
from hpctrain.errors import ClusterError, ClusterUnreachable
from hpctrain.ledger.run.layout import RunDir
from tests.support.clocks import jumping
from tests.support.patience import PATIENCE_S

FACTS = JobFacts(JobState.RUNNING, restarts=2, preempt_time=5.0, end_time=9.5, comes_back=True)


class Slurm:
    """What the process outside asks."""

    def __init__(self):
        self.done = []

    def facts(self):
        return FACTS

    def previous_end(self):
        return EndReason.NODE_FAILED

    def previous_stop(self):
        return 4.5

    def requeue(self):
        self.done.append("requeue")

    def end(self):
        self.done.append("end")

    def exclude(self, nodes):
        self.done.append(tuple(nodes))
        raise ClusterError("no longer pending execution")

    def forbid_requeue(self):
        raise ClusterUnreachable("slurmctld is silent")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """One that answers at `tmp_path / "port"`, until the test is over."""
    monkeypatch.setattr(relay, "LOOK_S", 0.02)
    over = threading.Event()
    control = Slurm()
    path = tmp_path / "port"
    answering = threading.Thread(
        target=serve, args=(path, "secret", control), kwargs={"is_over": over.is_set}
    )
    answering.start()
    yield control
    over.set()
    answering.join()


def ask(tmp_path, secret="secret"):
    return RelayedControl(tmp_path / "port", secret, timeout_s=PATIENCE_S)


def test_what_slurm_says_comes_in_and_what_is_asked_of_it_goes_out(tmp_path, slurm):
    control = ask(tmp_path)

    assert control.facts() == FACTS
    assert control.previous_end() is EndReason.NODE_FAILED
    assert control.previous_stop() == 4.5
    control.requeue()
    control.end()
    with pytest.raises(ClusterError, match="no longer pending execution"):
        control.exclude(["n1", "n2"])
    with pytest.raises(ClusterUnreachable, match="slurmctld is silent"):
        control.forbid_requeue()
    assert slurm.done == ["requeue", "end", ("n1", "n2")]


def test_who_does_not_know_the_secret_is_not_heard(tmp_path, slurm):
    ask(tmp_path).facts()  # it is there

    with jumping(), pytest.raises(ClusterUnreachable, match="nobody beside the batch script"):
        ask(tmp_path, "another").requeue()

    assert slurm.done == []
    assert ask(tmp_path).facts() == FACTS


def test_nothing_but_our_own_questions_is_asked(tmp_path, slurm):
    ask(tmp_path).facts()
    for what in ("__init__", "_record", "done"):
        with pytest.raises(ClusterError, match="nobody asks SLURM for"):
            ask(tmp_path)._ask(what)


def test_where_the_process_is_gone_the_batch_script_decides(tmp_path, hands):
    control = ask(tmp_path)

    for port in ("", "no port\n", "1\n"):
        (tmp_path / "port").write_text(port)
        with pytest.raises(ClusterUnreachable):
            control.facts()
    assert control.previous_end() is EndReason.UNKNOWN
    assert control.previous_stop() is None


def test_where_the_process_is_stopped_it_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    """The kernel accepts connections for a process that SIGSTOP has stopped."""
    monkeypatch.setattr(relay, "WORD_S", 0.05)
    with socket.create_server((relay.HOST, 0)) as server:
        (tmp_path / "port").write_text(f"{server.getsockname()[1]}\n")

        with pytest.raises(ClusterUnreachable, match="nobody beside the batch script"):
            RelayedControl(tmp_path / "port", "secret", timeout_s=0.05).requeue()


def test_a_strangers_answer_is_none(tmp_path, hands):
    """Whoever takes the port of one that is gone does not decide what becomes of a run."""
    with socket.create_server((relay.HOST, 0)) as server:
        (tmp_path / "port").write_text(f"{server.getsockname()[1]}\n")

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(relay.MOST_BYTES)
                text = json.dumps({"value": None, "error": ""})
                connection.sendall(sign("guess", "relay answers", text).encode() + b"\n")

        other_user = threading.Thread(target=answer)
        other_user.start()
        with pytest.raises(ClusterUnreachable):
            ask(tmp_path).requeue()
        other_user.join()


def test_agents_and_ranks_ask_it_where_the_batch_script_says_so(tmp_path, monkeypatch):
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    context = type("Context", (), {"job_id": "7", "restarts": 1, "nodes": ["n1"]})
    context.kill_wait_s = 30.0

    monkeypatch.delenv(HPCTRAIN_RELAY, raising=False)
    monkeypatch.setenv(HPCTRAIN_RUN_DIR, str(run.root))
    for control in (control_of_agent(run, context), get_control("slurm", "7", 1)):
        assert not isinstance(control, RelayedControl)
    monkeypatch.setenv(HPCTRAIN_RELAY, str(tmp_path / "port"))
    for control in (control_of_agent(run, context), get_control("slurm", "7", 1)):
        assert isinstance(control, RelayedControl)


def test_it_ends_with_the_batch_script():
    assert not relay.parent_is_gone(os.getppid())()
    assert relay.parent_is_gone(1 if os.getppid() != 1 else 2)()

"""`hpctrain tensorboard`: what it starts, what it prints, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from hpctrain.cli.main import main
from hpctrain.train.runtime.trackers import EventFile, file_name
from tests.support import patience
from tests.support.ledger_runs import Story
from tests.support.patience import PATIENCE_S
from tests.support.processes import AT_A_TERMINAL


def a_run(folder, name, *, attempts=1, scalars=True):
    run = Story(folder / name).submitted().started(1).run
    for attempt in range(1, attempts + 1):
        file = EventFile(run.tensorboard / file_name(attempt), purge_step=0)
        if scalars:
            file.log(attempt, {"loss": 1.0}, 0.0)
        file.close()
    return run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(socket, "getfqdn", lambda: "login2.cluster.example")
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path / "runs"


@pytest.fixture
def taken():
    """A port of localhost that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def dry(capsys, *words):
    assert main(["tensorboard", *words, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_run_is_shown_under_its_name(runs, tmp_path, capsys):
    a_run(runs, "gpt-a", attempts=3)
    a_run(runs, "gpt-b", scalars=False)
    other = a_run(tmp_path / "elsewhere", "gpt-a").root

    facts = dry(capsys, "gpt-a", "gpt-b", str(other))

    shown = [(run["name"], run["attempts"], run["has_scalars"]) for run in facts["runs"]]
    assert shown == [("gpt-a", 3, True), ("gpt-b", 1, False), ("gpt-a (2)", 1, True)]
    assert facts["command"][:4] == [sys.executable, "-P", "-m", "tensorboard.main"]


def test_the_ssh_line_is_for_copying(runs, capsys, monkeypatch):
    a_run(runs, "gpt-a")
    facts = dry(capsys, "gpt-a", "--port", "7007")
    assert facts["ssh"] == "ssh -N -L 7007:localhost:7007 ada@login2.cluster.example"
    assert facts["url"] == "http://localhost:7007/"

    facts = dry(capsys, "gpt-a", "--port", "7007", "--host", "0.0.0.0")  # noqa: S104 - is printed
    assert "-L 7007:login2.cluster.example:7007 ada@" in facts["ssh"]

    monkeypatch.setattr(socket, "getfqdn", lambda: "localhost.localdomain")
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.9 50000 10.0.0.7 22")
    assert dry(capsys, "gpt-a")["ssh"].endswith(" ada@10.0.0.7")


def test_a_taken_port_is_passed_over_unless_it_was_asked_for(runs, capsys, monkeypatch, taken):
    a_run(runs, "gpt-a")
    monkeypatch.setattr("hpctrain.cli.report.PORT", taken)

    assert dry(capsys, "gpt-a")["port"] != taken
    assert main(["tensorboard", "gpt-a", "--port", str(taken)]) == 2
    assert f"--port {taken} is taken on localhost" in capsys.readouterr().err


def test_a_host_that_is_none_is_refused(runs, capsys):
    a_run(runs, "gpt-a")

    assert main(["tensorboard", "gpt-a", "--host", "no.such.host.invalid"]) == 2
    assert "--host no.such.host.invalid: " in capsys.readouterr().err


def test_it_says_who_can_see_it_and_what_is_not_there_yet(runs, capsys):
    a_run(runs, "gpt-a", attempts=3)
    a_run(runs, "gpt-b", scalars=False)
    Story(runs / "gpt-c").submitted()

    assert main(["tensorboard", "gpt-a", "--dry-run"]) == 0
    told = capsys.readouterr()
    assert "for 1 run (3 attempts, no step twice)" in told.out
    assert "localhost only" in told.out
    assert not told.err
    assert max(map(len, told.out.splitlines())) <= 80

    words = ["gpt-b", "gpt-c", "--host", "127.0.0.1", "--dry-run"]
    assert main(["tensorboard", *words]) == 0
    told = capsys.readouterr().err
    assert "gpt-b has no scalars yet" in told
    assert "gpt-c has no scalars yet" in told
    assert "asks for no password" in told


def test_a_damaged_file_is_tensorboards_affair(runs, capsys):
    run = a_run(runs, "gpt-a")
    path = run.tensorboard / file_name(1)
    path.write_bytes(path.read_bytes()[:20])
    (run.tensorboard / file_name(2)).write_bytes(b"\xff" * 50)

    assert dry(capsys, "gpt-a")["runs"][0]["has_scalars"] is False


def test_it_serves_the_runs_until_it_is_interrupted(runs, tmp_path):
    a_run(runs, "gpt-a")
    a_run(runs, "gpt-b")
    (tmp_path / "tmp").mkdir()
    env = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    words = [sys.executable, "-c", AT_A_TERMINAL, "tensorboard", "gpt-a", "gpt-b", "--json"]
    with subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            url = _first_value(server.stdout)["url"]
            assert _served(url + "data/runs", server) == ["gpt-a", "gpt-b"]
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_S) == 0

    assert not list((tmp_path / "tmp").glob("hpctrain-tensorboard-*"))
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url)  # noqa: S310 - it is http


def _first_value(stream):
    text = ""
    for line in stream:
        text += line
        if line == "}\n":
            return json.loads(text)
    raise AssertionError(text)


def _served(url, server):
    """The JSON at this address, once it has anything."""

    def served():
        try:
            with urllib.request.urlopen(url) as answer:  # noqa: S310 - it is http
                found = json.load(answer)
        except (urllib.error.URLError, ConnectionError):
            return None
        return sorted(found) if len(found) > 1 else None

    return patience.until(served, url, alive=lambda: server.poll() is None)

"""`hpctrain stacks`: ranks at one place in one line, and a clear word where nobody can answer."""

from __future__ import annotations

import json
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpctrain.cli import profile as module
from hpctrain.cli.main import main
from hpctrain.node.hangs import stacks
from tests.support import patience
from tests.support.ledger_runs import Story, local_job


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCTRAIN_RUNS", raising=False)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    monkeypatch.setattr(module, "ANSWER_S", 5.0)
    return tmp_path / "runs"


@pytest.fixture
def running(runs, tmp_path):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    return Story(runs / "lm").submitted("local-17").started(1, "local-17")


def row(rank, **known):
    plain = {
        "rank": rank,
        "node": "n0",
        "state": "S",
        "has_returned": False,
        "step": 12,
        "phase": "step",
        "stood_s": 0.2,
        "limit_s": 60.0,
        "at": "/train.py:9 main",
        "frames": ["/torch/d.py:5 all_reduce", "/train.py:9 main"],
        "collectives": None,
    }
    return plain | known


BAD = {"at": "/train.py:23 fetch_rows", "phase": "data"}


def answered(run, *rows, **known):
    """An agent that answers the first request, with these rows."""

    def answer():
        token = patience.until(lambda: stacks.asked(run.stacks_request, "local-17"))
        verdict = {"kind": "behind", "ranks": [1], "summary": "3 ranks wait for rank 1"}
        told = {"t": 1.0, "token": token, "is_suspected": False, "verdict": verdict, "silent": []}
        where = stacks.path_of(run.attempt(1))
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(json.dumps({**told, **known, "ranks": rows}))

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def shown(capsys, *argv):
    code = main(["stacks", "lm", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_ranks_at_one_place_stand_in_one_line(running, capsys):
    agent = answered(running.run, row(0), row(1, **BAD), row(2), row(3, state="T"), silent=[4, 5])
    code, out, _ = shown(capsys)
    agent.join()
    assert code == 0
    assert out.splitlines() == [
        "ranks 0,2: /train.py:9 main (step 12, in step)",
        "rank 1: /train.py:23 fetch_rows (step 12, in data)",
        "rank 3: stopped (by a signal), /train.py:9 main (step 12, in step)",
        "ranks 4-5: their nodes' agents do not answer",
    ]
    assert not running.run.stacks_request.exists()


@pytest.mark.parametrize(
    ("rows", "known", "last"),
    [
        ([row(0, stood_s=9.0), row(1, stood_s=70.0, **BAD)], {}, "nothing has moved for 9 s: 3 ra"),
        ([row(0, stood_s=9.0)], {"is_suspected": True}, "it may hang: 3 ranks wait for rank 1"),
        ([row(0, stood_s=None, phase="")], {}, "at this moment 3 ranks wait for rank 1; look"),
        ([row(0, stood_s=1.0), row(1, stood_s=70.0)], {}, "ranks 0-1: /train.py:9 main (step 12"),
    ],
)
def test_what_it_means_is_said_where_ranks_stand(running, capsys, rows, known, last):
    agent = answered(running.run, *rows, **known)
    _, out, _ = shown(capsys)
    agent.join()
    assert out.splitlines()[-1].startswith(last)


def test_one_rank_is_shown_whole(running, capsys):
    agent = answered(running.run, row(0), row(1, **BAD), row(2, frames=None))
    _, out, _ = shown(capsys, "--rank", "1")
    agent.join()
    assert out.splitlines() == [
        "rank 1 on n0: /train.py:23 fetch_rows (step 12, in data)",
        "  /torch/d.py:5 all_reduce",
        "  /train.py:9 main",
    ]


AGENT = f"{Path(find_spec('hpctrain.node.agent.ranks').origin).parent}/"
STARTED_BY = [
    "<frozen runpy>:98 _run_module_code",
    "<frozen runpy>:291 run_path",
    f"{AGENT}ranks.py:190 _run_program",
    "/env/lib/python3.11/site-packages/torch/distributed/elastic/agent/server/api.py:711 run",
    f"{AGENT}main.py:80 run_agent",
]


@pytest.mark.parametrize(
    ("frames", "below"),
    [
        (row(1)["frames"], "  ... 5 frames of the launcher (--json has all)"),
        ([], f"  {AGENT}main.py:80 run_agent"),  # it has not come to its program
    ],
)
def test_the_launchers_frames_are_cut_below_a_program(running, capsys, frames, below):
    agent = answered(running.run, row(0), row(1, frames=[*frames, *STARTED_BY]))
    _, out, _ = shown(capsys, "--rank", "1")
    agent.join()
    assert out.splitlines()[1:-1] == [f"  {frame}" for frame in frames or STARTED_BY[:-1]]
    assert out.splitlines()[-1] == below


def test_json_has_all_that_was_found(running, capsys):
    agent = answered(running.run, row(0), row(1, **BAD))
    _, out, _ = shown(capsys, "--json")
    agent.join()
    told = json.loads(out)
    assert (told["run"], told["attempt"], told["ranks"][1]["phase"]) == ("lm", 1, "data")


def test_a_run_that_does_not_run_is_said_to_be_so(runs, capsys):
    Story(runs / "lm").submitted("local-17").started(1, "local-17").ended(1, "completed", "stop")
    code, _, err = shown(capsys)
    assert code == 5
    assert "lm does not run, so there is nothing to look at: it is" in err


def test_a_rank_that_there_is_not_is_refused(running, capsys):
    code, _, err = shown(capsys, "--rank", "4")
    assert (code, "lm has ranks 0 to 3" in err) == (2, True)


def test_agents_that_do_not_answer_are_said_not_to(running, capsys, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_S", 0.3)
    code, _, err = shown(capsys)
    assert code == 1
    assert "the agents of lm have not answered within 0 s" in err
    assert not running.run.stacks_request.exists()

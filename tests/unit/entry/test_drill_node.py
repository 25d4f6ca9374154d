"""What the program says that a drill starts on a node: one line, of what it did or could not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.core.base.process import own_program
from hpctrain.entry import drill_node
from hpctrain.ledger.run.layout import RunDir
from tests.support import patience

STANDS = "T"


@pytest.fixture
def run(tmp_path):
    found = RunDir(tmp_path / "lm")
    (found.checkpoints / "step-0000000040").mkdir(parents=True)
    (found.checkpoints / "step-0000000040" / "shard").write_bytes(bytes(8000))
    found.attempt(2).mkdir(parents=True)
    return found


@pytest.fixture
def rank(run):
    """Rank 3 of attempt 2, and the process that it says it is."""
    path = run.rank_log(2, 3)
    with path.open("wb") as out:
        command = [sys.executable, "-c", "print(1, flush=True); input()"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out)
    while not path.read_bytes():
        assert child.poll() is None
    yield child
    child.kill()
    child.communicate()


def said(capsys, run, *words):
    assert drill_node.main([str(run.root), *words]) == 0
    return json.loads(capsys.readouterr().out)


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def until(true):
    patience.until(true)


def test_a_rank_is_killed_and_one_that_is_not_here_is_told(run, rank, capsys):
    gone = said(capsys, run, "plant", "kill_rank", "2", "7", "0")
    assert gone["why"] == "rank 7 of attempt 2 was not found on its node"
    assert rank.poll() is None

    assert said(capsys, run, "plant", "kill_rank", "2", "3", "0")["why"] == ""
    assert rank.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize(("fault", "size"), [("tear_checkpoint", 4000), ("flip_bit", 8000)])
def test_a_damaged_checkpoint_is_named_and_its_rank_killed(run, rank, capsys, fault, size):
    done = said(capsys, run, "plant", fault, "2", "3", "0")

    assert done == {"why": "", "step": 40, "name": "step-0000000040"}
    data = (run.checkpoints / done["name"] / "shard").read_bytes()
    assert (len(data), data == bytes(size)) == (size, fault == "tear_checkpoint")
    assert rank.wait(60) == -signal.SIGKILL


def test_without_a_rank_or_a_checkpoint_nothing_is_damaged(run, capsys, rank):
    said(capsys, run, "plant", "flip_bit", "2", "7", "0")
    assert (run.checkpoints / "step-0000000040" / "shard").read_bytes() == bytes(8000)

    (run.checkpoints / "step-0000000040").rename(run.root / "away")
    done = said(capsys, run, "plant", "flip_bit", "2", "3", "0")
    assert done["why"] == "it has no checkpoint of hpctrain's form"
    assert rank.poll() is None


def test_a_frozen_rank_is_continued_also_where_the_program_is_ended(run, rank):
    words = (str(run.root), "plant", "freeze_rank", "2", "3")
    for seconds, code in (("0.2", 0), ("600", 1)):
        command = own_program("hpctrain.entry.drill_node", *words, seconds)
        top = str(Path(drill_node.__file__).parents[2])
        child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": top})
        if code:
            until(lambda: state(rank.pid) == STANDS)
            child.terminate()
        assert child.wait(60) == code
        until(lambda: state(rank.pid) != STANDS)


def test_other_words_are_no_fault(run, capsys):
    assert drill_node.main([str(run.root), "hurt"]) == 2
    assert "see its docstring" in capsys.readouterr().err

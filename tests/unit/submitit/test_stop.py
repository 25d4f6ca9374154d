"""When a rank hears that it must stop, and that its main thread hears it once."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hpctrain.core.base.records import StopCause
from hpctrain.node.hangs.witness import LOOK_SIGNAL
from hpctrain.submitit.task import INTERRUPT, read_stop
from tests.support.patience import PATIENCE_S

RANK = """
import os, signal, sys, time
from pathlib import Path
from hpctrain.submitit.task import StopWatch
from hpctrain.train.runtime.stops import RankSignals

class Requests:
    def __init__(self, meaning): self.stop, self.meaning = 0, meaning
    def start(self): pass
    def warn(self): self.stop = self.meaning


def rank(mode, meaning, path):
    due = (lambda: time.time()) if mode == "due" else (lambda: None)
    number = 1 if mode == "peer" else 0
    requests = None if number else Requests(meaning)
    watch = StopWatch(path, rank=number, requests=requests, due=due)
    acted = []

    def act():
        acted.append(watch.cause.value)
        time.sleep(0.2)
        raise SystemExit(0)

    watch.start()
    if mode == "early":
        os.kill(os.getpid(), signal.SIGTERM)
        while watch.cause is None:
            time.sleep(0.01)
    try:
        watch.call(act)
        if mode in ("sigterm", "sigusr2", "fork"):
            os.kill(os.getpid(), signal.SIGUSR2 if mode == "sigusr2" else signal.SIGTERM)
        if mode == "fork" and os.fork() == 0:
            os.kill(os.getpid(), signal.SIGRTMIN + 5)
            (path.parent / "child").touch()
            os._exit(0)
        if mode == "peer":
            path.write_text('{"cause": "sigterm"}')
        if mode == "replaced":
            RankSignals().start()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
            return f"left alone {acted}"
        time.sleep(100)
        return "slept on"
    except SystemExit as left:
        return f"{left.code} {acted} {path.read_text()}"


for word in sys.argv[2:]:  # a process for each, of one that has imported all of it
    mode, _, meaning = word.partition("=")
    path = Path(sys.argv[1]) / mode / "stop.json"
    path.parent.mkdir()
    if (child := os.fork()) == 0:
        (path.parent / "told").write_text(rank(mode, int(meaning or 0), path))
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the rank of each mode says, and its folder."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "rank.py").write_text(RANK)
    modes = ["sigterm", "sigusr2=2", "early", "due", "peer", "fork", "replaced"]
    done = subprocess.run(
        [sys.executable, str(folder / "rank.py"), str(folder), *modes],
        # A thread that is older than the watch could take the signal, and tell only the main one.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return lambda mode: (folder / mode / "told").read_text(), folder


@pytest.mark.parametrize(
    ("mode", "cause"),
    [
        ("sigterm", "sigterm"),
        ("early", "sigterm"),
        ("sigusr2", "sigusr2"),
        ("due", "clock"),
        ("peer", "sigterm"),
    ],
)
def test_a_stop_ends_the_call_once_and_is_written_for_the_other_ranks(told, mode, cause):
    assert told[0](mode) == f"0 ['{cause}'] {json.dumps({'cause': cause})}"


def test_a_forked_child_is_not_the_rank(told):
    assert told[0]("fork").startswith("0 ['sigterm']")
    assert (told[1] / "fork" / "child").exists()


def test_a_call_that_uses_hpctrain_itself_is_left_to_it(told):
    assert told[0]("replaced") == "left alone []"


@pytest.mark.parametrize("text", [None, "", "{", '{"cause": "hunger"}', "{}"])
def test_no_stop_is_read_from_what_is_not_one(tmp_path, text):
    path = tmp_path / "stop.json"
    if text is not None:
        path.write_text(text)

    assert read_stop(path) is None


def test_a_stop_is_read(tmp_path):
    path = tmp_path / "stop.json"
    path.write_text('{"cause": "clock"}')

    assert read_stop(path) is StopCause.CLOCK


def test_a_look_at_a_rank_that_stands_still_interrupts_no_call():
    assert INTERRUPT != LOOK_SIGNAL

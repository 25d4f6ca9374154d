"""The rehearsal on the real local cluster: what it finds, and that nothing of it stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.advise.check.forecast import CheckLine, CheckList
from hpctrain.advise.check.rehearsal import add_rehearsal, rehearse
from hpctrain.launch.prepare import SubmitRequest
from tests.support.patience import PATIENCE_S

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_loop.py"
FORGETS = """\
import hpctrain

run = hpctrain.init()
forgotten = 0.0
for step in run.steps(total=100_000):
    forgotten += 1.0
    run.log(loss=forgotten)
"""
FOREIGN = """\
import signal, sys, threading

stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
for step in range(100_000):
    print(f"iter {step}: loss {1 / (step + 1):.6f}", flush=True)
    if stop.wait(0.1):
        break
"""


@pytest.fixture
def request_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCTRAIN_RUNS", raising=False)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "never"))

    def make(text):
        (tmp_path / "train.py").write_text(text)
        return SubmitRequest(
            cwd=tmp_path, environ=os.environ, runs=Path("runs"), command=["train.py"]
        )

    return make


@pytest.mark.check
def test_a_program_that_resumes_well_is_told_so_and_nothing_stays(request_for, tmp_path):
    request = request_for(EXAMPLE.read_text())
    told = []

    stop, loss, alone = rehearse(request, told.append, calls_hpctrain=True, patience_s=120)

    assert stop.status == "ok", stop
    assert "no step lost" in stop.message
    assert loss.status == "ok", loss
    assert loss.message.endswith("as in an undisturbed run, bit for bit")
    assert alone.check == "rehearse: 1 rank"
    assert alone.status == "note"  # its ranks draw other samples each
    assert len(told) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert os.environ["HPCTRAIN_LOCAL_DIR"] == str(tmp_path / "never")


@pytest.mark.check
def test_what_is_not_saved_is_found(request_for):
    _, loss = rehearse(request_for(FORGETS), lambda _: None, calls_hpctrain=True, patience_s=120)

    assert loss.status == "fail"
    assert "it differs from an undisturbed run" in loss.message


SAVES = """\
import os, pathlib, signal, sys, time

signal.signal(signal.SIGTERM, lambda *_: sys.exit())
path = pathlib.Path("last.pt")
first = int(path.read_text()) + 1 if path.exists() and {goes_on} else 0
for epoch in range(first, 100_000):
    for it in range(2):
        print(f"epoch {{epoch}} it {{it}} loss {{1 / (epoch + 1):.6f}}", flush=True)
    time.sleep(0.1)
    if os.environ["RANK"] == "0":
        pathlib.Path("new.pt").write_text(str(epoch))
        os.replace("new.pt", path)
"""


@pytest.mark.check
def test_a_program_that_saves_and_begins_anew_is_never_called_all_right(request_for):
    lines = rehearse(
        request_for(SAVES.format(goes_on=False)),
        lambda _: None,
        calls_hpctrain=False,
        patience_s=120,
    )

    resume = lines[1]
    assert (resume.check, resume.status) == ("rehearse: resume", "fail")
    assert "started over at epoch 0 step 0: each preemption costs all" in resume.message
    assert len(lines) == 2


@pytest.mark.soak
def test_a_program_that_saves_and_goes_on_is_told_so(request_for):
    _, resume, _ = rehearse(
        request_for(SAVES.format(goes_on=True)),
        lambda _: None,
        calls_hpctrain=False,
        patience_s=120,
    )

    assert resume.status == "ok"
    assert "resumed at epoch " in resume.message


@pytest.mark.soak
def test_a_program_that_knows_nothing_of_hpctrain_is_watched_by_what_it_prints(request_for):
    left, resume = rehearse(
        request_for(FOREIGN), lambda _: None, calls_hpctrain=False, patience_s=120
    )

    assert left.status == "ok", left
    assert left.message.endswith("started again")
    assert resume.status == "note"
    assert "started over at step 0" in resume.message
    assert resume.message.endswith("unless it saves later than the rehearsal stopped it")


@pytest.mark.check
def test_a_program_that_raises_is_one_line(request_for, tmp_path):
    request = request_for("import hpctrain\nhpctrain.init()\nraise ValueError('no data')\n")

    (line,) = rehearse(request, lambda _: None, calls_hpctrain=True, patience_s=120)

    assert line.status == "fail"
    assert "ValueError: no data" in line.message
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.check
def test_where_a_program_cannot_start_nothing_is_tried(request_for, tmp_path):
    checks = CheckList([CheckLine("imports", "fail", "no einops")], calls_hpctrain=True)

    add_rehearsal(checks, request_for("import einops\n"), lambda _: None)

    assert checks.lines[-1] == CheckLine(
        "rehearse", "not known", "not tried: imports failed", "fix that first"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.check
def test_ctrl_c_ends_its_job_and_leaves_nothing(tmp_path):
    mark = tmp_path / "mark"
    os.mkfifo(mark)
    (tmp_path / "train.py").write_text(
        "import os, hpctrain\nrun = hpctrain.init()\n"
        f"if run.world.rank == 0:\n    open({str(mark)!r}, 'w').write(str(os.getpid()))\n"
        "import threading\nthreading.Event().wait()\n"
    )
    words = ["check", "--cluster", "local", "--rehearse", "--", "train.py"]
    # A shell that starts the tests in the background has it ignored, and so would this command.
    heard = ["env", "--default-signal=INT"]
    command = subprocess.Popen(
        [*heard, sys.executable, "-m", "hpctrain", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with mark.open() as told:
        rank = int(told.read())
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=PATIENCE_S)

    assert command.returncode == 130, err
    assert not Path(f"/proc/{rank}").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mark", "train.py"]


@pytest.mark.check
def test_a_folder_that_cannot_be_made_is_a_line(request_for, tmp_path):
    request = request_for(FORGETS)
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    (tmp_path / "runs").touch()

    (line,) = rehearse(request, lambda _: None, calls_hpctrain=True)

    assert line.status in {"not known", "fail"}
    assert str(tmp_path / "runs") in line.message

"""A program that resumes only when it is told to is told so from its second start on."""

from __future__ import annotations

import pytest

from tests.support import patience
from tests.support.local_runs import await_end, events, hpctrain, start

PROGRAM = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # it has saved, and need not be killed
saved = pathlib.Path("out/ckpt.txt")
print("arguments", sys.argv[1:], flush=True)
if "--init_from=resume" in sys.argv:
    sys.exit(0 if saved.read_text() == "10" else 1)
for step in range(1, 100_000):
    time.sleep(0.01)
    if step == 10:
        saved.parent.mkdir(exist_ok=True)
        saved.write_text("10")
"""


@pytest.mark.parametrize("condition", [(), ("--resume-if", "out/*.txt")])
def test_a_preempted_program_gets_its_arguments(tmp_path, condition):
    (tmp_path / "train.py").write_text(PROGRAM)
    flags = ("--resume-args", "--init_from=resume", *condition)
    run = start(tmp_path, "r", 1, 1, *flags, "--", "train.py", "--lr", "1")
    patience.until((tmp_path / "out" / "ckpt.txt").exists)
    hpctrain(tmp_path, "local", "preempt", "r", "--leave", "1", "--grace", "20")

    assert await_end(run, 2)["reason"] == "completed"
    assert len(events(run, "attempt_ended")) == 2
    first, second = (
        (run / "attempts" / name / "rank-00000.log").read_text() for name in ("0001", "0002")
    )
    assert "no arguments added: " in first
    assert "arguments ['--lr', '1']\n" in first
    assert "arguments added, since " in second
    assert "arguments ['--lr', '1', '--init_from=resume']\n" in second

"""`cancel --save` reaches programs that never call hpctrain.init(): real local runs."""

from __future__ import annotations

from tests.support import patience
from tests.support.local_runs import await_end, events, hpctrain, start

LOOKS = """#!/bin/bash
# Traps nothing: it looks.
touch "$HPCTRAIN_OUTPUT_DIR/ready-$RANK"
until [ -e "$HPCTRAIN_STOP_FILE" ]; do sleep 0.1; done
cp "$HPCTRAIN_STOP_FILE" "$HPCTRAIN_OUTPUT_DIR/saved-$RANK"
"""
TRAPS = """#!/bin/bash
# Does not look: SIGTERM comes once.
trap 'echo term >> "$HPCTRAIN_OUTPUT_DIR/saved-$RANK"; leaves=1' TERM
touch "$HPCTRAIN_OUTPUT_DIR/ready-$RANK"
until [ "$leaves" ]; do sleep 0.1; done
sleep 1
exit 3
"""
HANDLES = """
import os, pathlib, signal, sys, time
output = pathlib.Path(os.environ["HPCTRAIN_OUTPUT_DIR"])
rank = os.environ["RANK"]
def save(*_):
    (output / f"saved-{rank}").write_text("term\\n")
    raise SystemExit
signal.signal(signal.SIGTERM, save)
(output / f"ready-{rank}").touch()
while True:
    time.sleep(0.1)
"""


def cancelled(tmp_path, nodes, ranks, *command):
    """What each rank of a run has saved when it was asked to save and leave."""
    run = start(tmp_path, "r", nodes, ranks, "--", *command)
    output = run / "output"
    patience.until(lambda: len(list(output.glob("ready-*"))) >= nodes * ranks)
    text = hpctrain(tmp_path, "cancel", "r", "--save")
    assert "HPCTRAIN_STOP_FILE" in text
    end = await_end(run)
    assert (end["reason"], end["next"]) == ("stopped", "stop")
    assert not events(run, "failure")
    return [(output / f"saved-{rank}").read_text() for rank in range(nodes * ranks)]


def test_a_program_that_looks_for_the_file_saves_on_all_nodes(tmp_path):
    (tmp_path / "looks.sh").write_text(LOOKS)

    assert cancelled(tmp_path, 2, 2, "bash", "looks.sh") == ["user\n"] * 4


def test_a_shell_that_traps_sigterm_gets_it_once_and_may_leave_as_it_likes(tmp_path):
    (tmp_path / "traps.sh").write_text(TRAPS)

    assert cancelled(tmp_path, 1, 2, "bash", "traps.sh") == ["term\n"] * 2


def test_a_python_script_with_a_handler_gets_sigterm(tmp_path):
    (tmp_path / "handles.py").write_text(HANDLES)

    assert cancelled(tmp_path, 1, 2, "handles.py") == ["term\n"] * 2


def test_a_stop_before_the_program_was_there_is_told_to_it(tmp_path):
    (tmp_path / "slow.sh").write_text("sleep 3\n" + TRAPS.replace("exit 3", "exit 0"))
    run = start(tmp_path, "r", 1, 1, "--", "bash", "slow.sh")
    log = run / "attempts" / "0001" / "rank-00000.log"
    patience.until(log.exists)
    hpctrain(tmp_path, "cancel", "r", "--save")

    assert await_end(run)["reason"] == "stopped"
    assert (run / "output" / "saved-0").read_text() == "term\n"

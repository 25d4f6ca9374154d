"""What others put into a folder of runs breaks no command, hangs none, and costs little."""

from __future__ import annotations

import os
import sys
import time
import tracemalloc

import pytest

from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.attempt_files import LogFile
from hpctrain.ledger.run.events import BLOCK_BYTES, Tail, parse
from hpctrain.ledger.run.find_run import find_run, look_into
from hpctrain.ledger.run.layout import RunDir
from tests.support.ledger_runs import Story, write_event
from tests.support.users import OWNER, STRANGER, run_as

HPCTRAIN = [sys.executable, "-m", "hpctrain"]
MOST_ADDRESSES_BYTES = 3 << 30
MOST_MEMORY_BYTES = 12 << 20
MOST_S = 60.0
COMMANDS = (["status"], ["status", "--json"], ["status", "-"], ["events", "mi"], ["events", "17"])


def _strange(runs):
    """Entries of others: nothing that can be read, nothing that ends, nothing that makes sense."""
    (runs / "shut").mkdir(mode=0o700)
    Story(runs / "shut-ledger").run.events.touch(mode=0o600)
    for name in ("fifo-ledger", "fifo-spec", "sparse", "odd"):
        (runs / name).mkdir()
    os.mkfifo(runs / "fifo-ledger" / "events.jsonl")
    os.mkfifo(runs / "fifo-spec" / "spec.json")
    (runs / "fifo-spec" / "events.jsonl").touch()
    (runs / "odd" / "spec.json").write_text('{"format": 3, "entry": []}')
    (runs / "odd" / "events.jsonl").write_text('{"t": 1, "kind": "submit_intent"}\n')
    with (runs / "sparse" / "events.jsonl").open("wb") as file:
        file.truncate(1 << 40)
    (runs / "loop").symlink_to("loop")


@pytest.mark.two_users
def test_no_entry_of_others_breaks_a_command(common_path):
    runs = common_path / "runs"
    runs.mkdir()
    _strange(runs)
    for path in runs.rglob("*"):
        os.chown(path, STRANGER.uid, STRANGER.gid, follow_symlinks=False)
    mine = Story(runs / "mine").submitted("17").started(1, "17").ended(1, "crashed", "stop").run
    for path in (mine.root, *mine.root.iterdir()):
        os.chown(path, OWNER.uid, OWNER.gid)
    for words in COMMANDS:
        limit = ["prlimit", f"--as={MOST_ADDRESSES_BYTES}"]
        told = run_as(OWNER, [*limit, *HPCTRAIN, *words, "--runs", str(runs)])
        assert "mine" in told.stdout or words[0] == "events"
        assert ("3 folders" in told.stderr) == (words[0] == "status" and "-" not in words)


def test_a_hole_of_a_terabyte_takes_no_time(tmp_path):
    run = Story(tmp_path / "lm").submitted("17").run
    with run.events.open("r+b") as file:
        file.seek(1 << 40)
        file.write(b'\n{"t": 5.0, "kind": "done"}\n')
    began = time.process_time()
    for events in (ledger.read(run), ledger.read(run, marks="few"), Tail(run.events).new()):
        assert [event.kind for event in events] == ["submit_intent", "submitted", "done"]
    assert find_run("17", runs=tmp_path).root == run.root
    log = LogFile(run.events)
    assert [parse(line).kind for line in log.lines() if parse(line)][-1] == "done"
    assert log.at == run.events.stat().st_size
    assert time.process_time() - began < MOST_S


@pytest.mark.parametrize("filling", [b"\0", b"x", b'{"t": 1, "kind": "'])
def test_a_line_without_an_end_costs_no_memory(tmp_path, filling):
    run = Story(tmp_path / "lm").submitted("17").run
    with run.events.open("ab") as file:
        file.write(filling * ((32 << 20) // len(filling)))
        file.write(b'\n{"t": 5.0, "kind": "done"}\n')
    for marks in ("all", "few"):
        tracemalloc.start()
        assert len(ledger.read(run, marks=marks)) == 3
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST_MEMORY_BYTES


def test_zeros_before_a_fact_are_no_part_of_it(tmp_path):
    run = Story(tmp_path / "lm").submitted("17").run
    with run.events.open("ab") as file:
        file.write(b"\0" * (3 << 20) + b'{"t": 5.0, "kind": "done"}\n')
    assert [event.kind for event in ledger.read(run)][-1] == "done"


def test_the_end_of_a_long_line_is_no_fact(tmp_path):
    run = RunDir(tmp_path)
    run.events.write_bytes(b"x" * (3 * BLOCK_BYTES) + b'{"t": 5.0, "kind": "forged"}\n')
    assert ledger.read(run) == []


def test_a_long_line_is_left_out_and_its_neighbours_are_kept(tmp_path):
    run = Story(tmp_path / "lm").submitted("17").run
    tail = Tail(run.events)
    assert len(tail.new()) == 2
    with run.events.open("ab") as file:
        file.write(b'{"t": 1.0, "kind": "long", "x": "' + b"y" * (5 << 20))
    assert tail.new() == []
    with run.events.open("ab") as file:
        file.write(b'"}\n{"t": 5.0, "kind": "done"}')
    assert [event.kind for event in tail.new()] == ["done"]
    write_event(run, "after")
    assert [event.kind for event in tail.new()] == ["after"]


def test_a_folder_that_cannot_be_looked_into_is_counted(tmp_path, monkeypatch):
    Story(tmp_path / "lm").submitted("17")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "loop2").mkdir()
    (tmp_path / "loop2" / "spec.json").symlink_to("spec.json")
    assert look_into(tmp_path).unreadable == 2
    assert [run.name for run in look_into(tmp_path).runs] == ["lm"]

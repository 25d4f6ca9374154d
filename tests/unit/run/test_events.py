"""The ledger: every fact is whole or not there, whoever writes beside it and however it ends."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest

from hpctrain.core.base.records import EndReason, Skipped
from hpctrain.ledger.history.progress import progress
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events
from hpctrain.ledger.run.events import Tail, parse, read
from hpctrain.ledger.run.layout import RunDir
from tests.support.ledger_runs import event_of, fields_of, write_event


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_a_fact_is_read_back_with_its_fields(run):
    before = time.time()
    write_event(run, "saved", attempt=2, step=400, checkpoint=Path("/x/step-1"), nodes=["a", "b"])

    [event] = read(run)

    assert (event.kind, event.attempt) == ("saved", 2)
    assert fields_of(event) == {"step": 400, "checkpoint": "/x/step-1", "nodes": ["a", "b"]}
    assert round(before, 3) <= event.t <= round(time.time(), 3)  # the ledger has milliseconds


def test_enums_sets_and_dataclasses_become_plain_json(run):
    @dataclass
    class Facts:
        state: str

    write_event(run, "x", reason=EndReason.PREEMPTED, facts=Facts("RUNNING"), ranks={2, 1})
    write_event(run, "y", skipped=[Skipped(1, "step-1", "torn")])

    first, second = read(run)
    assert fields_of(first) == {
        "reason": "preempted",
        "facts": {"state": "RUNNING"},
        "ranks": [1, 2],
    }
    assert fields_of(second)["skipped"] == [{"step": 1, "name": "step-1", "reason": "torn"}]


def test_a_loss_that_is_not_a_number_stays_valid_json_and_can_be_read_as_a_float(run):
    write_event(run, "steps", loss=float("nan"), more=[float("-inf"), 1.5])

    def refuse(constant):
        raise AssertionError(constant)

    json.loads(run.events.read_text(), parse_constant=refuse)
    [event] = read(run)
    assert math.isnan(event.fact.loss)
    assert event.extra == {"more": ["-inf", 1.5]}


def test_something_that_is_no_json_is_refused_before_anything_is_written(run):
    with pytest.raises(TypeError, match="an event holds JSON values"):
        write_event(run, "x", thing=object())
    assert not run.events.exists()


def test_the_time_of_a_fact_can_be_given(run):
    write_event(run, "phase", attempt=1, name="batch_started", t=12.5)
    assert read(run)[0].t == 12.5


def test_no_ledger_has_no_facts(run):
    assert read(run) == []


@pytest.mark.parametrize(
    "torn",
    [
        b'{"t": 2, "kind": "sav',
        b'{"t": 2, "kind": "saved", "attempt": 1, "step": 4',
        b"\xff\xfe{",
        b"\0\0\0\0",
        b"[1, 2]",
        b'{"kind": "no time"}',
        b'{"t": "soon", "kind": "x"}',
        b'{"t": 1}',
        b"null",
        b"}{",
    ],
)
def test_a_torn_last_line_is_left_out_and_the_next_fact_begins_a_line_of_its_own(run, torn):
    write_event(run, "first")
    with run.events.open("ab") as file:
        file.write(torn)

    assert [e.kind for e in read(run)] == ["first"]
    write_event(run, "second")

    assert [e.kind for e in read(run)] == ["first", "second"]
    assert run.events.read_bytes().endswith(b"}\n")


def test_garbage_between_facts_is_left_out(run):
    write_event(run, "first")
    with run.events.open("ab") as file:
        file.write(b"srun: error: something\n\n\xff\xff\n" + b"\0" * 100)
        file.write(b'{"t": 2, "kind": "after a gap", "attempt": null}\n')

    assert [e.kind for e in read(run)] == ["first", "after a gap"]


def test_a_last_line_that_lacks_only_its_newline_counts_once(run):
    run.events.write_bytes(b'{"t": 1, "kind": "whole"}')
    tail = Tail(run.events)

    assert [e.kind for e in tail.new()] == ["whole"]
    write_event(run, "next")

    assert [e.kind for e in tail.new()] == ["next"]
    assert [e.kind for e in read(run)] == ["whole", "next"]


def test_a_tail_gives_each_fact_once_and_waits_for_the_rest_of_a_line(run):
    tail = Tail(run.events)
    assert tail.new() == []
    write_event(run, "first")
    assert [e.kind for e in tail.new()] == ["first"]
    with run.events.open("ab") as file:
        file.write(b'{"t": 3, "kind": ')
        file.flush()
        assert tail.new() == []
        file.write(b'"second"}\n')
    assert [e.kind for e in tail.new()] == ["second"]
    assert tail.new() == []


def test_a_ledger_that_was_replaced_by_a_shorter_one_is_read_from_its_start(run):
    tail = Tail(run.events)
    for number in range(10):
        write_event(run, f"old-{number}")
    tail.new()
    run.events.unlink()
    write_event(run, "new")
    assert [e.kind for e in tail.new()] == ["new"]


def _append_many(root: str, writer: int, count: int) -> None:
    for number in range(count):
        write_event(
            RunDir(Path(root)), "mark", attempt=writer, number=number, pad="x" * (number * 20)
        )


def test_eight_processes_writing_at_once_lose_and_tear_nothing(run):
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=_append_many, args=(str(run.root), writer, 500))
        for writer in range(8)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    assert [writer.exitcode for writer in writers] == [0] * 8
    lines = run.events.read_bytes().splitlines()
    assert len(lines) == 4000
    assert all(json.loads(line)["kind"] == "mark" for line in lines)
    for writer in range(8):
        own = [fields_of(e)["number"] for e in read(run) if e.attempt == writer]
        assert own == list(range(500))


def test_a_writer_that_hangs_with_the_lock_does_not_keep_a_fact_from_being_written(run):
    write_event(run, "first")
    with run.events_lock.open("ab") as holder:
        flock(holder, LOCK_EX)
        write_event(run, "second")
    assert [e.kind for e in read(run)] == ["first", "second"]


def test_a_child_forked_during_a_write_does_not_keep_the_lock(run):
    # What a fork in another thread does: the child has a copy of the descriptor, for life.
    script = f"""
import fcntl, os, sys, time
from pathlib import Path
from hpctrain.ledger.run import events
from hpctrain.ledger.run.event_types import TrainingDone, TrainingStopped
from hpctrain.ledger.run.layout import RunDir
real = events._ends_whole
ours, theirs = os.pipe()
def fork_then(descriptor):
    if os.fork() == 0:
        os.close(theirs)
        os.read(ours, 1)  # until this script has ended
        os._exit(0)
    return real(descriptor)
events._ends_whole = fork_then
run = RunDir(Path({str(run.root)!r}))
events.append(run, TrainingStopped())
events._ends_whole = real
started = time.monotonic()
events.append(run, TrainingDone())
print(time.monotonic() - started)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 0.5
    assert [e.kind for e in read(run)] == ["stopped", "done"]


def test_a_full_disk_is_an_error_and_not_a_lost_fact(run, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_event(run, "x")


def test_importing_the_ledger_imports_nothing_heavy():
    script = "import sys, hpctrain.ledger.run.events; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    heavy = {"asyncio", "torch", "numpy", "click", "rich", "filelock", "submitit", "subprocess"}
    assert heavy & set(done.stdout.split()) == set()


def test_events_are_values():
    assert event_of(1.0, "x", 2, {"a": 1}) == event_of(1.0, "x", 2, {"a": 1})


# ---- reading a long ledger ----------------------------------------------------------------------


def write(run: RunDir, *lines: str | bytes) -> None:
    run.events.write_bytes(
        b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in lines)
    )


def marks(attempt: int, first: int, count: int, **more: object) -> list[str]:
    """Step marks of ten steps each, as `append` writes them."""
    return [
        json.dumps(
            {"t": 1e9 + last, "kind": "steps", "attempt": attempt}
            | {"first": last - 9, "last": last, "loss": 2.5}
            | more
        )
        for last in range(first + 9, first + 10 * count, 10)
    ]


def other(kind: str, attempt: int | None = 1) -> str:
    return json.dumps({"t": 2e9, "kind": kind, "attempt": attempt})


def last_steps(run: RunDir) -> list[int]:
    return [e.fact.last for e in read(run, marks="few") if e.kind == "steps"]


TAIL = [other("saved")] * (events.NEWEST_BYTES // len(other("saved")))
"""So that the marks before it are not the newest."""


def test_of_a_row_of_marks_the_last_is_read_and_few_between(run):
    rows = [*marks(1, 1, 600), other("saved"), *marks(1, 6001, 3), *marks(2, 6011, 2)]
    write(run, other("created", None), *rows, *TAIL)

    assert last_steps(run) == [2560, 5120, 6000, 6030, 6030]


def test_a_mark_before_a_save_is_always_read(run):
    row = marks(1, 1, 100)
    row[40] = marks(1, 401, 1, at_save=True)[0]
    write(run, *row, *TAIL)
    assert last_steps(run) == [410, 1000]


def test_the_newest_marks_are_all_read(run):
    rows = marks(1, 1, 2000)
    write(run, *rows)
    whole = events.NEWEST_BYTES // (len(rows[-1]) + 1) - 1
    assert last_steps(run)[-whole:] == list(range(20_010 - 10 * whole, 20_001, 10))


def test_a_long_ledger_is_read_without_parsing_most_of_it(run, monkeypatch):
    parsed = []
    monkeypatch.setattr(events, "parse", lambda line: parsed.append(line) or parse(line))
    write(run, other("attempt_started"), *marks(1, 1, 20_000), other("done"))

    assert read(run, marks="few")[-1].kind == "done"
    newest = events.NEWEST_BYTES / len(marks(1, 1, 1)[0])
    assert len(parsed) < 20_000 / events.KEPT_EVERY + newest + 10


def test_few_marks_tell_the_same_as_all(run):
    write(run, *[line for n in range(1, 30) for line in (*marks(1, 100 * n, 9), other("x"))])
    few, full = read(run, marks="few"), read(run)
    assert progress(RunHistory.of(few)) == progress(RunHistory.of(full))
    assert [e for e in few if e.kind != "steps"] == [e for e in full if e.kind != "steps"]


def test_where_a_block_of_the_file_ends_makes_no_difference(run, monkeypatch):
    write(run, *[line for n in range(1, 300) for line in (*marks(1, 100 * n, 9), other("x"))])
    whole = read(run, marks="few")
    for size in (997, 4096):
        monkeypatch.setattr(events, "BLOCK_BYTES", size)
        assert read(run, marks="few") == whole


@pytest.mark.parametrize(
    "last",
    [
        b'{"t": 1.0, "kind": "steps", "attempt": 1, "first": 11, "la',
        b'{"t": 1.0, "kind": "steps", "attempt": 1, "fi\0\0\0\0\0\0, "last": 20}',
        b'{"kind": "steps", "t": 1.0, "attempt": 1, "first": 11, "last": 20, "loss": 1}',
        b'{"t": 1.0, "kind": "steps", "attempt": 1, "first": 11, "last": 20} ',
        b"",
        b"\0\0\0",
        b"\xff\xfe{",
    ],
)
def test_torn_and_foreign_lines_among_marks_cost_no_whole_one_its_place(run, last):
    row = marks(1, 1, 5)
    write(run, *row, last, *TAIL)

    assert 50 in last_steps(run)
    assert read(run, marks="few")[-1] == read(run)[-1]


@pytest.mark.parametrize("t", ["NaN", "Infinity", "1" + 400 * "0", "true", "[]", "null"])
def test_a_fact_without_a_time_is_no_fact(run, t):
    write(run, '{"t": ' + t + ', "kind": "done", "attempt": 1}')
    assert read(run) == []

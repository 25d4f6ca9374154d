"""Something else in the place of any file of a run: every command ends at once, with a word."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from hpctrain.cli.main import main
from hpctrain.cluster.preflight import report as node_lists
from hpctrain.ledger.run.attempt_files import Heartbeat, write_heartbeat
from hpctrain.node.agent.log_index import times_path
from hpctrain.observe.profile.trace import PROBLEM, TRACE, StepWindow, file_name
from tests.support import checkpoints as support
from tests.support.ledger_runs import Story
from tests.support.traces import GPU

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S = 4
"""Most commands take a hundredth of that; a FIFO would take for ever."""
MOST_KIB = 512 << 10
SPARSE_BYTES = 4 << 30
COMMANDS = (
    "status",
    "status lm",
    "status lm --json --ranks",
    "events lm",
    "logs lm --rank all --attempt all",
    "logs lm --rank 0,1 --tail 3",
    "logs lm --rank 0,1 --since 2025-11-21T02:00",
    "logs lm --rank batch --tail 3",
    "report lm --output page.html",
    "profile lm",
    "checkpoints list lm",
    "checkpoints verify lm --deep",
    "checkpoints prune lm --dry-run",
    "resume lm --dry-run",
    "resume lm",
    "profile lm --now",
    "cancel lm --save",
    "cancel lm",
)
_OPENED: list[Path] = []
_WATCHING: list[str] = []


def _hear(event: str, args: tuple[object, ...]) -> None:
    if event == "open" and _WATCHING and str(args[0]).startswith(_WATCHING[0]):
        _OPENED.append(args[0])


@pytest.fixture(scope="module")
def watched():
    sys.addaudithook(_hear)  # which cannot be taken away


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with a file of every kind, whose job a scheduler knows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    story = Story(tmp_path / "runs" / "lm", cluster="slurm")
    slurm = tmp_path / "bin"
    slurm.mkdir()
    for name in ("scontrol", "scancel", "sacct", "squeue", "sbatch", "sinfo"):
        (slurm / name).write_text(
            f"#!/bin/sh\n[ '{name} $3' = 'scontrol 17' ] && cat {tmp_path}/job\n"
        )
        (slurm / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{slurm}:/usr/bin:/bin")
    story.submitted("17").started(1, "17", by="start").restored(1)
    story.add("phase", 1, name="initialised").steps(1, 1, 50).saved(1, 50)
    _fill(story.run)
    return story.run


ALIVE = "JobId=17 JobName=lm JobState=RUNNING Reason=None Restarts=0"


def _fill(run) -> None:
    support.save(run, support.next_attempt(run), 50)
    for rank in (0, 1):
        log = run.rank_log(1, rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("step 1\nRuntimeError: x\n" * 5)
        times_path(log).write_text("1763700010 20\n1763700020 60\n")
        (run.attempt(1) / f"failure-{rank}.json").write_text("{}")
        (run.attempt(1) / f"torch-error-{rank}.json").write_text("{}")
    write_heartbeat(run, 1, Heartbeat(1_763_700_060.0, 50))
    run.outcome(1).write_text('{"outcome": "left"}')
    (run.attempt(1) / "environment.json").write_text("{}")
    run.rank_times(1).write_text(json.dumps({"t": 1_763_700_060.0, "step": 50, "ranks": {}}) + "\n")
    run.jobs.mkdir()
    for suffix in (".sh", ".out", "-0.out"):
        (run.jobs / f"tok-1{suffix}").write_text("words\n" * 5)
    folder = run.profile / "attempt-0001"
    folder.mkdir(parents=True)
    window = StepWindow(100, 100)
    (folder / file_name(0, window, TRACE)).write_bytes(gzip.compress(GPU.encode()))
    (folder / file_name(1, window, PROBLEM)).write_text("RuntimeError: no CUPTI\n")
    run.tensorboard.mkdir()
    (run.tensorboard / "events.out.tfevents.1").write_bytes(b"\0" * 64)
    node_lists.record_bad(node_lists.bad_nodes_path(run), {"n3": "slow"})
    for path in (run.stop_request, run.profile_request, run.lock, run.events_lock, run.secret):
        path.write_text("{}")


def _in_place(kind: str, path: Path) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        with path.open("wb") as file:
            file.truncate(SPARSE_BYTES)


@contextlib.contextmanager
def _no_longer_than(seconds: float, path: Path) -> Iterator[list[Path]]:
    """Whoever waits for the other end of a FIFO is let go after so long, and is told of."""
    stuck: list[Path] = []

    other_end: list[int] = []

    def let_go(*_: object) -> None:  # first from its open, the next time from its read
        stuck.append(path)
        if other_end:
            os.close(other_end.pop())
        else:
            with contextlib.suppress(OSError):
                other_end.append(os.open(path, os.O_RDWR | os.O_NONBLOCK))

    before = signal.signal(signal.SIGALRM, let_go)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.2)
    try:
        yield stuck
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        for descriptor in other_end:
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _opened_by(run, words: list[str]) -> list[Path]:
    """The run's files that a command opens, in a run that is as it should be."""
    _OPENED.clear()
    _WATCHING.append(str(run.root))
    try:
        main(words)
    finally:
        _WATCHING.clear()
    found = {type(run.root)(os.fsdecode(path)) for path in _OPENED}
    return sorted(path for path in found if not path.is_dir())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "sparse"])
def test_nothing_in_the_place_of_a_file_keeps_a_command_waiting(run, watched, capfd, kind, command):
    words = command.split()
    (run.root.parents[1] / "job").write_text("" if "resume lm --dry-run" in command else ALIVE)
    kept = run.root.parent / "kept"
    opened = _opened_by(run, words)
    capfd.readouterr()
    assert opened, "nothing of the run is read: this shows nothing"

    for path in opened:
        if path.exists():
            path.rename(kept)
        _in_place(kind, path)
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with _no_longer_than(PATIENCE_S, path) as stuck:
            code = main(words)
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
        said = capfd.readouterr()

        assert not stuck, f"{command} waits for {path}"
        assert code in {0, 1, 2, 3, 4, 5, 6, 7}, (path, said.err)
        assert "Traceback" not in said.err, (path, said.err)
        assert grown_kib < MOST_KIB, path
        _remove(path)
        if kept.exists():
            kept.rename(path)

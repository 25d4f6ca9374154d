"""`hpctrain status` on real terminals, wide and narrow, with colours and without."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.ledger_runs import Story, local_job
from tests.support.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def story(tmp_path, monkeypatch) -> Story:
    """A run with twelve attempts on many nodes that trains on; the newest is looked at."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCTRAIN_RUNS", raising=False)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    story = Story(tmp_path / "runs" / "lm-3", t=time.time() - 6000, steps=2_000_000)
    story.submitted("local-17")
    for number in range(1, 13):
        nodes = tuple(f"gpu-partition-a-node{n:04d}" for n in (1, 3, 5, 7, number + 10))
        story.started(number, "local-17", nodes, restarts=number - 1).restored(number, 1_000_000)
        story.t += 300
        more = {"tokens": 10**9, "grad_norm": 0.8, "slow_rank": 9, "slow_by": 0.04, "p95_s": 3.1}
        marked = {"first": 1_000_001, "last": 1_200_000, "seconds": 290.0, "loss": 2.1, **more}
        story.add("steps", number, **marked)
        if number < 12:
            story.add("failure", number, rank=3, node=nodes[0], summary="RuntimeError: " + 9 * "x ")
            story.ended(number, "node_failed", "requeue").add("requeued", number, by="agent")
    return story


@pytest.fixture
def deaf_to_interrupts() -> Iterator[None]:
    """Tests as a background job of a shell without job control, which ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def too_long(terminal: Terminal, columns: int) -> list[str]:
    """Lines that do not fit; paths and commands are not cut, so that they can be copied."""
    return [
        line
        for line in terminal.lines
        if len(line) > columns and not line.startswith(("log /", "  hpctrain "))
    ]


@pytest.mark.parametrize("columns", [80, 160])
@pytest.mark.parametrize("what", [["lm-3", "--attempts"], []])
def test_no_line_is_longer_than_the_terminal_is_wide(story, columns, what):
    with Terminal("status", *what, columns=columns, rows=50) as terminal:
        assert terminal.wait() == 0
        assert too_long(terminal, columns) == []
        assert "1,200,000/2,000,000" in terminal.text
        assert b"\x1b[32mrunning\x1b[0m" in terminal.raw


def test_no_color_is_without_any_escape(story):
    with Terminal("status", "lm-3", NO_COLOR="1") as terminal:
        assert terminal.wait() == 0
        assert "lm-3  running  step 1,200,000" in "\n".join(terminal.lines)
        assert b"\x1b" not in terminal.raw


@pytest.mark.usefixtures("deaf_to_interrupts")
def test_watching_redraws_in_place_and_leaves_the_last_screen_behind(story: Story):
    with Terminal("status", "lm-3", "--watch", "-i", "1", columns=80, rows=50) as terminal:
        terminal.until(lambda: "Ctrl-C ends" in terminal.text)
        assert "step 1,200,000/2,000,000" in terminal.text
        story.steps(12, 1_200_001, 1_200_500)
        terminal.until(lambda: "step 1,200,500/2,000,000" in terminal.text)
        assert terminal.screen.cursor.hidden
        assert terminal.text.count("lm-3  running") == 1
        assert not terminal.screen.history.top

        terminal.resize(160, 12)
        terminal.until(lambda: "more lines in a taller terminal" in terminal.text)
        story.steps(12, 1_200_501, 1_200_600)
        terminal.until(lambda: "step 1,200,600/2,000,000" in terminal.text)
        assert terminal.text.count("lm-3  running") == 1
        assert too_long(terminal, 160) == []

        terminal.type(b"\x03")
        assert terminal.wait() == 130
        assert not terminal.screen.cursor.hidden
        kept = terminal.raw.rpartition(b"\x1b[?1049l")[2].decode()
        assert "step 1,200,600/2,000,000" in kept
        assert "hpctrain cancel lm-3 --save" in kept
        assert "Ctrl-C ends" not in kept
        assert "Traceback" not in kept


def test_watching_draws_anew_at_once_for_another_size_and_after_a_pause(story):
    with Terminal("status", "lm-3", "--watch", "-i", "600", columns=80, rows=50) as terminal:
        terminal.until(lambda: "Ctrl-C ends" in terminal.text)
        terminal.resize(160, 12)
        terminal.until(lambda: "more lines in a taller terminal" in terminal.text)
        terminal.type(b"\x1a")
        terminal.until_stopped()
        terminal.until(lambda: terminal.raw.endswith(b"\x1b[?25h\x1b[?1049l"))
        paused = len(terminal.raw)
        terminal.send(signal.SIGCONT)
        terminal.until(lambda: b"Ctrl-C ends" in terminal.raw[paused:])
        assert terminal.screen.cursor.hidden


def test_watching_ends_with_the_run_and_tells_its_state(story: Story):
    args = ["status", "lm-3", "--watch", "-i", "1", "--exit-status"]
    with Terminal(*args, NO_COLOR="1", columns=80, rows=24) as terminal:
        terminal.until(lambda: "lm-3  running" in terminal.text)
        story.add("run_stopped", 12, reason="crashed", exit_code=93, detail="no progress")
        assert terminal.wait() == 93
        kept = terminal.raw.rpartition(b"\x1b[?1049l")[2].decode()
        assert "lm-3  stopped" in kept
        assert b"\x1b[1m" not in terminal.raw
        assert not terminal.screen.cursor.hidden


def test_watching_that_is_killed_gives_the_terminal_back(story: Story):
    with Terminal("status", "--watch", columns=80, rows=24) as terminal:
        terminal.until(lambda: "Ctrl-C ends" in terminal.text)
        terminal.send(signal.SIGTERM)
        assert terminal.wait() == 143
        assert terminal.raw.endswith(b"\x1b[?25h\x1b[?1049l")

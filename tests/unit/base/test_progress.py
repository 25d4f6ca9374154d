"""Long work tells how far it is, on stderr alone, in place on a terminal and sparsely in a log."""

from __future__ import annotations

import io
import re
import sys
import threading

import pyte
import pytest

from hpctrain.cli import progress as shown
from hpctrain.core.base.text import Meter

GIB = 1 << 30


class Terminal(io.StringIO):
    """A terminal, and what stood on it after each time that something was written."""

    def __init__(self, columns=80):
        super().__init__()
        self.screen = pyte.Screen(columns, 5)
        self._parser = pyte.Stream(self.screen)
        self.seen = []

    def isatty(self):
        return True

    def write(self, text):
        self._parser.feed(text.replace("\n", "\r\n"))
        self.seen.append([line.rstrip() for line in self.screen.display])
        return super().write(text)


def stderr(monkeypatch, stream, term="xterm"):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("LC_ALL", "C")
    if isinstance(stream, Terminal):
        monkeypatch.setenv("COLUMNS", str(stream.screen.columns))
    return stream


def work(hands, seconds, parts=10, total=10 * GIB):
    with shown.progress("reading", total) as on_bytes:
        for _ in range(parts):
            hands.advance(seconds / parts)
            on_bytes(total // parts)


def test_a_line_says_done_of_total_the_rate_and_what_is_left():
    meter = Meter("reading", 6 * GIB, 0.0)
    assert meter.text(0.0) == "reading 0 B of 6.0 GiB (0 %)"
    meter.done = 3 * GIB // 2
    assert meter.text(5.0) == "reading 1.5 GiB of 6.0 GiB (25 %), 307.2 MiB/s, 15 s left"
    meter.done = 7 * GIB  # a reader of whole blocks reads more than is wanted
    assert meter.text(6.0).startswith("reading 6.0 GiB of 6.0 GiB (100 %)")
    assert meter.text(6.0).endswith(", 0 s left")


def test_a_terminal_has_one_line_that_is_gone_at_the_end(hands, monkeypatch, capsys):
    terminal = stderr(monkeypatch, Terminal())

    work(hands, 60)

    told = "reading 5.0 GiB of 10.0 GiB (50 %), 170.7 MiB/s, 30 s left"
    assert f"{'-' * 8} {'-' * 7} {told}" in [lines[0] for lines in terminal.seen]
    assert not any(any(lines[1:]) for lines in terminal.seen)
    assert not any(terminal.seen[-1])
    assert not terminal.screen.cursor.hidden
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("language", "bar"), [("C", "--------"), ("", "--------"), ("de_DE.UTF-8", "\u2501" * 8)]
)
def test_a_bar_is_drawn_with_what_the_users_language_has(hands, monkeypatch, language, bar):
    terminal = stderr(monkeypatch, Terminal())
    monkeypatch.delenv("LANG", raising=False)
    monkeypatch.delenv("LC_CTYPE", raising=False)
    monkeypatch.setenv("LC_ALL", language)

    work(hands, 60)

    assert any(re.match(f"{bar}[^{bar[0]}]", lines[0]) for lines in terminal.seen)
    assert terminal.getvalue().isascii() or bar[0] != "-"


def test_a_line_obeys_no_sequence_of_a_message(monkeypatch):
    terminal = stderr(monkeypatch, Terminal())

    with shown.line() as one_line:
        one_line.show("waits ([red]\x1b[2J\x1b]52;c;x\x07)")
        assert terminal.screen.display[0].startswith("waits ([red]?[2J?]52;c;x?)")
        assert not terminal.screen.cursor.hidden, "who is killed here leaves the terminal so"


def test_a_line_is_cut_where_the_terminal_is_narrow(hands, monkeypatch):
    terminal = stderr(monkeypatch, Terminal(columns=30))

    work(hands, 60)

    assert "reading 5.0 GiB of 10.0 GiB (5" in [lines[0] for lines in terminal.seen]
    assert not any(any(lines[1:]) for lines in terminal.seen)


def test_many_small_parts_are_not_drawn_one_by_one(hands, monkeypatch):
    terminal = stderr(monkeypatch, Terminal())

    work(hands, 2, parts=1000)

    assert 5 <= len({lines[0] for lines in terminal.seen}) <= 12


@pytest.mark.parametrize(("stream", "term"), [(io.StringIO, "xterm"), (Terminal, "dumb")])
def test_a_log_gets_a_plain_line_every_ten_seconds(hands, monkeypatch, stream, term):
    log = stderr(monkeypatch, stream(), term)

    work(hands, 60, parts=60, total=60 * GIB)

    lines = log.getvalue().splitlines()
    assert len(lines) == 6
    assert lines[0] == "hpctrain: reading 10.0 GiB of 60.0 GiB (16 %), 1.0 GiB/s, 50 s left"
    assert "\033" not in log.getvalue()


def test_short_work_and_no_work_leave_nothing_in_a_log(hands, monkeypatch):
    log = stderr(monkeypatch, io.StringIO())

    work(hands, 9)
    work(hands, 60, total=0)

    assert log.getvalue() == ""


def test_threads_may_tell_at_once(hands, monkeypatch):
    log = stderr(monkeypatch, io.StringIO())

    with shown.progress("reading", 80_000) as on_bytes:
        threads = [
            threading.Thread(target=lambda: [on_bytes(1) for _ in range(10_000)]) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        hands.advance(10)
        on_bytes(0)

    assert log.getvalue().startswith("hpctrain: reading 78.1 KiB of 78.1 KiB (100 %)")


def test_a_line_in_a_log_is_written_when_it_is_news(hands, monkeypatch):
    log = stderr(monkeypatch, io.StringIO())

    with shown.line() as one_line:
        for text in ("waits (Priority)", "waits (Priority)", "waits (Resources)"):
            one_line.show(text)
        assert log.getvalue() == "hpctrain: waits (Priority)\n"
        hands.advance(10)
        one_line.show("waits (Resources)")
        hands.advance(100)
        one_line.show("waits (Resources)")

    assert log.getvalue().splitlines()[1:] == ["hpctrain: waits (Resources)"]

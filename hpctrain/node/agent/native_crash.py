"""Where Python was as a signal killed a rank from inside: in torch, in NCCL, in a C++ extension.

Such a rank writes no report. Python's faulthandler writes all threads' frames into its log, from
the signal's handler in C, and the agent reads them there. tests/unit/agent/test_failure_files.py
and tests/engines/test_rank_life.py hold the promises.
"""

from __future__ import annotations

import faulthandler
import itertools
import re
import runpy
import signal
import sys
import traceback
from typing import TYPE_CHECKING

from hpctrain.core.base.files import read_end

if TYPE_CHECKING:
    from pathlib import Path

CRASH_BYTES = 128 << 10
"""Of a log's end: faulthandler writes 100 threads of 100 frames at most, and then one long line."""
SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""What faulthandler tells of."""
RUNPY = frozenset({"<frozen runpy>", runpy.__file__})
_BEGIN = "Fatal Python error: "
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]{1,16}\b.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')


def tell_crashes() -> None:
    """Have this rank's log say where it is when SIGSEGV, SIGABRT, SIGBUS, SIGFPE or SIGILL ends it.

    Where its output is no file nothing is told. A program that sets up faulthandler itself has its
    way.
    """
    try:
        faulthandler.enable(sys.stderr)
    except (AttributeError, OSError, ValueError):  # a stream of the program's own, without a file
        faulthandler.disable()


def crash_traceback(log: Path, launcher: str) -> str:
    """Return a rank's crash from its log, in the form and order of any other traceback, or "".

    The frames of `launcher`, the file that started the program, are left out, and those around.
    """
    try:
        text = read_end(log, CRASH_BYTES)
    except OSError:
        return ""
    begin = text.rfind(_BEGIN)
    if begin < 0:
        return ""
    title, *lines = text[begin:].splitlines()
    frames = _inside(launcher, _frames(lines))
    return "".join(["Traceback (most recent call last):\n", *frames.format(), f"{title}\n"])


def _inside(launcher: str, frames: traceback.StackSummary) -> traceback.StackSummary:
    """A program's own frames: an agent that was forked has left its own around them."""
    files = [frame.filename for frame in frames]
    first = max((at + 1 for at, file in enumerate(files) if file == launcher), default=0)
    first += sum(1 for _ in itertools.takewhile(lambda file: file in RUNPY, files[first:]))
    return traceback.StackSummary.from_list(frames[first:] or frames)


def _frames(lines: list[str]) -> traceback.StackSummary:
    """The frames of the thread that crashed, outermost first.

    One of gloo's or NCCL's own has none. Those of the main thread say then what it worked for;
    faulthandler writes that thread last.
    """
    threads: list[list[tuple[str, int, str, None]]] = []
    current = 0
    for line in lines:
        frame = _FRAME.match(line)
        if head := _THREAD.match(line):
            current = len(threads) if head[1] == "Current thread" else current
            threads.append([])
        elif frame and threads:
            threads[-1].insert(0, (frame["file"], int(frame["line"]), frame["function"], None))
    if not threads:
        return traceback.StackSummary()
    return traceback.StackSummary.from_list(threads[current] or threads[-1])

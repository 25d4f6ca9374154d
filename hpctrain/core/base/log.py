"""What processes of ours log, and in which form: one line a record, on stderr.

    2026-11-22 16:20:06 node7 rank 12 attempt 3 hpctrain: saves are synchronous: ...

Agents, ranks and the batch side call `configure` first thing; a program that was started without us
gets it from `hpctrain.init()`. Where an application has configured logging itself, our records go
through its handlers alone. A signal handler, or a process between fork and exec, must not log:
another thread may hold the stream's lock. tests/unit/base/test_log.py holds the promises.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard

from hpctrain.core.base.env import HPCTRAIN_ATTEMPT, HPCTRAIN_LOG_LEVEL, HPCTRAIN_NODE

if TYPE_CHECKING:
    from collections.abc import Iterator

OURS = "hpctrain"
TORCH_ELASTIC = "torch.distributed.elastic"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class _Form(logging.Formatter):
    """Time, node, process and attempt before the text; the text alone for a command's user."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self.who = who

    def format(self, record: logging.LogRecord) -> str:
        is_ours = record.name.partition(".")[0] == OURS
        error = "error: " if is_ours and record.levelno >= logging.ERROR else ""
        text = f"{OURS if is_ours else record.name}: {error}{record.getMessage()}"
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        return f"{self._place(record.created)} {text}" if self.who else text

    def _place(self, created: float) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created))
        node = os.environ.get(HPCTRAIN_NODE) or os.uname().nodename
        attempt = os.environ.get(HPCTRAIN_ATTEMPT)
        number = f" attempt {json.loads(attempt)['number']}" if attempt else ""
        return f"{when} {node} {self.who}{number}"


class _Stderr(logging.Handler):
    """Writes to what is stderr just now; nothing where the application has come to have handlers.

    One that yields gives way to them; a command has nobody to give way to.
    """

    def __init__(self, who: str, *, yields: bool) -> None:
        super().__init__()
        self.setFormatter(_Form(who))
        self.yields = yields

    def emit(self, record: logging.LogRecord) -> None:
        if self.yields and _is_configured():
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - a full disk under the log must not end a run
            self.handleError(record)


def configure(who: str) -> None:
    """Log from now on, where nobody has configured logging. Harmless when repeated.

    `who` is what this process is to the run, such as "agent" or "rank 3".
    """
    if _is_for_user():
        return  # a command that trains in its own process
    _remove()
    if not _is_configured():
        _add(_Stderr(who, yields=True))


def hear_elastic() -> None:
    """Let torch's elastic agent be heard from WARNING on, in our form and once.

    torch gives the logger above it a handler of its own.
    """
    elastic = logging.getLogger(TORCH_ELASTIC)
    elastic.setLevel(logging.WARNING)
    for handler in filter(_is_ours, logging.getLogger(OURS).handlers):
        elastic.addHandler(handler)
        elastic.propagate = False


@contextmanager
def for_user() -> Iterator[None]:
    """A command: what is logged inside goes to its user, without time and place."""
    if _is_for_user():
        yield
        return
    _add(_Stderr("", yields=False))
    try:
        yield
    finally:
        _remove()


def _add(handler: logging.Handler) -> None:
    ours = logging.getLogger(OURS)
    ours.addHandler(handler)
    name = os.environ.get(HPCTRAIN_LOG_LEVEL) or "INFO"
    ours.setLevel(name.upper() if name.upper() in LEVELS else "INFO")
    if ours.level == logging.INFO and name.upper() != "INFO":
        text = "%s=%s is no level, which are %s; INFO is taken"
        ours.warning(text, HPCTRAIN_LOG_LEVEL, name, ", ".join(LEVELS))


def _remove() -> None:
    """Our handlers, and what came with them: a rank begins with its agent's."""
    for name, level in ((OURS, logging.NOTSET), (TORCH_ELASTIC, logging.WARNING)):
        logger = logging.getLogger(name)
        for handler in filter(_is_ours, list(logger.handlers)):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = True


def _is_for_user() -> bool:
    handlers = logging.getLogger(OURS).handlers
    return any(_is_ours(handler) and not handler.yields for handler in handlers)


def _is_configured() -> bool:
    """Whether somebody else has given handlers to our records."""
    handlers = [*logging.getLogger().handlers, *logging.getLogger(OURS).handlers]
    return not all(map(_is_ours, handlers))


def _is_ours(handler: logging.Handler) -> TypeGuard[_Stderr]:
    return isinstance(handler, _Stderr)


_WRITING = (logging.getLogger(OURS), logging.getLogger(TORCH_ELASTIC))
_held_for_a_fork: list[_Stderr] = []


def _before_fork() -> None:
    """Wait until no thread is in the middle of a line, and keep others from beginning one.

    A thread that writes holds the stream's own lock. A child that is forked then has it locked for
    ever: its first line would never end. `logging` renews only its own locks in a child.
    """
    for logger in _WRITING:
        for handler in filter(_is_ours, logger.handlers):
            handler.acquire()
            _held_for_a_fork.append(handler)


def _after_fork_in_parent() -> None:
    while _held_for_a_fork:
        _held_for_a_fork.pop().release()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_held_for_a_fork.clear,  # `logging` has given each handler a new lock
)

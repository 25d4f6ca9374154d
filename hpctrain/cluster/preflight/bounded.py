"""Acts that may never return, in a child with a time-out, and the process of the collective.

A mount whose server is gone blocks whoever looks at it, for ever and deaf to SIGKILL. So the look
is a child's, and a child that cannot be killed is left behind rather than waited for.
`CollectiveProcess` is this node's part in the tries of `collective.py`, which imports torch.
tests/unit/preflight/test_probe.py holds the promises.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Any, TextIO, cast

from hpctrain.core.base import clock
from hpctrain.core.base.process import is_readable, own_program

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REAP_S = 0.5
"""How long a killed child may take to be gone before it is left to the kernel."""
REAP_POLL_S = 0.002
_CHUNK = 65536
START_S = 120.0
"""Importing torch from a busy shared file system has been seen to take a minute."""
MARGIN_S = 10.0
MODULE = "hpctrain.cluster.preflight.collective"


class Unanswered(Exception):
    """The child gave no answer: it took too long, or it died."""


class Child:
    """A child at work; `answer` ends it."""

    def __init__(self, pid: int, reading: int) -> None:
        self._pid = pid
        self._reading = reading

    def answer(self, timeout_s: float) -> Any:
        """What it made, waited for at most so long; the child is gone afterwards.

        Raises:
            Unanswered: no answer in time, or it failed; the text says which.
        """
        try:
            text = _read_all(self._reading, clock.monotonic() + timeout_s)
        finally:
            os.close(self._reading)
            _end(self._pid)
        if text is None:
            raise Unanswered(f"no answer in {max(timeout_s, 0.0):g} s")
        if not text:
            raise Unanswered("the child died")
        answer = json.loads(text)
        if "error" in answer:
            raise Unanswered(answer["error"])
        return answer["value"]


def start(act: Callable[[], Any]) -> Child:
    """Begin `act` in a forked child; it must return plain data."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _answer(act, writing)
    os.close(writing)
    return Child(pid, reading)


def bounded(act: Callable[[], Any], timeout_s: float) -> Any:
    """What `act` returns, which must be plain data.

    Args:
        act: Run in a forked child, so nothing that it changes in memory is seen here.
        timeout_s: Seconds after which the child is killed.

    Raises:
        Unanswered: no answer in time, or `act` raised; the text says which.
    """
    return start(act).answer(timeout_s)


def _answer(act: Callable[[], Any], writing: int) -> None:
    """The child's whole life; it must not come back into its parent's code."""
    os.setsid()  # what it starts is killed with it
    try:
        try:
            answer = {"value": act()}
        except Exception as error:  # noqa: BLE001 - whatever went wrong is the answer
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
    finally:
        os._exit(0)


def _read_all(descriptor: int, deadline: float) -> bytes | None:
    """All that comes until the other end is closed; None where that does not happen in time."""
    parts: list[bytes] = []
    while True:
        if not is_readable(descriptor, deadline - clock.monotonic()):
            return None
        part = os.read(descriptor, _CHUNK)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _end(child: int) -> None:
    """Kill and reap, without ever waiting for a child that hangs in the kernel."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(child, signal.SIGKILL)
        os.killpg(child, signal.SIGKILL)
    deadline = clock.monotonic() + REAP_S
    with contextlib.suppress(ChildProcessError):
        while not os.waitpid(child, os.WNOHANG)[0] and clock.monotonic() < deadline:
            clock.sleep(REAP_POLL_S)


class CollectiveProcess:
    """Starts the process at once, so that torch is imported while the node is being looked at."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Start it; the job's own environment wins over `env`, as it does for ranks."""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            own_program(MODULE),
            stdin=pipe,
            stdout=pipe,
            text=True,
            bufsize=1,
            env={**env, **os.environ},
        )
        self._orders = cast("TextIO", self._process.stdin)
        self._answers = cast("TextIO", self._process.stdout)

    def ready(self, *, host: bool, address: str, port: int) -> str:
        """Wait for torch, and on the first node for the store; why they do not come, or ""."""
        return str(
            self._ask({"store": port, "host": host, "address": address}, START_S).get("error", "")
        )

    def attempt(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """What this node's ranks measured: {"ranks": [...]}, or {"error": why}."""
        return self._ask(order, float(order["timeout_s"]) + MARGIN_S)

    def _ask(self, order: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            self._orders.write(json.dumps(order) + "\n")
        except OSError:
            return {"error": self._end()}
        ready = is_readable(self._answers, timeout_s)
        line = self._answers.readline() if ready else ""
        if not line:
            return {"error": self._end() if ready else f"no answer in {timeout_s:g} s"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(MARGIN_S)
            died = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return f"{MODULE} ended {died}; its output is in the job's"
        return f"{MODULE} closed its output"

    def close(self) -> None:
        """End it; its ranks die with it."""
        self._process.kill()
        for pipe in (self._orders, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(MARGIN_S)

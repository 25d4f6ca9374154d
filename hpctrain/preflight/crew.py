"""This node's part in the tries of `collective`, which runs in a process of its own with torch."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from typing import TYPE_CHECKING, Any, TextIO, cast

from hpctrain.base.process import own_program

if TYPE_CHECKING:
    from collections.abc import Mapping

START_S = 120.0
"""Importing torch from a busy shared file system has been seen to take a minute."""
MARGIN_S = 10.0
MODULE = "hpctrain.preflight.collective"


class Crew:
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
        ready, _, _ = select.select([self._answers], [], [], timeout_s)
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

"""Starts the telling of news, as [notify] asks for it, and returns at once.

The telling is a process of its own (`notify_child.py`), in a session of its own: it may hang, flood
its output or be missing, and nobody here waits for it. Started where its starter lives on: by node
0's agent when ranks start again in the allocation, else by the batch side, since SLURM kills what a
step leaves behind when its last task exits.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from hpctrain.base.process import own_program

if TYPE_CHECKING:
    from hpctrain.run.layout import RunDir
    from hpctrain.settings.schema import NotifySettings

SPARE_S = 5.0
"""Beyond `notify.timeout_s`: for the child's own start and its line in the ledger."""

_started: list[subprocess.Popen[bytes]] = []  # kept: a Popen that is collected warns


def notify(run: RunDir, settings: NotifySettings, attempt: int) -> subprocess.Popen[bytes] | None:
    """Start to tell of an attempt's end, which is in the ledger; None where nobody asked for it.

    Costs the start of a process, never more; what comes of it is in the ledger as `notified`.
    """
    if not settings.on or not (settings.command or settings.webhook_file):
        return None
    command = own_program("hpctrain.agent.notify_child", str(run.root), str(attempt))
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:  # no memory, no process to be had: the run's end goes on without it
        print(f"hpctrain: nobody is notified: {error}", file=sys.stderr, flush=True)
        return None
    _started.append(child)
    return child


def telling() -> set[int]:
    """The processes that tell news just now."""
    return {child.pid for child in _started if child.poll() is None}


def wait_for(child: subprocess.Popen[bytes] | None, limit_s: float) -> None:
    """Let it finish where its end would come with ours; leaves it alone after the limit."""
    if child is not None:
        try:
            child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return

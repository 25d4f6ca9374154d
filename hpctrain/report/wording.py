"""Words and colours that charts, page and text share. Pure.

tests/unit/report/test_report.py holds the promises.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from hpctrain.base.text import duration, fold_nodes
from hpctrain.history.goodput import TimeClass

if TYPE_CHECKING:
    from hpctrain.history.attempts import AttemptView

NAMES = {
    TimeClass.STEP: "useful steps",
    TimeClass.DATA: "waiting for data",
    TimeClass.SAVE: "stopped for saves",
    TimeClass.STARTUP: "start-up",
    TimeClass.RESTORE: "restore",
    TimeClass.WARM_UP: "first step (warm-up)",
    TimeClass.REDONE: "steps done again",
    TimeClass.NO_PROGRESS: "without progress",
    TimeClass.SUSPENDED: "suspended",
    TimeClass.STALL: "stall",
    TimeClass.TEARDOWN: "teardown",
    TimeClass.OTHER: "other",
    TimeClass.QUEUE: "in the queue",
}
"""Every class in the order in which charts show it."""

COLOURS = {
    TimeClass.STEP: "#2f9e63",
    TimeClass.DATA: "#e0a22e",
    TimeClass.SAVE: "#2f7fc1",
    TimeClass.STARTUP: "#8896ab",
    TimeClass.RESTORE: "#6a62b7",
    TimeClass.WARM_UP: "#b184cf",
    TimeClass.REDONE: "#d64550",
    TimeClass.NO_PROGRESS: "#a83279",
    TimeClass.SUSPENDED: "#4f7d8c",
    TimeClass.STALL: "#8f2d38",
    TimeClass.TEARDOWN: "#a8835a",
    TimeClass.OTHER: "#59616d",
    TimeClass.QUEUE: "#c3c9d2",
}
SERIES = ("#2f7fc1", "#d9822b", "#2f9e63", "#b1479a", "#8f6f3f", "#3fa7a7", "#d64550", "#6a62b7")
"""Of curves that stand side by side."""

NOTHING = "-"
NOT_KNOWN = "not known"


def percent(share: float | None) -> str:
    """A share with as many digits as one can use: "91.9 %", "0.04 %"."""
    if share is None or not math.isfinite(share):
        return NOTHING
    value = 100 * share
    digits = 1 if value >= 1 or value == 0 else 2
    return f"{value:.{digits}f} %"


def figure(value: float | None, unit: str = "") -> str:
    """A number in three digits: "43.7k tokens/s"."""
    if value is None or not math.isfinite(value):
        return NOTHING
    tail = f" {unit}" if unit else ""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{letter}{tail}"
    return f"{value:.3g}{tail}"


def node_hours(seconds: float) -> str:
    """Node-seconds as node-hours."""
    hours = seconds / 3600
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"  # noqa: PLR2004 - three digits


def step_seconds(seconds: float | None) -> str:
    """The time of a step, also of a very short one."""
    if seconds is None:
        return NOTHING
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def when(t: float) -> str:
    """Local time to the minute, with its date."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(t))


def ended(attempt: AttemptView) -> str:
    """Why an attempt ended, in a word."""
    if attempt.cause is not None:
        return attempt.cause.value.replace("_", " ")
    if attempt.reason is not None:
        return attempt.reason.value.replace("_", " ")
    return "running" if attempt.ended is None else "unknown"


def where(attempt: AttemptView) -> str:
    """Its nodes, folded."""
    return fold_nodes(attempt.nodes) or NOTHING


def steps(attempt: AttemptView) -> str:
    """From which step to which, and where the first one's state came from but for the disk."""
    if attempt.first_step is None and attempt.last_step is None:
        return NOTHING
    last = "?" if attempt.last_step is None else f"{attempt.last_step:,}"
    source = f" ({attempt.read_from})" if attempt.read_from not in {"", "disk"} else ""
    return f"{attempt.first_step or 0:,}{source} → {last}"


def recovered(following: AttemptView | None) -> str:
    """How long until the next attempt trained: its wait in the queue, and its way to a step."""
    if following is None or following.ready_s is None:
        return NOTHING
    queue = "" if following.queued_s is None else f"{duration(following.queued_s)} queue + "
    return f"{queue}{duration(following.ready_s)}"

"""What the directories of a run's checkpoints are called, and how a name is read back.

    step-0000001000               committed (or torn, if its files are not what its manifest says)
    step-0000001000.staged-0003   being written by attempt 3
    step-0000001000.set-aside-1   found damaged and moved away, with its reason inside
    step-0000001000.deleting-1    on its way out; its bytes may be half gone

Only the first form is ever looked at for loading. A name counts only if it is exactly what this
module would write, so that no copy (`step-0000001000.bak`) and no half-typed name is taken for a
checkpoint.
"""

from __future__ import annotations

import re

MAX_STEP = 10**10 - 1

_STEP = re.compile(r"step-([0-9]{10})")  # not \d, which takes digits of every script
_STAGED = re.compile(r"step-([0-9]{10})\.staged-([0-9]{4,})")
_SET_ASIDE = re.compile(r"step-([0-9]{10})\.set-aside-([1-9][0-9]*)")
_DELETING = re.compile(r"step-([0-9]{10})\.deleting-([1-9][0-9]*)")


def step_name(step: int) -> str:
    """The name of the committed checkpoint of a step, e.g. ``step-0000001000``.

    Raises:
        ValueError: the step is negative or has more than ten digits.
    """
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"step {step} is not within 0..{MAX_STEP}")
    return f"step-{step:010d}"


def parse_step(name: str) -> int | None:
    """The step of a committed checkpoint's name; None for every other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def staged_name(step: int, attempt: int) -> str:
    """The name under which an attempt writes a step, e.g. ``step-0000001000.staged-0003``.

    Raises:
        ValueError: the step or the attempt is out of range.
    """
    return f"{step_name(step)}.staged-{_counted(attempt):04d}"


def parse_staged(name: str) -> tuple[int, int] | None:
    """Step and attempt of a staged checkpoint's name; None for every other name."""
    match = _STAGED.fullmatch(name)
    if not match or int(match[2]) < 1 or match[2] != f"{int(match[2]):04d}":
        return None
    return int(match[1]), int(match[2])


def set_aside_name(step: int, number: int) -> str:
    """The name of a damaged checkpoint that was moved away, e.g. ``step-0000001000.set-aside-1``.

    Raises:
        ValueError: the step or the number is out of range.
    """
    return f"{step_name(step)}.set-aside-{_counted(number)}"


def parse_set_aside(name: str) -> tuple[int, int] | None:
    """Step and number of a set-aside checkpoint's name; None for every other name."""
    match = _SET_ASIDE.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def deleting_name(step: int, number: int) -> str:
    """The name of what is being deleted, e.g. ``step-0000001000.deleting-1``.

    Raises:
        ValueError: the step or the number is out of range.
    """
    return f"{step_name(step)}.deleting-{_counted(number)}"


def parse_deleting(name: str) -> tuple[int, int] | None:
    """Step and number of the name of what is being deleted; None for every other name."""
    match = _DELETING.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def _counted(number: int) -> int:
    if number < 1:
        raise ValueError(f"{number} is not a number counted from 1")
    return number

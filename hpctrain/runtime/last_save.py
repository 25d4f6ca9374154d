"""A stop is asked for while a save is being written: finish that one, or make a newer one? Pure."""

from __future__ import annotations

from enum import StrEnum

SAFETY = 1.3
"""What is planned with is an estimate: a save that ends a moment too late is no save."""


class LastSave(StrEnum):
    """What to do before leaving."""

    BOTH = "both"
    """Wait for the save in flight, then save the step that training has come to."""
    FINISH = "finish"
    """Wait for the save in flight and leave with it: a newer one would not be done in time."""
    FRESH = "fresh"
    """Give the save in flight up, so that the newer one is done in time."""


def flight_left_s(usual_s: float, flying_s: float) -> float:
    """What a save that has taken so long is likely to take yet.

    One that takes longer than usual may hang: it is believed less and less to end soon.
    """
    return max(usual_s - flying_s, flying_s / 4)


def patience_s(left_s: float, fresh_s: float) -> float:
    """How long to wait for the save in flight, so that a new one still fits if it hangs."""
    return max(0.0, left_s - SAFETY * fresh_s)


def last_save(left_s: float | None, *, flight_left_s: float, fresh_s: float) -> LastSave:
    """What loses the fewest steps.

    Args:
        left_s: Until the processes are killed; None where nobody says.
        flight_left_s: What the save in flight is likely to take yet.
        fresh_s: What a save of the present step is likely to take.

    With too little time for either, the one in flight is finished: it is the further on.
    """
    if left_s is None or SAFETY * (flight_left_s + fresh_s) <= left_s:
        return LastSave.BOTH
    if SAFETY * fresh_s <= left_s:
        return LastSave.FRESH
    return LastSave.FINISH

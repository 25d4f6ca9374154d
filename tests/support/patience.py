"""How long a test waits for a thing that comes: as long as it takes.

No test promises a duration by waiting. pytest-timeout ends a test that waits in vain, and prints
every thread's stack; `PATIENCE_S` only ends what that cannot reach, such as a child that waits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 900.0
"""The one limit of all polls. Beyond pytest's own, so that its stacks come first."""
POLL_S = 0.02
LONGEST_POLL_S = 0.1
"""Each worker that waited for SLURM took a twentieth of a CPU with 20 ms."""

T = TypeVar("T")


def until(
    reached: Callable[[], T | None],
    what: Callable[[], object] | str = "",
    *,
    alive: Callable[[], bool] | None = None,
) -> T:
    """Poll until `reached` returns something true, and return that.

    Args:
        reached: What is awaited; called every 20 ms, of a long wait every 100 ms.
        what: What to say where it never comes.
        alive: Whether it can still come. Where not, `reached` is called a last time.

    Raises:
        AssertionError: it cannot come any more, or did not within `PATIENCE_S`.
    """
    deadline, poll_s = time.monotonic() + PATIENCE_S, POLL_S
    try:
        while True:
            hopeless = alive is not None and not alive()
            if found := reached():
                return found
            if hopeless or time.monotonic() > deadline:
                raise AssertionError("what is awaited did not come")  # noqa: TRY301
            time.sleep(poll_s)
            poll_s = min(LONGEST_POLL_S, poll_s * 1.1)
    except BaseException as error:  # pytest-timeout's, too
        said = what() if callable(what) else what
        error.add_note(f"waited for: {said or reached}")
        raise

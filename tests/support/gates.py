"""A gate: processes stop at a point of `hpctrain.core.testing.points` until the test has acted.

with Gate(tmp_path / "gate") as gate, faults.armed(f"hold:publish.rename,step=2,{gate.until}"):
    start(...)
    gate.wait()  # somebody stands there, and stays
    kill(...)
    gate.open()
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support import patience

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import pytest


@dataclass
class Gate(AbstractContextManager["Gate"]):
    """A gate that is shut until its file is there; it opens at the end of the block at the latest.

    Attributes:
        path: The file whose presence is the open gate.
    """

    path: Path

    @property
    def until(self) -> str:
        """The key of a `hold` fault."""
        return f"until={self.path}"

    def __exit__(self, *_: object) -> None:
        self.open()  # or a failing test would leave processes that wait for ever

    def open(self) -> None:
        """Let everybody continue."""
        self.path.touch()

    def arrivals(self) -> list[tuple[int, int]]:
        """Return (rank, process number) of each arrival so far."""
        path = self.path.with_name(f"{self.path.name}.arrived")
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(rank), int(pid)) for rank, pid in (line.split() for line in lines)]

    def wait(
        self, arrivals: int = 1, alive: Callable[[], bool] | None = None
    ) -> list[tuple[int, int]]:
        """Wait for so many arrivals and return them.

        Args:
            arrivals: How many.
            alive: Whether those who are awaited can still come.
        """

        def there() -> list[tuple[int, int]] | None:
            found = self.arrivals()
            return found if len(found) >= arrivals else None

        return patience.until(there, f"{arrivals} arrivals at {self.path}", alive=alive)


def before(
    patch: pytest.MonkeyPatch, kind: object, method: str, act: Callable[..., object]
) -> None:
    """Have each call of a class's or module's function call `act` first, with its arguments.

    Ranks that are forked afterwards do it too.
    """
    real = getattr(kind, method)

    def called(*args: Any, **named: Any) -> Any:
        act(*args, **named)
        return real(*args, **named)

    patch.setattr(kind, method, called)


def steps_held(folder: Path, held: Mapping[int, int]) -> tuple[dict[int, Gate], str]:
    """Return a gate in some attempts of a run, and the faults that shut them.

    A test that acts on a run in its middle holds the run there: it would else come to its end while
    the test's commands take their time.

    Args:
        folder: Of the gates' files.
        held: Attempt to the number of steps done when `run.steps` is held.
    """
    gates = {attempt: Gate(folder / f"gate-{attempt}") for attempt in held}
    faults = [
        f"hold:step.begin,step={step},attempt={attempt},{gates[attempt].until}"
        for attempt, step in held.items()
    ]
    return gates, ";".join(faults)

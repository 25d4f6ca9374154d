"""What `hpctrain status` has to show: of one run or of all, as a screen and as JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.run.layout import RunDir
    from hpctrain.status.reader import Looker
    from hpctrain.status.status import RunStatus

NARROWEST = 40
_AGES = frozenset({"words", "last_seen", "goodput", "last_24h", "disk_free_bytes"})
"""What changes as time goes by although nothing happens."""


@dataclass(frozen=True)
class Shown:
    """One look.

    Attributes:
        as_text: The screen; takes the width and whether it may have colours.
        as_value: The same for programs; made when it is asked for, since it takes its time.
        over: Nothing of it is under way.
        sure: False where a run seems lost: between two starts of a job a scheduler may not know it.
        exit_status: The run's state for scripts; 0 for all runs.
    """

    as_text: Callable[[int, bool], str]
    as_value: Callable[[], Any]
    over: bool
    sure: bool = True
    exit_status: int = 0

    def as_json(self, indent: int | None = None) -> str:
        """One JSON value."""
        return json.dumps(self.as_value(), indent=indent, allow_nan=False)

    @property
    def news(self) -> Any:
        """What two looks have in common unless something happened: all but ages."""
        value = self.as_value()
        runs = value if isinstance(value, list) else [value]
        return [{key: run[key] for key in run if key not in _AGES} for run in runs]


def look_at(looker: Looker, run: RunDir, *, attempts: bool, ranks: bool) -> Shown:
    """Everything about one run.

    Args:
        looker: Looks.
        run: The run.
        attempts: Show all attempts.
        ranks: Add the newest attempt's ranks.
    """
    from hpctrain.status import screen
    from hpctrain.status.reader import newest_ranks
    from hpctrain.status.status import exit_status

    status = looker.look(run)
    newest = status.attempts[-1].number if status.attempts else None
    sample = newest_ranks(run, newest) if ranks and newest is not None else None

    def text(width: int, color: bool) -> str:
        table = screen.ranks_as_text(status, sample, width) if ranks else ""
        return screen.as_text(status, width=width, color=color, all_attempts=attempts, ranks=table)

    def value() -> dict[str, Any]:
        more = {"ranks": screen.ranks_as_json(sample)} if ranks else {}
        return {**screen.as_json(status), **more}

    over, sure = _over([status])
    return Shown(text, value, over, sure, exit_status(status))


def look_at_all(looker: Looker, *, thorough: bool) -> Shown:
    """The table of runs.

    Args:
        looker: Looks.
        thorough: See `Looker.look`; the table has nothing of what it costs.
    """
    from hpctrain.status import screen

    found = looker.look_at_all(thorough=thorough)

    def text(width: int, color: bool) -> str:
        if not found:
            return f"no runs in {looker.runs}; `hpctrain submit` starts one"
        return screen.runs_as_text(found, width=width, color=color)

    return Shown(text, lambda: [screen.as_json(one) for one in found], *_over(found))


def _over(runs: Sequence[RunStatus]) -> tuple[bool, bool]:
    """Whether nothing is under way, and whether that is certain."""
    from hpctrain.ledger.derive import RunState
    from hpctrain.status.status import ALIVE

    under_way = ALIVE | {RunState.SUBMITTING}
    over = all(run.state not in under_way for run in runs)
    return over, all(run.state is not RunState.LOST for run in runs)


def width() -> int:
    """Columns of the terminal; 80 where there is none."""
    return max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)


def colored() -> bool:
    """Whether colours are wanted."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")

"""Where a run begins: what its ledger asks for, and that it forbids to begin anew unasked.

A run that has saved never starts at step 0 by itself: whatever keeps its checkpoints from being
found or loaded (a folder that is not mounted, one that somebody has emptied, damage to all of
them), weeks of training would be forgotten without a word. A person may ask for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.format.names import parse_step
from hpctrain.errors import NoCheckpoint
from hpctrain.run import events as ledger
from hpctrain.run.values import whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpctrain.run.events import Event
    from hpctrain.run.layout import RunDir

SHOWN = 3


def asked_step(events: Iterable[Event]) -> int | None:
    """The step of `resume --from STEP`, until an attempt of that submission has restored it."""
    step: int | None = None
    for event in events:
        if event.kind == "submitted":
            step = whole(event.data.get("from_step"))
        elif event.kind == "restored":
            step = None
    return step


def newest_known(events: Iterable[Event]) -> int | None:
    """The newest step that was saved or imported since the run last began at the beginning."""
    newest: int | None = None
    for event in events:
        step = whole(event.data.get("step"))
        if event.kind == "restored" and step == 0 and not event.data.get("checkpoint"):
            newest = None
        elif event.kind in {"saved", "imported"} and step is not None:
            newest = step if newest is None else max(newest, step)
    return newest


def refuse_to_forget(run: RunDir, passed_over: Sequence[Mapping[str, Any]]) -> None:
    """Refuse to begin at step 0 where the run has saved; asked where nothing can be loaded.

    Args:
        run: Which.
        passed_over: Checkpoints that are damaged or were never committed: step, name, reason.

    Raises:
        NoCheckpoint: with what became of the checkpoints, and how to begin anew.
    """
    # A committed name is a save as well, whatever the ledger has lost.
    known = [row["step"] for row in passed_over if parse_step(row["name"]) is not None]
    told = newest_known(ledger.read(run))
    known += [] if told is None else [told]
    if not known:
        return
    shown = [f"{row['name']}: {row['reason']}" for row in passed_over[:SHOWN]]
    more = [f"and {len(passed_over) - SHOWN} more"] if len(passed_over) > SHOWN else []
    why = "; ".join(shown + more) or f"none lies in {run.checkpoints}"
    raise NoCheckpoint(
        f"{run.name} has saved up to step {max(known)}, and none of its checkpoints can be loaded: "
        f"{why}. It does not begin anew unasked: bring one back, or `hpctrain resume {run.name} "
        "--from 0`"
    )

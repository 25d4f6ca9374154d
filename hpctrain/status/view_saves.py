"""Is the run safe? Its newest checkpoint, saves that did not come, the next one, the disk. Pure.

tests/unit/test_status_cli.py holds the promises.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from hpctrain.base.text import LABEL, count, duration, pack, size
from hpctrain.ledger.derive import RunState

if TYPE_CHECKING:
    from hpctrain.history.save_record import Missed, Saving
    from hpctrain.status.status import Checkpoint, RunStatus

SKIPPED_SHOWN = 8
ROOM_SHOWN = 100
"""Room for more checkpoints than these is no news."""


def save_lines(status: RunStatus, width: int) -> list[str]:
    """Labelled lines; nothing for a run that never began."""
    lines = _checkpoint(status, width)
    texts = [f"not taken   {one.name}: {one.reason}" for one in status.skipped[:SKIPPED_SHOWN]]
    hidden = len(status.skipped) - SKIPPED_SHOWN
    if hidden > 0:
        texts.append(f"{'':{LABEL}}... {hidden} more (--json shows all)")
    for text in [*_missed_saves(status.saving), *_next_save(status), *texts]:
        lines += textwrap.wrap(
            text,
            width,
            subsequent_indent=" " * LABEL,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return [*lines, *_disk(status)] if lines else []


def _checkpoint(status: RunStatus, width: int) -> list[str]:
    newest = status.checkpoint
    if newest is None:
        begun = status.progress.saved_step is not None or status.skipped
        none = "none that could be loaded" if begun else "none so far"
        return [f"checkpoint  {none}"] if status.attempts else []
    items = [newest.name]
    if newest.t:
        items.append(f"saved {duration(status.now - newest.t)} ago")
    if newest.size_bytes:
        items.append(size(newest.size_bytes))
    items.append(_verified(status, newest))
    return pack(items, width, label="checkpoint")


def _verified(status: RunStatus, newest: Checkpoint) -> str:
    """Whether its bytes were ever read: a restore proves each of them, the listing none."""
    name = newest.name
    read = status.verified.get(name)
    if read is not None and read >= (newest.t or 0.0):  # else another one had the name
        return f"every byte read {duration(status.now - read)} ago"
    readers = [one.number for one in status.attempts if one.from_checkpoint]
    of_newest = [o.number for o in status.attempts if o.from_checkpoint == name]
    if of_newest:
        return f"verified by attempt {of_newest[-1]}, which read every byte"
    if not readers:
        return "whole by its manifest, not read back yet"
    last = next(o for o in status.attempts if o.number == readers[-1])
    return f"whole by its manifest, not read back yet (last verified: step {last.first_step:,})"


def _missed_saves(saves: Saving) -> list[str]:
    """A warning for each kind of save that was due and did not come."""
    lines: list[str] = []
    if saves.last_failed is not None:
        before = f", {saves.failed} in a row" if saves.failed > 1 else ""
        lines.append(f"save failed {_at_step(saves.last_failed)}{before}: {saves.last_failed.why}")
    if saves.last_skipped is not None:
        due = saves.committed + saves.failed + saves.skipped
        why = saves.last_skipped.why
        last = _at_step(saves.last_skipped)
        lines.append(f"skipped     {saves.skipped} of {due} saves, the last {last}: {why}")
    return lines


def _at_step(missed: Missed) -> str:
    return "at step -" if missed.step is None else f"at step {missed.step:,}"


def _next_save(status: RunStatus) -> list[str]:
    """When the next save is due and why then; nothing where no rank is there to make it."""
    saves = status.saving
    every = saves.interval
    if every is None or status.state is not RunState.RUNNING:
        return []
    why = f": {every.why}" if every.why else ""
    if every.steps:
        done = status.progress.step or 0
        following = (done // every.steps + 1) * every.steps
        last = status.progress.total or following
        return [f"next save   at step {min(following, last):,} (every {every.steps:,} steps{why})"]
    if every.seconds is None or saves.since is None:
        return []
    # By a node's clock that is ahead of ours the last save may lie in the future.
    left = min(saves.since, status.now) + every.seconds - status.now
    when = f"in about {duration(left)}" if left > 0 else f"due {duration(-left)} ago, or under way"
    return [f"next save   {when} (every {duration(every.seconds)}{why})"]


def _disk(status: RunStatus) -> list[str]:
    free, newest = status.disk_free_bytes, status.checkpoint
    if free is None:
        return []
    each = newest.size_bytes if newest is not None else status.progress.saved_bytes
    text = f"disk        {size(free)} left"
    if each and free // each < ROOM_SHOWN:
        more = count(free // each, "more checkpoint")
        text += f", room for {more}" if free >= each else ", no room for another checkpoint"
    return [text]

"""Runs that wait for each other, as one chain. Pure.

tests/unit/status/test_chain.py holds the promises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.history.run_state import RunState
from hpctrain.status.status import UNDER_WAY_STATES, Link

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.status.status import RunStatus

ENDED_BADLY = {
    RunState.CREATED: "was never submitted",
    RunState.FAILED: "has failed",
    RunState.STOPPED: "was stopped",
    RunState.CANCELLED: "was cancelled",
    RunState.LOST: "is lost",
}


def chained(runs: Sequence[RunStatus]) -> list[RunStatus]:
    """The same runs, each with the chain of which it is a part, if it is of one."""
    by_root = {run.root: run for run in runs}
    linked = {run.root: _link(run, by_root) for run in runs}
    beside: dict[str, set[str]] = {root: set() for root in linked}
    for root, link in linked.items():
        for path in set(link.after) & linked.keys():
            beside[root].add(path)
            beside[path].add(root)
    chains = {root: _around(root, linked, beside) for root in linked}
    return [replace(run, chain=chains[run.root]) for run in runs]


def _link(run: RunStatus, by_root: Mapping[str, RunStatus]) -> Link:
    return Link(
        run=run.name,
        run_dir=run.root,
        state=run.state,
        job_id=run.ledger_state.job_id,
        after=run.after,
        words=_words(run, [by_root[path] for path in run.after if path in by_root]),
        label=run.label,
        flags=run.flags,
    )


def _words(run: RunStatus, before: Sequence[RunStatus]) -> str:
    progress = run.progress
    if run.state in {RunState.PENDING, RunState.CREATED} and not run.has_begun:
        missing = [one for one in before if one.state is not RunState.DONE]
        waits = ", ".join(
            one.name
            if one.state in UNDER_WAY_STATES
            else f"{one.name}, which {ENDED_BADLY[one.state]}"
            for one in missing
        )
        return f"waits for {waits}" if waits else ""
    if run.state in UNDER_WAY_STATES:
        if progress.step is None:
            return ""
        return f"step {progress.step:,}" + (f"/{progress.total:,}" if progress.total else "")
    return "" if run.state is RunState.DONE else run.ledger_state.detail


def _around(root: str, linked: Mapping[str, Link], beside: Mapping[str, set[str]]) -> list[Link]:
    """The runs that hang together with this one, predecessors first; none where it is alone.

    Args:
        root: This one's directory.
        linked: All runs.
        beside: Which of them come right before or behind each.
    """
    if not beside[root]:
        return []
    members, new = {root}, {root}
    while new:
        new = {path for member in new for path in beside[member]} - members
        members |= new
    order: list[Link] = []
    for path in linked:
        if path in members:
            _put(path, linked, order, set())
    return order


def _put(path: str, linked: Mapping[str, Link], order: list[Link], above: set[str]) -> None:
    """Add a run behind all that come before it; of a circle none comes first."""
    link = linked[path]
    if link in order or path in above:
        return
    for before in link.after:
        if before in linked:
            _put(before, linked, order, above | {path})
    order.append(link)

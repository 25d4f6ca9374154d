"""What must hold where nodes are changed and left out: part of the contract of a round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.simulation.checks import LOSING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.simulation.job import Job


def _is_behind_a_save(job: Job, at_s: float) -> bool:
    return any(0 <= at_s - saved < 2.0 for saved in job.saves_at_s)


def swaps_when_it_pays(job: Job) -> Iterator[str]:
    """A slow node gives its place to a spare behind a save, once it has cost a new start."""
    if job.slow is None:
        return
    name = f"n{job.slow}"
    kinds = {fault.kind for fault in job.faults if fault.node == job.slow}
    lost_at_s = job.lost_at_s.get(name)
    if lost_at_s is not None and not kinds & (LOSING | {"rank"}) and name not in job.bad:
        if job.slow == 0:
            yield "the first node gives its place away"
        if lost_at_s < job.slow_from_s + job.restart_s:
            yield f"{name} is changed at {lost_at_s:.1f} s, slow since {job.slow_from_s:.1f} s"
        if not _is_behind_a_save(job, lost_at_s):
            yield f"{name} is changed at {lost_at_s:.1f} s, and not behind a save"
    if job.faults or job.bad or not job.slow or job.size_most == job.setup.nodes:
        return
    due = [s for s in job.saves_at_s if s > job.slow_from_s + job.restart_s + 5.0]
    if len(due) > 2 and name in job.begun[0][1] and lost_at_s is None:
        yield f"{name} is slow, a spare waits, and it keeps its place"


def leaves_the_bad_out(job: Job) -> Iterator[str]:
    """No round follows a crash with a node that guards had named by then."""
    for number, names, _, _ in job.begun:
        before = [one for one in job.verdicts if one.round == number - 2 and one.node == 0]
        if not before or before[0].end.failure is None:
            continue
        judged_s = before[0].at_s - 1.0
        if bad := {name for name, at_s in job.bad_at_s.items() if at_s < judged_s} & set(names):
            yield f"attempt {number} begins with {sorted(bad)}"


CHECKS = (
    swaps_when_it_pays,
    leaves_the_bad_out,
)

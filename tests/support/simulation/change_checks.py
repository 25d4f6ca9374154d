"""What must hold where nodes are left out: part of the contract of a round."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.simulation.job import Job


def leaves_the_bad_out(job: Job) -> Iterator[str]:
    """No round follows a crash with a node that guards had named by then."""
    for number, names, _, _ in job.begun:
        before = [one for one in job.verdicts if one.round == number - 2 and one.node == 0]
        if not before or before[0].end.failure is None:
            continue
        judged_s = before[0].at_s - 1.0
        if bad := {name for name, at_s in job.bad_at_s.items() if at_s < judged_s} & set(names):
            yield f"attempt {number} begins with {sorted(bad)}"


CHECKS = (leaves_the_bad_out,)

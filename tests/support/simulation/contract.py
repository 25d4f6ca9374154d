"""The contract of a simulated job: all that must hold, whatever is done to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.simulation import change_checks, checks, hang_checks, record_checks
from tests.support.simulation.generations import RecordedJob

if TYPE_CHECKING:
    from tests.support.simulation.checks import Overlap
    from tests.support.simulation.job import Job

CHECKS = (*checks.CHECKS, *hang_checks.CHECKS, *change_checks.CHECKS)
OF_RECORDED = (
    checks.same_verdict,
    checks.nothing_runs_on,
    checks.who_is_lost_leaves,
    checks.hears_its_stop,
)


def wrong_with(job: Job, overlap: Overlap) -> list[str]:
    """All that is wrong with a job that has run, in words."""
    found = list(overlap.wrong)
    if isinstance(job, RecordedJob):
        found += [words for check in OF_RECORDED for words in check(job)]
        return [*found, *(words for check in record_checks.CHECKS for words in check(job))]
    return [*found, *(words for check in CHECKS for words in check(job))]

"""Which worker of pytest-xdist runs which file: two take those that need SLURM, all take the rest.

Tests with SLURM mostly wait, for it and for ranks that start; whoever needs none runs beside, with
what they leave of the CPUs. More than two clusters at once would have each other's time limits
missed. Beside them come first the tests that compute and watch no clock (`ORDER`): whole local
runs, whose commands and steps race, would get too little of the CPUs there.
tests/unit/test_two_clusters.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

CLUSTERS = 2
"""So many workers may have a cluster."""
SLURM_TESTS = ("tests/slurm/", "tests/stories/")
"""Folders of files that may need a cluster."""
ORDER = (SLURM_TESTS, "tests/engines/", "tests/unit/")
"""What comes first; the rest, whole local runs among it, comes last."""


def place(nodeid: str) -> int:
    """A sort key for `ORDER`."""
    return next((n for n, folder in enumerate(ORDER) if nodeid.startswith(folder)), len(ORDER))


class TwoClusters(LoadFileScheduling):  # type: ignore[misc] # xdist says no types
    """As `--dist loadfile`, in the order of the collection, and with two clusters at most."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if self.nodes.index(node) >= CLUSTERS:
            without = (file for file in self.workqueue if not file.startswith(SLURM_TESTS))
            file = next(without, None)
            if file is None:
                node.shutdown()
                return
            self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)

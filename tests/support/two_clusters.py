"""Which worker of pytest-xdist runs which file: two take those that need SLURM, one the unit tests.

Tests with SLURM mostly wait, for it and for ranks that start; whoever needs none runs beside, with
what they leave of the CPUs. More than two clusters at once would have each other's time limits
missed. Beside them come first the tests that compute and watch no clock (`ORDER`): whole local
runs, whose commands and steps race, would get too little of the CPUs there. The last of many
workers begins with unit tests: they wait for nothing, and take the CPUs that stand idle while the
others' ranks wait for each other and for `support.cpus`.
tests/unit/test_two_clusters.py holds the promises.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

CLUSTERS = 2
"""So many workers may have a cluster."""
SLURM_TESTS = ("tests/slurm/", "tests/stories/")
"""Folders of files that may need a cluster."""
UNIT_TESTS = "tests/unit/"
ORDER = (SLURM_TESTS, "tests/engines/", UNIT_TESTS)
"""What comes first; the rest, whole local runs among it, comes last."""


NO_CLUSTER_LEFT = "HPCTRAIN_NO_CLUSTER_LEFT"
"""Variable: path of a file to make when no test of this session needs a cluster any more."""


def place(nodeid: str) -> int:
    """A sort key for `ORDER`."""
    return next((n for n, folder in enumerate(ORDER) if nodeid.startswith(folder)), len(ORDER))


class TwoClusters(LoadFileScheduling):  # type: ignore[misc] # xdist says no types
    """As `--dist loadfile`, in the order of the collection, and with two clusters at most.

    Where a worker's process crashes, xdist gives its files to others whole: one whose tests are all
    over keeps the new worker waiting for ever, and CI until its limit. Here the test that crashed
    has failed, and what was not run yet goes on.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        workload = self.assigned_work.pop(node)
        left = {
            file: {test: False for test, is_over in unit.items() if not is_over}
            for file, unit in workload.items()
        }
        crashed: str | None = next((test for unit in left.values() for test in unit), None)
        for file, unit in left.items():
            unit.pop(crashed, None)
            if unit:
                self.workqueue[file] = unit
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def mark_test_complete(self, node: WorkerController, *args: Any, **kwargs: Any) -> None:
        super().mark_test_complete(node, *args, **kwargs)
        path = os.environ.get(NO_CLUSTER_LEFT)
        if path and not self._needs_cluster():
            Path(path).touch()

    def _needs_cluster(self) -> bool:
        """Whether a file that needs a cluster waits for a worker, or is not over."""
        return any(file.startswith(SLURM_TESTS) for file in self.workqueue) or any(
            file.startswith(SLURM_TESTS) and not all(tests.values())
            for files in self.assigned_work.values()
            for file, tests in files.items()
        )

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        # A worker begins a test when it knows the next one, or that there is none.
        while self.workqueue and not node.shutting_down and self._pending(node) < 2:
            super()._reschedule(node)

    def _pending(self, node: WorkerController) -> int:
        return int(self._pending_of(self.assigned_work[node]))

    def _assign_work_unit(self, node: WorkerController) -> None:
        number, nodes = self.nodes.index(node), len(self.nodes)
        if number >= CLUSTERS:
            files = [file for file in self.workqueue if not file.startswith(SLURM_TESTS)]
            if not files:
                node.shutdown()
                return
            begins_with_units = CLUSTERS < number == nodes - 1
            units = (file for file in files if begins_with_units and file.startswith(UNIT_TESTS))
            self.workqueue.move_to_end(next(units, files[0]), last=False)
        super()._assign_work_unit(node)

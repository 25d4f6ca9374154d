"""Nodes that guards have named again and again: left out of the next round, and of later starts.

Of these by the same list as nodes that a preflight has found bad, so that `submit` and `resume`
know them too. tests/unit/agent/test_convictions.py and tests/slurm/test_convicted_node.py hold the
promises.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hpctrain.cluster.preflight.node_lists import bad_nodes_path, read_bad, record_bad

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpctrain.core.base.records import JobContext
    from hpctrain.core.settings.schema import Settings
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.run.layout import RunDir

log = logging.getLogger("hpctrain.agent")


def convicted(history: RunHistory, least: int) -> dict[str, str]:
    """Nodes that were named at least so often since they were last left out, each with why."""
    named: dict[str, list[str]] = {}
    for node, what in history.suspicions:
        named.setdefault(node, []).append(what)
    return {
        node: f"guards named it {len(what)} times: {'; '.join(dict.fromkeys(what))}"
        for node, what in named.items()
        if len(what) >= least
    }


class Convictions:
    """What is done about such nodes in a job.

    Attributes:
        leave_out: Leaves nodes, each with why, out of all further rounds of this job. Returns
            whether the next round is without them. By itself a round takes all nodes of the job, so
            this is True only for nodes of other jobs.
    """

    def __init__(self, run: RunDir, settings: Settings, context: JobContext) -> None:
        """Nothing is done yet."""
        self._run, self._settings, self._context = run, settings, context
        self.leave_out: Callable[[Mapping[str, str]], bool] = lambda bad: (
            not bad.keys() & set(context.nodes)
        )

    def are_out(self, history: RunHistory) -> bool:
        """Whether the next round here is without such nodes: there are none, or others go on."""
        bad = self.keep_out(history)
        return not bad or self.leave_out(bad)

    def keep_out(self, history: RunHistory) -> dict[str, str]:
        """Write such nodes into the run's list; return those that are new, each with why.

        Return none if that would leave no node of the job, or if all nodes are this machine.
        """
        least, context = self._settings.guard.convict, self._context
        if not least or context.on_this_machine:
            return {}
        path = bad_nodes_path(self._run)
        bad = convicted(history, least)
        if not bad or not set(context.nodes) - bad.keys():
            return {}
        listed = read_bad(path)
        new = {node: why for node, why in bad.items() if node not in listed}
        try:
            record_bad(path, new)
        except OSError as error:
            log.warning("bad nodes could not be written down: %s", error)
        for node, why in new.items():
            log.warning("%s is left out from now on: %s", node, why)
        return bad

"""Nodes that guards have named again and again: left out of the job's next start.

By the same list as nodes that a preflight has found bad, so that `submit` and `resume` know them
too. tests/unit/agent/test_convictions.py holds the promises.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hpctrain.preflight.node_lists import bad_nodes_path, read_bad, record_bad

if TYPE_CHECKING:
    from hpctrain.base.records import JobContext
    from hpctrain.history.run_history import RunHistory
    from hpctrain.run.layout import RunDir
    from hpctrain.settings.schema import Settings

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


def keep_out(
    run: RunDir, history: RunHistory, settings: Settings, context: JobContext
) -> list[str]:
    """Write such nodes into the run's list of bad ones; returns those that no start left out yet.

    None where that would leave no node of the job, nor where all nodes are this machine.
    """
    least = settings.guard.convict
    if not least or context.on_this_machine:
        return []
    path = bad_nodes_path(run)
    bad = convicted(history, least)
    if not bad or not set(context.nodes) - bad.keys():
        return []
    listed = read_bad(path)
    new = {node: why for node, why in bad.items() if node not in listed}
    try:
        record_bad(path, new, hours=settings.preflight.bad_node_hours)
    except OSError as error:
        log.warning("bad nodes could not be written down: %s", error)
    for node, why in new.items():
        log.warning("%s is left out of the next start: %s", node, why)
    return list(bad)

"""The first node's part in the search for a slow node: orders out, measurements in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain.preflight.checks_between import check_bandwidth, check_products
from hpctrain.preflight.slow_nodes import search

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.preflight.report import Result
    from hpctrain.preflight.slow_nodes import Group, Limits, Verdict

Tests = list[dict[str, Any]]
"""Groups to try at the same time: {"name", "nodes"} each; empty when all is known."""


class Trial:
    """One search, a round at a time.

    Attributes:
        rounds: How many have begun.
    """

    def __init__(self, nodes: Sequence[str], limits: Limits) -> None:
        self.rounds = 0
        self._nodes = list(nodes)
        self._hunt = search(nodes, limits)
        self._groups: list[Group] = []
        self._sums: dict[str, list[float | None]] = {}
        self._tries: list[Any] = []
        self._failures: list[Any] = []
        self._verdict: Verdict | None = None

    def begin(self) -> Tests:
        """The first groups."""
        return self._tests(next(self._hunt))

    def go_on(self, found: Mapping[str, Any]) -> Tests:
        """The next groups.

        Args:
            found: Node to what it measured: {"ranks": [...]}, {"error": why}, or nothing.
        """
        for node, value in found.items():
            if "ranks" in value:
                self._sums[node] = [one["product"] for one in value["ranks"]]
        results = {group: self._of_group(group, found) for group in self._groups}
        try:
            return self._tests(self._hunt.send(results))
        except StopIteration as end:
            self._verdict = end.value
            return []

    def results(self) -> list[Result]:
        """What came of it."""
        if self._verdict is None:
            return []
        return [*check_bandwidth(self._nodes, self._verdict), *check_products(self._sums)]

    def measured(self) -> dict[str, Any]:
        """Numbers for the report: each try is [nodes, GB/s, seconds to join]."""
        whole = None if self._verdict is None else self._verdict.whole
        return {
            "busbw_gbs": whole,
            "rounds": self.rounds,
            "tries": self._tries,
            "failures": self._failures,
        }

    def _tests(self, groups: list[Group]) -> Tests:
        self._groups = groups
        self.rounds += 1
        return [
            {"name": f"{self.rounds}.{number}", "nodes": list(group)}
            for number, group in enumerate(groups)
        ]

    def _of_group(self, group: Group, found: Mapping[str, Any]) -> float | None:
        """The group's bandwidth is its slowest rank's; None where any of them failed."""
        values = [found.get(node, {}) for node in group]
        why = next((value["error"] for value in values if "error" in value), "")
        if why or not all("ranks" in value for value in values):
            self._failures.append([list(group), why or "silent"])
            return None
        ranks = [rank for value in values for rank in value["ranks"]]
        slowest = min(float(rank["busbw_gbs"]) for rank in ranks)
        joined = max(float(rank["init_s"]) for rank in ranks)
        self._tries.append([list(group), round(slowest, 4), joined])
        return slowest

"""The report of a preflight, as JSON and as one screen of text.

tests/unit/preflight/test_checks.py holds the promises.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.files import read_plain, replace_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

OK, WARN, FAIL, UNKNOWN = "ok", "warn", "fail", "unknown"
WORST_FIRST = (FAIL, UNKNOWN, WARN, OK)
SHOWN_NODES = 8
FORMAT = 1


@dataclass(frozen=True)
class Result:
    """One check's answer.

    Attributes:
        check: Which.
        status: ok; warn: worth a look; fail: training will fail, hang or crawl; unknown: it could
            not be read or decided.
        message: What was found, with its value.
        nodes: Those to blame; empty where nobody is, or where it cannot be said who.
        hint: What to do.
    """

    check: str
    status: str
    message: str
    nodes: list[str] = field(default_factory=list)
    hint: str = ""


@dataclass(frozen=True)
class PreflightReport:
    """One preflight.

    Attributes:
        nodes: Names of all nodes, in the job's order; empty where no job ran.
        results: One or more for each check.
        measured: Numbers: init_s, busbw_gbs, rounds and seconds of each part.
    """

    nodes: list[str]
    results: list[Result]
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """The worst of all results."""
        statuses = {result.status for result in self.results}
        return next((status for status in WORST_FIRST if status in statuses), OK)

    @property
    def bad(self) -> dict[str, str]:
        """Each node to blame for a failed check, to why."""
        bad: dict[str, str] = {}
        for result in self.results:
            if result.status != FAIL:
                continue
            for node in result.nodes:
                also = f"{bad[node]}; " if node in bad else ""
                bad[node] = f"{also}{result.check}: {result.message}"
        return bad

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {"format": FORMAT, "status": self.status, "bad_nodes": self.bad} | asdict(self)

    def dump(self, path: Path) -> None:
        """Write it, whole or not at all."""
        replace_text(path, json.dumps(self.plain(), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> PreflightReport:
        """Read it back.

        Raises:
            OSError: it is not there.
        """
        raw = json.loads(read_plain(path))
        results = [Result(**one) for one in raw["results"]]
        return PreflightReport(raw["nodes"], results, raw["measured"])


def lines(results: Iterable[Result]) -> list[str]:
    """One line for each result, and one for its hint, in the order of the checks."""
    shown = list(results)
    width = max((len(result.check) for result in shown), default=0)
    text = []
    for result in shown:
        who = f"{names(result.nodes)}: " if result.nodes else ""
        text.append(f"{result.status:7}  {result.check:{width}}  {who}{result.message}")
        if result.hint and result.status != OK:
            text.append(f"{'':7}  {'':{width}}  -> {result.hint}")
    return text


def names(nodes: Sequence[str]) -> str:
    """The nodes in a few words."""
    shown = ", ".join(nodes[:SHOWN_NODES])
    more = len(nodes) - SHOWN_NODES
    return f"{shown} and {more} more" if more > 0 else shown

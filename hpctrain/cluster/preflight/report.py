"""The report of a preflight, and the lists of nodes that come of it: bad ones, and known good ones.

Bad nodes are kept out until a date: one list beside the user's state for `hpctrain preflight`, one
in a run's directory for its attempts. Nodes that a run knows to be fast together are not tried
again at a requeue.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock
from hpctrain.core.base.files import read_plain, replace_text, whole_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpctrain.ledger.run.layout import RunDir

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
    """One preflight."""

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


BAD_NODES_NAME = "bad-nodes.json"
BAD_NODE_HOURS = 24.0
"""A day: what a restart or an admin repairs is mostly repaired by then."""
KNOWN_GOOD_NAME = "proven-nodes.json"
HOUR_S = 3600.0
KNOWN_GOOD_HOURS = 12.0


@dataclass(frozen=True)
class BadNode:
    """One entry."""

    reason: str
    time: float
    until: float


def bad_nodes_path(run: RunDir) -> Path:
    """The list of a run."""
    return run.root / BAD_NODES_NAME


def bad_nodes_of_user(environ: Mapping[str, str], cluster: str) -> Path:
    """The user's list for a cluster; `cluster` is the site's name, or the scheduler's."""
    home = Path(environ.get("HOME") or Path.home())
    state = environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else home / ".local" / "state"
    return base / "hpctrain" / f"{cluster}-{BAD_NODES_NAME}"


def read_bad(path: Path, *, now: float | None = None) -> dict[str, BadNode]:
    """The nodes that are kept out; none without a list. A list that is torn counts as none."""
    now = clock.now() if now is None else now
    try:
        raw = json.loads(read_plain(path))
        bad = {name: BadNode(**entry) for name, entry in raw["nodes"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {name: entry for name, entry in bad.items() if entry.until > now}


def record_bad(
    path: Path,
    bad: Mapping[str, str],
    *,
    well: Iterable[str] = (),
    hours: float = BAD_NODE_HOURS,
    now: float | None = None,
) -> None:
    """Add nodes with their reasons, and take those out that were found well.

    Raises:
        OSError: it cannot be written.
    """
    now = clock.now() if now is None else now
    gone = set(well)
    kept = {name: entry for name, entry in read_bad(path, now=now).items() if name not in gone}
    entries = kept | {name: BadNode(why, now, now + hours * 3600) for name, why in bad.items()}
    if not entries and not path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: asdict(entry) for name, entry in sorted(entries.items())}
    with whole_file(path, str(os.getpid())) as staged:  # two preflights may end at once
        staged.write_text(json.dumps({"format": FORMAT, "nodes": plain}, indent=1) + "\n")


def excluded(*paths: Path, now: float | None = None) -> list[str]:
    """The names of all nodes that these lists keep out, sorted."""
    return sorted({name for path in paths for name in read_bad(path, now=now)})


def known_good_path(run: RunDir) -> Path:
    """The list of a run."""
    return run.root / KNOWN_GOOD_NAME


def read_known_good(path: Path) -> dict[str, float]:
    """Each node to the time when it was last proven; a list that is torn or absent has none."""
    try:
        raw = json.loads(read_plain(path))
        return {str(node): float(t) for node, t in raw.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def are_known_good(path: Path, nodes: Sequence[str], *, now: float | None = None) -> bool:
    """Whether all of these nodes were proven lately: they are not tried again then."""
    now = clock.now() if now is None else now
    good = read_known_good(path)
    return all(now - good.get(node, 0.0) < KNOWN_GOOD_HOURS * HOUR_S for node in nodes)


def record_known_good(path: Path, nodes: Iterable[str], *, now: float | None = None) -> None:
    """Write down that these nodes are fast together.

    Raises:
        OSError: it cannot be written.
    """
    now = clock.now() if now is None else now
    replace_text(path, json.dumps(read_known_good(path) | dict.fromkeys(nodes, now)) + "\n")

"""The batch script's side of `environment.stage`: what it is told, and what it has found. Pure.

sbatch/stage.sh brings the environment to the nodes. It gets shell variables from staging.json by
`slurm_batch before`, and gives each node's line to `slurm_batch staged`, which makes one event of
them. tests/unit/scheduler/test_slurm_staging.py and tests/slurm/test_stage.py hold the promises.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from hpctrain.base.files import data_dir
from hpctrain.base.text import count, fold_nodes
from hpctrain.run.event_types import EnvironmentStaged
from hpctrain.run.staging import is_staged, places_of
from hpctrain.settings.schema import AUTO_STAGE_NODES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpctrain.run.staging import Staging
    from hpctrain.settings.schema import Settings
    from hpctrain.settings.spec import Spec
    from hpctrain.site.preset import Site

STAGE, STAGE_NODE = "stage.sh", "stage_node.sh"
_MARK = "hpctrain-stage"
_TO_NODE = "STAGE_NODE"
"""Ends the node's text in a batch script."""
_MOST_REASONS = 5


def notes_of(settings: Settings, site: Site | None) -> list[str]:
    """What `environment.stage` will do, for the user to read."""
    if not is_staged(settings):
        least = f"fewer than {AUTO_STAGE_NODES} nodes"
        return [] if settings.container.image else [f"environment.stage auto: not with {least}"]
    places = ", ".join(places_of(settings, site.storage.local if site else ""))
    return [f"environment.stage: nodes start from a copy of their Python, in the first of {places}"]


def script_lines(spec: Spec) -> list[str]:
    """What a batch script has of stage.sh and stage_node.sh; nothing where nothing is staged."""
    if not is_staged(spec.settings):
        return []
    folder = data_dir("sbatch")
    return [
        f"IFS= read -r -d '' hpctrain_stage_node <<'{_TO_NODE}'",
        (folder / STAGE_NODE).read_text().rstrip("\n"),
        _TO_NODE,
        "",
        (folder / STAGE).read_text().rstrip("\n"),
    ]


def shell_variables(staging: Staging) -> list[str]:
    """Assignments for the batch script, one a line."""
    archive = staging.archive
    values = {
        "wanted": "1",
        "why": staging.why,
        "timeout": f"{staging.timeout_s:.0f}",
        "archive": archive.path if archive else "",
        "key": archive.key if archive else "",
        "sha256": archive.sha256 if archive else "",
        "bytes": str(archive.size_bytes if archive else 0),
        "unpacked": str(archive.unpacked_bytes if archive else 0),
        "files": str(archive.files if archive else 0),
        "compress": archive.compress if archive else "",
        "prefix": archive.prefix if archive else "",
        "python": archive.python if archive else "",
    }
    places = " ".join(map(shlex.quote, staging.places))
    lines = [f"hpctrain_stage_{name}={shlex.quote(value)}" for name, value in values.items()]
    return [*lines, f"hpctrain_stage_places=({places})"]


def outcome(
    lines: Iterable[str],
    nodes: Sequence[str],
    job: tuple[str, int],
    *,
    way: str,
    seconds: float,
    why: str,
) -> EnvironmentStaged:
    """One event of what all nodes have said.

    Args:
        lines: `hpctrain-stage NODE WORD ...`, as stage_node.sh prints them.
        nodes: All nodes of the job.
        job: Its id, and how often it was restarted.
        way: "sbcast" or "read".
        seconds: That all of it took.
        why: Why no node was asked; "" where they were.
    """
    outcomes: dict[str, tuple[str, str]] = {}
    for line in lines:
        mark, _, rest = line.strip().partition(" ")
        node, _, said = rest.partition(" ")
        if mark == _MARK and node:
            word, _, detail = said.partition(" ")
            outcomes[node] = (word, detail)
    silent = {node: ("no", why or "no answer") for node in nodes if node not in outcomes}
    outcomes |= silent
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for node, (word, detail) in outcomes.items():
        if word not in {"staged", "reused"}:
            reasons[detail or word].append(node)
    roots = sorted({detail for word, detail in outcomes.values() if word in {"staged", "reused"}})
    facts: dict[str, Any] = {
        "staged": sum(word == "staged" for word, _ in outcomes.values()),
        "reused": sum(word == "reused" for word, _ in outcomes.values()),
        "not_staged": sum(map(len, reasons.values())),
        "folder": roots[0] if roots else "",
        "way": way if any(word == "staged" for word, _ in outcomes.values()) else "",
        "why": _reasons(reasons),
        "job_id": job[0],
        "restarts": job[1],
    }
    return EnvironmentStaged(seconds=seconds, **facts)


def _reasons(reasons: dict[str, list[str]]) -> str:
    """Why nodes go without, the most frequent first."""
    ordered = sorted(reasons.items(), key=lambda item: -len(item[1]))
    words = [f"{fold_nodes(nodes)}: {why}" for why, nodes in ordered[:_MOST_REASONS]]
    left = len(ordered) - _MOST_REASONS
    return "; ".join([*words, *([f"{count(left, 'more reason')}"] if left > 0 else [])])

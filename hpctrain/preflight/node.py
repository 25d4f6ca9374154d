"""One node of `hpctrain preflight`: `python -m hpctrain.preflight.node FOLDER RANK`.

Its place comes from the environment that the job's script exports (`entry.slurm_batch before`).
tests/slurm/test_preflight.py holds the promises.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base.env import (
    HPCTRAIN_MASTER_ADDR,
    HPCTRAIN_NODES,
    HPCTRAIN_PORT,
    HPCTRAIN_PREFLIGHT_KEY,
)
from hpctrain.errors import ChecksFailed, HpctrainError
from hpctrain.preflight.checks import Order
from hpctrain.preflight.rendezvous import Alone
from hpctrain.preflight.report import lines
from hpctrain.preflight.run import NodePlace, run_checks
from hpctrain.run.ownership import distrust

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ORDER, REPORT, PROGRESS = "order.json", "report.json", "progress.txt"


def main(argv: Sequence[str]) -> int:
    """Take part; the first node leaves the report in the folder. Returns the exit code."""
    folder, rank = Path(argv[0]), int(argv[1])
    if why := distrust(folder) or distrust(folder / ORDER):
        print(f"hpctrain: error: {folder} {why}: it says what this job starts", file=sys.stderr)
        return ChecksFailed.exit_code
    place = place_of(folder, rank, os.environ)
    try:
        order = Order.from_plain(json.loads((folder / ORDER).read_text())) if rank == 0 else None
        report, _ = run_checks(place, order, lambda text: _say(folder, text))
    except Alone as error:
        print(f"hpctrain: {place.node}: {error}", file=sys.stderr)
        return 0  # the first node names us, or is itself what the report will be missing
    except (HpctrainError, OSError) as error:
        print(f"hpctrain: error: {place.node}: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, HpctrainError) else 1
    if report is not None:
        print("\n".join(lines(report.results)), flush=True)
        report.dump(folder / REPORT)
    return 0


def place_of(folder: Path, rank: int, environ: Mapping[str, str]) -> NodePlace:
    """This node's place in the job, as the job's script has exported it."""
    nodes = environ[HPCTRAIN_NODES].split(",")
    return NodePlace(
        nodes=nodes,
        rank=rank,
        address=environ.get(HPCTRAIN_MASTER_ADDR) or nodes[0],
        port=int(environ[HPCTRAIN_PORT]),
        key=environ[HPCTRAIN_PREFLIGHT_KEY],
        folder=folder,
        env=_environment(folder),
    )


def _environment(folder: Path) -> dict[str, str]:
    """What ranks will have; nothing on a node that does not see the folder, which fails for it."""
    try:
        return Order.from_plain(json.loads((folder / ORDER).read_text())).expected.env
    except OSError:
        return {}


def _say(folder: Path, text: str) -> None:
    with (folder / PROGRESS).open("a") as file:
        file.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

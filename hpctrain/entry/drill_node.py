"""What a drill does on a node of the job, in a step of its own there, or on this machine.

    python -P -m hpctrain.entry.drill_node RUN plant FAULT ATTEMPT RANK SECONDS

Prints one line of JSON: what `drill.injectors.plant` says. tests/unit/entry/test_drill_node.py
holds the promises.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.advise.drill import injectors
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """See the module's docstring."""
    match list(argv):
        case [root, "plant", fault, attempt, rank, seconds]:
            run = RunDir(Path(root))
            done = injectors.plant(run, fault, int(attempt), int(rank), float(seconds))
            print(json.dumps(done._asdict()), flush=True)
        case _:
            words = " ".join(argv)
            print(f"hpctrain.entry.drill_node: {words!r}: see its docstring", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

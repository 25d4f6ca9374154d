"""One rank as a program of its own, below nsys: `python -m hpctrain.node.agent.rank_exec TASK`."""

from __future__ import annotations

import json
import sys

from hpctrain.core.base.records import RankTask
from hpctrain.node.agent.ranks import run_rank

if __name__ == "__main__":
    run_rank(RankTask(**json.loads(sys.argv[1])))

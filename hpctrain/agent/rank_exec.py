"""One rank as a program of its own, below nsys: `python -m hpctrain.agent.rank_exec TASK`."""

from __future__ import annotations

import json
import sys

from hpctrain.agent.ranks import run_rank
from hpctrain.base.records import RankTask

if __name__ == "__main__":
    run_rank(RankTask(**json.loads(sys.argv[1])))

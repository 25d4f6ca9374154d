"""The shipped recipe, whose steps take their time ahead of the update, as a real one's do.

STEP_S is how long; KILLED_AT, as "rank:step:step", has that rank killed in the middle of so-manieth
steps: the first number is for the first attempt, the second for the second. It lingers there for
LINGER_S before.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from typing import Any

from hpctrain.recipes.lm import train

STEP_S = float(os.environ["STEP_S"])
LINGER_S = float(os.environ.get("LINGER_S", "0"))


def main() -> None:
    killed, *steps = map(int, os.environ.get("KILLED_AT", "-1").split(":"))
    attempt = json.loads(os.environ["HPCTRAIN_ATTEMPT"])["number"]
    is_killed = int(os.environ["RANK"]) == killed and attempt <= len(steps)
    begun, microbatches = itertools.count(1), train.microbatches

    def slow(*given: Any) -> Any:
        time.sleep(STEP_S / 2)
        if is_killed and next(begun) == steps[attempt - 1]:
            time.sleep(LINGER_S)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(STEP_S / 2)
        return microbatches(*given)

    train.microbatches = slow
    train.main()


if __name__ == "__main__":
    main()

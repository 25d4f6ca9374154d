"""The shipped recipe; each step waits until the copies of the step before are settled in memory.

A step lasts STEP_S, and several times what the copies took, as a real one does: then ranks agree on
a copy at each step. KILLED_AT, as "rank:step:step", has that rank killed in the middle of its steps
of these numbers: the first is for the first attempt, the second for the second.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from hpctrain.recipes.lm import train
from hpctrain.train.runtime.kept_state import MemoryCopies
from tests.support.ledger_runs import all_fields

STEP_S = float(os.environ["STEP_S"])
LASTS = 8
"""Times the longest that copies took; a step's time is learnt from a third of the newest."""
POLL_S = 0.005


class Copies:
    """This rank's copies, and the longest that all nodes have taken to have one whole."""

    def __init__(self) -> None:
        self.made: MemoryCopies | None = None
        self.longest_ns = 0

    def watch(self) -> None:
        """Get hold of the copies as they are set up, behind the first step."""
        warm_up = MemoryCopies.warm_up

        def kept(copies: MemoryCopies, *given: Any) -> None:
            self.made = copies
            warm_up(copies, *given)

        MemoryCopies.warm_up = kept

    def wait(self) -> None:
        """Wait until the newest copy is whole on all nodes, and in proportion longer."""
        copies = self.made
        if copies is None:
            return
        while not copies._copies.is_ready:
            time.sleep(POLL_S)
        line, step, began_ns = copies._line, copies._newest, copies._began_ns
        if not began_ns:
            return
        while line.settled < step:
            time.sleep(POLL_S)
        if line.covered == step:
            self.longest_ns = max(self.longest_ns, line.covered_ns - began_ns)
        while time.monotonic_ns() < began_ns + LASTS * self.longest_ns:
            time.sleep(POLL_S)

    def wait_notified(self, attempt: int) -> None:
        """Wait until the ledger has the step before."""
        while _told(attempt) < self.made._newest:
            time.sleep(POLL_S)


def _told(attempt: int) -> int:
    """The newest step of this attempt in the ledger."""
    run = RunDir(Path(os.environ["HPCTRAIN_RUN_DIR"]))
    told = [e for e in ledger.read(run) if e.kind == "steps" and e.attempt == attempt]
    return max((int(all_fields(e)["last"]) for e in told), default=0)


def main() -> None:
    killed, *steps = map(int, os.environ.get("KILLED_AT", "-1").split(":"))
    attempt = json.loads(os.environ["HPCTRAIN_ATTEMPT"])["number"]
    is_killed = int(os.environ["RANK"]) == killed and attempt <= len(steps)
    begun, microbatches = itertools.count(1), train.microbatches
    copies = Copies()
    copies.watch()

    def paced(*given: Any) -> Any:
        time.sleep(STEP_S)
        copies.wait()
        if is_killed and next(begun) == steps[attempt - 1]:
            copies.wait_notified(attempt)
            os.kill(os.getpid(), signal.SIGKILL)
        return microbatches(*given)

    train.microbatches = paced
    train.main()


if __name__ == "__main__":
    main()

"""A training program whose rank 1 gets stuck in its first attempt: `stuck.py c-call|stopped STEP`.

It leaves the file `stuck` in the working directory a moment before.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpctrain
from hpctrain.checkpoint.store import find

if TYPE_CHECKING:
    from hpctrain.train.runtime.run import Run


def main() -> None:
    how, fatal_step = sys.argv[1], int(sys.argv[2])
    run = hpctrain.init()
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(total=20):
        is_first = os.environ["HPCTRAIN_RESTARTS"] == "0"
        if is_first and run.world.rank == 1 and step == fatal_step:
            wait_for_a_save(run)
            Path("stuck").touch()
            hold_the_gil() if how == "c-call" else stop_for_good()
        optimizer.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()


def wait_for_a_save(run: Run) -> None:
    """The one that is being written behind training needs this rank's report to be committed."""
    end = time.monotonic() + 60
    while not find.candidates(run.dir):
        assert time.monotonic() < end, "no save was committed"
        time.sleep(0.01)


def hold_the_gil() -> None:
    """No Python thread of this rank runs any more: neither a handler nor our thread for signals."""
    ctypes.PyDLL(None).sleep(600)


def stop_for_good() -> None:
    """Stopped, as by a debugger; SLURM's SIGCONT before each SIGTERM does not wake it for long."""

    def stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    signal.signal(signal.SIGCONT, stop)
    while True:
        stop()


if __name__ == "__main__":
    main()

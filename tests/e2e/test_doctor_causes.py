"""Each cause that a machine without a GPU can have, by a real fault: the ledger's and the doctor's.

Not among them: GPU errors and memory (no GPU), and what only a scheduler's nodes have (node_fail,
requeued, grown, fenced, unfit_node: tests/slurm).
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.support.local_runs import SCRIPTS, await_end, events, hpctrain, start

if TYPE_CHECKING:
    from pathlib import Path


class Ending(NamedTuple):
    """A way to end, what the ledger calls it, and what the doctor does."""

    way: str
    cause: str
    kind: str
    sets: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


BRISK = ("checkpoint.interval_steps=4", "preflight.enabled=no")
ENDINGS = [
    Ending("nothing", "completed", "completed"),
    Ending("raises", "user_error", "code"),
    Ending("killed", "crashed", "killed"),
    Ending("worker", "data_worker", "data_worker"),
    Ending("not_finite", "nan", "nan"),
    Ending("memory", "host_oom", "host_oom"),
    Ending("full", "storage_full", "storage_full"),
    Ending("unreadable", "storage_error", "storage_error"),
    # Its collective timed out; that the other rank never came is nearer to the cause.
    Ending("silent_peer", "nccl_error", "hang", ("alive.hang=off",)),
    Ending("stands", "hang", "hang", ("alive.hang_s=4",)),
    Ending("leaves_out", "desync", "desync", ("alive.desync=restart",)),
    # No GPU here: the real classes, with the words that PyTorch has for them.
    Ending("gpu_memory", "gpu_oom", "gpu_oom"),
    Ending("gpu", "gpu_error", "gpu_error"),
    Ending("stays", "hung_end", "hung_end", ("run.end_wait_s=1",)),
    Ending("goes_on", "cancelled", "cancelled", (), ("cancel", "it")),
    Ending("goes_on", "stopped", "stopped", (), ("cancel", "it", "--save")),
    Ending("goes_on", "preempted", "preempted", (), ("local", "preempt", "it")),
]
QUICK = {"full", "not_finite"}


def _marked(ending: Ending):
    marks = [] if ending.way in QUICK else [pytest.mark.soak]
    return pytest.param(ending, id=ending.cause, marks=marks)


@pytest.mark.parametrize("ending", [_marked(ending) for ending in ENDINGS])
def test_the_ledger_and_the_doctor_name_what_ended_it(tmp_path: Path, ending: Ending):
    sets = [word for value in (*BRISK, *ending.sets) for word in ("--set", value)]
    run = start(tmp_path, "it", 1, 2, *sets, "--", str(SCRIPTS / "ends.py"), ending.way)
    if ending.command:
        deadline = time.monotonic() + 120
        while not events(run, "saved"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        hpctrain(tmp_path, *ending.command)
    end = await_end(run)
    if end["next"] in {"restart", "requeue"}:
        hpctrain(tmp_path, "cancel", "it")
    attempt = json.loads(hpctrain(tmp_path, "status", "it", "--json"))["attempts"][0]
    verdict = json.loads(hpctrain(tmp_path, "doctor", "it", "--attempt", "1", "--json"))

    assert attempt["cause"] == ending.cause
    assert verdict["kind"] == ending.kind
    # Who sent a SIGKILL is told by nobody.
    sure = {"possible"} if ending.way == "killed" else {"certain", "likely"}
    assert verdict["certainty"] in sure

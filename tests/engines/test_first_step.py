"""What a rank has to do before its first step is what a restart in place takes, on every rank."""

from __future__ import annotations

import json

from tests.support.local_runs import SCRIPTS, await_end, events, start
from tests.support.recipe import TINY

SHARED = ("hpctrain", "numpy", "tensorboard", "google")
OWN = ("hpctrain.recipes", "hpctrain.train.data.tokens")
"""The script's."""


def test_ranks_import_nothing_but_their_program_and_start_no_process_before_their_first_step(
    tmp_path,
):
    """60 ms of imports and 90 ms of a writer process's start, on each rank of a node at once."""
    settings = {
        **TINY,
        "train.steps": 12,
        "train.step_delay_s": 0.1,
        "alive.memory": "auto",
        "alive.memory_steps": 1,
    }
    settings |= {"run.restarts_in_job": 1, "run.restart_pause_s": 0}
    words = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    root = start(tmp_path, "run", 1, 2, *words, "--", str(SCRIPTS / "first_step.py"))
    assert await_end(root, 2)["reason"] == "completed"

    assert events(root, "restored")[1]["read_from"] == "memory"
    for rank in range(2):
        (path,) = root.glob(f"attempts/0002/first-step-{rank}.json")
        told = json.loads(path.read_text())
        shared = [name for name in told["modules"] if name.startswith(SHARED)]
        assert [name for name in shared if not name.startswith(OWN)] == []
        assert told["children"] == []

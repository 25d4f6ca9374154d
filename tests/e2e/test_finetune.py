"""The shipped example of a Hugging Face model, from a folder to a folder, through a preemption."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support import hub, local_runs
from tests.support.gates import steps_held

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune.py"
SIZES = "STEPS, GLOBAL_BATCH, MICRO_BATCH, SEQ_LEN = 1000, 32, 4, 1024"
STEPS = 150


@pytest.mark.story(proved_by=("tests/engines/test_pretrained.py", "tests/engines/test_resume.py"))
@pytest.mark.timeout(600)
def test_the_example_begins_with_a_folder_is_preempted_and_ends_as_a_folder(tmp_path, monkeypatch):
    import torch

    folder = hub.make(tmp_path, "Llama")
    numbers = np.random.default_rng(0).integers(0, 64, 20_000)
    numbers.astype(np.uint16).tofile(tmp_path / "tokens.bin")
    program = EXAMPLE.read_text()
    assert SIZES in program
    smaller = SIZES.replace("1000, 32, 4, 1024", f"{STEPS}, 8, 2, 16")
    (tmp_path / "finetune.py").write_text(program.replace(SIZES, smaller))

    flags = ["--engine", "fsdp2", "--", "finetune.py", "Llama", "tokens.bin"]
    gates, held = steps_held(tmp_path, {1: 20})
    monkeypatch.setenv("HPCTRAIN_FAULTS", held)
    run = local_runs.start(tmp_path, "tuned", "1-2", 1, *flags)
    gates[1].wait(2)
    local_runs.hpctrain(tmp_path, "local", "preempt", "tuned", "--leave=1", "--grace=60")
    gates[1].open()
    local_runs.await_end(run, attempts=2)

    starts = local_runs.events(run, "attempt_started")
    assert [start["world_size"] for start in starts] == [2, 1]
    ends = local_runs.events(run, "attempt_ended")
    assert [end.get("steps_lost", 0) for end in ends] == [0, 0]
    assert local_runs.events(run, "done")[-1]["step"] == STEPS
    local_runs.hpctrain(
        tmp_path, "checkpoints", "export", "tuned", f"{STEPS}", "out", "--like", str(folder)
    )
    with torch.no_grad():
        before, after = (hub.loaded(f)(hub.tokens()).logits for f in (folder, tmp_path / "out"))
    assert after.isfinite().all()
    assert not torch.equal(before, after)

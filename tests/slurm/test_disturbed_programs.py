"""Programs that people have come to their end, however often SLURM takes their nodes away.

    pytest -m soak tests/slurm/test_disturbed_programs.py

Each disturbance prints a line: the steps that the program itself says it has done before and after.
"""

from __future__ import annotations

import dataclasses
import sys
import time

import pytest
import torch

from tests.support.local_runs import SCRIPTS
from tests.support.programs import (
    KINDS,
    PROGRAMS,
    RESULT,
    TRAINER,
    Campaign,
    Program,
    undisturbed,
)
from tests.support.scripts import one_file

pytestmark = pytest.mark.slurm

START = """#!/bin/sh
exec "$@" ${HPCTRAIN_RESUME:+--init-from=resume}
"""


def alone(steps):
    """The result of the program's four ranks, from one process."""
    model = one_file.model_of(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        batches = [one_file.batch_of(step, rank) for rank in range(4)]
        source, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(source), target).backward()
        optimizer.step()
    return sum(parameter.abs().sum().item() for parameter in model.parameters())


@pytest.fixture
def tell(capsys):
    """Prints a line at once, into whatever log a soak has."""

    def line(text):
        with capsys.disabled():
            print(f"{time.strftime('%T')} {text}", flush=True)

    return line


@pytest.mark.soak
def test_a_kill_in_the_middle_of_its_only_file_costs_an_unchanged_program_that_save(
    slurm, tmp_path
):
    script = tmp_path / "start.sh"
    script.write_text(START)
    script.chmod(0o755)
    words = ("--steps=60", "--every=20", "--die-in-save=40")
    program = Program(
        "one file",
        ("./start.sh", sys.executable, str(SCRIPTS / "one_file.py"), *words),
        flags=("--set=checkpoint.sealed=out/ckpt.pt", "--set=checkpoint.seal_settle_s=0.2"),
        result=RESULT,
    )

    campaign = Campaign(slurm, tmp_path, program)
    result = campaign.wait_end()

    assert campaign.steps(1) == list(range(1, 41)), campaign.run.story()
    assert campaign.steps(2) == list(range(21, 61)), campaign.run.story()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ckpt.pt", "ckpt.pt.torn-2"]
    assert float(result) == pytest.approx(alone(60), rel=1e-5)


@pytest.mark.story(
    proved_by="tests/engines/test_frameworks.py::test_the_program_that_is_shown_loses_no_step_to_a_preemption"
)
def test_transformers_trainer_with_the_callback_loses_no_step_in_a_preemption(slurm, tmp_path):
    program = dataclasses.replace(TRAINER, words=(TRAINER.words[0], "--steps=60", "--told"))
    campaign = Campaign(slurm, tmp_path, program, partition="grace")

    disturbed = campaign.disturb("grace", after=5)
    campaign.wait_end()

    assert (disturbed.reason, disturbed.lost) == ("preempted", 0), campaign.run.story()
    assert campaign.steps(1) + campaign.steps(2) == list(range(1, 61))


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_loses_no_more_than_it_must_and_ends_as_if_left_in_peace(
    slurm, tmp_path, tell, name
):
    program = PROGRAMS[name]
    campaign = Campaign(slurm, tmp_path, program)
    wrong = []

    for kind in KINDS:
        partition = {"without grace": "grace", "grace": "work"}.get(kind, "")
        disturbed = campaign.disturb(kind, next_partition=partition)
        tell(f"{name}: {disturbed}")
        most = program.may_lose(kind)
        if most is not None and disturbed.lost > most:
            wrong.append(f"{disturbed}: {most} at most")
    result = campaign.wait_end()

    assert not wrong, campaign.run.story()
    if program.result:
        peace = undisturbed(program, tmp_path / "undisturbed")
        assert float(result) == pytest.approx(float(peace), rel=1e-6), campaign.run.story()

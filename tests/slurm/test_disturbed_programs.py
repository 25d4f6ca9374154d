"""Programs that people have come to their end, however often SLURM takes their nodes away.

    pytest -m soak tests/slurm/test_disturbed_programs.py

Each disturbance prints a line: the steps that the program itself says it has done before and after.
"""

from __future__ import annotations

import time

import pytest

from tests.support.programs import KINDS, PROGRAMS, Campaign, undisturbed

pytestmark = pytest.mark.slurm


@pytest.fixture
def tell(capsys):
    """Prints a line at once, into whatever log a soak has."""

    def line(text):
        with capsys.disabled():
            print(f"{time.strftime('%T')} {text}", flush=True)

    return line


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

"""The page of what a program may rely on names what there is, and its script does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.core.base import env
from tests.docs.test_environment import WORDS, documented
from tests.docs.test_pages import table
from tests.support import patience
from tests.support.local_runs import await_end, events, hpctrain, start

PAGE = Path(__file__).parents[2] / "docs" / "getting-started.md"


def test_the_page_names_every_variable_that_programs_read():
    told = [
        (f"`{getattr(env, name)}`", said["what"])
        for name, text in documented().items()
        if "users' programs" in (said := WORDS.fullmatch(text))["read"]
    ]

    assert [tuple(row) for row in table(PAGE, "variable")] == told


@pytest.mark.check
def test_the_pages_script_saves_at_a_preemption_and_goes_on_from_there(tmp_path):
    (text,) = re.findall(r"<!-- test: preempted -->\n```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    script = tmp_path / "steps.sh"
    script.write_text(text)
    script.chmod(0o755)
    run = start(tmp_path, "r", 2, 2, "--", "./steps.sh")
    logs = [run / "attempts" / "0001" / f"rank-{rank:05d}.log" for rank in range(4)]
    patience.until(lambda: all(log.exists() and "from step 0" in log.read_text() for log in logs))
    hpctrain(tmp_path, "local", "preempt", "r", "--leave", "2", "--grace", "30")

    assert await_end(run, 2)["reason"] == "completed"
    assert [event["reason"] for event in events(run, "attempt_ended")] == ["preempted", "completed"]
    for rank in range(4):
        saved = int((run / "output" / f"step-of-{rank}").read_text())
        assert 0 < saved < 100
        log = run / "attempts" / "0002" / f"rank-{rank:05d}.log"
        assert log.read_text() == f"start 2 goes on from step {saved}\n"

"""Where a drill reaches for a rank, and what it says of nodes that give no answer."""

from __future__ import annotations

import json

import pytest

from hpctrain.advise.drill import schedule
from hpctrain.advise.drill.promises import FAULTS, Planted
from hpctrain.advise.drill.schedule import Course
from hpctrain.cluster.scheduler.base import Cluster
from hpctrain.ledger.history.run_history import RunHistory
from tests.support.ledger_runs import Story

DONE = json.dumps({"why": "", "step": None, "name": ""})


class Nodes(Cluster):
    """A scheduler whose nodes say what they are told to say."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def on_nodes(self, job_id, nodes, command):
        self.asked.append((job_id, list(nodes), list(command)[-5:]))
        return "a site's greeting\n" + self.answers.pop(0) + "\n"


@pytest.fixture
def reach(tmp_path, monkeypatch):
    """Plant a fault in a run of three nodes with two ranks each; what came of that."""
    story = Story(tmp_path / "lm").submitted(job_id="17")
    story.started(1, nodes=("n7", "n2", "n5")).restored(1)
    story.steps(1, 1, 20)
    folder = story.run.checkpoints / "step-0000000020"
    folder.mkdir(parents=True)

    def planted(fault, *answers):
        nodes = Nodes(*answers)
        monkeypatch.setattr(schedule, "get_cluster", lambda _: nodes)
        history = RunHistory.read(story.run)
        drill = Course(story.run, "slurm", armed=tmp_path, patience_s=1.0)
        found = drill._plant(FAULTS[fault], history, history.newest)
        return found, nodes.asked

    return planted


@pytest.mark.parametrize("fault", ["kill_rank", "kill_agent", "freeze_rank"])
def test_the_last_rank_is_met_on_its_own_node(reach, fault):
    found, asked = reach(fault, DONE)

    assert asked == [("17", ["n5"], ["plant", fault, "1", "5", "3.0"])]
    assert isinstance(found, Planted)


@pytest.mark.parametrize("line", ["{", "{}", '{"motd": "welcome"}', '{"a":' * 99_999, "[1]", "7"])
def test_lines_that_are_none_of_ours_are_passed_over(reach, line):
    found, _ = reach("kill_rank", f"{line}\n{DONE}\n{line}")
    assert isinstance(found, Planted)
    nothing, _ = reach("kill_rank", line)
    assert nothing.why == "n5 gave no answer"


def test_what_was_damaged_is_what_the_node_has_said(reach):
    said = json.dumps({"why": "", "step": 40, "name": "step-0000000040"})
    found, _ = reach("flip_bit", said)
    assert (found.damaged_step, found.damaged) == (40, "step-0000000040")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "n5 gave no answer"),
        ('{"why": "rank 5 of attempt 1 was not found on its node"}',
         "n5: rank 5 of attempt 1 was not found on its node"),
    ],
)  # fmt: skip
def test_a_rank_that_was_not_met_is_not_tried(reach, answer, why):
    verdict, _ = reach("kill_rank", answer)
    assert (verdict.outcome, verdict.why) == ("not tried", why)

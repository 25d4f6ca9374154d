"""A slow node is changed once it has cost a new start, right behind a save, and for a spare."""

from __future__ import annotations

import logging

import pytest

from hpctrain.agent.swaps import LOOK_S, SlowNode, Swaps, newest_save
from hpctrain.run.layout import RunDir

SLOW = SlowNode(1, "n2", 9.0, 4.0, "n2 is later than the others by 40% of a step")
SPARES = ("n3",)


class Job:
    def __init__(self):
        self.now, self.saved, self.looks = 0.0, 10, 0
        self.swaps = Swaps(self._newest, clock=lambda: self.now)

    def _newest(self):
        self.looks += 1
        return self.saved

    def due(self, slow=SLOW, spares=SPARES):
        self.now += LOOK_S
        return self.swaps.due(slow, spares)


@pytest.fixture
def job():
    return Job()


def test_the_change_comes_right_behind_the_next_save(job):
    assert [job.due() for _ in range(5)] == [""] * 5
    job.saved = 15
    assert job.due() == (
        "it gives its place to n3: n2 is later than the others by 40% of a step, which has cost "
        "9 s, and a new start costs 4 s"
    )


def test_a_run_s_first_save_is_one_too(job):
    job.saved = None
    assert [job.due() for _ in range(3)] == [""] * 3
    job.saved = 5
    assert "n3" in job.due()


@pytest.mark.parametrize("slow", [None, SLOW._replace(lost_s=4.0)])
def test_who_has_not_cost_a_new_start_yet_stays(job, slow, caplog):
    assert [job.due(slow) for _ in range(2)] == ["", ""]
    job.saved = 15
    assert job.due(slow) == ""
    assert (job.looks, caplog.messages) == (0, [])


def test_one_that_became_quick_meanwhile_waits_for_a_save_anew(job):
    job.due()
    job.due(None)
    job.saved = 15
    assert job.due() == "", "this save was before it was slow again"
    job.saved = 20
    assert "n3" in job.due()


def test_saves_are_looked_for_now_and_then_only(job):
    for _ in range(100):
        job.now += LOOK_S / 50
        job.swaps.due(SLOW, SPARES)
    assert job.looks <= 3


@pytest.mark.parametrize(
    ("slow", "spares", "why"),
    [
        (SLOW, (), "no spare waits"),
        (SLOW._replace(place=0), SPARES, "its agent leads the others, so it stays"),
    ],
)
def test_who_cannot_be_changed_is_told_of_once_with_a_line_for_the_admin(
    job, slow, spares, why, caplog
):
    caplog.set_level(logging.WARNING)
    for job.saved in (10, 15, 20):
        assert job.due(slow, spares) == ""
    [text] = caplog.messages
    assert why in text
    assert "scontrol update nodename=n2 state=drain reason='slow: hpctrain'" in text


def test_checkpoints_that_cannot_be_listed_are_none(tmp_path, caplog):
    run = RunDir(tmp_path / "run")
    assert newest_save(run) is None
    (run.checkpoints / "step-0000000005").mkdir(parents=True)
    (run.checkpoints / "step-0000000010").mkdir()
    assert newest_save(run) == 10
    run.checkpoints.rename(tmp_path / "away")
    run.checkpoints.write_text("no folder")
    assert newest_save(run) is None
    assert "cannot be listed" in caplog.text

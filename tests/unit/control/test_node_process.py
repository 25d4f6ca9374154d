"""What node processes leave behind, and what they do not take for left behind."""

from __future__ import annotations

import os
import time

import pytest

from hpctrain.control import node_process
from hpctrain.control.node_process import ANSWER_S, PREFIX
from tests.support.control_tree import ControlTree


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(node_process, "MEMORY", tmp_path)
    return tmp_path


def made_ago(folder, seconds):
    folder.mkdir()
    (folder / "board").touch()
    os.utime(folder, (time.time() - seconds,) * 2)
    return folder


def test_the_round_of_an_agent_that_was_killed_is_removed(memory):
    left = made_ago(memory / f"{PREFIX}killed", seconds=ANSWER_S + 1)

    with ControlTree(1, 1):
        assert not left.exists()


def test_a_round_that_another_agent_is_about_to_begin_stays(memory):
    begun = made_ago(memory / f"{PREFIX}begun", seconds=0)

    with ControlTree(1, 1):
        assert (begun / "board").exists()


def test_a_round_that_is_served_stays_however_old_it_is(memory):
    with ControlTree(1, 1) as served:
        os.utime(served.folder(0), (time.time() - 10 * ANSWER_S,) * 2)
        with ControlTree(1, 1):
            assert (served.folder(0) / "board").exists()

"""A script finds what PYTHONPATH names, also where the agent was started without it."""

from __future__ import annotations

import sys

from hpctrain.core.base.records import RankTask
from hpctrain.node.agent import ranks


def test_a_folder_that_the_run_names_is_searched_before_the_agents_own(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/the/run:/of/the/agent:")
    monkeypatch.setattr(sys, "path", ["/of/the/agent", "/std"])
    task = RankTask("", "train.py", [], python_path=["/copy"])

    assert ranks.import_path(task) == ["/copy", "/of/the/run", "/of/the/agent", "/std"]

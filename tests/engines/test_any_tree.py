"""Random trees of the closed set of types go through real saves and restores, at any ranks.

Each tree lies in everything that a program may put one into: what is tracked, the optimizer's state
of a parameter, and a value of a parameter group. tests/unit/checkpoint/test_values.py has the codec
alone.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gloo import launch
from tests.support.resumed import start
from tests.support.value_trees import TREES, facts

RANKS_SAVING = 2
TREES_AT_ONCE = 24
"""That go through one save of several ranks: a start of ranks takes seconds."""


class Tracked:
    """Anything as tracked state."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"tree": self.value}

    def load_state_dict(self, state):
        self.value = state["tree"]


class Keeps(torch.optim.SGD):
    """An optimizer that keeps a tree for its parameter, and another one in its group."""

    def keep(self, state, value):
        parameter = self.param_groups[0]["params"][0]
        self.state[parameter]["kept"] = state
        self.param_groups[0]["own"] = value

    @property
    def kept(self):
        return next(iter(self.state.values()))["kept"], self.param_groups[0]["own"]


def goes_through(folder, trees):
    """What the run has after a step with the given trees; without any what it has restored."""

    def program(run, total):
        model = torch.nn.Linear(1, 1)
        optimizer = Keeps(model.parameters(), lr=0.1)
        kept = Tracked()
        run.track(model=model, optimizer=optimizer, kept=kept)
        for step in run.steps(total):
            if step:
                return facts((kept.value, *optimizer.kept))
            kept.value = trees[0]
            optimizer.keep(*trees[1:])
        return None

    return start(folder, program, 1 if trees else 2)


@st.composite
def thrice(draw):
    return [draw(TREES) for _ in range(3)]


def round_trip(made):
    trees = [tree.value for tree in made]
    expected = facts(tuple(trees))
    folder = Path(tempfile.mkdtemp())
    try:
        goes_through(folder, trees)
        assert goes_through(folder, None) == expected
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@settings(max_examples=12)
@given(thrice())
def test_a_tree_goes_on_as_it_was(trees):
    round_trip(trees)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=400)
@given(thrice())
def test_four_hundred_trees_go_on_as_they_were(trees):
    round_trip(trees)


def on_ranks(folder, trees):
    """Save the trees, or without any return the facts of what was restored, on each rank."""

    def program(run, total):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = Tracked(trees)
        run.track(model=model, optimizer=optimizer, kept=kept)
        for _ in run.steps(total):
            restored = facts(kept.value)
        return restored

    return start(folder, program, 1 if trees else 2)


@settings(max_examples=2)
@given(st.lists(TREES, min_size=TREES_AT_ONCE, max_size=TREES_AT_ONCE))
def test_trees_go_on_at_any_number_of_ranks(made):
    trees = [tree.value for tree in made]
    expected = facts(trees)
    folder = Path(tempfile.mkdtemp())
    try:
        launch(on_ranks, RANKS_SAVING, folder=folder, trees=trees)
        for ranks in (1, 2, 3):
            copied = shutil.copytree(folder, folder.with_name(f"{folder.name}-{ranks}"))
            try:
                assert launch(on_ranks, ranks, folder=copied, trees=None) == [expected] * ranks
            finally:
                shutil.rmtree(copied, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)

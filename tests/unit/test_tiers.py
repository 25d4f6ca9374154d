"""Each test is in one tier by its folder and marks, and what a tier leaves out is named."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from tests.support.tiers import SPECIAL, Tier, closing_line, divide, tier_of


@pytest.mark.parametrize(
    ("nodeid", "marks", "tier"),
    [
        ("tests/unit/plan/test_mesh.py::test_one", [], Tier.TEST),
        ("tests/docs/test_links.py::test_one", [], Tier.TEST),
        ("tests/engines/test_zero.py::test_one", [], Tier.CHECK),
        ("tests/e2e/test_demo.py::test_one", [], Tier.CHECK),
        ("tests/slurm/test_cancel.py::test_one", [], Tier.CHECK),
        ("tests/engines/test_zero.py::test_one", ["quick"], Tier.TEST),
        ("tests/unit/plan/test_mesh.py::test_one", ["check"], Tier.CHECK),
        ("tests/unit/plan/test_mesh.py::test_one", ["realtime", "quick"], Tier.CHECK),
        ("tests/unit/plan/test_mesh.py::test_one", ["soak"], Tier.SOAK),
        ("tests/engines/test_zero.py::test_one", ["quick", "soak"], Tier.SOAK),
        ("tests/slurm/test_cancel.py::test_one", ["slurm", "soak"], Tier.SOAK),
        ("tests/slurm/test_cancel.py::test_one", ["slurm", "story"], Tier.SOAK),
    ],
)
def test_the_tier_follows_from_folder_and_marks(nodeid, marks, tier):
    assert tier_of(nodeid, marks) is tier


@pytest.mark.parametrize("need", SPECIAL)
def test_what_needs_something_special_is_never_in_make_test(need):
    assert tier_of("tests/unit/plan/test_mesh.py::test_one", [need]) is Tier.CHECK
    assert tier_of("tests/engines/test_zero.py::test_one", ["quick", need]) is Tier.CHECK


def item(nodeid, *marks):
    """A test as pytest collects it, as far as tiers look at it."""
    return SimpleNamespace(
        nodeid=nodeid, iter_markers=lambda: [SimpleNamespace(name=name) for name in marks]
    )


ITEMS = [
    item("tests/slurm/test_a.py::test_1", "slurm"),
    item("tests/unit/test_b.py::test_2"),
    item("tests/slurm/test_a.py::test_3", "slurm", "soak"),
    item("tests/unit/test_b.py::test_4", "two_users", "strace"),
    item("tests/engines/test_c.py::test_5"),
]


def test_a_tier_keeps_the_order_and_loses_no_test():
    chosen, left, counts = divide(ITEMS, Tier.TEST)

    assert chosen == [ITEMS[1]]
    assert left == [ITEMS[0], ITEMS[2], ITEMS[3], ITEMS[4]]
    assert counts == {"SLURM": 1, "soak": 1, "strace": 1, "long runs": 1}
    assert divide(ITEMS, Tier.CHECK)[:2] == ([*ITEMS[:2], *ITEMS[3:]], [ITEMS[2]])
    assert divide(ITEMS, Tier.SOAK)[:2] == (ITEMS, [])


def test_one_line_says_what_was_left_out_and_which_command_runs_it():
    line = closing_line(Counter({"SLURM": 62, "a browser": 3, "soak": 7}))

    assert line == (
        "not run here: 65 tests of `make check` (62 SLURM, 3 a browser), 7 of `make soak`"
    )
    assert closing_line(Counter({"soak": 7})) == "not run here: 7 of `make soak`"
    assert closing_line(Counter()) == ""

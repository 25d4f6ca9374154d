"""What no room but `scheduler` and `entry` says: which schedulers there are, and SLURM's words."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.base import SCHEDULERS
from hpctrain.cluster.scheduler.slurm.jobs import FINISHED, STATES
from hpctrain.core.base.records import JobState

pytestmark = pytest.mark.check  # reads all of hpctrain's syntax trees

PACKAGE = Path(__file__).parents[2] / "hpctrain"
INSIDE = ("cluster/scheduler/", "entry/")
SAID = frozenset(JobState) | FINISHED | STATES.keys() | {"SIGNALING", "SUSPENDED", "RESIZING"}


def outside():
    """The syntax tree of each module that stands outside, but for where the states are made."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if not str(name).startswith(INSIDE) and str(name) != "core/base/records.py":
            yield name, ast.parse(path.read_text())


def states_in(tree):
    """Strings that are a scheduler's state; also those that only begin with one, as sacct's do."""
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in SAID
    ]


def branches_in(tree):
    """Comparisons of a cluster with a scheduler's name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and "cluster" in (text := ast.unparse(node)):
            said = {child.value for child in ast.walk(node) if isinstance(child, ast.Constant)}
            found += [(node.lineno, text)] if said & SCHEDULERS.keys() else []
    return found


def lists_in(tree):
    """Lists and tables that name every scheduler."""
    kinds = (ast.List, ast.Tuple, ast.Set, ast.Dict)
    return [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(tree)
        if isinstance(node, kinds)
        and {"slurm", "local"}
        <= {child.value for child in ast.iter_child_nodes(node) if isinstance(child, ast.Constant)}
    ]


@pytest.mark.parametrize("rule", [states_in, branches_in, lists_in])
def test_nothing_outside_of_the_seam_knows_a_scheduler(rule):
    assert [f"{name}:{line} {said}" for name, tree in outside() for line, said in rule(tree)] == []


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (states_in, "now = job.state in {'REQUEUE_HOLD'}"),
        (branches_in, "x = 1 if spec.cluster == 'slurm' else 2"),
        (branches_in, "x = cluster not in ('local', 'y')"),
        (lists_in, "click.Choice(['slurm', 'local'])"),
    ],
)
def test_the_rules_see_it(rule, code):
    assert rule(ast.parse(code))

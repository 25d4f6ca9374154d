"""Environment variables of ours have one place in the code, which says who sets and reads each."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm.command import clean
from hpctrain.core.base import env

pytestmark = pytest.mark.check  # reads all of hpctrain's syntax trees

TOP = Path(__file__).parents[2]
SOURCE = Path(env.__file__)
WORDS = re.compile(r"(?P<what>.*)\. Set by (?P<set>.*); read by (?P<read>.*)\.")


def documented():
    """Each constant's name with its docstring on one line."""
    body = ast.parse(SOURCE.read_text()).body
    found = {}
    for node, following in itertools.pairwise(body):
        if isinstance(node, ast.Assign) and node.targets[0].id.startswith("HPCTRAIN_"):
            assert isinstance(following, ast.Expr), f"{node.targets[0].id} has no docstring"
            found[node.targets[0].id] = " ".join(following.value.value.split())
    return found


def literals(path):
    """Strings of a module that name a variable of ours; docstrings may."""
    tree = ast.parse(path.read_text())
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        f"{path.relative_to(TOP)}:{node.lineno} {node.value!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and "HPCTRAIN_" in node.value
        and id(node) not in said
    ]


def test_no_other_module_writes_a_name_out():
    others = [path for path in (TOP / "hpctrain").rglob("*.py") if path != SOURCE]

    assert [found for path in others for found in literals(path)] == []


def test_each_constant_has_the_name_that_it_stands_for():
    assert {name: getattr(env, name).removesuffix("_") for name in documented()} == {
        name: name for name in documented()
    }


def test_each_constant_says_who_sets_and_who_reads_it():
    assert documented()
    for name, text in documented().items():
        assert WORDS.fullmatch(text) is not None, f"{name}: {text}"


def test_what_shell_scripts_name_is_known_here():
    scripts = [TOP / "sbatch" / name for name in ("body.sh", "preflight.sh")]
    named = {name for path in scripts for name in re.findall(r"HPCTRAIN_\w+", path.read_text())}

    assert named <= env.OF_ONE_JOB


def test_what_users_set_reaches_the_job_and_what_a_job_sets_does_not():
    assert "HPCTRAIN_ATTEMPT_DIR" in env.OF_ONE_JOB
    assert {"HPCTRAIN_RUNS", "HPCTRAIN_SITE", "HPCTRAIN_FAULTS"}.isdisjoint(env.OF_ONE_JOB)


def test_names_of_files_through_which_processes_speak_are_the_layouts_own():
    """But for the batch script's helper, which starts without what the layout imports."""
    layout, helper = "hpctrain/ledger/run/layout.py", "hpctrain/entry/slurm_batch.py"
    shared = ("events.jsonl", "outcome.json", "environment.json", "heartbeat.json", "spec.json")
    names = re.compile("|".join([*(rf'"{re.escape(name)}"' for name in shared),
                                 r'f"(?:failure|torch-error)-\{', r'f"rank-.*\.log"']))  # fmt: skip
    written = {
        str(path.relative_to(TOP))
        for path in (TOP / "hpctrain").rglob("*.py")
        if names.search(path.read_text())
    }

    assert written == {layout, helper}


def test_a_submit_from_inside_a_job_takes_nothing_of_that_job_along():
    inside = dict.fromkeys(env.OF_ONE_JOB, "1")

    assert clean({**inside, "HPCTRAIN_RUNS": "/runs"}).env == {"HPCTRAIN_RUNS": "/runs"}

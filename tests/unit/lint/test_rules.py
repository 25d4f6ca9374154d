"""Each rule finds what it is about, nothing that only looks like it, and no other rule does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hpctrain.lint.catalogue import RULES
from hpctrain.lint.check import EVERY_RULE, RuleChoice, check_text

_spec = importlib.util.spec_from_file_location("lint_cases", Path(__file__).with_name("cases.py"))
_cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_cases)
CASES = _cases.CASES
BAD = [case for case in CASES if case.kind == "bad"]
CLEAN = [case for case in CASES if case.kind != "bad"]
LEVELS = ("error", "warning")


def codes(case, choice=EVERY_RULE):
    return {one.rule.code for one in check_text(case.text, case.path, choice, cpus=case.cpus)}


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.label)
def test_a_rule_finds_what_it_is_about(case):
    assert case.code in codes(case)


@pytest.mark.parametrize("case", CLEAN, ids=lambda case: case.label)
def test_a_rule_leaves_what_is_right_or_only_looks_wrong(case):
    assert case.code not in codes(case)


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.label)
def test_no_other_rule_would_find_it(case):
    """A rule that is switched off is missed: nothing tells of that place in its stead."""
    found = check_text(case.text, case.path, cpus=case.cpus)
    places = {one.line for one in found if one.rule.code == case.code}

    left = check_text(case.text, case.path, RuleChoice(ignore=(case.code,)), cpus=case.cpus)

    assert [one for one in left if one.rule.level in LEVELS and one.line in places] == []


def test_a_loop_is_told_of_once():
    text = "for x in data:\n    loss.backward()\n    print(loss.item(), norm.item())\n"

    assert [one.rule.code for one in check_text(text, "program.py")] == ["HT205"]


def test_every_rule_has_its_cases():
    by_kind = {"bad": set(), "good": set(), "near": set()}
    for case in CASES:
        by_kind[case.kind].add(case.code)

    assert by_kind == {kind: set(RULES) for kind in by_kind}


@pytest.mark.parametrize("case", CLEAN, ids=lambda case: case.label)
def test_nothing_false_is_called_an_error(case):
    errors = [one for one in check_text(case.text, case.path) if one.rule.level == "error"]

    assert errors == []

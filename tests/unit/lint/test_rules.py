"""Each rule finds what it is about, nothing that only looks like it, and no other rule does."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.advise.lint.check import EVERY_RULE, RuleChoice, check_text
from hpctrain.advise.lint.patterns import check_patterns, packaged_patterns
from hpctrain.advise.lint.reporting import ProgramFacts
from hpctrain.advise.lint.rule import PRELUDE, ROWS, RULES, read_rules
from hpctrain.advise.lint.syntax import ProgramSyntax

_spec = importlib.util.spec_from_file_location("lint_cases", Path(__file__).with_name("cases.py"))
_cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_cases)
CASES = _cases.CASES
BAD = [case for case in CASES if case.kind == "bad"]
CLEAN = [case for case in CASES if case.kind != "bad"]
LEVELS = ("error", "warning")
PROGRAMS = {row.rule.code: row.programs for row in ROWS}
PATTERNS = packaged_patterns()


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


def test_what_holds_of_a_whole_program_is_told_once():
    wrap = "from torch.distributed.fsdp import FullyShardedDataParallel\n"
    text = wrap + "FullyShardedDataParallel(a)\nb = FullyShardedDataParallel(a)\n"

    found = [one for one in check_text(text, "program.py") if one.rule.code == "HT404"]

    assert [one.line for one in found] == [2]


def test_every_rule_has_its_cases():
    by_kind = {"bad": set(), "good": set(), "near": set()}
    for case in CASES:
        by_kind[case.kind].add(case.code)

    assert by_kind == {kind: set(RULES) for kind in by_kind}


@pytest.mark.parametrize("case", CLEAN, ids=lambda case: case.label)
def test_nothing_false_is_called_an_error(case):
    errors = [one for one in check_text(case.text, case.path) if one.rule.level == "error"]

    assert errors == []


def found_by(patterns, text):
    facts = ProgramFacts(ProgramSyntax(PRELUDE + text, "program.py"))
    return {one.rule.code for one in check_patterns(facts, tuple(patterns))}


@pytest.mark.parametrize("number", range(len(PATTERNS)))
def test_a_pattern_that_is_switched_off_is_missed(number):
    """Each `find` table has a bad program of its rule that no other table finds."""
    code = PATTERNS[number].code
    others = [one for at, one in enumerate(PATTERNS) if at != number]

    missed = [text for text in PROGRAMS[code]["bad"] if code not in found_by(others, text)]

    assert missed


def without_a_condition():
    """Each pattern with one of its conditions left out: an argument, a word, a whole list."""
    nothing = {
        "mentions": (),
        "mentions_not": (),
        "calls_not": (),
        "says_not": (),
        "imports_not": (),
    }
    nothing |= {"names_not": "", "texts_not": "", "value": None, "by_default": False}
    for number, pattern in enumerate(PATTERNS):
        for key in ("args", "file", "place"):
            values = getattr(pattern, key)
            for at in range(len(values)):
                fewer = {key: values[:at] + values[at + 1 :]}
                yield number, replace(pattern, **fewer), f"{key}-{at}"
        for key in [key for key in nothing if getattr(pattern, key)]:
            yield number, replace(pattern, **{key: nothing[key]}), key
        if any(test.place is not None for test in pattern.args):
            by_keyword = tuple(replace(test, place=None) for test in pattern.args)
            yield number, replace(pattern, args=by_keyword), "places"


@pytest.mark.parametrize(
    ("number", "changed"),
    [
        pytest.param(number, changed, id=f"{changed.code}-{number}-{what}")
        for number, changed, what in without_a_condition()
    ],
)
def test_a_condition_that_is_left_out_is_missed(number, changed):
    """Each condition of a `find` table decides about one of its rule's programs."""
    programs = [text for kind in PROGRAMS[changed.code].values() for text in kind]
    own = [one for one in PATTERNS if one.code == changed.code]
    others = [changed if one is PATTERNS[number] else one for one in own]

    assert [found_by(own, text) for text in programs] != [
        found_by(others, text) for text in programs
    ]


def test_a_rule_with_patterns_has_its_programs_in_its_row():
    assert {row.rule.code for row in ROWS if row.finds} == {
        code for code, programs in PROGRAMS.items() if all(programs.values())
    }


def test_a_field_that_no_rule_has_is_refused():
    row = '[[rule]]\ncode = "HT999"\nnivel = "error"\n'

    with pytest.raises(ValueError, match="HT999: no rule has a field nivel"):
        read_rules(row)


def test_an_argument_that_a_star_may_hide_is_neither_there_nor_absent():
    absent = [one for one in PATTERNS if one.code == "HT604"]

    assert found_by(absent, "dist.init_process_group()\ntorch.load(*args)\n") == set()
    assert found_by(absent, "dist.init_process_group()\ntorch.load(path, **options)\n") == set()
    assert found_by(absent, "dist.init_process_group()\ntorch.load(path)\n") == {"HT604"}

"""A list of answers: its exit code, its screen, its JSON."""

from __future__ import annotations

import json

import pytest

from hpctrain.advise.check.forecast import (
    FAIL,
    NOT_KNOWN,
    NOTE,
    OK,
    CheckLine,
    CheckList,
    summary,
    text_lines,
)


@pytest.mark.parametrize(
    ("statuses", "refusal", "code"),
    [
        ([OK, NOTE, NOT_KNOWN], 0, 0),
        ([OK, FAIL], 0, 3),
        ([FAIL], 4, 4),
        ([], 0, 0),
    ],
)
def test_the_exit_code_is_submits_else_3_where_a_check_failed(statuses, refusal, code):
    lines = [CheckLine("a", status, "b") for status in statuses]

    assert CheckList(lines, refusal=refusal).exit_code == code


def test_strict_lets_a_note_fail():
    notes = CheckList([CheckLine("a", NOTE, "b")])

    assert notes.exit_code == 0
    notes.strict = True
    assert notes.exit_code == 3
    assert CheckList([CheckLine("a", NOT_KNOWN, "b")], strict=True).exit_code == 0


def test_a_line_has_its_answer_evidence_and_what_to_do():
    lines = [CheckLine("disk", FAIL, "full", "make room"), CheckLine("preset", OK, "fine", "no")]

    assert [text for text, _ in text_lines(lines)] == [
        "fail       disk    full",
        "                   -> make room",
        "ok         preset  fine",
    ]
    assert [status for _, status in text_lines(lines)] == [FAIL, "", OK]


def test_the_last_line_counts_and_names_the_exit_code():
    lines = [CheckLine("a", one, "b") for one in (OK, FAIL, NOTE, NOTE, NOT_KNOWN)]

    assert summary(CheckList(lines)) == "1 failed, 2 notes, 1 not known in 5 checks: exit code 3"
    assert summary(CheckList(lines[:1])) == "all is well in 1 check: exit code 0"


def test_json_has_all_of_it():
    plain = CheckList([CheckLine("a", NOTE, "b", seconds=1.5)], name="train.py").plain()

    assert json.loads(json.dumps(plain)) == plain
    assert plain["program"] == "train.py"
    assert (plain["exit_code"], plain["failed"], plain["notes"], plain["not_known"]) == (0, 0, 1, 0)
    assert plain["checks"][0]["seconds"] == 1.5

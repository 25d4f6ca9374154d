"""A program with 29 defects, after those that other linters were tried on: each is found."""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain.advise.lint.check import check_text

TEXT = Path(__file__).with_name("planted.txt").read_text()
PLANTED = {
    int(number): (code, line)
    for line, text in enumerate(TEXT.splitlines(), start=1)
    for number, code in re.findall(r"# (\d+) (HT\d{3})", text)
}
HANG = {17, 18, 19, 24, 26}
"""Those at which ranks wait for each other, or fall."""


def test_there_are_29():
    assert sorted(PLANTED) == list(range(1, 30))


def test_each_is_found_at_its_line():
    found = {(one.rule.code, one.line) for one in check_text(TEXT, "planted.py")}

    assert {number: place for number, place in PLANTED.items() if place not in found} == {}


def test_those_that_hang_are_errors():
    levels = {(one.rule.code, one.line): one.rule.level for one in check_text(TEXT, "planted.py")}

    assert {levels[PLANTED[number]] for number in HANG} == {"error"}


def test_nothing_else_is_found_but_what_follows_from_them():
    """No time-out of its own, a load without map_location: hints of the same lines."""
    beside = {
        (one.rule.code, one.line)
        for one in check_text(TEXT, "planted.py")
        if (one.rule.code, one.line) not in PLANTED.values()
    }

    assert {code for code, _ in beside} == {"HT508", "HT604"}

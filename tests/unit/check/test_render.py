"""JUnit's XML and SARIF: both can be read, and say of each check what the list says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.parse import unquote_to_bytes
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from hpctrain.advise.check.forecast import CheckLine, CheckList, junit, sarif
from hpctrain.advise.lint.check import check_text
from tests.support.fuzzing import Faults, cases, chances, odd_text

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "data" / "sarif-2.1.0-part.schema.json").read_text()
)
VALIDATOR = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)
HANGS = "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n"


@pytest.fixture
def checks():
    lines = [
        CheckLine("submit", "ok", "fine", seconds=1.5),
        CheckLine("submit", "note", 'a <b> & "c" \x1b[31m\x00', "do this"),
        CheckLine("imports", "fail", "no einops", "install it", "src/my train.py", 7),
        CheckLine("lint", "fail", "train.py:3 HT101", path="train.py", line=3),
        CheckLine("disk", "not known", "nobody knows"),
        CheckLine("space", "fail", "full"),
    ]
    return CheckList(lines, check_text(HANGS, "train.py"), name="train.py", place="train.py")


def test_junit_has_a_case_for_each_line_and_counts_them(checks):
    suite = ET.fromstring(junit(checks)).find("testsuite")  # noqa: S314 - our own

    assert {name: suite.get(name) for name in ("tests", "failures", "skipped", "time")} == {
        "tests": "6",
        "failures": "3",
        "skipped": "1",
        "time": "1.500",
    }
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == [
        *("submit", "submit (2)", "imports", "lint", "disk", "space")
    ]
    assert [[child.tag for child in case] for case in cases] == [
        *(["system-out"], ["system-out"], ["failure"], ["failure"], ["skipped"], ["failure"])
    ]
    failure = cases[2].find("failure")
    assert (failure.get("message"), failure.text) == ("no einops", "no einops\ninstall it")
    assert (cases[2].get("file"), cases[2].get("line")) == ("src/my train.py", "7")
    assert cases[1].find("system-out").text == 'note: a <b> & "c" ?[31m?\ndo this'


def test_sarif_has_lints_findings_and_the_other_checks(checks):
    log = sarif(checks)

    jsonschema.validate(log, SCHEMA)
    of_lint, of_checks = log["runs"]
    assert [one["ruleId"] for one in of_lint["results"]] == ["HT101"]
    places = {
        one["ruleId"]: (
            one["level"],
            one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"],
            one["locations"][0]["physicalLocation"]["region"]["startLine"],
        )
        for one in of_checks["results"]
    }
    assert places == {
        "check/submit": ("warning", "train.py", 1),
        "check/imports": ("error", "src/my%20train.py", 7),
        "check/space": ("error", "train.py", 1),
    }
    rules = of_checks["tool"]["driver"]["rules"]
    for one in of_checks["results"]:
        assert rules[one["ruleIndex"]]["id"] == one["ruleId"]


def test_sarif_of_a_list_without_a_program_has_no_places(checks):
    checks.place = ""

    last = sarif(checks)["runs"][1]["results"][-1]

    assert (last["ruleId"], "locations" in last) == ("check/space", False)


def test_strict_lets_a_note_fail():
    notes = CheckList([CheckLine("a", "note", "b")])

    assert notes.exit_code == 0
    notes.strict = True
    assert notes.exit_code == 3
    assert CheckList([CheckLine("a", "not known", "b")], strict=True).exit_code == 0


@cases(short=30, long=1000)
def test_whatever_a_name_holds_both_can_be_read(begin, end):
    faults = Faults()
    for number, chance in chances(begin, end):
        faults.of(f"case {number}", lambda chance=chance: read_back(odd_checks(chance)))

    assert faults.found == []


def odd_name(chance):
    """A name of a file, as Python gives it: also one whose bytes are no text."""
    raw = chance.choice((b"\xff\xfe.py", chance.randbytes(6), odd_text(chance).encode("utf-16")))
    return chance.choice((os.fsdecode(raw.replace(b"\0", b"")), odd_text(chance), "\ud800", ""))


def odd_checks(chance):
    lines = [
        CheckLine(
            chance.choice(("submit", "lint", odd_text(chance))),
            chance.choice(("ok", "note", "fail", "not known")),
            odd_text(chance),
            odd_text(chance),
            odd_name(chance),
            chance.choice((0, -1, 7, 2**70)),
        )
        for _ in range(chance.randrange(5))
    ]
    name = odd_name(chance)
    return CheckList(lines, check_text(HANGS, odd_name(chance) or "x.py"), name=name, place=name)


def read_back(checks):
    """Both as their readers see them: XML and JSON in UTF-8, each check and each path in it."""
    xml = junit(checks).encode()
    suite = ET.fromstring(xml).find("testsuite")  # noqa: S314 - our own
    assert len(suite.findall("testcase")) == len(checks.lines)
    log = json.loads(json.dumps(sarif(checks)).encode())
    VALIDATOR.validate(log)
    for result in log["runs"][0]["results"]:
        path = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert path.isascii()
        assert not set(path) & set(' \\<>"\n\0')


def test_a_path_whose_bytes_are_no_text_is_named_by_its_bytes(checks):
    path = os.fsdecode(b"\xff a%20/b.py")

    (result,) = sarif(CheckList([], check_text(HANGS, path), name=path, place=path))["runs"][0][
        "results"
    ]

    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == "%FF%20a%2520/b.py"
    assert unquote_to_bytes(uri) == os.fsencode(path)

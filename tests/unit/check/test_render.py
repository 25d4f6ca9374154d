"""JUnit's XML and SARIF: both can be read, and say of each check what the list says."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from hpctrain.check.lines import CheckLine, CheckList
from hpctrain.check.render import junit, sarif
from hpctrain.lint.check import check_text

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "data" / "sarif-2.1.0-part.schema.json").read_text()
)
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

"""The list as pipelines read it: JUnit's XML for their table of tests, SARIF for their code view.

tests/unit/check/test_render.py holds the promises.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from hpctrain.base import VERSION
from hpctrain.check.lines import FAIL, NOT_KNOWN, NOTE
from hpctrain.lint.render import sarif as sarif_of_lint
from hpctrain.lint.render import uri_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.check.lines import CheckLine, CheckList

NAME = "hpctrain check"
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SARIF_LEVELS = {FAIL: "error", NOTE: "warning"}
_OF_LINT = "lint"


def junit(checks: CheckList) -> str:
    """The list as one suite of JUnit's: what failed is a failure, what is not known is skipped."""
    suite = ET.Element(
        "testsuite",
        {
            "name": _plain(f"{NAME}: {checks.name}"),
            "tests": str(len(checks.lines)),
            "failures": str(checks.number(FAIL)),
            "errors": "0",
            "skipped": str(checks.number(NOT_KNOWN)),
            "time": f"{sum(line.seconds for line in checks.lines):.3f}",
        },
    )
    for name, line in zip(_names(checks.lines), checks.lines, strict=True):
        _add_case(suite, name, line)
    top = ET.Element("testsuites", {"name": NAME})
    top.append(suite)
    ET.indent(top)
    return ET.tostring(top, encoding="unicode", xml_declaration=True) + "\n"


def _names(lines: Sequence[CheckLine]) -> list[str]:
    """One for each: several lines of a check are numbered, as tables of tests know them by name."""
    seen: Counter[str] = Counter()
    names = []
    for line in lines:
        seen[line.check] += 1
        number = seen[line.check]
        names.append(line.check if number == 1 else f"{line.check} ({number})")
    return names


def _add_case(suite: ET.Element, name: str, line: CheckLine) -> None:
    attributes = {
        "classname": "hpctrain.check",
        "name": _plain(name),
        "time": f"{line.seconds:.3f}",
    }
    if line.path:
        attributes["file"] = _plain(line.path)
        attributes["line"] = str(max(line.line, 1))
    case = ET.SubElement(suite, "testcase", attributes)
    text = _plain("\n".join(filter(None, [line.message, line.hint])))
    if line.status == FAIL:
        ET.SubElement(case, "failure", {"message": _plain(line.message)}).text = text
    elif line.status == NOT_KNOWN:
        ET.SubElement(case, "skipped", {"message": _plain(line.message)})
    else:
        ET.SubElement(case, "system-out").text = f"{line.status}: {text}"


def _plain(text: str) -> str:
    """Text without what XML cannot hold."""
    return _NOT_XML.sub("?", text)


def sarif(checks: CheckList) -> dict[str, Any]:
    """What lint has found, and in a run of its own what other checks failed or noted."""
    log = sarif_of_lint(checks.findings)
    lines = [
        line for line in checks.lines if line.status in _SARIF_LEVELS and line.check != _OF_LINT
    ]
    rules = list(dict.fromkeys(_rule_id(line.check) for line in lines))
    log["runs"].append(
        {
            "tool": {
                "driver": {
                    "name": NAME,
                    "version": VERSION,
                    "rules": [{"id": rule} for rule in rules],
                }
            },
            "columnKind": "unicodeCodePoints",
            "results": [
                _result(line, rules.index(_rule_id(line.check)), checks.place) for line in lines
            ],
        }
    )
    return log


def _rule_id(check: str) -> str:
    return "check/" + re.sub(r"[^a-z0-9]+", "-", check.lower()).strip("-")


def _result(line: CheckLine, rule: int, place: str) -> dict[str, Any]:
    """A result; what has no place of its own is shown at the program's first line."""
    hint = f". {line.hint}" if line.hint else ""
    result: dict[str, Any] = {
        "ruleId": _rule_id(line.check),
        "ruleIndex": rule,
        "level": _SARIF_LEVELS[line.status],
        "message": {"text": f"{line.message}{hint}"},
    }
    path = line.path or place
    if path:
        physical = {
            "artifactLocation": {"uri": uri_of(path)},
            "region": {"startLine": max(line.line, 1)},
        }
        result["locations"] = [{"physicalLocation": physical}]
    return result

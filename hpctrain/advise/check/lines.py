"""A check's answer and the list of all answers, also as JUnit XML and as SARIF. Pure.

tests/unit/check/test_lines.py and test_render.py hold the promises.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from hpctrain.advise.lint.render import sarif as sarif_of_lint
from hpctrain.advise.lint.render import uri_of
from hpctrain.core.base import VERSION
from hpctrain.core.base.text import count
from hpctrain.errors import ChecksFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.advise.lint.rule import LintFinding


OK, NOTE, FAIL, NOT_KNOWN = "ok", "note", "fail", "not known"
STATUSES = (OK, NOTE, FAIL, NOT_KNOWN)
FORMAT = 1


@dataclass(frozen=True)
class CheckLine:
    """One check's answer.

    Attributes:
        check: Which.
        status: ok; note: worth a look; fail: the run would be refused, fail or lose its work;
            not known: nobody can say before a run, or it could not be read.
        message: What was found, with its value and where that came from.
        hint: What to do.
        path: The file that it is about, as seen from where the command was called.
        line: In it, 0 for all of it.
        seconds: How long the check took, where that is worth telling.
    """

    check: str
    status: str
    message: str
    hint: str = ""
    path: str = ""
    line: int = 0
    seconds: float = 0.0


@dataclass
class CheckList:
    """All answers, in the order in which they were found.

    Attributes:
        lines: The answers.
        findings: What lint has found, for SARIF.
        refusal: The exit code with which `submit` would refuse, 0 where it would not.
        name: What is checked: the program, or the shipped recipe.
        place: The program's file, as seen from where the command was called; "" where it has none.
        strict: Notes fail too.
        tells: Whether the program calls hpctrain; None where nobody knows.
    """

    lines: list[CheckLine] = field(default_factory=list)
    findings: list[LintFinding] = field(default_factory=list)
    refusal: int = 0
    name: str = ""
    tells: bool | None = None
    place: str = ""
    strict: bool = False

    def number(self, status: str) -> int:
        """How many checks have that answer."""
        return sum(one.status == status for one in self.lines)

    @property
    def exit_code(self) -> int:
        """That of submit's refusal, else 3 where a check failed, else 0."""
        failed = self.number(FAIL) or (self.strict and self.number(NOTE))
        return self.refusal or (ChecksFailed.exit_code if failed else 0)

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "format": FORMAT,
            "program": self.name,
            "exit_code": self.exit_code,
            "failed": self.number(FAIL),
            "notes": self.number(NOTE),
            "not_known": self.number(NOT_KNOWN),
            "checks": [asdict(one) for one in self.lines],
        }


def text_lines(lines: list[CheckLine]) -> Iterator[tuple[str, str]]:
    """(text, status) for each line of the screen."""
    wide = max((len(one.check) for one in lines), default=0)
    room = max(len(status) for status in STATUSES)
    for line in lines:
        took = f" ({line.seconds:.1f} s)" if line.seconds else ""
        yield f"{line.status:{room}}  {line.check:{wide}}  {line.message}{took}", line.status
        if line.hint and line.status != OK:
            yield f"{'':{room}}  {'':{wide}}  -> {line.hint}", ""


def summary(checks: CheckList) -> str:
    """The last line."""
    parts = [f"{checks.number(FAIL)} failed"] if checks.number(FAIL) else []
    parts += [count(checks.number(NOTE), "note")] if checks.number(NOTE) else []
    parts += [f"{checks.number(NOT_KNOWN)} not known"] if checks.number(NOT_KNOWN) else []
    what = ", ".join(parts) or "all is well"
    return f"{what} in {count(len(checks.lines), 'check')}: exit code {checks.exit_code}"


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
        "classname": "hpctrain.advise.check",
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

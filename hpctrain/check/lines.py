"""A check's answer, and the list of all of them. Pure.

tests/unit/check/test_lines.py holds the promises.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hpctrain.base.text import count
from hpctrain.errors import ChecksFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.lint.rule import LintFinding

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

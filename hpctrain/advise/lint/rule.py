"""What a rule is, what it finds, and how the text would be fixed.

tests/unit/lint/test_rules.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("error", "warning", "info")
"""The worst first: hangs or computes something else; likely wrong or dear; worth knowing."""
DOCS = "docs/check.md"


@dataclass(frozen=True)
class LintRule:
    """One thing that a program should not do."""

    code: str
    level: str
    name: str
    """In a few words, as a heading of docs/check.md."""
    why: str
    """What comes of it."""
    remedy: str
    """What to write instead."""
    mends: bool = False
    """Whether `--fix` may change it."""

    @property
    def anchor(self) -> str:
        """Where docs/check.md tells of it."""
        return f"{DOCS}#{self.code.lower()}"


@dataclass(frozen=True, order=True)
class SourceEdit:
    """A piece of the text, in bytes from its beginning, and what comes in its place."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class LintFinding:
    """One place at which a rule does not hold."""

    rule: LintRule
    path: str
    line: int
    """From 1; 0 where no line is meant."""
    column: int
    """From 1, in characters."""
    end_line: int
    message: str
    evidence: str = ""
    """The line of the source."""
    edits: tuple[SourceEdit, ...] = ()
    """What would mend it for certain."""

    @property
    def place(self) -> tuple[str, int, int, str]:
        """By which findings are sorted."""
        return (self.path, self.line, self.column, self.rule.code)


def finding_plain(finding: LintFinding) -> dict[str, object]:
    """A finding as JSON has it."""
    rule = finding.rule
    return {
        "code": rule.code,
        "level": rule.level,
        "path": finding.path,
        "line": finding.line,
        "column": finding.column,
        "end_line": finding.end_line,
        "message": finding.message,
        "evidence": finding.evidence,
        "why": rule.why,
        "remedy": rule.remedy,
        "docs": rule.anchor,
        "fixable": bool(finding.edits),
    }

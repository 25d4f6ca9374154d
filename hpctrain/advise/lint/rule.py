"""What a rule is, all rules as rules/*.toml has them, and what one finds.

HT0 the check itself, HT1 ranks that part, HT2 numbers, HT3 data, HT4 interfaces that torch has left
behind, HT5 the cluster, HT6 checkpoints, HT7 configurations. docs/check.md has a section for each;
tests/docs/test_lint_page.py holds them against each other. `lint.patterns` finds a rule that has
`find` tables, modules of Python find all others.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

LEVELS = ("error", "warning", "info")
"""The worst first: hangs or computes something else; likely wrong or expensive; worth knowing."""
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

    @property
    def anchor(self) -> str:
        """Where docs/check.md tells of it."""
        return f"{DOCS}#{self.code.lower()}"


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
    }


FOLDER = Path(__file__).with_name("rules")
FILES = ("check", "ranks", "numbers", "data", "torch", "cluster", "checkpoints", "configurations")
KINDS = ("bad", "good", "near")
"""Programs of a rule: it must find the bad ones, and neither the good ones nor those that only look
alike. Each begins with `PRELUDE`."""
PRELUDE = "import os\nimport torch\nimport torch.distributed as dist\n"


@dataclass(frozen=True)
class RuleRow:
    """One row of a file of rules: the rule, its patterns, and its programs by kind.

    A rule without patterns has no programs here; its programs are in the tests.
    """

    rule: LintRule
    finds: tuple[dict[str, Any], ...]
    programs: dict[str, tuple[str, ...]]


def read_rules(text: str) -> list[RuleRow]:
    """The rows of a file of rules.

    Raises:
        ValueError: a row has a field that no rule has.
    """
    own = {one.name for one in fields(LintRule)}
    rows = []
    for row in tomllib.loads(text)["rule"]:
        if odd := row.keys() - own - {"find", *KINDS}:
            raise ValueError(f"{row.get('code')}: no rule has a field {min(odd)}")
        rule = LintRule(**{key: value for key, value in row.items() if key in own})
        programs = {kind: tuple(row.get(kind, ())) for kind in KINDS}
        rows.append(RuleRow(rule, tuple(row.get("find", ())), programs))
    return rows


ROWS = [row for name in FILES for row in read_rules((FOLDER / f"{name}.toml").read_text("utf-8"))]
RULES: dict[str, LintRule] = {row.rule.code: row.rule for row in ROWS}
"""By their codes, in the order of the page."""

"""All rules, read from rules/*.toml: code, level, what comes of it, what to write instead.

HT0 the check itself, HT1 ranks that part, HT2 numbers, HT3 data, HT4 interfaces that torch has left
behind, HT5 the cluster, HT6 checkpoints, HT7 configurations. docs/check.md has a section for each;
tests/docs/test_lint_page.py holds them against each other. A rule that has `find` tables is found by
`lint.patterns`, all others by a module of Python.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hpctrain.advise.lint.rule import LintRule

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

"""docs/check.md has a section for each rule, and says of it what the table of rules says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from hpctrain.advise.lint.rule import DOCS, RULES

TOP = Path(__file__).parents[2]
PAGE = TOP / "docs" / "check.md"


def test_the_rules_of_the_page_are_those_of_the_table():
    written = runpy.run_path(str(TOP / "docs" / "generate_lint.py"))["page"]()

    assert PAGE.read_text() == written, "run: make settings"


def test_each_rules_anchor_is_there():
    anchors = {
        f"{DOCS}#{name.lower()}"
        for name in re.findall(r"^#### (HT\d{3})$", PAGE.read_text(), re.MULTILINE)
    }

    assert {rule.anchor for rule in RULES.values()} == anchors


def test_the_hook_calls_what_there_is():
    hook = (TOP / ".pre-commit-hooks.yaml").read_text()

    assert "entry: hpctrain lint" in hook
    assert "id: hpctrain-lint" in hook

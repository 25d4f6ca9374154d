"""Writes the rules of docs/check.md from hpctrain/advise/lint/rules; `make settings` calls it.

tests/docs/test_lint_page.py fails where the page is not what this gives.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.advise.lint.rule import RULES

if TYPE_CHECKING:
    from hpctrain.advise.lint.rule import LintRule

PAGE = Path(__file__).with_name("check.md")
PART = re.compile(r"(<!-- rules: [^\n]*\n).*?(<!-- end of rules -->)", re.DOTALL)
FAMILIES = {
    "HT0": "The check itself",
    "HT1": "Ranks that diverge",
    "HT2": "Numbers",
    "HT3": "Data",
    "HT4": "Deprecated in torch",
    "HT5": "The cluster",
    "HT6": "Checkpoints",
    "HT7": "Configurations",
}


def page() -> str:
    """The whole page."""
    parts = ["\n## Rules\n"]
    for beginning, title in FAMILIES.items():
        parts.append(f"### {beginning}xx: {title}\n")
        parts += [_rule(rule) for code, rule in RULES.items() if code.startswith(beginning)]
    rules = "\n".join(parts)
    return PART.sub(lambda match: match[1] + rules + match[2], PAGE.read_text())


def _rule(rule: LintRule) -> str:
    return (
        f"#### {rule.code}\n\n"
        f"{rule.level.capitalize()}: {rule.name}. {rule.why} Instead: {rule.remedy}\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page())

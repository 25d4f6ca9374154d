"""What is known of each fault stands in its page too."""

from __future__ import annotations

from pathlib import Path

from hpctrain.advise.doctor.faults import FAULTS

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"


def test_the_page_has_each_code_with_its_words():
    page = PAGE.read_text()

    for kind, knowledge in FAULTS.items():
        row = f"| {knowledge.code} | `{kind}` | {knowledge.title} | {knowledge.do[0]} |"
        assert row.replace("|", "or") in page.replace("|", "or"), kind

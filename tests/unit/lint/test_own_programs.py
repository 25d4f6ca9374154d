"""What we train with and show to others is what the rules ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.advise.lint.check import check_text, files_to_check
from hpctrain.core.base.files import read_source

TOP = Path(__file__).parents[3]
AT_FAULT = "stalls.py"
"""An example of what lint finds (docs/staying-alive.md)."""
FOLDERS = (
    "examples",
    "demo",
    "hpctrain/recipes",
    "hpctrain/train/engines",
    "hpctrain/train/runtime",
)


def test_our_own_programs_have_neither_errors_nor_warnings():
    folders = [str(TOP / name) for name in FOLDERS]
    paths = list(files_to_check(folders, pytest.fail))

    findings = [
        one
        for path, folder in paths
        for one in check_text(read_source(path), str(path), folder=folder)
    ]

    assert len(paths) > 40
    worse = [one for one in findings if one.rule.level != "info"]
    assert [Path(one.path).name for one in worse] == [AT_FAULT]

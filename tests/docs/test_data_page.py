"""The examples of the page on data run, one after the other, as one program."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 3

    exec(compile("\n".join(blocks), str(PAGE), "exec"), {"__name__": "example"})  # noqa: S102

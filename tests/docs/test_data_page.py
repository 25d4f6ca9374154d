"""The examples of the page on data run, one after the other, as one program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


@pytest.mark.check
def test_the_examples_run(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 3

    # A process of its own: hpctrain.init() blocks signals in it for good.
    program = tmp_path / "example.py"
    program.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

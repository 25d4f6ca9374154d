"""The example of docs/api.md, as it stands, on the local cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.patience import PATIENCE_S

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_example_runs_as_it_stands(tmp_path, monkeypatch):
    [code] = re.findall(
        r"^<!-- test: run -->\n```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    said = done.stdout.splitlines()
    assert said[0] == "try"
    assert said[2] == str(tmp_path / "runs" / "try")
    assert "done 20 0" in said
    assert re.fullmatch(r"1 \w+ 0 20", said[-2])
    assert said[-1].startswith("no run or job 'tyr' in ")

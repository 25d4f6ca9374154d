"""What `make compiled` leaves in the caches is what pytest takes: no worker rewrites a file."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.compile_tests import cache_of, compile_all

TEST = "def test_a():\n    wanted = 1\n    assert wanted == 2\n"


def test_pytest_takes_what_was_compiled_and_its_failures_say_why(tmp_path):
    path = tmp_path / "test_a.py"
    path.write_text(TEST)
    compile_all([path])
    assert cache_of(path).exists()

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--debug=said", path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
    )

    assert "assert 1 == 2" in done.stdout
    said = (tmp_path / "said").read_text().splitlines()
    taken = [line for line in said if "test_a.py" in line and "rewrit" in line]
    assert taken
    assert all(
        "found cached rewritten pyc" in line or "matched test file" in line for line in taken
    )


def test_a_file_that_has_changed_is_compiled_anew(tmp_path):
    path = tmp_path / "test_a.py"
    path.write_text(TEST)
    compile_all([path])
    before = cache_of(path).read_bytes()

    compile_all([path])
    assert cache_of(path).read_bytes() == before
    path.write_text(TEST.replace("2", "3"))
    compile_all([path])

    assert cache_of(path).read_bytes() != before

"""Runs inside an image that has no command of SLURM's, on the real cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support import container_image

pytestmark = pytest.mark.container

LOOK = """
import json, pathlib, shutil, ssl, sqlite3, hpctrain
release = pathlib.Path("/etc/os-release").read_text()
print(json.dumps([release.split()[0], shutil.which("scontrol")]))
"""


def test_the_image_has_a_root_of_its_own_with_python_and_no_slurm(container_image_path):
    binds = [f"--bind={path}" for path in container_image.mounts()]
    done = subprocess.run(
        ["ch-run", *binds, str(container_image_path), "--", sys.executable, "-c", LOOK],
        env=os.environ | {"USER": "root"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert json.loads(done.stdout) == [f"ID={container_image.NAME}", None]

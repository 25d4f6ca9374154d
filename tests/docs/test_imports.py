"""The login node's half can be imported where torch and numpy cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "hpctrain"
LOGIN_ROOMS = (
    "cli",
    "submit",
    "plan",
    "site",
    "settings",
    "slurm",
    "rundir",
    "ledger",
    "checkpoint",
)
LOGIN_MODULES = ("clusters", "errors", "records", "local.client", "local.control", "local.jobs")
TENSORS = "checkpoint.store"
CODE = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "tensorboard"}:
            raise ImportError(f"{name} imported")

sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
"""


def test_rooms_of_the_login_node_import_without_torch_and_numpy():
    modules = [f"hpctrain.{name}" for name in LOGIN_MODULES]
    for room in LOGIN_ROOMS:
        paths = sorted((PACKAGE / room).glob("*.py"))
        assert paths, room
        modules += [f"hpctrain.{room}.{path.stem}" for path in paths if path.stem != "__init__"]
    modules.remove(f"hpctrain.{TENSORS}")

    assert _import(modules) == ""


def test_the_refusal_refuses():
    assert "torch imported" in _import([f"hpctrain.{TENSORS}"])


def _import(modules):
    command = [sys.executable, "-c", CODE, *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr

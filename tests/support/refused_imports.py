"""Processes of tests in which some packages cannot be imported."""

from __future__ import annotations

from pathlib import Path

_HOOK = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in {refused}):
            raise ImportError(f"{{name}} is not to be imported on a login node")

sys.meta_path.insert(0, Refuse())
"""


def refuse_imports(folder: Path, *packages: str) -> None:
    """Every Python that has this folder in its PYTHONPATH refuses these packages or modules."""
    Path(folder, "sitecustomize.py").write_text(_HOOK.format(refused=set(packages)))

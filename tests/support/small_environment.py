"""A virtual environment with hpctrain and what it needs, small enough to be packed in a test.

Files of the packages are hard links to those of the environment in which the tests run; hpctrain
itself is copied, as a wheel has it.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).parents[2]
_LEFT_OUT = frozenset({"plotly", "setuptools"})
"""Needed by no run."""
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def make_environment(folder: Path, *packages: str) -> Path:
    """Make it; returns its interpreter.

    Args:
        folder: Its prefix, better on the file system of the packages.
        packages: Distributions that it gets with all that they need; with "hpctrain" this checkout.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    version = "python{}.{}".format(*sys.version_info)
    site = folder / "lib" / version / "site-packages"
    for name in sorted(_closure(packages)):
        if name == "hpctrain":
            _copy_own(site)
        else:
            _link(importlib.metadata.distribution(name), site)
    return folder / "bin" / "python"


def _closure(packages: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    left = list(packages)
    while left:
        name = left.pop().lower().replace("_", "-")
        if name in found or name in _LEFT_OUT:
            continue
        try:
            needs = importlib.metadata.distribution(name).requires or []
        except importlib.metadata.PackageNotFoundError:  # of another platform
            continue
        found.add(name)
        names = (_NAME.match(need) for need in needs if "extra ==" not in need)
        left += [match[0] for match in names if match]
    return found


def _link(package: importlib.metadata.Distribution, site: Path) -> None:
    for file in package.files or []:
        source = Path(str(package.locate_file(file)))
        if ".." in file.parts or not source.is_file():
            continue
        target = site / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            _link_or_copy(source, target)


def _link_or_copy(source: Path, target: Path) -> None:
    """A hard link; a copy where the folder is another mount, as in the system of another SLURM."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copy2(source, target)


def _copy_own(site: Path) -> None:
    shutil.copytree(
        TOP / "hpctrain", site / "hpctrain", ignore=shutil.ignore_patterns("__pycache__")
    )
    for kind in ("sbatch", "site-configs"):
        shutil.copytree(TOP / kind, site / "hpctrain" / "_data" / kind)

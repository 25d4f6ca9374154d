"""Which files are looked at.

What a folder holds is looked through without following links to folders, so that no circle of them
is walked. tests/unit/lint/test_files.py holds the promises.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.advise.lint.check import SETTINGS_NAME
from hpctrain.advise.lint.deepspeed_config import is_deepspeed, parse_json
from hpctrain.advise.lint.folder import PASSED_OVER, LintFolder
from hpctrain.core.base.files import read_source
from hpctrain.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def files_to_check(
    paths: Sequence[str], say: Callable[[str], None]
) -> Iterator[tuple[Path, LintFolder]]:
    """Yield each file that was named, and of each folder its programs and configurations, once.

    Each comes with the folder whose files are looked at for its imports. `say` is called with each
    folder that cannot be looked into.

    Raises:
        NotFound: there is no such file or folder.
    """
    seen: set[Path] = set()
    beside: dict[Path, LintFolder] = {}
    for name in paths:
        path = Path(name)
        if path.is_dir():
            folder = LintFolder(path)
            candidates = _in_folder(path, folder, say)
        elif os.path.lexists(path):
            folder = beside.setdefault(path.parent, LintFolder(path.parent, is_whole=False))
            candidates = iter([path])
        else:
            raise NotFound(f"{name} is not there; check the path")
        for candidate in candidates:
            if candidate not in seen:
                seen.add(candidate)
                yield candidate, folder


def _in_folder(folder: Path, together: LintFolder, say: Callable[[str], None]) -> Iterator[Path]:
    def passed_over(error: OSError) -> None:
        say(f"{error.filename} is passed over: {error.strerror}")

    for root, folders, files in os.walk(folder, onerror=passed_over):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in PASSED_OVER
        )
        for name in sorted(files):
            path = Path(root, name)
            of_python = name.endswith(".py") or name == SETTINGS_NAME
            if of_python or (name.endswith(".json") and _is_configuration(path, together)):
                yield path


def _is_configuration(path: Path, folder: LintFolder) -> bool:
    """Whether a JSON file of a folder is DeepSpeed's; one that cannot be read is nobody's."""
    try:
        value = parse_json(read_source(path))
    except ValueError:  # NotText among them
        return False
    return is_deepspeed(value) or (is_deepspeed(value, is_named=True) and folder.names(path))

"""The folder in which torch keeps what it has compiled: one that nobody else can have filled.

torch takes its cache from a name in the temporary folder that everybody can guess, whoever has made
it, and runs what lies there. On a node that users share, the first to make that folder would run
code as the others. tests/unit/test_compile_cache.py holds the promises.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.run.layout import RunDir

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
NAME = "hpctrain-compiled-{uid}"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def compile_cache(run: RunDir) -> Path:
    """The user's cache on this node, made if need be; where that is not his alone, the run's.

    The caller exports it; torch makes the run's folder when it compiles something.
    """
    try:
        folder = Path(tempfile.gettempdir(), NAME.format(uid=os.geteuid()))
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:  # also where a file or a dangling link has the name
        why = str(error)
    else:
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if is_own and not status.st_mode & _OTHERS_WRITE:
            return folder
        why = f"{folder} is not this user's alone"
    other = run.root / "compiled"
    print(f"hpctrain: what torch compiles is kept in {other}: {why}", flush=True)
    return other

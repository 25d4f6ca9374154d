"""How Lustre spreads the files of checkpoints over its servers, where a site says so.

Rank 0 asks once an attempt, for the run's folder of checkpoints: Lustre gives a folder's layout to
every folder and file that is made in it later, so no save costs a call. What is asked is
`lfs setstripe -c COUNT -S SIZE FOLDER`; its words go by Lustre's manual, and nobody has run it on a
Lustre. A layout is for speed alone: where it cannot be had, that is one line in the log.

The promises are held by tests/unit/checkpoint/test_stripes.py, with an `lfs` of its own.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from hpctrain.checkpoint.store.retention import one_line

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.core.settings.schema import CheckpointSettings

TIMEOUT_S = 30.0
"""All ranks wait for rank 0."""


def lay_out(folder: Path, settings: CheckpointSettings) -> str:
    """Have the files of later checkpoints in a folder striped as the settings say.

    Not collective: rank 0 calls it. The folder is made if it is missing. If `stripe_count` and
    `stripe_mib` are both 0, nothing is asked.

    Returns:
        Why files are not striped so, in one line; empty where they are, or where nothing was asked.
    """
    words = []
    if settings.stripe_count:
        words += ["-c", str(settings.stripe_count)]
    if settings.stripe_mib:
        words += ["-S", f"{settings.stripe_mib}M"]
    if not words:
        return ""
    program = shutil.which("lfs")
    if program is None:
        return f"checkpoints are not striped: there is no lfs on this node to stripe {folder}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        answer = subprocess.run(
            [program, "setstripe", *words, str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"checkpoints are not striped: {one_line(str(error))}"
    if answer.returncode:
        said = one_line(answer.stderr or answer.stdout) or f"exit code {answer.returncode}"
        return f"checkpoints are not striped: lfs setstripe: {said}"
    return ""

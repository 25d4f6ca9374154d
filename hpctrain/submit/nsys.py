"""What a submit can know of nsys beforehand."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def nsys_notes(rank: int, cluster: str, environ: Mapping[str, str]) -> list[str]:
    """A note where the rank will start without nsys.

    Of a SLURM cluster nothing is known here: its login nodes often lack what a module gives the
    others.
    """
    if rank < 0 or cluster != "local" or shutil.which("nsys", path=environ.get("PATH", "")):
        return []
    return [f"there is no nsys on PATH: rank {rank} will train without it"]

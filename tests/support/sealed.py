"""Sealed checkpoints of a few small files, for tests."""

from __future__ import annotations

import os
import zipfile
from typing import TYPE_CHECKING

from hpctrain.checkpoint.sealed import seals
from hpctrain.checkpoint.sealed.resume import Choice

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.checkpoint.sealed.resume import Resume
    from hpctrain.checkpoint.sealed.seals import StoredSeal
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir


def seal(
    run: RunDir, attempt: Attempt, path: Path, step: int | None, *, copy: bool | None = None
) -> StoredSeal:
    """Seal what lies there, as one rank does it."""
    plan = seals.begin(run, attempt, path, step=step, copy=copy)
    files = [plan.seal_file(file) for file in plan.files]
    return seals.commit(run, attempt, plan, files, step=step, by="program")


def choose(run: RunDir, attempt: Attempt, *, at_step: int | None = None) -> Resume:
    """What a start of this attempt goes on from."""
    return Choice(run, attempt, patience_s=0).choose(at_step=at_step)


def archive(path: Path, content: bytes, *, later_than: Path | None = None) -> None:
    """A zip with one stored member, as torch.save writes; maybe newer than another file."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", content)
    if later_than is not None:
        newer = later_than.stat().st_mtime_ns + 1_000_000
        os.utime(path, ns=(newer, newer))

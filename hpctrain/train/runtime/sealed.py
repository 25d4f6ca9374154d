"""`run.sealed` and `run.resume_path`: a program's own checkpoints, proved whole by the run.

The ranks share the reading of the files by size; rank 0 lists them and commits.
tests/engines/test_sealed.py holds the promises.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.checkpoint.sealed import seals
from hpctrain.checkpoint.sealed.manifest import FILES_NAME
from hpctrain.core.base.env import HPCTRAIN_ATTEMPT, HPCTRAIN_RESUME
from hpctrain.core.world import gather, gather_on_0, on_rank_0, one_line
from hpctrain.errors import CheckpointError, FileSystemFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.checkpoint.sealed.files import UnitFile
    from hpctrain.checkpoint.sealed.manifest import SealedFile
    from hpctrain.checkpoint.sealed.seals import SealPlan
    from hpctrain.core.settings.schema import CheckpointSettings
    from hpctrain.core.world import World
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir

log = logging.getLogger("hpctrain.runtime")


def seal(
    run: RunDir,
    attempt: Attempt,
    world: World,
    settings: CheckpointSettings,
    *,
    step: int,
    path: Path,
    own_s: float | None = None,
) -> None:
    """Prove what the ranks have written, and make it the newest registered checkpoint. Collective.

    Rank 0's `path` and `own_s` count. `own_s` is what the program's own save took; None if unknown.

    Raises:
        CheckpointError: it was not sealed; the older ones stand.
    """
    # Rank 0 would list a folder, or read a file, into which another rank is still writing.
    gather(world, None)
    plan = on_rank_0(world, lambda: seals.begin(run, attempt, path, step=step))
    try:
        shares = gather_on_0(world, _read(plan, share_of(plan.files, world.rank, world.world_size)))

        def commit() -> None:
            files = [_settled(plan, file, read) for share in shares for file, read in share]
            _commit(run, attempt, settings, plan, files, step=step, own_s=own_s)

        on_rank_0(world, commit)
    finally:
        if world.rank == 0:
            seals.discard(plan)


def share_of(files: Sequence[UnitFile], rank: int, ranks: int) -> list[UnitFile]:
    """The files that a rank reads: each goes to the rank that has the fewest bytes so far."""
    loads = [0] * ranks
    share: list[UnitFile] = []
    for file in sorted(files, key=lambda file: (-file.size, file.name)):
        least = loads.index(min(loads))
        loads[least] += max(1, file.size)
        if least == rank:
            share.append(file)
    return share


def _read(plan: SealPlan, files: Sequence[UnitFile]) -> list[tuple[UnitFile, SealedFile | str]]:
    """Each file with its digest, or with what kept this rank from it."""
    read: list[tuple[UnitFile, SealedFile | str]] = []
    for file in files:
        try:
            read.append((file, plan.seal_file(file)))
        except (CheckpointError, OSError) as error:
            read.append((file, one_line(error)))
    return read


def _commit(
    run: RunDir,
    attempt: Attempt,
    settings: CheckpointSettings,
    plan: SealPlan,
    files: list[SealedFile],
    *,
    step: int,
    own_s: float | None,
) -> None:
    files.sort(key=lambda file: file.name)
    stored = seals.commit(run, attempt, plan, files, step=step, by="program")
    keep = settings.keep_sealed
    seals.sealed_now(run, attempt, plan, stored, keep, own_s=own_s)


def _settled(plan: SealPlan, file: UnitFile, read: SealedFile | str) -> SealedFile:
    """Rank 0 reads what another could not: its node may not see the file yet."""
    if not isinstance(read, str):
        return read
    log.warning("%s; rank 0 reads it", read)
    if plan.is_copy:
        (plan.staged / FILES_NAME / file.name).unlink(missing_ok=True)
    try:
        return plan.seal_file(file)
    except OSError as error:
        raise FileSystemFault(f"{plan.path} cannot be registered: {error}") from error


def resume_path(
    run: RunDir | None, attempt: Attempt | None, world: World, settings: CheckpointSettings
) -> Path | None:
    """What this start goes on from: the agent's choice; without an agent rank 0's. Collective.

    Raises:
        CheckpointError: see `Choice.choose`.
    """
    if HPCTRAIN_ATTEMPT in os.environ or run is None or attempt is None:
        path = os.environ.get(HPCTRAIN_RESUME, "")
        return Path(path) if path else None

    def choose() -> str | None:
        from hpctrain.checkpoint.sealed.start import resume_at_start

        return resume_at_start(run, attempt, settings)

    chosen = on_rank_0(world, choose)
    return Path(chosen) if chosen else None

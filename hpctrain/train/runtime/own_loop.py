"""What a program needs that counts its own steps (`Run.at`) and saves in its own way.

tests/engines/test_external_loop.py and test_sealed.py hold the promises.
"""

from __future__ import annotations

import logging
import operator
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.checkpoint.sealed import seals
from hpctrain.checkpoint.sealed.files import FILES_NAME
from hpctrain.core.base.env import HPCTRAIN_ATTEMPT, HPCTRAIN_RESUME
from hpctrain.core.device import is_accelerator, memory_stats
from hpctrain.core.world import gather, gather_on_0, on_rank_0, one_line
from hpctrain.errors import CheckpointError, FileSystemFault, UsageError
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.plan import interval
from hpctrain.train.runtime.guarding import slices
from hpctrain.train.runtime.telemetry import memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hpctrain.checkpoint.sealed.files import SealedFile, UnitFile
    from hpctrain.checkpoint.sealed.seals import SealPlan
    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.world import World
    from hpctrain.ledger.run.layout import RunDir


def earlier_save_s(run: RunDir, world_size: int) -> float | None:
    """What the longest of the newest saves of earlier attempts took; None before the first."""
    return interval.longest_save_s(RunHistory.read(run, marks="few"), world_size)


def memory_in_use(device: torch.device) -> int:
    """Bytes that this rank holds between two steps; what it saves is not more."""
    if is_accelerator(device):
        return memory_stats(device)["allocated_bytes.all.current"]
    return int(memory(device)["mem_peak_bytes"])


def step_number(step: object, name: str = "") -> int:
    """Check a number of updates; `name` is the argument of `Run.at`, "" for its step.

    Raises:
        UsageError: it is none.
    """
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        what = f"{name} is how many updates there are in all"
        what = what if name else "the step is how many updates are applied"
        given = f"{name}={step!r}" if name else repr(step)
        raise UsageError(f"run.at({given}): {what}, a whole number from 0 on")
    return number


# ---- checkpoints of its own

log = logging.getLogger("hpctrain.runtime")


def seal(
    place: SavePlace, world: World, *, step: int, path: Path, own_s: float | None = None
) -> None:
    """Prove what the ranks have written, and make it the newest registered checkpoint. Collective.

    Rank 0's `path` and `own_s` count. `own_s` is what the program's own save took; None if unknown.

    Raises:
        CheckpointError: it was not sealed; the older ones stand.
    """
    # Rank 0 would list a folder, or read a file, into which another rank is still writing.
    gather(world, None)
    plan = on_rank_0(world, lambda: seals.begin(place.run, place.attempt, path, step=step))
    try:
        shares = gather_on_0(world, _read(plan, share_of(plan.files, world.rank, world.world_size)))

        def commit() -> None:
            run, attempt, keep = place.run, place.attempt, place.settings.keep_sealed
            files = [_settled(plan, file, read) for share in shares for file, read in share]
            files.sort(key=lambda file: file.name)
            stored = seals.commit(run, attempt, plan, files, step=step, by="program")
            seals.sealed_now(run, attempt, plan, stored, keep, own_s=own_s)

        on_rank_0(world, commit)
    finally:
        if world.rank == 0:
            seals.discard(plan)


def share_of(files: Sequence[UnitFile], rank: int, ranks: int) -> list[UnitFile]:
    """The files that a rank reads: each goes to the rank that has the fewest bytes so far."""
    ordered = sorted(files, key=lambda file: file.name)
    return [ordered[n] for n in slices([max(1, file.size) for file in ordered], ranks)[rank]]


def _read(plan: SealPlan, files: Sequence[UnitFile]) -> list[tuple[UnitFile, SealedFile | str]]:
    """Each file with its digest, or with what kept this rank from it."""
    read: list[tuple[UnitFile, SealedFile | str]] = []
    for file in files:
        try:
            read.append((file, plan.seal_file(file)))
        except (CheckpointError, OSError) as error:
            read.append((file, one_line(error)))
    return read


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


def resume_path(place: SavePlace | None, world: World) -> Path | None:
    """What this start resumes from: the agent's choice; without an agent rank 0's. Collective.

    Raises:
        CheckpointError: see `Choice.choose`.
    """
    if HPCTRAIN_ATTEMPT in os.environ or place is None:
        path = os.environ.get(HPCTRAIN_RESUME, "")
        return Path(path) if path else None

    def choose() -> str | None:
        from hpctrain.checkpoint.sealed.start import resume_at_start

        return resume_at_start(place.run, place.attempt, place.settings)

    chosen = on_rank_0(world, choose)
    return Path(chosen) if chosen else None

"""The seam to storage: tensors by name into a staged directory, and back at any world size.

The only module of this room that imports torch. Underneath lie torch DCP's own file writer and
reader; a later layer replaces them here (design section 8). One writer thread: with more, DCP can
lose a thread's I/O error and still commit (pytorch#191391).
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hpctrain.checkpoint import commit, find, retention, verify
from hpctrain.checkpoint.digest import file_digest
from hpctrain.checkpoint.manifest import FileEntry, Manifest
from hpctrain.checkpoint.names import step_name
from hpctrain.errors import CheckpointError, HpctrainError
from hpctrain.ledger import events as ledger
from hpctrain.world import broadcast, gather

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

    from hpctrain.rundir.fence import Attempt
    from hpctrain.rundir.layout import RunDir
    from hpctrain.world import World

METADATA = ".metadata"


@dataclass
class Saved:
    """A committed checkpoint, as rank 0 knows it."""

    step: int
    path: str
    bytes: int
    seconds: float


@dataclass
class Chosen:
    """The checkpoint that all ranks load."""

    step: int
    path: Path | None
    manifest: Manifest | None
    skipped: list[dict[str, Any]] = field(default_factory=list)


def save(
    run: RunDir,
    attempt: Attempt,
    world: World,
    tensors: dict[str, torch.Tensor],
    manifest: Manifest,
) -> Saved:
    """Write and commit one checkpoint. Collective: every rank calls it with its own shards.

    Either it is committed on return, or an error is raised on every rank and nothing is left that
    could be loaded.

    Args:
        run: Where.
        attempt: The right to write; an older attempt's save is refused.
        world: The ranks.
        tensors: Full names to plain tensors (replicated) or DTensors (sharded).
        manifest: Everything but the files, which are filled in here.

    Raises:
        CheckpointError: some rank could not write; the message is the first one's.
        Fenced: a newer attempt has taken the run over.
    """
    started = time.monotonic()
    step = manifest.step
    staged = _on_rank_0(world, lambda: commit.stage(run, step, attempt))
    entries, problem = _write(staged, world, tensors)
    everything = [entry for part in gather(world, entries) for entry in part]
    problems = [text for text in gather(world, problem) if text]
    if problems:
        _on_rank_0(world, lambda: commit.discard(staged))
        raise CheckpointError(f"step {step} was not committed: {problems[0]}")
    manifest.files = sorted(everything, key=lambda entry: entry.name)
    _on_rank_0(world, lambda: _publish(run, staged, manifest, attempt))
    size = sum(entry.size for entry in everything)
    return Saved(step, step_name(step), size, time.monotonic() - started)


def _publish(run: RunDir, staged: Path, manifest: Manifest, attempt: Attempt) -> None:
    try:
        commit.publish(run, staged, manifest, attempt)
    except HpctrainError:
        commit.discard(staged)
        raise


def _write(
    staged: Path, world: World, tensors: dict[str, torch.Tensor]
) -> tuple[list[FileEntry], str]:
    """This rank's shards; an error is returned, not raised, so that all ranks abort together."""
    try:
        writer = FileSystemWriter(staged, thread_count=1, sync_files=True, overwrite=False)
        with _alone_is_fine():
            dcp_save(
                tensors,
                storage_writer=writer,
                process_group=world.control,
                no_dist=not world.is_distributed,
            )
        mine = sorted(staged.glob(f"__{world.rank}_*.distcp"))
        if world.rank == 0:
            mine.append(staged / METADATA)
        return [FileEntry(path.name, path.stat().st_size, file_digest(path)) for path in mine], ""
    except Exception as error:  # noqa: BLE001 - whatever it is, every rank must hear of it
        return [], f"rank {world.rank}: {_line(error)}"


def choose(run: RunDir, attempt: Attempt, world: World) -> Chosen:
    """The newest checkpoint whose every byte is as its manifest says.

    Collective: every rank calls it. Rank 0 looks and the choice is broadcast, since ranks can see a
    shared file system at different moments. Each rank reads its share of the files; on damage all
    agree, rank 0 sets the checkpoint aside, and the next older one is tried. No state is touched.

    Raises:
        CheckpointError: the directory cannot be read, or the step that `resume --from` asked for is
            damaged; on every rank.
        Fenced: a newer attempt has taken the run over; on every rank.
    """
    asked = _on_rank_0(world, lambda: asked_step(run))
    skipped = _on_rank_0(world, lambda: _staged_leftovers(run))
    while True:
        choice = _on_rank_0(world, lambda: find.choose(run, at_step=asked))
        newer = [{"step": s.step, "name": s.name, "reason": s.reason} for s in choice.skipped]
        found = choice.found
        if found is None or found.manifest is None:
            return Chosen(0, None, None, _unique(skipped + newer))
        names = [entry.name for entry in found.manifest.files]
        problems = verify.verify(found, verify.share(names, world.rank, world.world_size))
        problems = [text for part in gather(world, problems) for text in part]
        if not problems:
            if asked is not None:
                _on_rank_0(world, lambda: _set_newer_aside(run, attempt, asked))
            return Chosen(found.step, found.path, found.manifest, _unique(skipped + newer))
        if asked is not None:
            raise CheckpointError(
                f"step {asked}, which `resume --from` asked for, is damaged: {problems[0]}; "
                "resume from another step"
            )
        damaged = {"step": found.step, "name": found.path.name, "reason": problems[0]}
        skipped = [*skipped, damaged]
        _on_rank_0(world, functools.partial(_give_up, run, attempt, found, damaged))


def asked_step(run: RunDir) -> int | None:
    """The step of `resume --from STEP`, until an attempt of that submission has restored it."""
    step: int | None = None
    for event in ledger.read(run):
        if event.kind == "submitted":
            asked = event.data.get("from_step")
            step = None if asked is None else int(asked)
        elif event.kind == "restored":
            step = None
    return step


def _on_rank_0(world: World, act: Callable[[], Any]) -> Any:
    """What rank 0's action returns, on every rank; its error is raised on every rank too.

    An error on rank 0 alone would leave the others waiting in the next collective.
    """
    result, error = None, None
    if world.rank == 0:
        try:
            result = act()
        except (HpctrainError, OSError) as problem:
            error = problem
    result, error = broadcast(world, (result, error))
    if isinstance(error, HpctrainError):
        raise error
    if error is not None:
        raise CheckpointError(_line(error))
    return result


def _staged_leftovers(run: RunDir) -> list[dict[str, Any]]:
    return [
        {"step": left.step, "name": left.path.name, "reason": left.reason}
        for left in find.staged(run)
    ]


def _unique(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each directory once; the first word on it stands."""
    by_name: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_name.setdefault(str(row["name"]), row)
    return list(by_name.values())


def _give_up(run: RunDir, attempt: Attempt, found: Any, damaged: dict[str, Any]) -> None:
    verify.set_aside(run, found, damaged["reason"], attempt)
    ledger.append(run, "checkpoint_set_aside", attempt=attempt.number, **damaged)


def _set_newer_aside(run: RunDir, attempt: Attempt, step: int) -> None:
    """So that their steps can be saved anew; nothing is deleted."""
    for found in find.candidates(run):
        if found.step > step:
            reason = f"newer than `resume --from {step}`"
            row = {"step": found.step, "name": found.path.name, "reason": reason}
            _give_up(run, attempt, found, row)


def load(chosen: Chosen, world: World, tensors: dict[str, torch.Tensor]) -> None:
    """Read a chosen checkpoint into these tensors, in place, whatever world size wrote it.

    Collective: every rank calls it.

    Raises:
        CheckpointError: the checkpoint does not hold what this program asks for.
    """
    try:
        with _alone_is_fine():
            dcp_load(
                tensors,
                storage_reader=FileSystemReader(chosen.path),  # type: ignore[arg-type]
                process_group=world.control,
                no_dist=not world.is_distributed,
            )
    except Exception as error:
        raise CheckpointError(
            f"{chosen.path} is whole but does not fit this program: {_line(error)}"
        ) from error


def prune(run: RunDir, attempt: Attempt, *, keep_last: int, keep_every: int) -> None:
    """Delete what retention no longer keeps; rank 0 only, after a commit.

    Raises:
        Fenced: a newer attempt has taken the run over; nothing was deleted.
    """
    retention.prune(run, keep_last=keep_last, keep_every=keep_every, attempt=attempt)


def sweep(run: RunDir, attempt: Attempt, world: World) -> None:
    """Remove what older attempts left half written. Collective; rank 0 acts."""
    _on_rank_0(world, lambda: retention.sweep(run, attempt))


@contextlib.contextmanager
def _alone_is_fine() -> Iterator[None]:
    """DCP warns when there is no process group; a single process is a world like any other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _line(error: BaseException) -> str:
    """An error in one line: torch wraps the cause of a rank's failure in a long report."""
    inner = getattr(error, "failures", None)
    if inner:
        error = next(iter(inner.values()))[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]

"""Loading, every byte of it proved: seconds, CPU and bytes read at other world sizes; as ratios.

Saved by 4 FSDP2 ranks, loaded by 4, 3 and 8, and whole by each of several ranks (DDP). In one run
and in turns: a raw read of the share into warm memory, `restore` as a run calls it, unverified
dcp.load. All files are in the page cache. `--params 20` for a quick look.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import _measure as measure

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    from _measure import Line, Options, Turns

    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.world import World

STEP = 1000


def main() -> None:
    """Save once, then a group of ranks for each world size."""
    asked = measure.options(__doc__ or "")
    measure.require_memory(3 * asked.state_bytes)
    with measure.scratch(asked, 3 * asked.state_bytes) as folder:
        from _model import into_cache, new_place

        place = new_place(folder / "run")
        measure.on_ranks(_save, asked.ranks, place=place, folder=folder, params=asked.params)
        into_cache(folder)
        lines = [
            *_same(asked, place, folder),
            *_fewer(asked, place, folder),
            *_more(asked, place, folder),
            *_replicated(asked, place, folder),
            *_verify(asked, place),
        ]
        measure.show(asked, lines, parameters=f"{asked.params} M", saved_by=f"{asked.ranks} ranks")


def _save(world: World, place: SavePlace, folder: Path, params: int) -> None:
    import _model
    import torch.distributed.checkpoint as dcp

    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.save import save

    trained = _model.sharded(world, params)
    _model.fill(trained.tensors, world)
    save(place, world, State(trained.tensors), _model.manifest(place, world, STEP))
    dcp.save(dict(trained.tensors), storage_writer=dcp.FileSystemWriter(folder / "dcp"))
    _model.write_raw(folder / f"raw-{world.rank}", trained.views())


def _same(asked: Options, place: SavePlace, folder: Path) -> list[Line]:
    results = _load(asked, place, folder, asked.ranks)
    turns = [one["turns"] for one in results]
    raw, ours, dcp = (measure.best_wall(turns, name) for name in ("raw", "ours", "dcp"))
    cpu, theirs = measure.best_cpu(turns, "ours"), measure.best_cpu(turns, "dcp")
    return [
        measure.Line(
            f"load on {asked.ranks} ranks, proved: CPU",
            f"{cpu:.2f} s",
            cpu / theirs,
            0.6,
            "x dcp.load's",
            {"raw read": measure.best_cpu(turns, "raw") / theirs},
        ),
        measure.Line(
            f"load on {asked.ranks} ranks, proved: wall",
            f"{ours:.2f} s",
            ours / raw,
            None,
            "x raw cached read",
            {"dcp.load": dcp / raw},
        ),
    ]


def _fewer(asked: Options, place: SavePlace, folder: Path) -> list[Line]:
    ranks = max(1, asked.ranks - 1)
    results = _load(asked, place, folder, ranks)
    turns = [one["turns"] for one in results]
    raw, ours, dcp = (measure.best_wall(turns, name) for name in ("raw", "ours", "dcp"))
    wall = measure.Line(
        f"load {asked.ranks} -> {ranks} ranks, proved: wall",
        f"{ours:.2f} s",
        ours / raw,
        1.7,
        "x raw cached read",
        {"dcp.load": dcp / raw},
    )
    return [wall, _bytes(f"load {asked.ranks} -> {ranks} ranks: bytes", results)]


def _more(asked: Options, place: SavePlace, folder: Path) -> list[Line]:
    ranks = 2 * asked.ranks
    results = _load(asked, place, folder, ranks)
    return [_bytes(f"load {asked.ranks} -> {ranks} ranks: bytes", results)]


def _bytes(name: str, results: list[dict[str, Any]]) -> Line:
    turns = [one["turns"] for one in results]
    needed = sum(one["bytes"] for one in results)
    ours, dcp = (measure.least_read(turns, who) / needed for who in ("ours", "dcp"))
    value = f"{ours * needed / 1e9:.2f} GB"
    return measure.Line(name, value, ours, 1.15, "x needed", {"dcp.load": dcp})


def _load(asked: Options, place: SavePlace, folder: Path, ranks: int) -> list[dict[str, Any]]:
    return measure.on_ranks(
        _load_rank,
        ranks,
        place=place,
        folder=folder,
        params=asked.params,
        repeats=asked.repeats,
    )


def _load_rank(
    world: World, place: SavePlace, folder: Path, params: int, repeats: int
) -> dict[str, Any]:
    import _model
    import torch.distributed.checkpoint as dcp

    from hpctrain.checkpoint.tensors.arena import Arena
    from hpctrain.checkpoint.tensors.restore import restore

    trained = _model.sharded(world, params)
    files = sorted(folder.glob("raw-*"))
    memory = _model.warm(sum(path.stat().st_size for path in files) // world.world_size + 1)
    wanted = _wanted(trained.tensors)
    # A run has this memory anyway: that of its saves behind training.
    with contextlib.closing(Arena(trained.nbytes)) as arena:
        acts: dict[str, Callable[[], object]] = {
            "raw": lambda: _model.read_raw(files, world.rank, world.world_size, memory),
            "ours": lambda: restore(place, world, wanted, arena=arena),
            "dcp": lambda: dcp.load(
                dict(trained.tensors), storage_reader=dcp.FileSystemReader(folder / "dcp")
            ),
        }

        def before(_: str) -> None:
            _model.blank(trained.tensors)

        def after(name: str) -> None:
            if name != "raw":
                _model.require_right(trained.tensors, world, name)

        turns = measure.alternate(world, acts, repeats, before=before, after=after)
    return {"turns": turns, "bytes": trained.nbytes}


def _wanted(tensors: dict[str, torch.Tensor]) -> Callable[[object], Any]:
    """As a run wants them: a new optimizer's moments hold nothing of value."""
    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.restore import Wanted
    from hpctrain.train.engines.state import OPTIM

    fresh = frozenset(name for name in tensors if name.startswith(OPTIM))
    return lambda _: Wanted(State(dict(tensors)), fresh)


# ---- replicated


def _replicated(asked: Options, place: SavePlace, folder: Path) -> list[Line]:
    from hpctrain.checkpoint.tensors.arena import room

    ranks = 4 if room().nbytes > 6 * asked.state_bytes else 2
    results = measure.on_ranks(
        _replicated_rank, ranks, place=place, folder=folder, params=asked.params
    )
    held = results[0]["bytes"]
    ours = sum(one["read"] for one in results)
    dcp = measure.least_read([one["turns"] for one in results], "dcp")
    walls = {
        name: measure.best_wall([one["turns"] for one in results], name) for name in ("ours", "dcp")
    }
    return [
        measure.Line(
            f"load by {ranks} replicated ranks: bytes, in sum",
            f"{ours / 1e9:.2f} GB",
            ours / held,
            1.1,
            "x the checkpoint",
            {"dcp.load": dcp / held},
        ),
        measure.Line(
            f"load by {ranks} replicated ranks: wall",
            f"{walls['ours']:.2f} s",
            walls["ours"] / walls["dcp"],
            None,
            "x dcp.load",
        ),
    ]


def _replicated_rank(world: World, place: SavePlace, folder: Path, params: int) -> dict[str, Any]:
    import _model
    import torch.distributed.checkpoint as dcp

    from hpctrain.checkpoint.format.manifest import TABLE_NAME, step_name
    from hpctrain.checkpoint.tensors.restore import restore

    tensors = _model.replicated(params)
    wanted = _wanted(tensors)
    path = place.run.checkpoints / step_name(STEP)
    read = 0

    def ours() -> None:
        nonlocal read
        # Counted by the reader: the kernel's count has what came over sockets as well.
        read = restore(place, world, wanted).bytes_read + (path / TABLE_NAME).stat().st_size

    def dcp_load() -> None:
        dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(folder / "dcp"))

    def before(_: str) -> None:
        _model.blank(tensors)

    def after(name: str) -> None:
        _model.require_right(tensors, world, name)

    acts: dict[str, Callable[[], object]] = {"ours": ours, "dcp": dcp_load}
    turns: Turns = measure.alternate(world, acts, 2, before=before, after=after)
    return {"turns": turns, "read": read, "bytes": sum(t.nbytes for t in tensors.values())}


# ---- verify --deep


def _verify(asked: Options, place: SavePlace) -> list[Line]:
    from hpctrain.checkpoint.store import find, verify

    found = find.choose(place.run).checkpoint
    assert found is not None
    assert found.manifest is not None
    seconds = []
    for _ in range(asked.repeats):
        started = time.process_time()
        problems = verify.verify(found)
        seconds.append(time.process_time() - started)
        if problems:
            raise AssertionError(f"a whole checkpoint was called damaged: {problems[0]}")
    cost = min(seconds) / (found.manifest.size / 1e9)
    return [
        measure.Line(
            "checkpoints verify: CPU",
            f"{min(seconds):.2f} s",
            cost,
            0.12,
            "s/GB",
        )
    ]


if __name__ == "__main__":
    main()

"""Saving: how long training stands, and what it costs; as ratios.

In one run and in turns: raw write + fsync of the same bytes by the same ranks, or memcpy of them;
hpctrain; torch's DCP. `--params 20` for a quick look.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import _measure as measure
from _peer import Dcp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from _measure import Line, Options
    from _model import Trained

    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.world import World

MB = 1e6


def main() -> None:
    """Two groups of ranks, one after the other."""
    asked = measure.options(__doc__ or "")
    measure.require_memory(5 * asked.state_bytes)
    with measure.scratch(asked, 3 * asked.state_bytes) as folder:
        lines = [*_sync(asked, folder), *_behind(asked, folder)]
        measure.show(asked, lines, parameters=f"{asked.params} M", ranks=asked.ranks)


# ---- while training waits


def _sync(asked: Options, folder: Path) -> list[Line]:
    from _model import new_place

    place = new_place(folder / "sync")
    results = measure.on_ranks(
        _sync_rank,
        asked.ranks,
        place=place,
        folder=folder,
        params=asked.params,
        repeats=asked.repeats,
    )
    turns = [one["turns"] for one in results]
    raw, ours, dcp = (measure.best_wall(turns, name) for name in ("raw", "ours", "dcp"))
    extra = max(one["extra"]["ours"] for one in results) / MB
    theirs = max(one["extra"]["dcp"] for one in results) / MB
    files = results[0]["files"]
    return [
        measure.Line(
            "save, training waits: checksums, commit",
            f"{ours:.2f} s",
            ours / raw,
            1.3,
            "x raw write + fsync",
            {"dcp.save": dcp / raw},
        ),
        measure.Line(
            "extra peak memory of it, a rank",
            f"{extra:.0f} MB",
            extra,
            64,
            "MB",
            {"dcp.save": theirs},
        ),
        measure.Line(
            "files of a checkpoint beyond the ranks'",
            f"{files}",
            files - asked.ranks,
            3,
            "files",
        ),
    ]


def _sync_rank(
    world: World, place: SavePlace, folder: Path, params: int, repeats: int
) -> dict[str, Any]:
    import _model
    import torch.distributed.checkpoint as dcp

    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.save import save

    trained = _model.sharded(world, params)
    _model.fill(trained.tensors, world)
    raw, views = folder / f"raw-{world.rank}", trained.views()
    other = folder / "dcp"
    extra = {"raw": 0, "ours": 0, "dcp": 0}
    files = 0
    step = 0
    peak = measure.Peak()

    def ours() -> None:
        save(place, world, State(trained.tensors), _model.manifest(place, world, step))

    def before(_: str) -> None:
        nonlocal peak, step
        step += 1
        peak = measure.Peak()

    def after(name: str) -> None:
        nonlocal files
        extra[name] = max(extra[name], peak.nbytes)
        if name == "ours" and world.rank == 0:
            files = sum(1 for path in place.run.checkpoints.rglob("*") if path.is_file())
        raw.unlink(missing_ok=True)
        measure.clear(world, place.run.checkpoints, other)

    acts: dict[str, Callable[[], object]] = {
        "raw": lambda: _model.write_raw(raw, views),
        "ours": ours,
        "dcp": lambda: dcp.save(
            dict(trained.tensors), storage_writer=dcp.FileSystemWriter(other), no_dist=False
        ),
    }
    turns = measure.alternate(world, acts, repeats, before=before, after=after)
    return {"turns": turns, "extra": extra, "files": files}


# ---- behind training


def _behind(asked: Options, folder: Path) -> list[Line]:
    from _model import new_place

    ranks = min(asked.ranks, os.cpu_count() or 1)
    place = new_place(folder / "behind", checkpoint__keep_last=2)
    results = measure.on_ranks(
        _behind_rank,
        ranks,
        place=place,
        folder=folder,
        params=asked.params,
        repeats=asked.repeats + 1,
    )
    turns = [one["turns"] for one in results]
    copy = measure.best_wall(turns, "memcpy")
    steady, dcp = (measure.best_wall(turns, name, skip=1) for name in ("ours", "dcp"))
    first, dcp_first = (
        max(one["turns"][name][0].wall for one in results) for name in ("ours", "dcp")
    )
    shard = max(one["bytes"] for one in results)
    extra, theirs = (max(one["extra"][name] for one in results) for name in ("ours", "dcp"))
    return [
        measure.Line(
            f"stall of a save behind training, {ranks} ranks",
            f"{steady * 1e3:.0f} ms",
            steady / copy,
            1.2,
            "x memcpy",
            {"dcp.async_save, process": dcp / copy},
        ),
        measure.Line(
            "stall of the first one",
            f"{first * 1e3:.0f} ms",
            first / steady,
            2.0,
            "x the next ones",
            {"dcp.async_save, process": dcp_first / dcp},
        ),
        measure.Line(
            "extra peak memory of them, a rank",
            f"{extra / MB:.0f} MB",
            extra / shard,
            1.05,
            "x its shard",
            {"dcp.async_save, process": theirs / shard},
        ),
    ]


def _behind_rank(
    world: World, place: SavePlace, folder: Path, params: int, repeats: int
) -> dict[str, Any]:
    import _model

    trained = _model.sharded(world, params)
    _model.fill(trained.tensors, world)
    # In this order: each one's memory is counted from where it begins.
    copy = _Memcpy(trained)
    acts: dict[str, Any] = {
        "memcpy": copy,
        "ours": _Ours(world, place, trained),
        "dcp": _Theirs(folder, trained),
    }

    def after(name: str) -> None:
        acts[name].land()
        measure.clear(world, place.run.checkpoints, folder / "dcp")

    turns = measure.alternate(
        world, {name: act.begin for name, act in acts.items()}, repeats, after=after
    )
    extra = {name: act.extra for name, act in acts.items()}
    for act in acts.values():
        act.close()
    return {"turns": turns, "extra": extra, "bytes": trained.nbytes}


class _Memcpy:
    """What every save behind training has to do at least."""

    extra = 0

    def __init__(self, trained: Trained) -> None:
        from _model import warm

        self._views, self._target = trained.views(), warm(trained.nbytes)

    def begin(self) -> None:
        done = 0
        for view in self._views:
            self._target[done : done + len(view)] = view
            done += len(view)

    def land(self) -> None:
        """Nothing is on its way."""

    def close(self) -> None:
        """Give the memory back."""
        del self._target


class _Ours:
    """As a run does it: from "a save is due" to "training goes on"."""

    def __init__(self, world: World, place: SavePlace, trained: Trained) -> None:
        from hpctrain.checkpoint.tensors.save import Saver

        self._world, self._place, self._trained = world, place, trained
        self._step = 0
        self.extra = 0
        self._peak = measure.Peak()
        self._saver = Saver(place, world)
        self._saver.prepare(self._state())

    def _state(self) -> State:
        from hpctrain.checkpoint.tensors.boxes import State
        from hpctrain.train.engines import state as engine_state
        from hpctrain.train.runtime.generators import Generators

        tensors = engine_state.collect(self._trained.model, self._trained.optimizer)
        return State({**tensors}, Generators(self._world).capture())

    def begin(self) -> None:
        from _model import manifest

        self._step += 1
        self._saver.land()
        self._saver.begin(self._state(), manifest(self._place, self._world, self._step))

    def land(self) -> None:
        """Wait until it is committed; nobody knows how long it takes if it is not."""
        outcome = self._saver.land()
        if outcome is None or outcome.saved is None:
            raise AssertionError(f"not saved: {outcome}")
        self.extra = self.extra or self._peak.nbytes

    def close(self) -> None:
        """End the writer."""
        self._saver.close()


class _Theirs:
    """torch's, in a process of its own and with memory that it keeps."""

    def __init__(self, folder: Path, trained: Trained) -> None:
        self._path, self._tensors = folder / "dcp", trained.tensors
        self._dcp: Dcp | None = None
        self._peak: measure.Peak | None = None
        self.extra = 0

    def begin(self) -> None:
        if self._dcp is None:
            self._peak = measure.Peak()
            self._dcp = Dcp(self._path, processes=True)
        self._dcp.begin(self._tensors)

    def land(self) -> None:
        """Wait until it is committed."""
        assert self._dcp is not None
        assert self._peak is not None
        self._dcp.land()
        self.extra = self.extra or self._peak.nbytes

    def close(self) -> None:
        """Give the staged memory back."""
        assert self._dcp is not None
        self._dcp.close()


if __name__ == "__main__":
    main()

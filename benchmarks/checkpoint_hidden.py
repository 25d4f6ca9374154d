"""What a save stops training for where its copy hides behind the next forward and backward pass.

In one run and in turns: memcpy of the same bytes by the same ranks; a save that copies at once; one
with `checkpoint.overlap_copy`. Behind each save follows work, small matmuls, that takes longer than
the copy, and then the moment at which the optimizer would change weights. A stall is what training
stands still before and after that work; how much slower the work is beside the copy is told too.
`--ranks` are as many as cores at most; with all cores at work a copy takes its time from them.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import _measure as measure

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from _measure import Line, Options
    from _model import Trained

    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.world import World

LONGER = 4
"""The work takes so many times as long as the memcpy."""
WAYS = {"at once": False, "hidden": True}


def main() -> None:
    """One group of ranks."""
    asked = measure.options(__doc__ or "")
    measure.require_memory(4 * asked.state_bytes)
    with measure.scratch(asked, 3 * asked.state_bytes) as folder:
        measure.show(asked, _lines(asked, folder), parameters=f"{asked.params} M")


def _lines(asked: Options, folder: Path) -> list[Line]:
    from _model import new_place

    places = {
        way: new_place(
            folder / way.replace(" ", "-"),
            checkpoint__keep_last=2,
            checkpoint__overlap_copy=overlap,
        )
        for way, overlap in WAYS.items()
    }
    results = measure.on_ranks(
        _rank, asked.ranks, places=places, params=asked.params, repeats=asked.repeats
    )
    rows = [
        {name: max(one[turn][name] for one in results) for name in results[0][turn]}
        for turn in range(1, asked.repeats + 1)  # the first one starts processes
    ]
    best = {name: min(row[name] for row in rows) for name in rows[0]}
    copy, ranks = best["memcpy"], f"{asked.ranks} rank" + "s" * (asked.ranks > 1)
    at_once = {"copied at once": best["at once"] / copy}
    return [
        measure.Line(
            f"stall of a save whose copy hides, {ranks}",
            f"{best['hidden'] * 1e3:.1f} ms of {copy * 1e3:.0f}",
            best["hidden"] / copy,
            0.1,
            "x memcpy",
            at_once,
        ),
        measure.Line(
            "training lost to it, slower work included",
            f"{best['hidden lost'] * 1e3:.1f} ms",
            best["hidden lost"] / copy,
            1.2,
            "x memcpy",
            {"copied at once": best["at once lost"] / copy},
        ),
    ]


def _rank(
    world: World, places: dict[str, SavePlace], params: int, repeats: int
) -> list[dict[str, float]]:
    import _model

    trained = _model.sharded(world, params)
    _model.fill(trained.tensors, world)
    views, target = trained.views(), _model.warm(trained.nbytes)
    saving = {way: _Saving(world, place, trained) for way, place in places.items()}
    rows = []
    for _ in range(repeats + 1):
        row = {"memcpy": _timed(lambda: _memcpy(views, target))}
        work = functools.partial(_work, _passes(LONGER * row["memcpy"]))
        alone = _timed(work)
        for way, save in saving.items():
            row[way], beside = save.stall(work)
            row[f"{way} lost"] = row[way] + max(0.0, beside - alone)
        rows.append(row)
    for save in saving.values():
        save.close()
    return rows


class _Saving:
    """Saves of one way, as a run makes them."""

    def __init__(self, world: World, place: SavePlace, trained: Trained) -> None:
        from hpctrain.checkpoint.tensors.save import Saver

        self._world, self._place, self._trained = world, place, trained
        self._step = 0
        self._saver = Saver(place, world)
        self._saver.prepare(self._state())

    def _state(self) -> State:
        """As `Program.snapshot` makes it."""
        from hpctrain.checkpoint.tensors.boxes import State
        from hpctrain.train.engines import state as engine_state
        from hpctrain.train.runtime.generators import Generators

        tensors = engine_state.collect(self._trained.model, self._trained.optimizer)
        return State({**tensors}, Generators(self._world).capture(), steady=frozenset(tensors))

    def stall(self, work: Callable[[], object]) -> tuple[float, float]:
        """Seconds that training stands still for a save, and those of the work beside it."""
        from _model import manifest

        from hpctrain.core.world import gather

        self._step += 1
        gather(self._world, None)
        began = time.perf_counter()
        self._saver.begin(self._state(), manifest(self._place, self._world, self._step))
        copied = time.perf_counter()
        beside = _timed(work)
        held = _timed(self._saver.before_update)
        outcome = self._saver.land()
        if outcome is None or outcome.saved is None:
            raise AssertionError(f"not saved: {outcome}")
        measure.clear(self._world, self._place.run.checkpoints)
        return copied - began + held, beside

    def close(self) -> None:
        """End the writer."""
        self._saver.close()


def _memcpy(views: Any, target: Any) -> None:
    done = 0
    for view in views:
        target[done : done + len(view)] = view
        done += len(view)


def _passes(seconds: float) -> int:
    """So many passes of the work take about that long."""
    return max(1, round(seconds * 20 / _timed(lambda: _work(20))))


def _work(passes: int) -> None:
    import torch

    matrix = torch.full((192, 192), 1 / 192)
    product = matrix
    for _ in range(passes):
        for _ in range(10):
            product = product @ matrix


def _timed(act: Any) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

"""How fast training runs while a save behind it is on its way, against no save; in turns with DCP.

The work is Python with small numpy arrays, and small matmuls of torch, on half of the cores: a
rank and its writer have a core each.
"""

from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING, Any

import _measure as measure
from _peer import Dcp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    from _measure import Line, Options

    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.world import World

IDLE_S = 1.5


def main() -> None:
    """Both kinds of work on one group of ranks."""
    asked = measure.options(__doc__ or "")
    measure.require_memory(2 * asked.state_bytes)
    with measure.scratch(asked, asked.state_bytes) as folder:
        measure.show(asked, _beside(asked, folder), parameters=f"{asked.params} M / 4")


def _beside(asked: Options, folder: Path) -> list[Line]:
    from _model import new_place

    place = new_place(folder / "beside", checkpoint__keep_last=2)
    ranks = max(1, (os.cpu_count() or 1) // 2)
    results = measure.on_ranks(
        _beside_rank,
        ranks,
        place=place,
        folder=folder,
        nbytes=asked.state_bytes // 4 // ranks,
        repeats=asked.repeats,
    )
    lines = []
    for work in ("python and numpy", "small matmuls"):
        idle, ours, dcp, gap = (min(one[work][name] for one in results) for name in _WINDOWS)
        lines.append(
            measure.Line(
                f"speed beside a save, {work}, {ranks} rank" + "s" * (ranks > 1),
                f"{ours:,.0f} /s",
                100 * ours / idle,
                90,
                f"% of idle (gap {gap * 1e3:.0f} ms)",
                {"dcp.async_save, process": 100 * dcp / idle},
                at_least=True,
            )
        )
    return lines


def _is_before(end: float) -> bool:
    return time.perf_counter() < end


_WINDOWS = ("idle", "ours", "dcp", "gap")


def _beside_rank(
    world: World, place: SavePlace, folder: Path, nbytes: int, repeats: int
) -> dict[str, Any]:
    import numpy as np
    import torch
    from _model import manifest

    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.save import Saver
    from hpctrain.core.world import gather

    count = nbytes // 4 // 64
    tensors = {f"rank-{world.rank}.{i}": torch.rand(count) for i in range(64)}
    saver = Saver(place, world)
    saver.prepare(State(own=tensors))
    theirs = Dcp(folder / "dcp", processes=True)
    numbers, matrix = np.ones(512), torch.rand(96, 96)
    works: dict[str, Callable[[], object]] = {
        "python and numpy": functools.partial(_numpy_work, numbers),
        "small matmuls": functools.partial(_matmul_work, matrix),
    }
    step = 0
    rates: dict[str, Any] = {work: dict.fromkeys(("idle", "ours", "dcp"), 0.0) for work in works}
    for turn in range(repeats + 1):  # the first one starts processes and does not count
        for work, act in works.items():
            seen = rates[work] if turn else dict.fromkeys(("idle", "ours", "dcp"), 0.0)
            gather(world, None)
            until = time.perf_counter() + IDLE_S
            _note(seen, "idle", _rate(act, functools.partial(_is_before, until)))
            step += 1
            saver.begin(State(own=tensors), manifest(place, world, step))
            _note(seen, "ours", _rate(act, lambda: saver.in_flight))
            saver.land()
            theirs.begin(tensors)
            _note(seen, "dcp", _rate(act, lambda: theirs.in_flight))
            theirs.land()
            measure.clear(world, place.run.checkpoints, folder / "dcp")
    theirs.close()
    saver.close()
    return rates


def _note(seen: dict[str, float], name: str, measured: tuple[float, float]) -> None:
    rate, gap = measured
    if rate > seen[name]:
        seen[name] = rate
        if name == "ours":
            seen["gap"] = gap


def _rate(act: Callable[[], object], goes_on: Callable[[], bool]) -> tuple[float, float]:
    """How often an act is done in a second meanwhile, and the longest time that one took."""
    count, longest = 0, 0.0
    begun = last = time.perf_counter()
    while goes_on():
        act()
        now = time.perf_counter()
        longest, last, count = max(longest, now - last), now, count + 1
    return count / (last - begun) if count else 0.0, longest


def _numpy_work(numbers: Any) -> float:
    total = 0.0
    for factor in range(1, 21):
        total += float((numbers * factor).sum()) / factor
    return total


def _matmul_work(matrix: torch.Tensor) -> torch.Tensor:
    product = matrix
    for _ in range(5):
        product = product @ matrix
        product = product / product.max()
    return product


if __name__ == "__main__":
    main()

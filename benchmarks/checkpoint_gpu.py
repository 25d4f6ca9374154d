"""Saves from a GPU: what the device stands still for, and the bits.

In turns: a plain step, and one behind a save. A step is products of matrices that take longer than
the copy, and AdamW. A stall is how much longer the step with its save takes, and is held against
the copy of the same bytes into page-locked memory. Every checkpoint is read back and compared with
clones that the GPU made when its save began. One rank, one GPU; without a GPU it says so and ends.
`--params 100` is 1.2 GB.
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

import _measure as measure

from hpctrain.core.device import synchronize

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from _measure import Line, Options

    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.world import World

LONGER = 4
"""The products take so many times as long as the copy."""
WIDTH, PRODUCT = 2048, 4096
"""Of a weight, and of the matrix of the products."""


def main() -> None:
    """In this process: its one rank needs no others."""
    asked = measure.options(__doc__ or "")
    import torch

    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        sys.exit(0)
    measure.require_memory(3 * asked.state_bytes)
    with measure.scratch(asked, 3 * asked.state_bytes) as folder:
        lines = lines_of(asked, folder, torch.device("cuda", 0))
        name = torch.cuda.get_device_name()
        measure.show(asked, lines, parameters=f"{asked.params} M", device=name)


def lines_of(asked: Options, folder: Path, device: torch.device) -> list[Line]:
    """Measure; tests/gpu does so too, and rehearses it on a CPU."""
    from _model import new_place

    from hpctrain.core.world import World

    world = World(0, 0, 1, device)
    trained = Trained(asked.params, device)
    copy = trained.copy_s()
    trained.work_s(LONGER * copy)
    trained.step()
    best = dict.fromkeys(("plain", "save", "told"), float("inf"))
    saving = _Saving(world, new_place(folder / "run"), trained)
    for _ in range(asked.repeats + 1):
        seconds, stall_s = saving.step()
        for name, took in (("plain", trained.step()), ("save", seconds), ("told", stall_s)):
            best[name] = min(best[name], took)
    saving.close()
    stall = best["save"] - best["plain"]
    return [
        measure.Line(
            "stall of a save, 1 GPU",
            f"{stall * 1e3:.1f} ms of {copy * 1e3:.0f}",
            stall / copy,
            1.1,
            "x copy",
        ),
        measure.Line(
            "the same as the ledger tells it",
            f"{best['told'] * 1e3:.1f} ms",
            best["told"] / copy,
            None,
            "x copy",
        ),
    ]


class Trained:
    """Weights of so many millions of elements, their optimizer, and products beside them."""

    def __init__(self, params: int, device: torch.device) -> None:
        import torch

        self.device = device
        on_cpu = device.type == "cpu"  # a rehearsal
        width, size = (64, 64) if on_cpu else (WIDTH, PRODUCT)
        count = max(1, round(params * 1e6 / width**2))
        self.weights = [
            torch.nn.Parameter(torch.rand(width, width, device=device) / width)
            for _ in range(count)
        ]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-3, fused=True)
        self._matrix = torch.rand(size, size, device=device) / size
        self._passes = 1
        for weight in self.weights:
            weight.grad = torch.full_like(weight, 0.01)
        self.optimizer.step()

    @property
    def tensors(self) -> dict[str, Any]:
        """What is saved, by name."""
        found = {}
        for number, weight in enumerate(self.weights):
            found[f"model.{number}"] = weight.detach()
            state = self.optimizer.state[weight]
            found.update({f"optim.{number}.{key}": state[key] for key in state})
        return found

    def copy_s(self) -> float:
        """Seconds of a copy of all of it into page-locked memory."""
        import torch

        sources = [tensor.reshape(-1) for tensor in self.tensors.values()]
        pin = self.device.type == "cuda"
        targets = [torch.empty(s.shape, dtype=s.dtype, pin_memory=pin) for s in sources]
        took = []
        for _ in range(4):
            synchronize(self.device)
            began = time.perf_counter()
            torch._foreach_copy_(targets, sources, non_blocking=True)
            synchronize(self.device)
            took.append(time.perf_counter() - began)
        return min(took)

    def work_s(self, seconds: float) -> None:
        """Have the products take about that long."""
        self._passes = 50
        self._products()
        self._passes = max(1, round(50 * seconds / self._products()))

    def _products(self) -> float:
        synchronize(self.device)
        began = time.perf_counter()
        self.forward_backward()
        synchronize(self.device)
        return time.perf_counter() - began

    def forward_backward(self) -> None:
        """Compute, and give each weight a gradient that reads it."""
        product = self._matrix
        for _ in range(self._passes):
            product = product @ self._matrix
        for weight in self.weights:
            weight.grad = weight.detach() * 0.01 + product[0, 0]

    def step(self, begin: Any = lambda: None, before_update: Any = lambda: None) -> float:
        """One step behind `begin`; its seconds, by the device's end."""
        synchronize(self.device)
        began = time.perf_counter()
        begin()
        self.forward_backward()
        before_update()
        self.optimizer.step()
        synchronize(self.device)
        return time.perf_counter() - began


class _Saving:
    """Saves of one way, each proved against clones."""

    def __init__(self, world: World, place: SavePlace, trained: Trained) -> None:
        from hpctrain.checkpoint.tensors.save import Saver

        self._world, self._place, self._trained = world, place, trained
        self._step = 0
        self._saver = Saver(place, world)
        self._saver.prepare(self._state())

    def _state(self) -> State:
        from hpctrain.checkpoint.tensors.boxes import State

        return State(self._trained.tensors)

    def step(self) -> tuple[float, float]:
        """A step behind a save: its seconds, and the stall as it was told."""
        from _model import manifest

        self._step += 1
        clones = {name: tensor.clone() for name, tensor in self._trained.tensors.items()}
        seconds = self._trained.step(
            lambda: self._saver.begin(self._state(), manifest(self._place, self._world, self._step))
        )
        outcome = self._saver.land()
        if outcome is None or outcome.saved is None:
            raise AssertionError(f"not saved: {outcome}")
        self._require_same(clones)
        return seconds, outcome.saved.stall_s

    def _require_same(self, clones: dict[str, Any]) -> None:
        import torch

        from hpctrain.checkpoint.format.reader import CheckpointSource, Target
        from hpctrain.checkpoint.store import find
        from hpctrain.checkpoint.tensors.boxes import State, bytes_of, held
        from hpctrain.core.world import World

        newest = find.candidates(self._place.run)[0]
        if newest.step != self._step or newest.manifest is None:
            raise AssertionError(f"step {newest.step} was found, step {self._step} saved")
        loaded = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in clones.items()}
        boxes = held(State({**loaded}), World(0, 0, 1, torch.device("cpu")))
        source = CheckpointSource.open(newest.path, newest.manifest)
        source.read([Target(box.piece, bytes_of(box.local)) for box in boxes])
        wrong = [
            name for name, tensor in clones.items() if not torch.equal(loaded[name], tensor.cpu())
        ]
        if wrong:
            raise AssertionError(
                f"step {self._step}: {len(wrong)} tensors are not of it: {wrong[:3]}"
            )
        shutil.rmtree(self._place.run.checkpoints)

    def close(self) -> None:
        """End the writer."""
        self._saver.close()


if __name__ == "__main__":
    main()

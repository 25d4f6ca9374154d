"""How long a save holds training up, and how fast it is on disk; beside torch's DCP."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from hpctrain.checkpoint.tensors.boxes import State
from hpctrain.checkpoint.tensors.restore import Wanted, restore
from hpctrain.checkpoint.tensors.save import save
from hpctrain.core.device import synchronize
from hpctrain.core.world import World
from tests.support import sharded

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MILLIONS = 100
"""Parameters: 1.2 GB with their moments, in fp32."""
TURNS = 3
MOST_STALL = 1.1
"""Of the copy of the same bytes over PCIe."""

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture(scope="module")
def benchmarks():
    """The benchmarks' own modules, which import each other by their bare names."""
    names = ("_measure", "_model", "_peer", "checkpoint_gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield SimpleNamespace(**{name.strip("_"): importlib.import_module(name) for name in names})
    for name in names:
        sys.modules.pop(name)


@pytest.fixture(scope="module")
def trained(benchmarks, device, is_cuda):
    """Weights and moments, and a step that takes four times as long as their copy."""
    training = benchmarks.checkpoint_gpu.Trained(MILLIONS if is_cuda else 0.05, device)
    training.work_s(4 * training.copy_s())
    return training


def test_a_save_holds_training_up_for_the_copy_alone(benchmarks, folder, device, note):
    millions = MILLIONS if note.is_cuda else 0.05
    asked = SimpleNamespace(params=millions, repeats=TURNS if note.is_cuda else 1)
    stall, told = benchmarks.checkpoint_gpu.lines_of(asked, folder, device)

    note.at_most("stall of a save", stall.number, MOST_STALL, "x the PCIe copy")
    note.at_most("stall of a save as the ledger tells it", told.number, unit="x the copy")
    assert stall.goal == MOST_STALL
    note.on_gpu("stalls against the PCIe copy, each checkpoint read back")


def test_dcps_own_save_behind_training_beside_it(benchmarks, trained, folder, note):
    peer = benchmarks.peer.Dcp(folder / "dcp", processes=False, pinned=note.is_cuda)
    copy, plain, saving = trained.copy_s(), [], []
    for _ in range(TURNS + 1):
        plain.append(trained.step())
        saving.append(trained.step(lambda: peer.begin(trained.tensors), peer.await_staging))
        peer.land()
    peer.close()
    stall = min(saving[1:]) - min(plain)
    note.at_most("stall of DCP's async save, pinned", stall / copy, unit="x the PCIe copy")
    note.on_gpu("DCP with pinned memory")


def test_saves_and_loads_take_no_longer_than_dcps(benchmarks, trained, tmp_path, device, note):
    world, tensors = World(0, 0, 1, device), trained.tensors
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    blank = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    raw = [np.ones(nbytes, np.uint8)]
    memory = np.ones(nbytes, np.uint8)
    took: dict[str, list[float]] = {}
    for turn in range(2 if note.is_cuda else 1):
        at = tmp_path / f"{turn}"
        at.mkdir()
        run = sharded.place(world, at / "run")
        manifest = sharded.manifest(world, 1)
        acts: dict[str, Any] = {
            "save raw": lambda at=at: benchmarks.model.write_raw(at / "raw", raw),
            "save dcp": lambda at=at: dcp.save(dict(tensors), checkpoint_id=at / "dcp"),
            "save": lambda run=run, m=manifest: save(run, world, State(dict(tensors)), m),
            "load raw": lambda at=at: benchmarks.model.read_raw([at / "raw"], 0, 1, memory),
            "load dcp": lambda at=at: dcp.load(dict(blank), checkpoint_id=at / "dcp"),
            "load": lambda run=run: restore(run, world, lambda _: Wanted(State(dict(blank)))),
        }
        for name, act in acts.items():
            took.setdefault(name, []).append(_seconds(act, device))
    best = {name: min(seconds) for name, seconds in took.items()}
    wrong = [name for name, tensor in tensors.items() if not torch.equal(blank[name], tensor)]
    assert wrong == []
    for what in ("save", "load"):
        gbs = nbytes / best[what] / 1e9
        note.at_most(f"{what} of {nbytes / 1e9:.1f} GB", gbs, unit="GB/s")
        note.at_most(f"{what} against raw files", best[what] / best[f"{what} raw"], unit="x")
        note.at_most(f"{what} against dcp", best[what] / best[f"{what} dcp"], 1.0, "x")
    note.on_gpu("saves and loads of a GPU's tensors against raw files and dcp")


def _seconds(act, device):
    synchronize(device)
    began = time.perf_counter()
    act()
    synchronize(device)
    return time.perf_counter() - began

"""A ZeRO-3 run that goes on under FSDP2 on half the ranks: seconds, disk and memory; as ratios.

Beside it, in the same run, what DeepSpeed offers for another number of ranks: `save_checkpoint`,
then `ds_to_universal` over the files, then a load with `load_universal`. All files are in the page
cache. Each path is gone once: it builds its engines anew. `--params 20` for a quick look.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import _measure as measure

if TYPE_CHECKING:
    from pathlib import Path

    from _measure import Options

    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.checkpoint.tensors.boxes import Flat, State
    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.world import World
    from hpctrain.train.engines.engine import Engine

STEP = 1000
LIMIT = 1.3
"""Memory beyond what was there, at most, of what the rank's part of the state takes."""


def main() -> None:
    """Save under ZeRO-3 both ways, then load both ways."""
    asked = measure.options(__doc__ or "")
    measure.require_memory(4 * asked.state_bytes)
    with measure.scratch(asked, 5 * asked.state_bytes) as folder:
        from _model import new_place

        fewer = max(1, asked.ranks // 2)
        place = new_place(folder / "run")
        saved = measure.on_ranks(
            _save, asked.ranks, place=place, folder=folder, params=asked.params
        )
        converted_s = _convert(folder)
        ours = measure.on_ranks(_load, fewer, place=place, params=asked.params)
        theirs = measure.on_ranks(_load_universal, fewer, folder=folder, params=asked.params)
        lines = _lines(asked, folder, saved, converted_s, (ours, theirs))
        measure.show(
            asked, lines, parameters=f"{asked.params} M", ranks=f"{asked.ranks} to {fewer}"
        )


def _lines(
    asked: Options,
    folder: Path,
    saved: list[dict[str, float]],
    converted_s: float,
    loaded: tuple[list[dict[str, float]], list[dict[str, float]]],
) -> list[measure.Line]:
    ours, theirs = loaded
    save_s, their_save_s = _slowest(saved, "ours_s"), _slowest(saved, "theirs_s")
    load_s, their_load_s = _slowest(ours, "load_s"), _slowest(theirs, "load_s")
    total, their_total = save_s + load_s, their_save_s + converted_s + their_load_s
    disk = _size(folder / "run")
    their_disk = _size(folder / "deepspeed") + _size(folder / "universal")
    save_peak = max(one["save_peak"] / one["shards"] for one in saved)
    load_peak = max(one["load_peak"] / one["shards"] for one in ours)
    their_peak = max(one["load_peak"] / one["shards"] for one in theirs)
    parts = {"save": their_save_s, "convert": converted_s, "load": their_load_s}
    return [
        measure.Line("memory to save, beyond the shards", f"{save_peak:.2f} x", save_peak, LIMIT),
        measure.Line(
            "memory to load, of what the rank keeps",
            f"{load_peak:.2f} x",
            load_peak,
            LIMIT,
            peers={"load_universal": their_peak},
        ),
        measure.Line("save and load", f"{total:.2f} s", total / their_total, unit="of DeepSpeed's"),
        measure.Line("DeepSpeed's: " + ", ".join(parts), _join(parts), their_total, unit="s"),
        measure.Line(
            "disk", f"{disk / 1e9:.2f} GB", disk / their_disk, unit="of DeepSpeed's",
            peers={"GB": their_disk / 1e9},
        ),
        measure.Line("disk, of the state", "", disk / asked.state_bytes),
    ]  # fmt: skip


def _join(parts: dict[str, float]) -> str:
    return " + ".join(f"{seconds:.1f}" for seconds in parts.values())


def _slowest(ranks: list[dict[str, float]], key: str) -> float:
    return max(one[key] for one in ranks)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _save(world: World, place: SavePlace, folder: Path, params: int) -> dict[str, float]:
    import _model

    from hpctrain.checkpoint.tensors.save import save

    engine = _engine("zero3", world, params)
    state = engine.state()
    for name, flat in _flats(state):
        if not name.endswith(".step"):
            _fill(name, flat.local, flat.first)
    engine.apply(dict(state.shared))
    shards = sum(flat.local.nbytes for _, flat in _flats(state))
    del state
    peak = measure.Peak()
    ours = measure.turn(
        world, lambda: save(place, world, engine.state(), _model.manifest(place, world, STEP))
    )
    save_peak = peak.nbytes
    deepspeed: Any = engine.model
    theirs = measure.turn(
        world, lambda: deepspeed.save_checkpoint(str(folder / "deepspeed"), tag="it")
    )
    return {
        "ours_s": ours.wall, "theirs_s": theirs.wall, "save_peak": save_peak, "shards": shards,
    }  # fmt: skip


def _load(world: World, place: SavePlace, params: int) -> dict[str, float]:
    from hpctrain.checkpoint.tensors.restore import Wanted, restore

    engine = _engine("fsdp2", world, params)
    peak = measure.Peak()

    def load() -> None:
        states = []

        def wanted(found: Manifest) -> Wanted:
            states.append(engine.state(saved={entry.name: entry for entry in found.tensors}))
            shared = states[-1].shared
            return Wanted(
                states[-1], frozenset(name for name in shared if name.startswith("optim."))
            )

        restore(place, world, wanted)
        engine.apply(dict(states[-1].shared))

    found = measure.turn(world, load)
    load_peak = peak.nbytes
    kept = 0
    for name, tensor in engine.state().shared.items():
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        kept += local.nbytes
        if not name.endswith(".step") and local.numel():
            rows = tensor.__create_chunk_list__()[0].offsets  # type: ignore[union-attr]
            row = local[0].numel() if local.dim() > 1 else 1
            _require(name, local.reshape(-1), int(rows[0]) * row)
    return {"load_s": found.wall, "load_peak": load_peak, "shards": kept}


def _load_universal(world: World, folder: Path, params: int) -> dict[str, float]:
    engine = _engine("zero3", world, params, universal=True)
    peak = measure.Peak()
    deepspeed: Any = engine.model
    found = measure.turn(
        world, lambda: deepspeed.load_checkpoint(str(folder / "universal"), tag="it")
    )
    load_peak = peak.nbytes
    kept = 0
    for name, flat in _flats(engine.state()):
        kept += flat.local.nbytes
        _require(name, flat.local, flat.first)
    return {"load_s": found.wall, "load_peak": load_peak, "shards": kept}


def _flats(state: State) -> list[tuple[str, Flat]]:
    """What ZeRO-3 has cut, by name."""
    from hpctrain.checkpoint.tensors.boxes import Flat

    return [(name, flat) for name, flat in state.shared.items() if isinstance(flat, Flat)]


def _convert(folder: Path) -> float:
    """DeepSpeed's own program, with a worker for each core of this machine."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    words = [
        "--input_folder", str(folder / "deepspeed" / "it"),
        "--output_folder", str(folder / "universal" / "it"),
        "--num_extract_workers", "2", "--num_merge_workers", "2",
    ]  # fmt: skip
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"ds_to_universal failed:\n{done.stderr[-2000:]}")
    return time.perf_counter() - began


def _engine(kind: str, world: World, params: int, *, universal: bool = False) -> Engine:
    from unittest import mock

    import torch
    from _model import Net

    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.ledger.plan.deepspeed import engine_config
    from hpctrain.train.engines.parallelize import parallelize
    from hpctrain.train.engines.zero import engine as zero

    model = Net(params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = EngineSettings(kind=kind, precision="fp32", clip_norm=0.0)
    if universal:
        own = {"checkpoint": {"load_universal": True}}
        mock.patch.object(
            zero, "engine_config", lambda *args, **more: engine_config(*args, **more) | own
        ).start()
    return parallelize(model, optimizer, settings, world)


def _values(name: str, first: int, count: int) -> Any:
    import zlib

    import torch

    start = zlib.crc32(name.encode()) % 1000 + first
    return (torch.arange(start, start + count) % 65_521).float()


def _fill(name: str, local: Any, first: int) -> None:
    local.copy_(_values(name, first, local.numel()))


def _require(name: str, local: Any, first: int) -> None:
    """A load that gives wrong values is not worth being measured."""
    if not local.equal(_values(name, first, local.numel())):
        raise AssertionError(f"{name} was not loaded as it was saved")


if __name__ == "__main__":
    main()

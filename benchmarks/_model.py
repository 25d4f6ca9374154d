"""A model of so many parameters on gloo ranks, its values known by their place, and raw I/O."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.checkpoint.tensors.boxes import State, bytes_of, held
from hpctrain.checkpoint.tensors.save import SavePlace
from hpctrain.train.engines import state as engine_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from hpctrain.checkpoint.tensors.boxes import Held
    from hpctrain.core.world import World

IO_BYTES = 8 << 20
FILL = 1 << 22
VOCABULARY = 32000


class Block(nn.Module):
    """The parameters of one layer of a transformer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)


class Net(nn.Module):
    """About so many millions of parameters; it is never run."""

    def __init__(self, params: int) -> None:
        super().__init__()
        dim = 1024 if params >= 100 else 512
        layers = max(1, round((params * 1e6 - VOCABULARY * dim) / (12 * dim * dim)))
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)


@dataclass(frozen=True)
class Trained:
    """A model that has done a step, and its state."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    tensors: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Of this rank's memory."""
        return sum(_local(tensor).nbytes for tensor in self.tensors.values())

    def views(self) -> list[NDArray[np.uint8]]:
        """This rank's bytes, as they lie."""
        local = [_local(tensor) for tensor in self.tensors.values()]
        return [np.frombuffer(bytes_of(one), np.uint8) for one in local if one.nbytes]


def sharded(world: World, params: int) -> Trained:
    """FSDP2 over all ranks. Collective."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world.world_size,))
    with torch.device("meta"):
        model = Net(params)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Trained(model, optimizer, engine_state.collect(model, optimizer))


def replicated(params: int) -> dict[str, torch.Tensor]:
    """The same names, whole on each rank, every page of them touched."""
    with torch.device("meta"):
        model = Net(params)
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[engine_state.MODEL + name] = torch.full(parameter.shape, -7.0)
        for moment in ("exp_avg", "exp_avg_sq"):
            full = f"{engine_state.OPTIM}{name}.{moment}"
            tensors[full] = torch.full(parameter.shape, -7.0)
        tensors[f"{engine_state.OPTIM}{name}.step"] = torch.full((), -7.0)
    return tensors


def fill(tensors: Mapping[str, torch.Tensor], world: World) -> None:
    """Give every element a value that follows from its tensor's name and its place."""
    for box in held(State({**tensors}), world):
        local = box.local.view(-1).numpy()
        for low, values in _values(box):
            local[low : low + len(values)] = values


def blank(tensors: dict[str, torch.Tensor]) -> None:
    """Make every element wrong."""
    for tensor in tensors.values():
        _local(tensor).fill_(-7.0)


def require_right(tensors: Mapping[str, torch.Tensor], world: World, who: str) -> None:
    """A load that gives wrong values is not worth being measured."""
    for box in held(State({**tensors}), world):
        local = box.local.view(-1).numpy()
        for low, values in _values(box):
            if not np.array_equal(local[low : low + len(values)], values):
                raise AssertionError(f"{who}: {box.piece.name} was not loaded as it was saved")


def _values(box: Held) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """For boxes that are a run of rows: what their elements have to be, part by part."""
    piece = box.piece
    row = int(np.prod(piece.shape[1:], dtype=np.int64))
    first = piece.begin[0] * row if piece.begin else 0
    seed = np.uint32(zlib.crc32(piece.name.encode()))
    for low in range(0, box.local.numel(), FILL):
        count = min(FILL, box.local.numel() - low)
        index = np.arange(first + low, first + low + count, dtype=np.uint32)
        index *= np.uint32(2654435761)
        index += seed
        yield low, (index >> np.uint32(8)).astype(np.float32)


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def manifest(place: SavePlace, world: World, step: int) -> Manifest:
    """Everything but files and tensors."""
    return Manifest(
        run_id="bench",
        name=place.run.name,
        step=step,
        world_size=world.world_size,
        mesh={"dp": world.world_size},
        engine="fsdp2",
        rng={"ranks": world.world_size},
    )


def new_place(folder: Path, **changes: Any) -> SavePlace:
    """A run of its own to save into."""
    from hpctrain.core.settings.spec import load_spec
    from hpctrain.ledger.run.fence import take_attempt
    from tests.support.recipe import make_run

    run = make_run(folder, **changes)
    attempt = take_attempt(run, job_id="bench", restarts=0)
    return SavePlace(run, attempt, load_spec(run.spec).settings.checkpoint)


# ---- raw I/O of the same bytes


def write_raw(path: Path, views: list[NDArray[np.uint8]]) -> None:
    """Write and flush them, 8 MiB a call."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for view in views:
            for low in range(0, len(view), IO_BYTES):
                os.write(file, view[low : low + IO_BYTES].data)
        os.fsync(file)
    finally:
        os.close(file)


def read_raw(paths: list[Path], share: int, shares: int, memory: NDArray[np.uint8]) -> int:
    """Read a share of what the files hold together, 8 MiB a call; returns its bytes."""
    sizes = [path.stat().st_size for path in paths]
    begin, end = (sum(sizes) * one // shares for one in (share, share + 1))
    done = start = 0
    for path, size in zip(paths, sizes, strict=True):
        low, high = max(begin, start) - start, min(end, start + size) - start
        if low < high:
            file = os.open(path, os.O_RDONLY)
            while low < high:
                part = memory[done : done + min(IO_BYTES, high - low)]
                count = os.preadv(file, [part.data], low)
                assert count  # else `memory` is too small, and this would never end
                low, done = low + count, done + count
            os.close(file)
        start += size
    return done


def warm(nbytes: int) -> NDArray[np.uint8]:
    """Memory, every page of which is there."""
    return np.full(nbytes, 1, np.uint8)


def into_cache(folder: Path) -> None:
    """Read every file below, so that all of them start from the page cache."""
    part = memoryview(bytearray(IO_BYTES))
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(part):
                    continue

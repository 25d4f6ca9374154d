"""Two ranks on one GPU, over gloo: NCCL refuses a device to two ranks."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from typing import TYPE_CHECKING, Any

from tests.support.gloo import launch
from tests.support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

RANKS = 2
LIMIT_S = 80.0
SHAPE = {"layers": 2, "dim": 64, "heads": 2, "seq_len": 16}


def spread(folder: Path, kinds: Sequence[str], *, anew: bool) -> list[dict[str, Any]]:
    """Return what `_act` says on each of two ranks.

    Args:
        folder: Of the checkpoints.
        kinds: Of engines.
        anew: Start processes anew, for CUDA is in use here; else they are forked.
    """
    if not anew:
        return launch(_act, RANKS, folder=folder, kinds=kinds)
    context = multiprocessing.get_context("spawn")
    port = free_port()
    ranks = [
        context.Process(target=_rank, args=(rank, port, folder, list(kinds)))
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LIMIT_S)
    for rank in ranks:
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    paths = [folder / f"said-{rank}" for rank in range(RANKS)]
    return [pickle.loads(path.read_bytes()) for path in paths]  # noqa: S301 - our own bytes


def _rank(rank: int, port: int, folder: Path, kinds: Sequence[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (folder / f"said-{rank}").write_bytes(pickle.dumps(_act(folder, kinds)))


def _act(folder: Path, kinds: Sequence[str]) -> dict[str, Any]:
    import torch.distributed as dist

    from hpctrain.train.joining_ranks import join_world

    dist.init_process_group("gloo")
    world = join_world()
    said = {kind: _both(world, folder, kind) for kind in kinds}
    dist.barrier()
    dist.destroy_process_group()
    return said


def _both(world: Any, folder: Path, kind: str) -> dict[str, Any]:
    """Load what one rank has saved, change it, and save it for one rank. Collective."""
    from tests.gpu.training import Training

    training = Training.of(world, kind=kind, shape=SHAPE)
    assert training.load(folder / f"{kind}-by-1") == 1
    loaded = parts(training.engine)
    change(training.engine)
    training.save(folder / f"{kind}-by-2", 2)
    return {"loaded": loaded, "changed": parts(training.engine), "device": str(world.device)}


def change(engine: Any) -> None:
    """An update without a forward pass: gloo gathers no shards from a GPU. Collective."""
    for weight in engine.model.parameters():
        weight.grad = 0.1 * weight.detach() + 0.01
    engine.step()


def parts(engine: Any) -> dict[str, torch.Tensor]:
    """What this rank holds of weights and moments, in host memory."""
    state = engine.state().shared
    local = {name: getattr(t, "_local_tensor", t) for name, t in state.items()}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in local.items()}

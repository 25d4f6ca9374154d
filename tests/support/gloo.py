"""Real gloo process groups in forked ranks: `launch(fn, world_size)` returns every rank's value."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import socket
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
TIMEOUT_S = 120
PRELOAD = (
    "torch._dynamo",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "hpctrain.checkpoint.saver",
    "hpctrain.engines.fsdp",
    "hpctrain.engines.parallelize",
    "hpctrain.recipes.lm.train",
    "hpctrain.runtime.board",
    "hpctrain.runtime.run",
)
"""What every rank would import for itself, 0.7 s in each that trains the recipe."""


def preload() -> None:
    """Import once in the parent what its ranks need, as a node's agent does."""
    import torch

    for name in PRELOAD:
        import_module(name)
    torch.set_num_threads(1)


def launch(
    fn: Callable[..., Any], world_size: int, *, may_fail: bool = False, **kwargs: Any
) -> list[Any]:
    """Run ``fn(**kwargs)`` in `world_size` forked ranks with torchrun's environment set.

    With `may_fail` the ranks may die (a test kills them), and nothing is returned.

    Raises:
        AssertionError: a rank failed or hung; with its traceback.
    """
    preload()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        ranks = [
            context.Process(
                target=_rank,
                args=(fn, rank, world_size),
                kwargs={"port": port, "out": out, "kwargs": kwargs},
            )
            for rank in range(world_size)
        ]
        gc.freeze()  # else the first collection in a rank copies every page that it shares
        for process in ranks:
            process.start()
        gc.unfreeze()
        for process in ranks:
            process.join(TIMEOUT_S)
        hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
        if may_fail:
            assert not hung, f"ranks {hung} hung"
            return []
        errors = "\n".join(path.read_text() for path in sorted(out.glob("*.error")))
        assert not errors, errors
        assert not hung, f"ranks {hung} hung"
        codes = [process.exitcode for process in ranks]
        assert codes == [0] * world_size, f"exit codes {codes}"
        results = [out / f"{rank}.pkl" for rank in range(world_size)]
        return [pickle.loads(path.read_bytes()) for path in results]  # noqa: S301 - our own bytes


def _rank(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    *,
    port: int,
    out: Path,
    kwargs: dict[str, Any],
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        result = fn(**kwargs)
        (out / f"{rank}.pkl").write_bytes(pickle.dumps(result))
    except SystemExit as leaving:
        (out / f"{rank}.pkl").write_bytes(pickle.dumps(("exit", leaving.code)))
    except BaseException:  # noqa: BLE001 - the test shows it, whatever it is
        (out / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    os._exit(0)

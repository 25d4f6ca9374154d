"""Real process groups in forked ranks: `launch(fn, world_size)` returns every rank's value.

Ranks agree through gloo groups, or through as many nodes of a control plane as `tree` says.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.env import HPCTRAIN_CONTROL
from tests.support import cpus
from tests.support.control_tree import ControlTree
from tests.support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
TIMEOUT_S = 540
"""For all ranks together: pytest ends a test at 600 s, and would not show where they stand."""
STUCK_S = TIMEOUT_S - 10
"""By then a rank writes down where it stands."""
LEAVE_S = 60
"""A rank that was killed keeps the others waiting so long; one that failed says so."""
PRELOAD = (
    "torch._dynamo",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "hpctrain.checkpoint.tensors.save",
    "hpctrain.train.engines.native",
    "hpctrain.train.engines.parallelize",
    "hpctrain.recipes.lm.train",
    "hpctrain.train.runtime.trackers",
    "hpctrain.train.runtime.joining",
)
"""What every rank would import for itself, 0.7 s in each that trains the recipe."""


def preload() -> None:
    """Import once in the parent what its ranks need, as a node's agent does."""
    gc.disable()
    for name in PRELOAD:
        import_module(name)
    gc.enable()
    _compute_alone()


def _compute_alone() -> None:
    """One thread for torch's operators; in a forked rank also before any other thread computes.

    Behind a fork torch makes its pool of threads anew at the first use, and of two threads that are
    the first together one fails with "Invalid thread pool!" (transformers loads by four).
    """
    import torch

    torch.set_num_threads(1)


def launch(
    fn: Callable[..., Any],
    world_size: int,
    *,
    may_fail: bool = False,
    tree: int = 0,
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(**kwargs)`` in `world_size` forked ranks with torchrun's environment set.

    With `may_fail` the ranks may die (a test kills them), and nothing is returned. With `tree` the
    ranks are those of so many nodes, and agree by a control plane as an agent's ranks do.

    Raises:
        AssertionError: a rank failed or hung; with its traceback.
    """
    preload()
    with cpus.taken(world_size):
        return _launch(fn, world_size, may_fail=may_fail, tree=tree, kwargs=kwargs)


def _launch(
    fn: Callable[..., Any], world_size: int, *, may_fail: bool, tree: int, kwargs: dict[str, Any]
) -> list[Any]:
    """See `launch`."""
    port = free_port()
    context = multiprocessing.get_context("fork")
    together = None if may_fail else context.Barrier(world_size)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        out = Path(folder)
        control = ControlTree(tree, world_size // tree) if tree else None
        if control is not None:
            stack.enter_context(control)
        ranks = [
            context.Process(
                target=_rank,
                args=(fn, rank, world_size),
                kwargs={
                    "port": port,
                    "out": out,
                    "together": together,
                    "control": control,
                    "kwargs": kwargs,
                },
            )
            for rank in range(world_size)
        ]
        gc.freeze()  # else the first collection in a rank copies every page that it shares
        for process in ranks:
            process.start()
        gc.unfreeze()
        ends = time.monotonic() + TIMEOUT_S
        for process in ranks:
            process.join(max(0.0, ends - time.monotonic()))
        hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
        if may_fail:
            assert not hung, f"ranks {hung} hung"
            return []
        errors = "\n".join(path.read_text() for path in sorted(out.glob("*.error")))
        codes = [process.exitcode for process in ranks]
        if errors or hung or any(codes):  # one that took long has written where it stood, too
            errors += _stacks(out)
        assert not errors, f"{errors}\nexit codes {codes}, hung {hung}"
        assert not hung, f"ranks {hung} hung"
        assert codes == [0] * world_size, f"exit codes {codes}"
        results = [out / f"{rank}.pkl" for rank in range(world_size)]
        return [pickle.loads(path.read_bytes()) for path in results]  # noqa: S301 - our own bytes


def _stacks(out: Path) -> str:
    """Where ranks were that a signal killed, and those that have taken long."""
    said = {path.stem: path.read_text() for path in sorted(out.glob("*.crash"))}
    return "".join(
        f"\n{rank} crashed, or stood here:\n{text}" for rank, text in said.items() if text
    )


def _rank(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    *,
    port: int,
    out: Path,
    together: Any,
    control: ControlTree | None,
    kwargs: dict[str, Any],
) -> None:
    per_node = world_size if control is None else control.ranks_per_node
    os.environ.pop(HPCTRAIN_CONTROL, None)
    if control is not None:
        os.environ[HPCTRAIN_CONTROL] = str(control.folder(rank))
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank % per_node),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(per_node),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    _compute_alone()
    crash = (out / f"rank {rank}.crash").open("w")  # its stack, if torch or gloo kills it
    faulthandler.enable(crash)
    faulthandler.dump_traceback_later(STUCK_S, file=crash)
    try:
        result = fn(**kwargs)
        (out / f"{rank}.pkl").write_bytes(pickle.dumps(result))
        _leave(together)
    except SystemExit as leaving:
        (out / f"{rank}.pkl").write_bytes(pickle.dumps(("exit", leaving.code)))
        _leave(together)
    except BaseException:  # noqa: BLE001 - the test shows it, whatever it is
        (out / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        if together is not None:
            together.abort()
    os._exit(0)


def _leave(together: Any) -> None:
    """Wait until all ranks are done.

    Rank 0 would take the store with it, from those that still make or leave a group, and any rank
    its connections, from those that are short of CPU time and still in their last collective.
    """
    if together is not None:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(LEAVE_S)

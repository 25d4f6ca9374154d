"""Ranks on this machine for a check: started together, awaited together, and ended together.

What a rank prints goes to a file, so that a command's own output stays readable. There is no agent
and no run directory here; training proper has both. tests/engines/test_parity.py holds the
promises.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.base.process import die_with_parent, print_to
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.process import BaseProcess

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankFailure:
    """Why a rank ended; picklable."""

    rank: int
    at: float
    error: HpctrainError | None
    summary: str


def run_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, start_method: str = "fork"
) -> list[Any]:
    """Call a function in so many processes, which find each other by torchrun's environment.

    One process gets none of that environment: it is a world by itself.

    Args:
        function: Of a module; it may import torch, which this process must not have used yet.
        ranks: How many.
        args: For the function; picklable, as what it returns.
        start_method: "fork" or "spawn".

    Returns:
        What each rank returned, in their order.

    Raises:
        HpctrainError: a rank failed: its own error where that was one for the user. All others
            have been ended; so they have on Ctrl-C.
    """
    context: Any = multiprocessing.get_context(start_method)
    with tempfile.TemporaryDirectory(prefix="hpctrain-") as folder:
        out = Path(folder)
        environ = _environ(ranks)
        processes: list[BaseProcess] = [
            context.Process(target=_rank, args=(function, args, {**environ[rank]}, rank, out))
            for rank in range(ranks)
        ]
        with _all_ended(processes):
            for process in processes:
                process.start()
            failed = _await(processes)
        if failed is not None:
            raise _first_error(failed, processes[failed].exitcode or 0, out)
        return [pickle.loads((out / f"{rank}.result").read_bytes()) for rank in range(ranks)]  # noqa: S301 - our own ranks wrote it


def _environ(ranks: int) -> list[dict[str, str]]:
    if ranks == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        # A host's own name may lead to no address, or to one that a firewall guards.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


@contextlib.contextmanager
def _all_ended(processes: list[BaseProcess]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def _await(processes: list[BaseProcess]) -> int | None:
    """Until all are done, or one has failed, whose number it is: its peers may wait for it."""
    left: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(processes)}
    while left:
        for sentinel in wait(list(left)):
            rank = left.pop(sentinel)
            processes[rank].join()
            if processes[rank].exitcode != 0:
                return rank
    return None


def _first_error(failed: int, exitcode: int, out: Path) -> HpctrainError:
    """What to tell: an error for the user, or else the first; later ones are of lost connections.

    Args:
        failed: The rank that was seen to fail first.
        exitcode: How it ended; negative for a signal.
        out: The ranks' files.
    """
    failures: list[RankFailure] = [
        pickle.loads(path.read_bytes())  # noqa: S301 - our own ranks wrote it
        for path in out.glob("*.failure")
    ]
    for failure in failures:
        if failure.error is not None:
            return failure.error
    if (out / f"{failed}.failure").exists():
        first = min(failures, key=lambda failure: failure.at)
        return HpctrainError(f"rank {first.rank} failed: {first.summary}")
    lines = (out / f"{failed}.log").read_text(errors="replace").splitlines() or ["nothing"]
    how = f"exit code {exitcode}" if exitcode > 0 else signal.Signals(-exitcode).name
    return HpctrainError(f"rank {failed} ended with {how}; it printed last: {lines[-1]}")


def _rank(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environ: dict[str, str],
    rank: int,
    out: Path,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the parent ends this one
    die_with_parent(os.getppid())
    print_to(out / f"{rank}.log", 0o600)
    for name in TORCHRUN:
        os.environ.pop(name, None)
    os.environ.update(environ)
    code = 1
    try:
        staged = out / f"{rank}.part"
        staged.write_bytes(pickle.dumps(function(*args)))
        staged.replace(out / f"{rank}.result")
        code = 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent tells it
        summary = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        own_error = error if isinstance(error, HpctrainError) else None
        failure = RankFailure(rank, time.monotonic(), own_error, summary)
        (out / f"{rank}.failure").write_bytes(pickle.dumps(failure))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not through torch's own ending, which waits for peers that may be gone

"""Every name of torch that a rank's witness uses and that torch does not promise to keep.

Where this torch has one not, what it would have told is not known, and nothing else is missing.
docs/torch-versions.md says which releases were run; tests/engines/test_look.py holds the promises.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    Note = Callable[[Mapping[str, Sequence[int]]], None]


def serve_recorder(path: Path) -> bool:
    """Have a native thread of torch answer for its flight recorder, for this process's life.

    Args:
        path: Of its socket.

    Returns:
        Whether this torch can.
    """
    try:
        from torch._C._distributed_c10d import _WorkerServer  # public: through an environment alone
    except ImportError:
        return False
    with _without_stderr(), _without_signals():  # it says that it listens, in the user's log
        server = _WorkerServer(str(path))
    # Never taken down: that would be said too, and wait for the thread while the process ends.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    return True


def watch_groups(note: Note) -> bool:
    """Tell of the members of all process groups, by name, whenever there is a new one.

    Args:
        note: What is told.

    Returns:
        Whether this torch lets it be seen.
    """
    from torch.distributed import distributed_c10d as c10d

    names, ranks = _groups_of(c10d)
    if names is None or type(ranks) is not dict:
        return False
    c10d._pg_group_ranks = _WatchedRanks(ranks, names, note)  # noqa: SLF001
    return True


def collectives_called() -> int:
    """How many collectives of all ranks' own group this rank has called; -1 where nobody says."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    group = getattr(getattr(c10d, "GroupMember", None), "WORLD", None)
    count = getattr(group, "_get_sequence_number_for_group", None)
    if count is None:
        return -1
    try:
        return int(count())
    except RuntimeError:  # of a backend that does not count
        return -1


class _WatchedRanks(dict[Any, dict[int, int]]):
    """torch's own book of each group's ranks, which tells of what is written into it."""

    def __init__(
        self, ranks: Mapping[Any, dict[int, int]], names: Mapping[Any, str], note: Note
    ) -> None:
        super().__init__(ranks)
        self._names, self._note = names, note

    def __setitem__(self, group: Any, ranks: dict[int, int]) -> None:
        super().__setitem__(group, ranks)
        named = {self._names.get(known): members for known, members in self.items()}
        self._note({name: list(members) for name, members in named.items() if name is not None})


def _groups_of(c10d: Any) -> tuple[Mapping[Any, str] | None, object]:
    names = getattr(c10d, "_pg_names", None)
    return names if isinstance(names, dict) else None, getattr(c10d, "_pg_group_ranks", None)


@contextlib.contextmanager
def _without_signals() -> Iterator[None]:
    """Threads that begin inside are given no signal.

    Else the kernel may hand them a SIGTERM whose handler Python runs in the main thread, which
    sleeps or waits in a collective and never hears of it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)

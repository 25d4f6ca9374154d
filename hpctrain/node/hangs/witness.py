"""Set up what a rank leaves for an inspection when it stands still; free while it trains.

torch's flight recorder answers from a native thread, and faulthandler writes from a C signal
handler: both work while the GIL is held. Private names of torch that this torch lacks are left out,
and their facts are then not known. tests/engines/test_look.py holds the promises.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.files import replace_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    Note = Callable[[Mapping[str, Sequence[int]]], None]


LOOK_SIGNAL = signal.SIGRTMIN + 4
"""Has a rank write its stacks. One that has no handler for it would die of it. Not the signal by
which a call of submitit's is interrupted (`submitit/task.py`)."""


def stacks_path(folder: Path, rank: int) -> Path:
    """Where a rank's stacks are written, one look after the other."""
    return folder / f"stacks-{rank}"


def recorder_path(folder: Path, rank: int) -> Path:
    """The socket on which a rank's flight recorder is asked; it must be short, as sockets' are."""
    return folder / f"fr-{rank}"


def groups_path(folder: Path, rank: int) -> Path:
    """The members of a rank's process groups, as JSON."""
    return folder / f"groups-{rank}"


class Witness:
    """This rank's, for the rest of its life."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Be ready to be inspected, in a `folder` that only the user can enter."""
        self._groups_path = groups_path(folder, rank)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._stacks = os.open(stacks_path(folder, rank), flags, 0o600)
        faulthandler.register(LOOK_SIGNAL, file=self._stacks, all_threads=True)
        serve_recorder(recorder_path(folder, rank))
        watch_groups(self._note_groups)

    def _note_groups(self, members: Mapping[str, Sequence[int]]) -> None:
        with contextlib.suppress(OSError):  # a full memory costs the verdict, never the training
            replace_text(self._groups_path, json.dumps(members))


def serve_recorder(path: Path) -> bool:
    """Have a native thread of torch serve its flight recorder for good; False if torch cannot."""
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
    """Note all process groups' members, by name, at each new one; False if torch hides them."""
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

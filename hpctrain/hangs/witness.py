"""What a rank leaves for whoever looks at it when it stands still: set up once, then free.

Nothing here runs while the rank trains. torch's own server answers for its flight recorder from a
native thread, faulthandler writes from a signal handler in C: both also while Python's lock is
held. What only Python knows, the members of the process groups, is written down whenever there are
new ones. tests/engines/test_look.py holds the promises.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from typing import TYPE_CHECKING, Any

from hpctrain.base.files import replace_text

if TYPE_CHECKING:
    from pathlib import Path

LOOK_SIGNAL = signal.SIGRTMIN + 5
"""Has a rank write its stacks. One that has no handler for it would die of it."""


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
        """Be ready to be looked at.

        Args:
            folder: Of the node and the round, which only the user can enter.
            rank: This rank's number.
        """
        self._folder, self._rank = folder, rank
        self._groups_written = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._stacks = os.open(stacks_path(folder, rank), flags, 0o600)
        faulthandler.register(LOOK_SIGNAL, file=self._stacks, all_threads=True)
        self._server = _recorder_server(recorder_path(folder, rank))

    def note_groups(self) -> None:
        """Write down the members of the process groups, where there are new ones."""
        from torch.distributed import distributed_c10d as c10d

        groups = c10d._world.pg_map  # noqa: SLF001 - no public list; see engines/torch_private.py
        if len(groups) == self._groups_written:
            return
        members = {
            c10d._world.pg_names[group]: c10d.get_process_group_ranks(group)  # noqa: SLF001
            for group in groups
        }
        replace_text(groups_path(self._folder, self._rank), json.dumps(members))
        self._groups_written = len(groups)


def _recorder_server(path: Path) -> Any:
    """What torch serves; None where this torch has none."""
    try:
        from torch._C._distributed_c10d import _WorkerServer  # public: through an environment alone
    except ImportError:
        return None
    return _WorkerServer(str(path))

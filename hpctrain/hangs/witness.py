"""What a rank leaves for whoever looks at it when it stands still: set up once, then free.

Nothing here runs while the rank trains. torch's own server answers for its flight recorder from a
native thread, faulthandler writes from a signal handler in C: both also while Python's lock is
held. What only Python knows, the members of the process groups, is written down whenever there is
a new one. What this torch has not is left out, and then not known. tests/engines/test_look.py
holds the promises.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
from typing import TYPE_CHECKING

from hpctrain.base.files import replace_text
from hpctrain.hangs import torch_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

LOOK_SIGNAL = signal.SIGRTMIN + 4
"""Has a rank write its stacks. One that has no handler for it would die of it. Not the signal by
which a call of submitit's is interrupted (`submitit/stop.py`)."""


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
        self._groups_path = groups_path(folder, rank)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._stacks = os.open(stacks_path(folder, rank), flags, 0o600)
        faulthandler.register(LOOK_SIGNAL, file=self._stacks, all_threads=True)
        torch_names.serve_recorder(recorder_path(folder, rank))
        torch_names.watch_groups(self._note_groups)

    def _note_groups(self, members: Mapping[str, Sequence[int]]) -> None:
        with contextlib.suppress(OSError):  # a full memory costs the verdict, never the training
            replace_text(self._groups_path, json.dumps(members))

"""What an error of the file system proves about a checkpoint, and how long such errors are retried.

A name that is not there is damage. Any other error (a stale handle, a server that is away, an
expired ticket, no descriptors left) says nothing about the bytes: taken for damage it would cost a
run all its checkpoints. The promises are held by tests/unit/checkpoint/test_reader.py and
test_beginning.py.
"""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING, TypeVar

from hpctrain.core.base import clock
from hpctrain.errors import FileSystemFault, IncompleteCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("hpctrain.checkpoint")

T = TypeVar("T")

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 15.0

_PROOF = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})
"""The file system has answered: there is no such file."""


def proves_absence(error: OSError) -> bool:
    """Whether the error says that there is no such file, and not that nobody can tell."""
    return error.errno in _PROOF


class Patience:
    """Tries again what the file system refuses, for so many seconds in all; then raises it.

    The sum is bounded, not each wait: other ranks wait meanwhile in a collective with a time-out.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        """Wait so long in all; without any seconds every error is raised at once."""
        self._all_s = seconds
        self._left_s = seconds

    def __call__(self, act: Callable[[], T]) -> T:
        """What the action returns, once it does; it may be called several times.

        Raises:
            FileSystemFault: and OSError, as the action's last try raised them.
            IncompleteCheckpoint: the same; a node may see a file later than others.
        """
        wait_s = FIRST_WAIT_S
        while True:
            try:
                return act()
            except (OSError, FileSystemFault, IncompleteCheckpoint) as error:
                if self._left_s <= 0:
                    raise
                wait_s = min(wait_s, self._left_s)
                self._tell(error, wait_s)
            clock.sleep(wait_s)
            self._left_s -= wait_s
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _tell(self, error: Exception, wait_s: float) -> None:
        log.warning(
            "%s; tried again in %g s, for %g s more of %g s (checkpoint.patience_s)",
            error,
            wait_s,
            self._left_s,
            self._all_s,
        )

"""TensorBoard's files, one curve over all attempts. Rank 0 only.

A resumed run passes its step as `purge_step`; without it TensorBoard shows the redone steps twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


QUEUE = 1000


class Board:
    """Scalars by step; the writer is made with the first one, since importing it takes a second."""

    def __init__(self, folder: Path | None, resumed_step: int) -> None:
        self._folder = folder
        self._resumed_step = resumed_step
        self._writer: Any = None

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write scalars for a step; nothing without a folder."""
        if self._folder is None:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # A short queue makes the training loop wait for the writer's thread, scalar by scalar.
            self._writer = SummaryWriter(
                str(self._folder), purge_step=self._resumed_step, max_queue=QUEUE
            )
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Put everything on disk: the process may be killed next."""
        if self._writer is not None:
            self._writer.flush()

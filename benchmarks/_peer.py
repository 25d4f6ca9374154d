"""torch's own saves behind training, beside which ours are measured."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import torch


class Dcp:
    """torch's own saves behind training, as the user of it has to set them up to be quick."""

    def __init__(self, path: Path, *, processes: bool, pinned: bool = False) -> None:
        """Make the stager.

        Args:
            path: Where saves go.
            processes: Write in a process, else in a thread.
            pinned: Stage a GPU's tensors into page-locked memory, behind training.
        """
        self._path, self._processes, self._pinned = path, processes, pinned
        self._future: Any = None
        self._stderr: int | None = None
        self._stager = self._new_stager()

    def _new_stager(self) -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        return DefaultStager(
            StagingOptions(
                use_pinned_memory=self._pinned,
                use_shared_memory=self._processes,
                use_async_staging=self._pinned,
                use_non_blocking_copy=self._pinned,
            )
        )

    def begin(self, tensors: dict[str, torch.Tensor]) -> None:
        """Stage, and write behind training."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kind = AsyncCheckpointerType.PROCESS if self._processes else AsyncCheckpointerType.THREAD
        if self._future is None:
            self._stderr = _silence()
        elif not getattr(self._stager._state_dict_stager, "_deepcopy_dispatch", True):  # noqa: SLF001
            self._stager = self._new_stager()  # torch 2.11 can use one only once
        self._future = dcp.async_save(
            dict(tensors),
            checkpoint_id=self._path,
            async_checkpointer_type=kind,
            async_stager=self._stager,
        )

    @property
    def in_flight(self) -> bool:
        """Whether it still writes."""
        return not self._upload.done()

    def await_staging(self) -> None:
        """Wait until the tensors may change, where they are staged behind training."""
        if hasattr(self._future, "staging_completion"):
            self._future.staging_completion.result()

    @property
    def _upload(self) -> Any:
        return getattr(self._future, "upload_completion", self._future)

    def land(self) -> None:
        """Wait for it."""
        self._upload.result()
        if self._stderr is not None:
            os.dup2(self._stderr, 2)
            os.close(self._stderr)
            self._stderr = None

    def close(self) -> None:
        """Give the staged memory back."""
        self._stager.close()


def _silence() -> int:
    """What was standard error; the process that the first save starts would tell its life on it."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    return kept

"""Lightning as a part of a run: `callbacks=[lightning.LightningCallback(run)]`."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.frameworks import meet, need, seal

need("lightning", since="2.6", below="2.7")
import lightning.pytorch as pl  # noqa: E402 - refused in a line before its own errors
from lightning.pytorch.plugins.environments import TorchElasticEnvironment  # noqa: E402

if TYPE_CHECKING:
    from hpctrain.train.runtime.run import Run


class LightningCallback(pl.Callback):  # type: ignore[misc] # lightning is skipped by mypy
    """Tells the run where the Trainer is, saves and seals, and leaves at a stop.

    ``trainer.fit(model, ckpt_path=run.resume_path)`` resumes from the registered checkpoint. Tokens
    are reported by `Run.log` in the module's training_step. Make it after `hpctrain.init`.
    """

    def __init__(self, run: Run, *, every_n_steps: int = 0, keep: int = 2) -> None:
        """Collective, as `hpctrain.init` is: every rank has one.

        Args:
            run: What `hpctrain.init` gave.
            every_n_steps: Save so often; 0 saves at stops only.
            keep: How many of its checkpoints it leaves on the disk, over all starts of the run.
        """
        self._run = run
        self._every = every_n_steps
        self._keep = keep
        folder = None if run.dir is None else run.dir.root / "output"
        self._saved = [] if folder is None else sorted(folder.glob("step-*.ckpt"))
        self._on_sigterm = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Say where this start continues."""
        meet(self._run, "Lightning", trainer.world_size, "Trainer(**lightning.where(run), ...)")
        # Lightning's own handler makes a collective in the middle of whatever a rank is doing.
        signal.signal(signal.SIGTERM, self._on_sigterm)
        total = trainer.estimated_stepping_batches if module.automatic_optimization else math.inf
        self._run.at(trainer.global_step, total=int(total) if math.isfinite(total) else None)

    def on_train_batch_end(
        self, trainer: pl.Trainer, _: pl.LightningModule, outputs: Any, *__: Any
    ) -> None:
        """Count the update, save where it is due, and leave at a stop."""
        before, step = self._run.step, trainer.global_step
        if step == before:  # gradients are still being gathered
            return
        self._run.at(step, **self._loss(trainer, outputs))
        stops = self._run.should_stop()
        # Two optimizers count two steps for a batch, and may step over a multiple.
        if stops or (self._every and step // self._every > before // self._every):
            self._save(trainer, step)
        if stops:
            self._run.leave()

    def _loss(self, trainer: pl.Trainer, outputs: Any) -> dict[str, float]:
        """The step's loss where Lightning logs: reading it each time would hold up the GPU."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is None or trainer.global_step % trainer.log_every_n_steps:
            return {}
        return {"loss": float(loss)}

    def _save(self, trainer: pl.Trainer, step: int) -> None:
        run = self._run.dir
        folder = Path(trainer.default_root_dir) if run is None else run.root / "output"
        path = folder / f"step-{step:010d}.ckpt"
        trainer.save_checkpoint(path)
        is_sealed = seal(self._run, step, path)
        self._saved = [*(old for old in self._saved if old.name < path.name), path]
        if not is_sealed:  # the run resumes from an older one
            return
        for old in self._saved[: -self._keep]:
            trainer.strategy.remove_checkpoint(old)
        self._saved = self._saved[-self._keep :]


def where(run: Run) -> dict[str, Any]:
    """Arguments of the Trainer that fit the ranks of this start, however many nodes it got.

    With them Lightning takes the ranks that are there: it starts none, and requeues nothing.
    """
    if "RANK" not in os.environ:
        return {}
    ranks = run.world.ranks_per_node
    nodes = run.world.world_size // ranks
    return {"devices": ranks, "num_nodes": nodes, "plugins": [TorchElasticEnvironment()]}

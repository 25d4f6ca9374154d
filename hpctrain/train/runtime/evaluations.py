"""What a program calls in the job of an evaluation: its checkpoint's weights, and its results.

The job is a run of its own; the run that made the checkpoint is read and never touched. The
promises are held by tests/engines/test_evaluation.py and tests/unit/runtime/test_evaluations.py.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.format.manifest import parse_step
from hpctrain.checkpoint.store.find import look_at
from hpctrain.core.base.env import HPCTRAIN_CHECKPOINT, HPCTRAIN_RESULTS, HPCTRAIN_RUN_DIR
from hpctrain.core.base.log import configure
from hpctrain.core.settings.schema import CheckpointSettings
from hpctrain.core.settings.spec import load_spec
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.results import LONGEST_NAME, MOST_METRICS, is_name, write_results

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from hpctrain.core.world import World
    from hpctrain.train.engines.engine import Engine

log = logging.getLogger("hpctrain.runtime")


def evaluation() -> Evaluation:
    """The evaluation that this process is a rank of. Not collective.

    Raises:
        UsageError: this is not the job of an evaluation, and no checkpoint is named.
    """
    configure(f"rank {os.environ.get('RANK', '0')}")
    named = os.environ.get(HPCTRAIN_CHECKPOINT)
    if not named:
        raise UsageError(
            f"{HPCTRAIN_CHECKPOINT} is not set: this is not the job of an evaluation. Settings "
            "[evaluate] of a run start one for each checkpoint; to try the program alone, set it "
            "to the path of a checkpoint (`hpctrain help how-do-i`)"
        )
    root = os.environ.get(HPCTRAIN_RUN_DIR)
    spec_path = RunDir(Path(root)).spec if root else None
    spec = load_spec(spec_path) if spec_path is not None and spec_path.exists() else None
    path = Path(named)
    if spec is not None and spec.evaluates is not None:
        step = spec.evaluates.step
    else:
        step = parse_step(path.name) or 0
    settings = spec.settings.checkpoint if spec is not None else CheckpointSettings()
    return Evaluation(step, path, settings)


class Evaluation:
    """One checkpoint that is to be judged.

    Attributes:
        step: Updates in it; 0 where nobody says.
        checkpoint: Its path: a folder in hpctrain's format, or what the program has saved in its
            own way and sealed.
    """

    def __init__(self, step: int, checkpoint: Path, settings: CheckpointSettings) -> None:
        """Use `evaluation`."""
        self.step = step
        self.checkpoint = checkpoint
        self._settings = settings
        self._reported: dict[str, float] = {}

    def load(self, model: nn.Module | Engine) -> None:
        """Fill a model's parameters and buffers with the checkpoint's, each byte proved.

        The number of ranks and the engine need not be those of the training. Collective where there
        is a process group: every rank calls it; otherwise each rank reads for itself. The
        checkpoint's dtypes count: cast the model afterwards. After an error the model holds
        anything.

        Args:
            model: A module, wrapped by DDP or FSDP2 or not; or what `Run.parallelize` gave.

        Raises:
            UsageError: the program has saved this checkpoint in its own way.
            CheckpointError: the checkpoint is damaged, or another model's; on every rank.
        """
        from hpctrain.checkpoint.tensors.boxes import State
        from hpctrain.checkpoint.tensors.restore import load_weights
        from hpctrain.core.world import on_rank_0
        from hpctrain.train.engines import state as names
        from hpctrain.train.engines.engine import Engine
        from hpctrain.train.runtime.program import BASE

        if parse_step(self.checkpoint.name) is None:
            raise UsageError(
                f"{self.checkpoint} was saved by the program in its own way; load it from "
                "`evaluation.checkpoint` as the program does"
            )
        world = _world()
        checkpoint = on_rank_0(world, lambda: look_at(self.checkpoint, self.step))
        entries = checkpoint.manifest.tensors if checkpoint.manifest is not None else []
        saved = {entry.name: entry for entry in entries}
        if isinstance(model, Engine):
            state = model.state(with_optimizer=False, saved=saved)
        else:
            state = State(dict(names.wanted(model, None, saved)))
        manifest = load_weights(checkpoint, world, state, self._settings)
        if not isinstance(model, Engine):
            names.apply(model, None, state.shared)
        else:
            model.apply(state.shared, with_optimizer=False)
            if model.base is not None and BASE in manifest.extra:
                model.base.load_state_dict(manifest.extra[BASE])

    def report(self, metrics: Mapping[str, float] | None = None, /, **more: float) -> None:
        """Say what was measured: names and numbers. Not collective; rank 0's call counts.

        Each call adds to those before it. A number that is not finite is kept as unknown: it is
        shown as such, and is never the best. The run's ledger takes the results when the program
        has ended well.

        Args:
            metrics: By name, for names that are no Python names.
            more: By name: ``report(loss=2.3, accuracy=0.5)``.

        Raises:
            UsageError: a name or a value that cannot be.
            HpctrainError: the results could not be written.
        """
        self._reported |= _numbers({**(metrics or {}), **more})
        if len(self._reported) > MOST_METRICS:
            raise UsageError(f"{len(self._reported)} metrics; report {MOST_METRICS} at most")
        if os.environ.get("RANK", "0") != "0":
            return
        unknown = [name for name, value in self._reported.items() if not math.isfinite(value)]
        if unknown:
            log.warning("step %d: not finite, kept as unknown: %s", self.step, ", ".join(unknown))
        path = os.environ.get(HPCTRAIN_RESULTS)
        if not path:
            log.warning("step %d: %s; %s is not set", self.step, self._reported, HPCTRAIN_RESULTS)
            return
        try:
            write_results(Path(path), self._reported)
        except OSError as error:
            raise HpctrainError(f"the results cannot be written: {error}") from error


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in metrics.items():
        if not is_name(name):
            raise UsageError(
                f"{name!r} cannot be the name of a metric: give one line of {LONGEST_NAME} "
                "characters at most"
            )
        with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
            if not isinstance(value, bool | str | bytes):
                numbers[name] = float(value)
        if name not in numbers:
            raise UsageError(
                f"{name} is {value!r}, which is no number; report one number for each metric"
            )
    return numbers


def _world() -> World:
    """The ranks, where they have met; else this rank by itself."""
    import torch.distributed as dist

    from hpctrain.core.device import device_of_rank
    from hpctrain.core.world import World
    from hpctrain.train.joining_ranks import join_world

    if dist.is_available() and dist.is_initialized():
        return join_world()
    return World(0, 0, 1, device_of_rank(int(os.environ.get("LOCAL_RANK", "0"))))

"""hpctrain keeps a PyTorch training program training on a SLURM cluster until it is done.

What is in `__all__` is for users, with `faults` for tests, `dcp` for `torch.distributed.checkpoint`
and `errors`; everything below `hpctrain.` is internal and may change with any version.

`import hpctrain` is cheap: what stands behind a name, with torch, is imported on its first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import VERSION

if TYPE_CHECKING:
    from hpctrain import errors, frameworks, submitit
    from hpctrain.checkpoint.tensors import dcp
    from hpctrain.cli.api import CancelledJob, StartedJob, Status, cancel, resume, status, submit
    from hpctrain.core.base.mesh import MicrobatchRules
    from hpctrain.core.settings.schema import Settings
    from hpctrain.core.testing import faults
    from hpctrain.core.world import World, broadcast
    from hpctrain.errors import CheckpointError, HpctrainError, UsageError
    from hpctrain.ledger.history.attempts import AttemptView
    from hpctrain.ledger.plan.mesh import ModelShape
    from hpctrain.observe.status.status import Checkpoint
    from hpctrain.train.data.batches import GlobalBatches, MicrobatchSamples, StepBatch, cut_step
    from hpctrain.train.data.loader import Loader, LoaderOptions
    from hpctrain.train.data.order import Mixture, SampleOrder
    from hpctrain.train.data.stream_loader import StreamLoader
    from hpctrain.train.data.streams import PackedDocuments, TokenSequences, cu_seqlens
    from hpctrain.train.data.tokens import TokenFile, write_tokens
    from hpctrain.train.engines.engine import Engine, Microbatch
    from hpctrain.train.engines.parallelize import ModelPlan
    from hpctrain.train.engines.tensor_parallel import cross_entropy
    from hpctrain.train.runtime.evaluations import Evaluation, evaluation
    from hpctrain.train.runtime.joining import init
    from hpctrain.train.runtime.run import Run, Stopped
    from hpctrain.train.runtime.trackers import TrackedRun, Tracker

__version__ = VERSION

_NAMES = {
    "hpctrain.checkpoint.tensors.dcp": "dcp",
    "hpctrain.cli.api": "CancelledJob StartedJob Status cancel resume status submit",
    "hpctrain.core.base.mesh": "MicrobatchRules",
    "hpctrain.core.settings.schema": "Settings",
    "hpctrain.core.testing.faults": "faults",
    "hpctrain.core.world": "World broadcast",
    "hpctrain.errors": "CheckpointError HpctrainError UsageError errors",
    "hpctrain.frameworks": "frameworks",
    "hpctrain.ledger.history.attempts": "AttemptView",
    "hpctrain.ledger.plan.mesh": "ModelShape",
    "hpctrain.observe.status.status": "Checkpoint",
    "hpctrain.submitit": "submitit",
    "hpctrain.train.data.batches": "GlobalBatches MicrobatchSamples StepBatch cut_step",
    "hpctrain.train.data.loader": "Loader LoaderOptions",
    "hpctrain.train.data.order": "Mixture SampleOrder",
    "hpctrain.train.data.stream_loader": "StreamLoader",
    "hpctrain.train.data.streams": "PackedDocuments TokenSequences cu_seqlens",
    "hpctrain.train.data.tokens": "TokenFile write_tokens",
    "hpctrain.train.engines.engine": "Engine Microbatch",
    "hpctrain.train.engines.parallelize": "ModelPlan",
    "hpctrain.train.engines.tensor_parallel": "cross_entropy",
    "hpctrain.train.runtime.evaluations": "Evaluation evaluation",
    "hpctrain.train.runtime.joining": "init",
    "hpctrain.train.runtime.run": "Run Stopped",
    "hpctrain.train.runtime.trackers": "TrackedRun Tracker",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
"""Module of each name; a name that its module ends with is that module itself."""

__all__ = [
    "AttemptView",
    "CancelledJob",
    "Checkpoint",
    "CheckpointError",
    "Engine",
    "Evaluation",
    "GlobalBatches",
    "HpctrainError",
    "Loader",
    "LoaderOptions",
    "Microbatch",
    "MicrobatchRules",
    "MicrobatchSamples",
    "Mixture",
    "ModelPlan",
    "ModelShape",
    "PackedDocuments",
    "Run",
    "SampleOrder",
    "Settings",
    "StartedJob",
    "Status",
    "StepBatch",
    "Stopped",
    "StreamLoader",
    "TokenFile",
    "TokenSequences",
    "TrackedRun",
    "Tracker",
    "UsageError",
    "World",
    "__version__",
    "broadcast",
    "cancel",
    "cross_entropy",
    "cu_seqlens",
    "cut_step",
    "dcp",
    "errors",
    "evaluation",
    "faults",
    "frameworks",
    "init",
    "resume",
    "status",
    "submit",
    "submitit",
    "write_tokens",
]


class _Package(ModuleType):
    """This package: two of its rooms are named like functions of its users.

    As a room is imported Python sets it over the function of its name; `import hpctrain` would then
    mean one or the other by what ran before.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and isinstance(value, ModuleType) and value.__name__ != _HOMES[name]:
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Import what stands behind a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
    module = import_module(_HOMES[name])
    value = module if _HOMES[name].endswith(f".{name}") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted({*globals(), *__all__})

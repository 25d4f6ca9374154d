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

from hpctrain.base import VERSION

if TYPE_CHECKING:
    from hpctrain import errors, frameworks, submitit
    from hpctrain.api import CancelledJob, StartedJob, Status, cancel, resume, status, submit
    from hpctrain.checkpoint.tensors import dcp
    from hpctrain.data.batches import (
        GlobalBatches,
        MicrobatchRules,
        MicrobatchSamples,
        StepBatch,
        cut_step,
    )
    from hpctrain.data.loader import Loader, LoaderOptions
    from hpctrain.data.mixture import Mixture
    from hpctrain.data.order import SampleOrder
    from hpctrain.data.packing import PackedDocuments, cu_seqlens
    from hpctrain.data.stream_loader import StreamLoader
    from hpctrain.data.streams import TokenSequences
    from hpctrain.data.tokens import TokenFile, write_tokens
    from hpctrain.engines.engine import Engine, Microbatch
    from hpctrain.engines.loss import cross_entropy
    from hpctrain.engines.parallelize import ModelPlan
    from hpctrain.errors import CheckpointError, HpctrainError, UsageError
    from hpctrain.history.attempts import AttemptView
    from hpctrain.plan.mesh import ModelShape
    from hpctrain.runtime.evaluations import Evaluation, evaluation
    from hpctrain.runtime.joining import init
    from hpctrain.runtime.run import Run, Stopped
    from hpctrain.runtime.trackers import TrackedRun, Tracker
    from hpctrain.settings.schema import Settings
    from hpctrain.status.status import Checkpoint
    from hpctrain.testing import faults
    from hpctrain.world import World, broadcast

__version__ = VERSION

_HOMES = {
    "AttemptView": "hpctrain.history.attempts",
    "CancelledJob": "hpctrain.api",
    "Checkpoint": "hpctrain.status.status",
    "CheckpointError": "hpctrain.errors",
    "Engine": "hpctrain.engines.engine",
    "Evaluation": "hpctrain.runtime.evaluations",
    "GlobalBatches": "hpctrain.data.batches",
    "HpctrainError": "hpctrain.errors",
    "Loader": "hpctrain.data.loader",
    "LoaderOptions": "hpctrain.data.loader",
    "Microbatch": "hpctrain.engines.engine",
    "MicrobatchRules": "hpctrain.data.batches",
    "MicrobatchSamples": "hpctrain.data.batches",
    "Mixture": "hpctrain.data.mixture",
    "ModelPlan": "hpctrain.engines.parallelize",
    "ModelShape": "hpctrain.plan.mesh",
    "PackedDocuments": "hpctrain.data.packing",
    "Run": "hpctrain.runtime.run",
    "SampleOrder": "hpctrain.data.order",
    "Settings": "hpctrain.settings.schema",
    "StartedJob": "hpctrain.api",
    "Status": "hpctrain.api",
    "StepBatch": "hpctrain.data.batches",
    "Stopped": "hpctrain.runtime.run",
    "StreamLoader": "hpctrain.data.stream_loader",
    "TokenFile": "hpctrain.data.tokens",
    "TokenSequences": "hpctrain.data.streams",
    "TrackedRun": "hpctrain.runtime.trackers",
    "Tracker": "hpctrain.runtime.trackers",
    "UsageError": "hpctrain.errors",
    "World": "hpctrain.world",
    "broadcast": "hpctrain.world",
    "cancel": "hpctrain.api",
    "cross_entropy": "hpctrain.engines.loss",
    "cu_seqlens": "hpctrain.data.packing",
    "cut_step": "hpctrain.data.batches",
    "dcp": "hpctrain.checkpoint.tensors.dcp",
    "errors": "hpctrain.errors",
    "evaluation": "hpctrain.runtime.evaluations",
    "faults": "hpctrain.testing.faults",
    "frameworks": "hpctrain.frameworks",
    "init": "hpctrain.runtime.joining",
    "resume": "hpctrain.api",
    "status": "hpctrain.api",
    "submit": "hpctrain.api",
    "submitit": "hpctrain.submitit",
    "write_tokens": "hpctrain.data.tokens",
}
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

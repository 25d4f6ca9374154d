"""What an agent imports once, so that the processes that it forks share it.

The controller of a local job imports the same, and forks its nodes from there
(`entry.local_nodes`). tests/unit/agent/test_preload.py holds the promises.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.core.settings.spec import Spec

OF_AGENTS = (
    "hpctrain.node.agent.main",
    "torch.distributed.elastic.agent.server.api",
    "hpctrain.node.agent.node",
    "hpctrain.node.agent.node",
    "hpctrain.node.agent.ranks",
    "hpctrain.node.agent.rendezvous",
    "hpctrain.node.agent.sealing",
    "hpctrain.node.agent.stop_deadline",
    "hpctrain.node.agent.stop_notice",
    "hpctrain.checkpoint.sealed.start",
)
"""What every agent uses, whatever its ranks run."""
OF_RANKS = (
    # Every optimizer imports it as it is made, and hpctrain.engines does.
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "hpctrain.train.runtime.joining",
    # 60 ms of CPU in every rank, at every start in place.
    "hpctrain.train.engines.parallelize",
    "hpctrain.train.engines.tensor_parallel",
    "hpctrain.train.engines.step_guard",
    "numpy.ma",  # numpy.unique imports it
)
"""What a rank that runs Python uses."""


def is_shared(spec: Spec) -> bool:
    """Return whether the ranks get what their agent has imported.

    Spawned ranks import for themselves. A rank whose program is not Python becomes that program.
    """
    return spec.settings.run.start_method == "fork" and spec.entry.kind != "program"


def modules(spec: Spec) -> tuple[str, ...]:
    """Return the modules to import before the ranks of this run are forked."""
    return (*OF_AGENTS, *OF_RANKS) if is_shared(spec) else OF_AGENTS


def preload(spec: Spec) -> None:
    """Import them.

    Nothing here may initialise CUDA: a forked process could not use it any more.
    """
    gc.disable()  # else it looks through all that torch makes, again and again: 0.8 s of 4
    try:
        for name in modules(spec):
            import_module(name)
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()  # so that a collection in a forked process does not copy the shared pages

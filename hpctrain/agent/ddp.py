"""A repair of DDP's end: it lets go of its process group last, and no program hangs there.

A program that destroys its process group while a DDP object lives leaves the last reference to
DDP's C++ half. That half goes with the GIL held, and the group's end waits for gloo's thread, which
may just be waiting for the GIL to let go of what a backward pass left behind. The Python reference
gives the GIL away first; it only has to be the last one. tests/engines/test_program_ends.py holds
that.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.nn.parallel import DistributedDataParallel

_init = DistributedDataParallel.__init__


@functools.wraps(_init)
def _group_last(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    own = vars(self)
    if "process_group" in own:  # attributes go in the order in which they came
        own["process_group"] = own.pop("process_group")


def let_groups_go_last() -> None:
    """From now on, for every DDP object of this process. Harmless when repeated."""
    DistributedDataParallel.__init__ = _group_last  # type: ignore[method-assign]

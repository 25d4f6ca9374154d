"""The arithmetic of batches: global = micro x passes x data-parallel ranks, or a refusal.

Pure. tests/unit/strategy/test_batch.py holds it.
"""

from __future__ import annotations

from hpctrain.base.text import one_of
from hpctrain.errors import UsageError
from hpctrain.plan.mesh import divisors


def shares(global_batch: int, data_ranks: int) -> int:
    """Samples of one rank in a step.

    Raises:
        UsageError: ranks would have unequal shares; with the nearest batches that all can share.
    """
    if global_batch % data_ranks:
        below = global_batch // data_ranks * data_ranks
        near = [n for n in (below, below + data_ranks) if n]
        fitting = [n for n in divisors(global_batch) if n <= data_ranks][-1]
        raise UsageError(
            f"--global-batch {global_batch} cannot be shared by {data_ranks} data-parallel ranks; "
            f"nearest: {one_of(near)}, or {fitting} data-parallel ranks"
        )
    return global_batch // data_ranks


def passes(global_batch: int, data_ranks: int, micro: int) -> int:
    """Passes of a step, of `micro` samples each.

    Raises:
        UsageError: they do not come out even; with the nearest values that do.
    """
    share = shares(global_batch, data_ranks)
    if share % micro:
        near = nearest(divisors(share), micro)
        raise UsageError(
            f"--micro-batch {micro} does not divide the {share} samples that each of {data_ranks} "
            f"data-parallel ranks has of --global-batch {global_batch}; nearest: {one_of(near)}"
        )
    return share // micro


def nearest(values: list[int], wanted: int) -> list[int]:
    """The next lower and the next higher of ascending values, as far as there are."""
    below = [value for value in values if value < wanted][-1:]
    above = [value for value in values if value > wanted][:1]
    return below + above

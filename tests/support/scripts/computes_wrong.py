"""The shipped recipe on nodes of which some compute wrong: a bit of a weight flips there.

FLIPS is a list of "attempt:node:step", separated by commas: in that attempt the first rank of the
node, which is its own name, has another bit in one weight from before the update of that step on.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from hpctrain.core.base.env import HPCTRAIN_NODE
from hpctrain.recipes.lm import train


def _steps() -> set[int]:
    """Before whose update a bit of this rank flips in this attempt."""
    own = json.loads(os.environ["HPCTRAIN_ATTEMPT"])["number"], os.environ[HPCTRAIN_NODE]
    steps = set()
    for one in filter(None, os.environ.get("FLIPS", "").split(",")):
        attempt, node, step = one.split(":")
        if (int(attempt), node) == own and os.environ["LOCAL_RANK"] == "0":
            steps.add(int(step))
    return steps


def main() -> None:
    steps, engines = _steps(), []
    real_batches, real_rate = train.make_batches, train.lr_at

    def make_batches(tokens: Any, settings: Any, engine: Any) -> Any:
        engines.append(engine)
        return real_batches(tokens, settings, engine)

    def lr_at(step: int, **rest: Any) -> float:
        if step in steps:
            weight = engines[-1].optimizer.param_groups[0]["params"][0]
            weight.detach().view(-1).view(torch.int32)[3] ^= 1 << 20
        return real_rate(step, **rest)

    train.make_batches, train.lr_at = make_batches, lr_at
    train.main()


if __name__ == "__main__":
    main()

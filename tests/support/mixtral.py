"""Mixtrals whose experts `engine.ep` takes, for the child that measures a plan's steps.

`engine.ep` asks for a module that holds experts and nothing else, which no model of transformers
has: the blocks get the recipe's here, of the same sizes.
"""

from __future__ import annotations

from typing import Any

import torch

from hpctrain.advise.strategy.measure_child import builder
from hpctrain.recipes.lm.model import MoE
from tests.support.plan_cases import MODELS


def mixtral_45m() -> Any:
    """See `plan_cases.MODELS`."""
    return _with_experts("mixtral-45M")


def mixtral_12m() -> Any:
    """See `plan_cases.MODELS`."""
    return _with_experts("mixtral-12M")


def _with_experts(name: str) -> Any:
    model: Any = builder(MODELS[name])()
    config = model.config
    sizes = (config.hidden_size, config.intermediate_size)
    for block in model.model.layers:
        mine = MoE(*sizes, config.num_local_experts, config.num_experts_per_tok)
        for (
            weight
        ) in mine.parameters():  # the experts have no values yet, which might be no numbers
            torch.nn.init.normal_(weight, std=0.02)
        block.mlp = mine
    return model

"""Hugging Face's decoders under DDP, FSDP2 and ZeRO: the numbers of one process."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines import test_decoders as decoders
from tests.support import lm_training as lmt
from tests.support.gloo import launch

alone = decoders.alone
NATIVE: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "ddp, whole, full": {"kind": "ddp", "whole": True, "activation_checkpointing": "full"},
    "fsdp2": {"kind": "fsdp2"},
    "fsdp2, selective": {"kind": "fsdp2", "activation_checkpointing": "selective"},
    "fsdp2, aot": {"kind": "fsdp2", "compile": "aot_eager"},
}
ZERO = ("zero1", "zero2", "zero3")
SOME = ("Qwen3, tied", "Olmo2")
CHANGED = SOME[:1]
"""Of some, recomputed and compiled as well, which takes longest: 15 s of CPU a family."""
MORE = ("Llama, tied", *SOME)
"""The same, of all."""
OF_FAMILIES = pytest.mark.parametrize(
    "families",
    [
        pytest.param(SOME, id="some"),
        pytest.param(tuple(decoders.FAMILIES), id="all", marks=pytest.mark.soak),
    ],
)
"""These engines take a model as it comes: what one family shows, nearly all do."""


def _native(cases: Any) -> dict[str, Any]:
    from hpctrain.train.joining_ranks import join_world

    warnings.simplefilter("ignore")  # an error inside torch's compiler breaks it
    world = join_world()
    return {
        (case, family): decoders.seen(decoders.engine_of(world, family, **NATIVE[case]))
        for case, families in cases.items()
        for family in families
    }


@OF_FAMILIES
def test_decoders_train_under_ddp_and_fsdp2_as_in_one_process(alone, families):
    """Families as they come, some of them recomputed and compiled."""
    changed = CHANGED if families == SOME else MORE
    cases = {case: changed if "," in case else families for case in NATIVE}
    for ours in launch(_native, 2, cases=cases):
        assert len(ours) == 2 * len(families) + 3 * len(changed)
        for (_, family), numbers in ours.items():
            decoders.assert_alike(numbers, alone[family])


def _zero(kind: str, families: tuple[str, ...]) -> dict[str, Any]:
    """Logits, some steps, and the state; DeepSpeed keeps gradients to itself."""
    from hpctrain.train.joining_ranks import join_world

    warnings.simplefilter("ignore")  # DeepSpeed's own, and what it imports of torch's compiler
    world, numbers = join_world(), {}
    tokens = torch.arange(2 * lmt.SEQ_LEN).view(2, -1) * 5 % 257
    for family in families:
        engine = decoders.engine_of(world, family, kind=kind)
        with torch.no_grad():
            logits = engine.model(tokens).logits.numpy()
        steps = []
        for step in range(decoders.STEPS):
            batches = lmt.microbatches(engine, step, per_rank=1)
            steps.append((engine.forward_backward(batches, decoders.share), engine.step()))
        numbers[family] = (logits, np.array(steps), set(engine.state().shared))
    return numbers


@OF_FAMILIES
@pytest.mark.parametrize("kind", ZERO)
def test_decoders_train_under_zero_as_in_one_process(alone, kind, families):
    ranks = launch(_zero, 2, kind=kind, families=families)
    for family in families:
        theirs = alone[family]
        for ours in ranks:
            logits, steps, _ = ours[family]
            assert np.abs(logits - theirs["logits"]).max() < decoders.LOGIT, family
            assert np.allclose(steps[:, 0], theirs["steps"][:, 0], rtol=0, atol=decoders.LOSS)
            assert np.allclose(steps[:, 1], theirs["steps"][:, 1], rtol=decoders.NORM, atol=0)
        held = set().union(*(ours[family][2] for ours in ranks))
        assert held == theirs["state"].keys(), family

"""Losses of logits that stay cut over the vocabulary: those of whole logits, which no rank has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812, its usual name
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain import cross_entropy
from tests.engines import test_decoders as decoders
from tests.support import lm_training as lmt
from tests.support.gloo import launch

VOCABULARY = 24


def cases() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Logits and targets."""
    torch.manual_seed(3)
    logits = torch.randn(3, 5, VOCABULARY) * 4
    targets = torch.randint(0, VOCABULARY, (3, 5))
    ignored = targets.clone()
    ignored[0, 1:] = ignored[2, 0] = -100
    return {
        "fp32": (logits, targets),
        "bf16": (logits.bfloat16(), targets),
        "far apart": (logits * 1e4, targets),
        "some ignored": (logits, ignored),
        "all ignored": (logits, torch.full_like(targets, -100)),
        "of one sequence": (logits[0], targets[0]),
    }


def _losses() -> list[str]:
    """Cases in which the cut loss or its gradient is not the whole one."""
    from torch.distributed.device_mesh import init_device_mesh

    from hpctrain.train.joining_ranks import join_world

    mesh = init_device_mesh("cpu", (join_world().world_size,))
    wrong = []
    for case, (logits, targets) in cases().items():
        weight = torch.linspace(-1, 2, targets.numel()).view_as(targets)
        whole = logits.clone().requires_grad_()
        flat = F.cross_entropy(whole.flatten(0, -2).float(), targets.flatten(), reduction="none")
        (flat.view_as(targets) * weight).sum().backward()
        for placement in (Shard(logits.ndim - 1), Replicate()):
            part = distribute_tensor(logits, mesh, [placement]).requires_grad_()
            loss = cross_entropy(part, targets)
            assert type(loss) is torch.Tensor
            (loss * weight).sum().backward()
            gradient = part.grad.full_tensor()
            small = 1e-2 if case == "bf16" else 2e-6
            near = torch.allclose(loss, flat.view_as(targets), rtol=1e-6, atol=2e-6)
            if not near or not torch.allclose(gradient, whole.grad, rtol=0, atol=small):
                wrong.append(f"{case} {placement}")
    part = distribute_tensor(cases()["of one sequence"][0], mesh, [Shard(1)])
    for target in (VOCABULARY, -1):
        with pytest.raises((IndexError, RuntimeError)):
            cross_entropy(part, torch.full((5,), target))
    return wrong


def test_the_cut_loss_is_the_whole_one_with_its_gradient():
    for wrong in launch(_losses, 4):
        assert wrong == []


class Largest(TorchDispatchMode):
    """The largest tensor of this rank's that is something for each token, in elements of each."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.width = tokens, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come again
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if type(tensor) is torch.Tensor and not tensor.is_meta:  # else it has no memory
                whole, rest = divmod(tensor.numel(), self.tokens)
                self.width = max(self.width, 0 if rest else whole)
        return made


def _train_cut(families: Any, **settings: Any) -> dict[str, Any]:
    from hpctrain.train.engines.parallelize import ModelPlan
    from hpctrain.train.joining_ranks import join_world

    world, plan = join_world(), ModelPlan(loss_parallel=True)
    numbers = {}
    for family in families:
        engine = decoders.engine_of(world, family, plan=plan, **settings)
        numbers[family] = decoders.seen(engine)
    engine = lmt.engine_of(world, lmt.lm(), tp="2", plan=plan)
    batches = lmt.microbatches(engine, 0, per_rank=1)
    with Largest(batches[0].targets.numel()) as largest:
        engine.forward_backward(batches, lmt.share)
    numbers["width"] = largest.width
    for case, more in {"recipe": {}, "pipeline": {"pp": "2"}}.items():
        engine = lmt.engine_of(world, lmt.lm(), tp="2", plan=plan, **more)
        value = engine.evaluate(lmt.microbatches(engine, 0), lmt.share)
        numbers[case] = (value, lmt.train(engine, 3))
    return numbers


def _train_alone(families: Any) -> dict[str, Any]:
    alone = decoders._alone()
    numbers = {family: decoders.seen(decoders.engine_of(alone, family)) for family in families}
    engine = lmt.engine_of(alone, lmt.lm())
    value = engine.evaluate(lmt.microbatches(engine, 0), lmt.share)
    return {**numbers, "recipe": (value, lmt.train(engine, 3))}


@pytest.mark.parametrize(
    "families",
    [
        # A decoder with cut logits is in test_decoders.py too, in stages.
        pytest.param([], id="the recipe"),
        pytest.param(["Qwen3, tied", "Gemma2, tied"], id="decoders", marks=pytest.mark.soak),
    ],
)
def test_training_with_cut_logits_is_that_of_one_process_and_none_are_whole(families):
    (alone,) = launch(_train_alone, 1, families=families)

    for ours in launch(_train_cut, 4, families=families, tp="2"):
        for family in families:
            decoders.assert_alike(ours[family], alone[family])
        for case in ("recipe", "pipeline"):
            (value, trained), (expected, reference) = ours[case], alone["recipe"]
            assert np.allclose([value, *trained.losses], [expected, *reference.losses], atol=5e-6)
            assert np.allclose(trained.norms, reference.norms, rtol=5e-5)
        assert ours["width"] == 320 // 2  # of the vocabulary; the MLP has 96

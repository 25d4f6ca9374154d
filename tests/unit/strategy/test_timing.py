from __future__ import annotations

import pytest

from hpctrain.strategy.facts import of_config
from hpctrain.strategy.hardware import Accelerator
from hpctrain.strategy.memory import Batch, Spread
from hpctrain.strategy.strategies import Machines, Strategy
from hpctrain.strategy.timing import (
    SHARE_OF_PEAK,
    Links,
    flops_of_step,
    step_time,
    traffic_of_step,
)
from tests.support.plan_cases import MODELS

LLAMA = of_config(MODELS["llama-7B"], "llama")
BATCH = Batch(1, 2048)
GPU = Accelerator("GPU", 80 * 10**9, 300e12, 300e9)


def way(kind="fsdp2", **layout):
    made = Spread(kind, **layout)
    return Strategy(kind, kind, made, made.shards * made.copies)


def test_a_token_costs_six_operations_for_each_weight_and_attention_on_top():
    flops = flops_of_step(LLAMA, BATCH, way())

    weights = 6 * (LLAMA.params - LLAMA.embed_params) * 2048
    attention = 6 * LLAMA.layers * LLAMA.hidden * 2048 * 2048
    assert flops == pytest.approx(weights + attention, rel=1e-6)
    again = flops_of_step(LLAMA, BATCH, way(recompute=True))
    assert 1.25 < again / flops < 4 / 3


def test_gathers_and_reductions_are_counted_with_what_a_ring_sends():
    sharded = traffic_of_step(LLAMA, BATCH, way(shards=16), Machines(2, 8))
    kept = traffic_of_step(LLAMA, BATCH, way(shards=16, reshard=False), Machines(2, 8))
    ddp = traffic_of_step(LLAMA, BATCH, Strategy("ddp", "", Spread("ddp"), 16), Machines(2, 8))

    assert sharded.between == pytest.approx((2 * 2 + 4) * LLAMA.params * 15 / 16)
    assert kept.between == pytest.approx((2 + 4) * LLAMA.params * 15 / 16)
    assert ddp.between == pytest.approx(8 * LLAMA.params * 15 / 16)
    assert sharded.inside == kept.inside == ddp.inside == 0


def test_copies_of_shards_send_a_shards_gradients_between_nodes_alone():
    hybrid = traffic_of_step(LLAMA, BATCH, way(shards=8, copies=2), Machines(2, 8))

    assert hybrid.between == pytest.approx(8 * LLAMA.params / 8 / 2)
    assert hybrid.inside == pytest.approx(8 * LLAMA.params * 7 / 8)


def test_the_longer_of_products_and_traffic_counts():
    traffic = traffic_of_step(LLAMA, BATCH, way(shards=16), Machines(2, 8))
    flops = flops_of_step(LLAMA, BATCH, way(shards=16))

    fast, slow = (step_time(flops, traffic, GPU, Links(1e12, rate)) for rate in (1e12, 1e9))
    assert fast.seconds == fast.compute_s == pytest.approx(flops / (300e12 * SHARE_OF_PEAK))
    assert slow.seconds == slow.traffic_s == pytest.approx(traffic.between / 1e9)


@pytest.mark.parametrize(
    ("gpu", "links", "basis"),
    [
        (Accelerator("warp9", 1), Links(1e12, 1e12), "not known: the peak of warp9"),
        (GPU, Links(1e12, None), "not known: the rate between nodes"),
        (Accelerator("warp9", 1), Links(None, None), "the peak of warp9, the rate between nodes"),
    ],
)
def test_what_is_not_known_is_said(gpu, links, basis):
    traffic = traffic_of_step(LLAMA, BATCH, way(shards=16), Machines(2, 8))

    time = step_time(1e15, traffic, gpu, links)

    assert time.seconds is None
    assert basis in time.basis

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.advise.strategy.facts import of_config
from hpctrain.advise.strategy.hardware import Accelerator
from hpctrain.advise.strategy.memory import Batch, Spread
from hpctrain.advise.strategy.strategies import Machines, Strategy
from hpctrain.advise.strategy.timing import (
    Links,
    bubble,
    operations_of_step,
    share_of,
    step_time,
    traffic_of_step,
    work_of_step,
)
from tests.support.plan_cases import MODELS

LLAMA = of_config(MODELS["llama-7B"], "llama")
BATCH = Batch(1, 2048)
GPU = Accelerator("GPU", 80 * 10**9, 300e12, 300e9)


def flops_of_step(model, batch, strategy):
    return sum(operations_of_step(model, batch, strategy))


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


def test_attention_takes_half_as_long_again_as_products_of_the_same_operations():
    """Twice the sequence adds attention alone to a token's operations."""
    short, long = Batch(2, 2048), Batch(1, 4096)
    more = flops_of_step(LLAMA, long, way()) - flops_of_step(LLAMA, short, way())
    longer = work_of_step(LLAMA, long, way()) - work_of_step(LLAMA, short, way())

    assert longer / (1 + 400 / LLAMA.hidden) == pytest.approx(1.5 * more)


def test_adapters_that_cast_take_longer():
    layouts = [way(lora=16), way(lora=16, casts=True)]
    plain, cast = (work_of_step(LLAMA, BATCH, each) for each in layouts)

    assert cast == pytest.approx(1.3 * plain)


def test_narrow_models_reach_less_of_the_peak():
    narrow = replace(LLAMA, hidden=LLAMA.hidden // 4)
    wide, thin = (
        work_of_step(model, BATCH, way()) / flops_of_step(model, BATCH, way())
        for model in (LLAMA, narrow)
    )

    assert 1.05 < wide < 1.15
    assert 1.35 < thin < 1.45


def test_gathers_and_reductions_are_counted_with_what_a_ring_sends():
    sharded = traffic_of_step(LLAMA, BATCH, way(shards=16), Machines(2, 8))
    kept = traffic_of_step(LLAMA, BATCH, way(shards=16, reshard=False), Machines(2, 8))
    ddp = traffic_of_step(LLAMA, BATCH, Strategy("ddp", "", Spread("ddp"), 16), Machines(2, 8))

    for traffic, nbytes in ((sharded, 2 * 2 + 4), (kept, 2 + 4), (ddp, 8)):
        sent = nbytes * LLAMA.params * 15 / 16
        assert traffic.between == pytest.approx(sent / 8), "one of a node's eight links leaves it"
        assert traffic.inside == pytest.approx(sent * 7 / 8)
    twice = replace(BATCH, passes=2)
    once, each = (
        traffic_of_step(LLAMA, twice, way(shards=16, each_pass=flag), Machines(2, 8))
        for flag in (False, True)
    )
    assert each.nbytes - once.nbytes == pytest.approx(4 * LLAMA.params * 15 / 16)


def test_copies_of_shards_send_a_shards_gradients_between_nodes_alone():
    hybrid = traffic_of_step(LLAMA, BATCH, way(shards=8, copies=2), Machines(2, 8))

    assert hybrid.between == pytest.approx(8 * LLAMA.params / 8 / 2)
    assert hybrid.inside == pytest.approx(8 * LLAMA.params * 7 / 8)


def test_the_longer_of_products_and_traffic_counts():
    traffic = traffic_of_step(LLAMA, BATCH, way(shards=16), Machines(2, 8))
    flops = flops_of_step(LLAMA, BATCH, way(shards=16))

    fast, slow = (
        step_time(flops, traffic, GPU, Links(1e12, rate), Spread()) for rate in (1e12, 1e9)
    )
    share, _ = share_of("", Spread())
    assert fast.seconds == fast.compute_s == pytest.approx(flops / (300e12 * share))
    assert fast.least_s < fast.seconds < fast.most_s
    assert slow.least_s == slow.seconds, "no program sends faster than its link"
    sent = traffic.between / 1e9 + traffic.inside / 1e12
    assert slow.seconds == slow.traffic_s == pytest.approx(sent)


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

    time = step_time(1e15, traffic, gpu, links, Spread())

    assert time.seconds is None
    assert basis in time.basis


def test_a_pipeline_waits_as_long_as_its_stages_and_microbatches_say():
    batch = Batch(1, 2048, 12)
    piped = way(shards=4, pp=4)

    assert bubble(batch, piped) == pytest.approx(3 / 15)
    assert bubble(batch, way(shards=16)) == 0
    alone = flops_of_step(LLAMA, batch, way(shards=16))
    assert flops_of_step(LLAMA, batch, piped) == pytest.approx(alone / 4 * 15 / 12)
    sent = traffic_of_step(LLAMA, batch, piped, Machines(4, 4))
    handed = 2 * 2 * LLAMA.hidden * 2048 * 12
    assert sent.between == pytest.approx(handed)
    assert sent.inside == pytest.approx((2 + 4) * LLAMA.params / 4 * 3 / 4)


def test_what_is_offloaded_travels_to_the_host_and_its_rate_is_asked_for():
    batch = Batch(1, 2048, 2)
    for kind, nbytes in (("fsdp2", 4 * 4 + 4), ("zero3", 4 * 2 + 8)):
        away = way(kind, shards=16, offload=True)
        sent = traffic_of_step(LLAMA, batch, away, Machines(2, 8))
        assert sent.host == pytest.approx(nbytes * LLAMA.params / 16)
        unknown = step_time(1.0, sent, GPU, Links(1e9, 1e9), Spread())
        assert unknown.seconds is None
        assert unknown.basis == "not known: the rate to the host (--host-gbs)"
        known = step_time(1.0, sent, GPU, Links(1e9, 1e9, 1e9), Spread())
        assert known.traffic_s == pytest.approx(sent.nbytes / 1e9)
        assert "the host's own update of the weights is not in it" in known.basis


def test_adapters_spare_the_gradients_of_frozen_weights_and_their_travels():
    full, few = (flops_of_step(LLAMA, BATCH, way(lora=rank)) for rank in (0, 16))
    adapters = LLAMA.layers * LLAMA.adapter_params(16)

    spared = 2 * (LLAMA.params - LLAMA.embed_params) - 6 * adapters
    assert full - few == pytest.approx(spared * 2048, rel=1e-6)
    ddp = Strategy("ddp", "ddp", Spread("ddp", lora=16), 16)
    sent = traffic_of_step(LLAMA, BATCH, ddp, Machines(2, 8))
    assert sent.nbytes == pytest.approx(2 * 4 * adapters * 15 / 16)


def test_experts_stay_and_their_tokens_travel():
    mixtral = of_config(MODELS["mixtral-270M"], "mixtral")
    kept = traffic_of_step(mixtral, BATCH, way(shards=8), Machines(1, 8)).nbytes
    sent = traffic_of_step(mixtral, BATCH, way(shards=8, ep=8), Machines(1, 8)).nbytes

    experts = (2 * 2 + 4) * 4 * mixtral.expert_params * 7 / 8
    tokens = 4 * 4 * 2 * 2 * mixtral.hidden * 2048 * 7 / 8
    assert kept - sent == pytest.approx(experts - tokens)

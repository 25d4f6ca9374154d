"""Single terms of the formulas; their sums are held against torch in tests/engines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.strategy.activations import widths
from hpctrain.strategy.facts import of_config
from hpctrain.strategy.memory import CONTEXT_BYTES, PARTS, Batch, Spread, peak
from tests.support.plan_cases import MODELS

LLAMA = of_config(MODELS["llama-7B"], "llama")
TINY = Batch(1, 1)
LONG = Batch(2, 8192)
FSDP2 = Spread("fsdp2", shards=16)


def test_without_activations_training_takes_20_bytes_a_parameter_as_it_updates():
    fullest = peak(LLAMA, TINY, Spread())

    assert fullest.moment == "the update"
    assert fullest.nbytes == 20 * LLAMA.params
    assert fullest.parts["weights"] == 4 * LLAMA.params
    assert fullest.parts["moments"] == 8 * LLAMA.params
    assert fullest.parts["gradients"] == fullest.parts["update"] == 4 * LLAMA.params


@pytest.mark.parametrize(
    ("name", "cast", "autocast"),
    [  # of width, of the MLP, and what else, in bytes of a token
        ("llama-7B", (16 + 8, 8, 4 * 32 + 8), (26 + 8, 8, 4 * 32 + 8)),
        ("gpt2-124M", (16, 10, 4 * 12 + 8), (20, 10, 4 * 12 + 16)),
        ("bert-335M", (16, 4, 4 * 16 + 8), (24, 4, 4 * 16 + 16)),
    ],
)
def test_a_block_keeps_what_was_counted_in_its_code(name, cast, autocast):
    model = of_config(MODELS[name], name)

    for is_autocast, (width, inner, more) in ((False, cast), (True, autocast)):
        kept = widths(model, low=2, autocast=is_autocast).block
        assert kept == width * model.hidden + inner * model.inner + more


def test_shards_divide_what_rests_and_not_what_is_gathered():
    few, many = (peak(LLAMA, TINY, replace(FSDP2, shards=n)) for n in (1024, 1 << 20))

    assert few.parts["weights"] == pytest.approx(4 * LLAMA.params / 1024)
    assert many.parts["gathered units"] == few.parts["gathered units"] > LLAMA.block_params
    assert many.parts["buffers"] == few.parts["buffers"] > 4 * LLAMA.block_params


def test_without_resharding_all_weights_stay_in_16_bits():
    kept = peak(LLAMA, LONG, replace(FSDP2, reshard=False))

    assert kept.parts["gathered units"] == pytest.approx(2 * LLAMA.params)


def test_several_passes_keep_whole_gradients_under_fsdp2():
    once, twice = (peak(LLAMA, Batch(2, 8192, n), FSDP2) for n in (1, 2))

    assert twice.nbytes - once.nbytes == pytest.approx(4 * LLAMA.params)


def test_ddps_gradients_are_there_all_the_time_and_one_process_frees_them():
    alone, ddp = (peak(LLAMA, LONG, Spread(kind)) for kind in ("single", "ddp"))

    assert alone.moment == ddp.moment == "the loss"
    assert ddp.nbytes - alone.nbytes == 4 * LLAMA.params


def test_autocast_keeps_a_copy_of_every_matrix_in_16_bits():
    fullest = peak(LLAMA, LONG, Spread())

    matrices = LLAMA.params - LLAMA.embed_params
    assert fullest.parts["16-bit copies"] == pytest.approx(2 * matrices, rel=1e-3)
    assert peak(LLAMA, LONG, Spread(low=4)).parts["16-bit copies"] == 0


def test_recomputation_keeps_a_blocks_input_alone():
    kept, again = (peak(LLAMA, LONG, replace(FSDP2, recompute=r)) for r in (False, True))

    width = widths(LLAMA, low=2, autocast=False)
    saved = LLAMA.layers * (width.block - width.entry) * LONG.tokens
    assert kept.moment == "the loss"
    at_loss = kept.nbytes - saved
    assert again.nbytes >= at_loss
    assert again.parts["activations"] < kept.parts["activations"] / 5


def test_tensor_parallelism_divides_weights_and_most_of_the_activations():
    alone = widths(LLAMA, low=2, autocast=False)
    shared = widths(LLAMA, low=2, autocast=False, tp=4)

    inputs = 4 * LLAMA.hidden
    assert shared.block == pytest.approx((alone.block - inputs) / 4 + inputs)
    whole, cut = (peak(LLAMA, TINY, Spread("fsdp2", shards=8, tp=tp)) for tp in (1, 4))
    assert cut.parts["weights"] == pytest.approx(whole.parts["weights"] / 4, rel=1e-6)


def test_logits_take_12_bytes_of_a_token_and_class():
    assert peak(LLAMA, LONG, FSDP2).parts["logits"] == 12 * LONG.tokens * LLAMA.vocab


def test_what_the_allocator_takes_is_apart():
    fullest = peak(LLAMA, LONG, FSDP2)

    assert fullest.allowance == pytest.approx(0.05 * fullest.nbytes + CONTEXT_BYTES, rel=1e-6)
    assert fullest.needed == fullest.nbytes + fullest.allowance
    assert set(fullest.parts) <= set(PARTS)


def test_deepspeeds_stages_shard_what_they_say():
    one, two, three = (peak(LLAMA, TINY, Spread(f"zero{n}", shards=8)) for n in (1, 2, 3))

    assert one.parts["weights"] == pytest.approx((2 + 4 / 8) * LLAMA.params)
    assert one.parts["gradients"] == pytest.approx(2 * LLAMA.params)
    assert two.parts["gradients"] == pytest.approx(4 * LLAMA.params / 8)
    assert three.parts["weights"] == pytest.approx((2 + 4) / 8 * LLAMA.params)
    gathered = peak(LLAMA, LONG, Spread("zero3", shards=8)).parts["gathered units"]
    assert gathered == 2e9, "what DeepSpeed keeps gathered at most"
    for each in (one, two, three):
        assert each.parts["moments"] == pytest.approx(LLAMA.params)

"""Single terms of the formulas; their sums are held against torch in tests/engines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.advise.strategy.activations import widths
from hpctrain.advise.strategy.facts import of_config
from hpctrain.advise.strategy.memory import CONTEXT_BYTES, Batch, Spread
from hpctrain.advise.strategy.peaks import host_bytes, peak
from hpctrain.advise.strategy.screen import PARTS
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


def test_a_loss_in_16_bits_takes_8_bytes_of_a_token_and_class():
    """The model's logits, their log-softmax, its gradient and theirs, 2 bytes each."""
    layout = replace(FSDP2, recompute=True, stored=2, moment=2, loss=2)

    assert peak(LLAMA, Batch(8, 8192), layout).parts["logits"] == 8 * 8 * 8192 * LLAMA.vocab


def test_a_loss_cut_over_tensor_parallel_ranks_has_a_part_of_the_classes():
    whole, cut = (
        peak(LLAMA, LONG, Spread("fsdp2", shards=8, tp=4, loss_parallel=on)) for on in (False, True)
    )

    assert whole.parts["logits"] == 12 * LONG.tokens * LLAMA.vocab
    assert cut.parts["logits"] == whole.parts["logits"] / 4


def test_pefts_adapters_keep_their_inputs_in_fp32():
    """As counted in peft 0.21: a copy for each of seven matrices; the two 16-bit inputs go."""
    both = [
        widths(LLAMA, low=2, autocast=False, lora=16, casts=casts).block for casts in (False, True)
    ]

    copies = 4 * (6 * LLAMA.hidden + LLAMA.inner) + 7 * 2 * 16
    assert both[1] - both[0] == copies - 2 * (2 * LLAMA.hidden + LLAMA.inner)


def test_what_the_allocator_takes_is_apart():
    """Weights and moments are there from the first step on: between them nothing is left over."""
    fullest = peak(LLAMA, LONG, FSDP2)

    comes = fullest.nbytes - fullest.parts["weights"] - fullest.parts["moments"]
    assert fullest.allowance == pytest.approx(0.05 * comes + CONTEXT_BYTES, rel=1e-6)
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


def test_what_is_offloaded_rests_on_the_host_and_units_are_gathered_all_the_same():
    kept, away = (peak(LLAMA, LONG, replace(FSDP2, offload=off)) for off in (False, True))

    assert kept.moment == away.moment == "the loss"
    assert away.parts["weights"] == away.parts["moments"] == 0
    assert kept.nbytes - away.nbytes == pytest.approx(12 * LLAMA.params / 16)
    again = Batch(2, 8192, 2)
    assert peak(LLAMA, again, replace(FSDP2, offload=True)).parts["gradients"] == pytest.approx(
        4 * LLAMA.params
    ), "several passes keep them whole, on the device"
    low = peak(LLAMA, TINY, Spread("zero3", shards=8, offload=True))
    assert low.parts["weights"] == low.parts["moments"] == 0
    assert host_bytes(LLAMA, replace(FSDP2, offload=True)) == LLAMA.params
    assert host_bytes(LLAMA, Spread("zero3", shards=9, offload=True)) == 2 * LLAMA.params
    assert host_bytes(LLAMA, FSDP2) == 0


def test_adapters_alone_have_gradients_and_moments():
    adapters = 32 * LLAMA.adapter_params(16)
    fullest = peak(LLAMA, LONG, Spread(lora=16))

    assert LLAMA.adapter_params(16) == 16 * (4 * 2 * 4096 + 3 * (4096 + 11_008))
    assert fullest.parts["weights"] == 4 * (LLAMA.params + adapters)
    assert fullest.parts["moments"] == 8 * adapters
    ddp = peak(LLAMA, LONG, Spread("ddp", lora=16))
    assert ddp.nbytes - fullest.nbytes == 4 * adapters
    sharded = peak(LLAMA, LONG, replace(FSDP2, lora=16))
    assert sharded.parts["weights"] == pytest.approx(4 * (LLAMA.params + adapters) / 16)
    assert sharded.parts["moments"] == pytest.approx(8 * adapters / 16)


def test_frozen_matrices_are_copied_for_the_blocks_that_keep_them():
    kept, again = (peak(LLAMA, LONG, Spread(lora=16, recompute=on)) for on in (False, True))

    adapters = 32 * LLAMA.adapter_params(16)
    first = 3 * LLAMA.hidden**2
    blocks = LLAMA.layers * LLAMA.matrix_params
    assert kept.moment == again.moment == "the loss"
    assert again.parts["16-bit copies"] == 2 * (LLAMA.head_params + adapters)
    assert kept.parts["16-bit copies"] - again.parts["16-bit copies"] == 2 * (blocks - first)


def test_a_block_with_adapters_keeps_what_is_between_their_two_and_no_norms_product():
    for autocast, norms, more in ((False, 4, 0), (True, 8, 2)):
        whole, few = (widths(LLAMA, low=2, autocast=autocast, lora=r) for r in (0, 16))
        between = 7 * 2 * 16
        assert whole.block - few.block == norms * 4096 - more * 4096 - between
        assert few.outside == few.spared == 4 * 4096


def test_experts_of_other_ranks_are_not_gathered_and_all_are_cut_over_all_ranks():
    mixtral = of_config(MODELS["mixtral-270M"], "mixtral")
    whole, shared = (peak(mixtral, Batch(1, 64), replace(FSDP2, ep=ep)) for ep in (1, 8))

    assert shared.parts["weights"] == whole.parts["weights"]
    away = mixtral.expert_params * 7 / 8
    assert whole.nbytes - shared.nbytes > 2 * 2 * away * 0.9
    alone = widths(mixtral, low=2, autocast=False)
    travels = widths(mixtral, low=2, autocast=False, ep=8)
    assert travels.block_backward - alone.block_backward == 2 * 2 * 2 * mixtral.hidden


def test_a_unit_is_gathered_into_one_piece_and_copied_out_of_it():
    fullest = peak(LLAMA, TINY, replace(FSDP2, shards=1 << 20, lora=1))

    unit = LLAMA.block_params + LLAMA.adapter_params(1)
    assert fullest.moment == "a block is gathered"
    assert fullest.parts["gathered units"] == 2 * 2 * unit
    assert fullest.parts["buffers"] == 2 * unit

"""Each moment of a step, worked out by hand for a model of round numbers.

Without tokens a moment holds parameters alone, and without parameters it holds activations alone.
The numbers come from what FSDP2, DDP, DeepSpeed and a pipeline's stage were seen to hold
(tests/engines/test_strategy_measured.py), not from the formulas.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.advise.strategy.facts import LLAMA, MOE, ModelFacts
from hpctrain.advise.strategy.memory import Batch, Sharded, Spread, Whole
from hpctrain.advise.strategy.peaks import (
    PipelineStage,
    StageFacts,
    ZeroStep,
    peak,
    stage_peaks,
    stages_of,
)

MODEL = ModelFacts(
    "round", LLAMA, layers=2, hidden=4, heads=1, kv_heads=1, head_dim=4, inner=8, vocab=10,
    block_params=1000, matrix_params=900, embed_params=400, head_params=700, tied=False,
)  # fmt: skip
TIED = replace(MODEL, head_params=50, tied=True)
ROUTED = replace(MODEL, family=MOE, experts=4, routed=2, matrix_params=300, expert_params=600)
NOTHING = replace(MODEL, block_params=0, matrix_params=0, embed_params=0, head_params=0)
NO_TOKENS, TWICE = Batch(0, 0), Batch(0, 0, passes=2)
TEN = Batch(2, 5)
CUT = Spread("fsdp2", shards=4)
AWAY = replace(CUT, offload=True)


def _line(step):
    """Moments in order, and bytes of each."""
    return [(moment.moment, moment.nbytes) for moment in step.moments()]


def _parts(step, part):
    return [moment.parts.get(part, 0) for moment in step.moments()]


SHARDED_MOMENTS = [
    "the loss", "a block is gathered", "the head is gathered", "the head's reduction",
    "a block's backward pass", "the end of a block's backward pass", "a block's reduction",
    "a block's backward pass", "the end of a block's backward pass", "a block's reduction",
    "the last reduction", "the update",
]  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "layout", "expected"),
    [
        # 3,100 parameters: a quarter in fp32 with two moments rests, 9,300 bytes. Gathered in 16
        # bits a block is 2,000, the head 1,400; their gradients in fp32 4,000 and 2,800, and a
        # quarter of that comes out of a reduction.
        (NO_TOKENS, CUT, [
            9300 + 1400,
            9300 + 2000 + 2000 + 2000,
            9300 + 2000 + 1400 + 1400,
            9300 + 1400 + 2000 + 2800 + 700,
            9300 + 700 + 64 + 2000 + 2000 + 2800,
            9300 + 700 + 2000 + 2000 + 2000 + 2800,
            9300 + 700 + 2000 + 4000 + 2000,
            9300 + 1700 + 64 + 2000 + 4000,
            9300 + 1700 + 2000 + 2000 + 4000,
            9300 + 1700 + 2000 + 4000,
            9300 + 2700 + 800 + 1600 + 400,
            9300 + 3100 + 3100,
        ]),
        # On the host: what rests, shards of gradients, the update.
        (NO_TOKENS, AWAY, [
            1400, 6000, 4800, 1400 + 2000 + 2800 + 700,
            64 + 2000 + 2000 + 2800, 2000 + 2000 + 2000 + 2800, 2000 + 4000 + 2000,
            64 + 2000 + 4000, 2000 + 2000 + 4000, 2000 + 4000,
            800 + 1600 + 400, 0,
        ]),
        # Two passes: all gradients wait in fp32 on the device, 12,400, until each is reduced.
        (TWICE, AWAY, [
            12_400 + 1400, 12_400 + 6000, 12_400 + 4800, 12_400 + 2000 + 2800 + 700,
            9600 + 64 + 2000 + 2000 + 2800, 9600 + 2000 + 2000 + 2000 + 2800,
            9600 + 4000 + 2000,
            5600 + 64 + 2000 + 4000, 5600 + 2000 + 2000 + 4000, 5600 + 4000,
            1600 + 1600 + 400, 0,
        ]),
        # Blocks and embedding stay gathered, 4,800 bytes: nothing is fetched ahead.
        (NO_TOKENS, replace(AWAY, reshard=False), [
            6200, 4800 + 2000, 4800 + 1400 + 1400, 1400 + 4800 + 2800 + 700,
            64 + 4800 + 2800, 2000 + 4800 + 2800, 2000 + 2800 + 4000,
            64 + 2800 + 4000, 2000 + 2800 + 4000, 2000 + 800 + 4000,
            800 + 1600 + 400, 0,
        ]),
        # In fp32 what is gathered takes twice the room.
        (NO_TOKENS, replace(AWAY, low=4), [
            2800, 12_000, 9600, 2800 + 4000 + 2800 + 700,
            128 + 4000 + 4000 + 2800, 4000 + 4000 + 4000 + 2800, 4000 + 4000 + 4000,
            128 + 4000 + 4000, 4000 + 4000 + 4000, 4000 + 4000,
            1600 + 1600 + 400, 0,
        ]),
    ],
)  # fmt: skip
def test_fsdp2_holds_in_each_moment(batch, layout, expected):
    assert _line(Sharded(MODEL, batch, layout)) == list(zip(SHARDED_MOMENTS, expected, strict=True))


def test_a_tied_matrix_is_gathered_to_the_end_and_its_gradients_are_added_there():
    # Its 40 parameters are of the head's 450; a gradient of 80 bytes waits for the embedding's.
    line = _line(Sharded(TIED, NO_TOKENS, AWAY))

    assert line == [
        ("the loss", 900),
        ("a block is gathered", 6000),
        ("the head is gathered", 2000 + 900 + 900),
        ("a block's backward pass", 80 + 64 + 900 + 2000 + 2000),
        ("the end of a block's backward pass", 80 + 2000 + 900 + 2000 + 2000),
        ("a block's reduction", 80 + 2000 + 900 + 4000 + 2000),
        ("a block's backward pass", 80 + 64 + 900 + 2000 + 4000),
        ("the end of a block's backward pass", 80 + 2000 + 900 + 2000 + 4000),
        ("a block's reduction", 80 + 2000 + 900 + 4000),
        ("a tied matrix' gradients are added", 820 + 80 + 80 + 80 + 900 + 4000),
        ("the last reduction", 900 + 900 + 1800),
        ("the update", 0),
    ]
    waits = Sharded(TIED, TWICE, AWAY)
    assert _parts(waits, "gradients") == [
        9800, 9800, 9800, 9800 + 144, 9800 + 2080, 9800 + 80,
        5800 + 144, 5800 + 2080, 5800 + 80, 1800 + 1060, 1800, 0,
    ]  # fmt: skip
    frozen = Sharded(TIED, NO_TOKENS, replace(AWAY, lora=1))
    assert _parts(frozen, "gradients")[3] == 16
    halves = Sharded(TIED, NO_TOKENS, replace(AWAY, tp=2))
    assert _parts(halves, "gradients")[3] == 40 + 32


def test_adapters_are_gathered_with_their_block_and_reduced_alone():
    # 68 of rank 1: 2 x (4 + 4) and 2 x (4 + 4) of the attention, 3 x (4 + 8) of the MLP.
    rests = 4 * 3236 / 4 + 8 * 136 / 4
    line = _line(Sharded(MODEL, NO_TOKENS, replace(CUT, lora=1)))

    assert line == [
        ("the loss", rests + 1400),
        ("a block is gathered", rests + 3 * 2136),
        ("the head is gathered", rests + 2136 + 1400 + 1400),
        ("a block's backward pass", rests + 16 + 2136 + 2136),
        ("the end of a block's backward pass", rests + 136 + 2136 + 2136),
        ("a block's reduction", rests + 136 + 272 + 2136),
        ("a block's backward pass", rests + 68 + 16 + 2136 + 272),
        ("the end of a block's backward pass", rests + 68 + 136 + 2136 + 272),
        ("a block's reduction", rests + 68 + 136 + 272),
        ("the last reduction", rests + 136),
        ("the update", rests + 136 + 136),
    ]


def test_experts_of_other_ranks_are_neither_gathered_nor_reduced_here():
    alone = Sharded(ROUTED, NO_TOKENS, AWAY)
    shared = Sharded(ROUTED, NO_TOKENS, replace(AWAY, ep=2))

    assert (alone.unit, shared.unit) == (1000, 700)
    # Of the last of three matrices of every expert that is here.
    assert (alone.moving, shared.moving) == (2 * 600 / 3, 2 * 600 / 3 / 2)
    assert _line(shared)[6] == ("a block's reduction", 1400 + 2800 + 1400)


def test_tensor_parallel_ranks_have_their_part_of_each_matrix():
    half = Sharded(replace(MODEL, block_params=1001), NO_TOKENS, replace(AWAY, tp=2))

    assert (half.unit, half.root, half.free) == (501, 350, 200)
    assert half.moving == 2 * 4 * 8 / 2
    assert half.model.matrix_params == 450


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # A block keeps 172 bytes of a token: 16 x 4 + 8 of its norms, 4 x (4 + 4) and 4 of its
        # attention, 8 x 8 of its MLP. What goes in is 8, what is outside 32; its backward pass
        # takes 4 x 8 + 4, the end of it 22 x 4.
        (CUT, [3440 + 320, 1720, 3440, 3440 + 320,
               1720 + 1720 + 360, 1720 + 880, 1720, 1720 + 360, 880, 0, 0, 0]),
        (replace(CUT, recompute=True), [160 + 320, 80, 160, 160 + 320,
               80 + 1720 + 360 + 80, 80 + 880, 80, 1720 + 360 + 80, 880, 0, 0, 0]),
    ],
)  # fmt: skip
def test_activations_go_block_by_block(layout, expected):
    # The head is there, so that its reduction is a moment; it weighs nothing.
    model = replace(NOTHING, head_params=1)
    step = Sharded(model, TEN, layout)

    assert _parts(step, "activations") == expected
    assert _parts(step, "logits") == [12 * 10 * 10, *[0] * 11]


@pytest.mark.parametrize(
    ("model", "kind", "batch", "expected"),
    [
        # 37,200 rest in fp32; 2,500 parameters in matrices have copies in 16 bits.
        (MODEL, "single", NO_TOKENS, [
            42_200, 42_200 + 2800, 42_200 + 2800 + 64, 42_200 + 6800 + 64, 42_200 + 12_400,
            37_200 + 12_400 + 12_400,
        ]),
        # Gradients are there from the start, and what is added to them is in fp32 first.
        (MODEL, "ddp", NO_TOKENS, [
            54_600, 54_600, 54_600 + 192, 54_600 + 192, 54_600 + 160, 37_200 + 24_800,
        ]),
        (MODEL, "single", TWICE, [
            54_600, 54_600, 54_600 + 192, 54_600 + 192, 54_600 + 160, 37_200 + 24_800,
        ]),
        # 2,450 parameters; the head's copy is of its own 50 and the tied matrix' 40, whose
        # gradients come from both of its ends.
        (TIED, "single", NO_TOKENS, [
            33_180, 33_180, 33_180 + 64, 33_180 + 4000 + 64, 33_180 + 9800 + 320,
            29_400 + 9800 + 9800,
        ]),
        (TIED, "ddp", NO_TOKENS, [
            42_980, 42_980, 42_980 + 192, 42_980 + 192, 42_980 + 480, 29_400 + 19_600,
        ]),
    ],
)  # fmt: skip
def test_a_whole_model_holds_in_each_moment(model, kind, batch, expected):
    names = ["the loss", "the head's backward pass", *["a block's backward pass"] * 2,
             "the end of the backward pass", "the update"]  # fmt: skip
    step = Whole(model, batch, Spread(kind))

    assert _line(step) == list(zip(names, expected, strict=True))


def test_experts_are_copied_with_their_block():
    assert _parts(Whole(ROUTED, NO_TOKENS, Spread()), "16-bit copies")[0] == 2 * (2 * 900 + 700)


@pytest.mark.parametrize(
    ("again", "copies"),
    [
        # 136 of adapters; the first block's queries, keys and values, 48, keep none.
        (False, [2 * (1752 + 700 + 136)] * 2 + [2 * (1752 + 136), 2 * (852 + 136), 272, 0]),
        (True, [2 * (700 + 136)] * 2 + [2 * (852 + 136)] * 2 + [272, 0]),
    ],
)
def test_frozen_weights_are_copied_as_long_as_their_block_is_kept(again, copies):
    step = Whole(MODEL, NO_TOKENS, Spread(lora=1, recompute=again))

    assert _parts(step, "16-bit copies") == copies
    assert _parts(step, "gradients") == [0, 0, 0, 272, 544, 544]
    assert _parts(step, "buffers") == [0, 0, 16, 16, 0, 0]
    assert _parts(step, "update") == [0, 0, 0, 0, 0, 544]


def test_a_whole_models_activations_go_block_by_block():
    # 10 x 4 + 8 more of a token's norms than in 16 bits; what goes in is in fp32.
    kept, again = (Whole(NOTHING, TEN, Spread(recompute=on)) for on in (False, True))
    block = (26 * 4 + 8 + 4 * 8 + 4 + 8 * 8) * 10
    own = 4 * 8 * 10

    assert _parts(kept, "activations") == [2 * block + 400, 2 * block + 400 + 400,
                                           2 * block + own, block + own, 0, 0]  # fmt: skip
    assert _parts(again, "activations") == [
        320 + 400, 320 + 400 + 400, 160 + block + own + 160, block + own + 160, 0, 0,
    ]  # fmt: skip


def test_the_first_blocks_input_is_not_kept_for_adapters():
    step = Sharded(MODEL, TEN, replace(CUT, lora=1))
    # 16 less than with all weights trained, and 2 for each of seven adapters; outside 16.
    block = (172 - 16 + 14) * 10

    assert _parts(step, "activations")[:3] == [2 * block - 160 + 160, block - 160, 2 * block - 160]
    again = Sharded(MODEL, TEN, replace(CUT, lora=1, recompute=True))
    assert _parts(again, "activations")[:3] == [160 + 160, 80, 160], "of which nothing is spared"


BUCKET = 100_000_000


@pytest.mark.parametrize(
    ("stage", "batch", "expected"),
    [
        # A quarter of 3,100 in fp32 with two moments, 9,300, and all weights in 16 bits, 6,200.
        (1, NO_TOKENS, [15_500, 15_500, 15_500 + 1400 + BUCKET, 15_500 + 3400 + BUCKET,
                        15_500 + BUCKET, 15_500 + 6200 + BUCKET, 15_500 + 6200]),
        (1, TWICE, [15_500 + 6200, 15_500 + 6200, *[15_500 + 6200 + BUCKET] * 4, 15_500 + 6200]),
        # Gradients of what is through lie in one piece beside the bucket; then their shards.
        (2, NO_TOKENS, [15_500, 15_500, 15_500 + 1400 + BUCKET, 15_500 + 1550 + 3400 + BUCKET,
                        15_500 + 6200 + BUCKET, 15_500 + 3100 + 160 + BUCKET, 15_500 + 6200]),
        (2, TWICE, [15_500 + 3100 + BUCKET, 15_500 + 3100 + BUCKET,
                    15_500 + 3100 + 1400 + BUCKET, 15_500 + 3100 + 3400 + BUCKET,
                    15_500 + 3100 + 6200 + BUCKET, 15_500 + 3100 + 160 + BUCKET, 15_500 + 6200]),
        # Weights are cut too: 10,850 rest, 6,200 are gathered, shards of gradients are kept.
        (3, NO_TOKENS, [10_850 + 6200 + 3100 + BUCKET, 10_850 + 6200 + 3100 + 6200 + BUCKET,
                        *[10_850 + 6200 + 3100 + BUCKET] * 4, 10_850 + 6200 + BUCKET]),
    ],
)  # fmt: skip
def test_deepspeeds_stages_hold_in_each_moment(stage, batch, expected):
    names = ["the loss", "the first block's forward pass", *["a block's backward pass"] * 2,
             "the last reduction", "the end of the backward pass", "the update"]  # fmt: skip
    step = ZeroStep(MODEL, batch, Spread(f"zero{stage}", shards=4))

    assert _line(step) == list(zip(names, expected, strict=True))


def test_zero_3_gathers_and_buckets_no_more_than_it_is_told():
    large = replace(MODEL, block_params=10**9)
    gathers = ZeroStep(large, NO_TOKENS, Spread("zero3", shards=4, offload=True))
    flat = ZeroStep(large, NO_TOKENS, Spread("zero2", shards=4, offload=True))

    assert _parts(gathers, "gathered units")[0] == 2 * 10**9
    assert _parts(gathers, "buffers")[1] == BUCKET + BUCKET
    assert _parts(flat, "buffers")[3:5] == [BUCKET + BUCKET, BUCKET + BUCKET]
    assert _parts(flat, "weights")[0] == 2 * large.params
    assert _parts(gathers, "weights")[0] == 0


def _stage(number, count, passes, batch=NO_TOKENS, layout=CUT):
    """Of a pipeline, with two blocks; the first has the embedding, the last the head."""
    embed = 400 if number == 0 else 0
    head = 700 if number == count - 1 else 0
    stage = StageFacts(number, count, 2, embed, head, 1000)
    layout = replace(layout, pp=count)
    return PipelineStage(MODEL, replace(batch, passes=passes), layout, stage)


STAGE_MOMENTS = [
    *["a block's backward pass"] * 2, "a block's gradients are added",
    "the embedding's gradients are added", "the reduction", "the update",
]  # fmt: skip


def test_a_first_stage_holds_in_each_moment():
    # 2,400 parameters: 7,200 rest, 4,800 are gathered, 9,600 of gradients wait in fp32.
    expected = [21_600 + 64, 21_600 + 64, 21_600 + 2000, 21_600 + 800, 21_600 + 4000, 12_000]

    assert _line(_stage(0, 3, 8)) == list(zip(STAGE_MOMENTS, expected, strict=True))


def test_the_largest_unit_is_reduced_last():
    last = _stage(2, 3, 8)

    assert _line(last)[0] == ("the loss", 2700 * 9)
    assert _line(last)[-2:] == [("the reduction", 2700 * 9 + 4000), ("the update", 2700 * 5)]
    wide = PipelineStage(MODEL, TWICE, CUT, StageFacts(0, 2, 1, 3000, 0, 1000))
    assert _parts(wide, "buffers")[-2] == 4 * 3000
    deep = PipelineStage(MODEL, TWICE, CUT, StageFacts(1, 2, 1, 0, 5000, 1000))
    assert _parts(deep, "buffers")[-2] == 4 * 5000


@pytest.mark.parametrize(
    ("number", "passes", "flights", "received"),
    [  # of three stages: as many microbatches as stages from here on, and not more than there are
        (0, 8, 3, 8), (1, 8, 2, 16), (0, 2, 2, 2), (1, 1, 1, 2),
    ],
)  # fmt: skip
def test_a_stage_keeps_microbatches_in_flight_and_all_it_receives(
    number, passes, flights, received
):
    step = _stage(number, 3, passes, TEN)
    sent = 2 * 4 * 10
    others = (flights - 1) * (2 * 1720 + sent)

    assert _parts(step, "activations") == [
        others + 1720 + 360, others + 1720 + 1720 + 360, others + 1720, others, 0, 0,
    ]  # fmt: skip
    moving = [64, 64, 2000, 800 if number == 0 else 0, 4000, 0]
    assert _parts(step, "buffers") == [received * sent + more for more in moving]


def test_the_last_stage_keeps_what_the_head_takes_of_one_microbatch():
    step = _stage(2, 3, 8, TEN)

    assert _parts(step, "activations") == [
        2 * 1720 + 320,
        1720 + 360,
        2 * 1720 + 360,
        1720,
        0,
        0,
        0,
    ]
    assert _parts(step, "logits") == [14 * 10 * 10, 0, 0, 0, 0, 0, 0]
    assert _parts(step, "buffers")[0] == 8 * 80
    again = _stage(2, 3, 8, TEN, replace(CUT, recompute=True))
    assert _parts(again, "activations")[:4] == [
        160 + 320,
        1720 + 360 + 80,
        80 + 1720 + 360 + 80,
        80,
    ]


def test_of_a_stage_s_blocks_the_last_s_gradients_are_added_first():
    stage = PipelineStage(MODEL, TEN, replace(CUT, pp=2), StageFacts(0, 2, 4, 400, 0, 1000))

    assert _parts(stage, "activations") == [
        1720 * n + 1720 + 360 for n in range(4)
    ] + [3 * 1720, 0, 0, 0]  # fmt: skip


def test_of_two_stages_the_fullest_is_the_peak():
    split = replace(CUT, pp=2)
    each = stage_peaks(replace(MODEL, layers=4), TWICE, split)

    assert len(each) == 2
    assert peak(replace(MODEL, layers=4), TWICE, split).nbytes == max(one.nbytes for one in each)
    assert peak(MODEL, TWICE, AWAY).nbytes == 12_400 + 6000


def test_stages_of_a_model_have_its_parameters_where_the_engine_puts_them():
    deep = replace(MODEL, layers=4, embed_params=1040, head_params=44)
    first, last = stages_of(deep, 2)

    assert (first.number, first.count, first.embed, first.head) == (0, 2, 1040, 0)
    assert (last.number, last.embed, last.head) == (1, 0, 44)
    assert first.blocks + last.blocks == 4
    assert (first.is_last, last.is_last) == (False, True)
    assert last.params == last.blocks * 1000 + 44


def test_a_whole_model_in_fp32_has_no_copies_and_the_same_logits():
    for low in (2, 4):
        assert _parts(Whole(MODEL, TEN, Spread(low=low)), "logits") == [1200, 0, 0, 0, 0, 0]
    plain = Whole(MODEL, NO_TOKENS, Spread(low=4))
    assert _line(plain)[0] == ("the loss", 37_200)
    assert _parts(plain, "16-bit copies") == [0] * 6

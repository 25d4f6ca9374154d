"""What a stage of a pipeline holds, term by term; tests/engines hold the sums against torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.advise.strategy.activations import widths
from hpctrain.advise.strategy.facts import of_config
from hpctrain.advise.strategy.memory import Batch, Spread
from hpctrain.advise.strategy.peaks import peak, stage_peaks, stages_of
from tests.support.plan_cases import MODELS

LLAMA = of_config(MODELS["llama-7B"], "llama")
BATCH = Batch(1, 4096, 16)
PIPE = Spread("fsdp2", shards=4, pp=4)


def test_stages_are_those_that_the_engine_cuts():
    stages = stages_of(LLAMA, 4)

    assert sum(stage.params for stage in stages) == LLAMA.params
    assert [stage.blocks for stage in stages] == [8, 8, 8, 8]
    assert [stage.embed for stage in stages] == [LLAMA.embed_params, 0, 0, 0]
    assert [stage.head for stage in stages] == [0, 0, 0, LLAMA.head_params]


def test_a_tied_matrix_is_on_the_first_and_on_the_last_stage():
    tied = of_config(MODELS["llama-7B"] | {"tie_word_embeddings": True}, "tied")
    first, *_, last = stages_of(tied, 4)

    matrix = tied.vocab * tied.hidden
    assert (first.embed, last.head) == (matrix, matrix + tied.hidden)


def test_a_stages_weights_stay_gathered_and_its_gradients_whole():
    (first, *_) = stage_peaks(LLAMA, BATCH, PIPE)
    (stage, *_) = stages_of(LLAMA, 4)

    assert first.parts["weights"] == pytest.approx(4 * stage.params / 4)
    assert first.parts["moments"] == pytest.approx(8 * stage.params / 4)
    assert first.parts["gathered units"] == 2 * stage.params
    assert first.parts["gradients"] == 4 * stage.params


def test_the_first_stage_has_as_many_microbatches_in_flight_as_there_are_stages():
    first, second, third, last = stage_peaks(LLAMA, BATCH, PIPE)
    block = widths(LLAMA, low=2, autocast=False).block * BATCH.tokens
    sent = 2 * LLAMA.hidden * BATCH.tokens

    step = second.parts["activations"] - third.parts["activations"]
    assert step == pytest.approx(8 * block + sent)
    assert first.parts["activations"] - second.parts["activations"] == pytest.approx(step)
    assert last.moment == "the loss"
    fewer = stage_peaks(LLAMA, replace(BATCH, passes=2), PIPE)[0]
    assert fewer.parts["activations"] < first.parts["activations"] - step


def test_the_last_stage_keeps_the_models_own_logits_beside_the_loss():
    last = stage_peaks(LLAMA, BATCH, PIPE)[-1]

    assert last.parts["logits"] == (12 + 2) * BATCH.tokens * LLAMA.vocab


def test_each_microbatch_is_received_in_memory_of_its_own():
    first, second, *_ = stage_peaks(LLAMA, BATCH, PIPE)
    more = stage_peaks(LLAMA, replace(BATCH, passes=32), PIPE)

    entry = 2 * LLAMA.hidden * BATCH.tokens
    assert more[0].parts["buffers"] - first.parts["buffers"] == 16 * entry
    assert more[1].parts["buffers"] - second.parts["buffers"] == 2 * 16 * entry


def test_the_fullest_stage_decides():
    each = stage_peaks(LLAMA, BATCH, PIPE)

    assert peak(LLAMA, BATCH, PIPE).nbytes == max(one.nbytes for one in each)


def test_gradients_are_added_and_reduced_in_pieces_of_their_own():
    tiny = Batch(1, 1, 16)
    first = stage_peaks(LLAMA, tiny, PIPE)[0]

    assert first.moment == "the reduction"
    unit = max(LLAMA.embed_params, LLAMA.block_params)
    assert first.parts["buffers"] == pytest.approx(4 * unit, rel=1e-3)

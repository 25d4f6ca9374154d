"""Counts of parameters, against those that the models' makers publish."""

from __future__ import annotations

import pytest

from hpctrain.advise.strategy.facts import count_of, of_config, of_numbers
from hpctrain.errors import UsageError

LLAMA_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32_000,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32_000, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50_257}
QWEN2 = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "params"),
    [
        (LLAMA_7B, 6_738_415_616),
        (GPT2, 124_439_808),
        (MIXTRAL, 46_702_792_704),
        (QWEN2, 494_032_768),
    ],
)
def test_parameters_are_those_that_are_published(config, params):
    assert of_config(config, "here").params == params


SMALL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "params"),
    [
        ({}, 108_992),
        ({"attention_bias": True}, 109_568),
        ({"mlp_bias": True}, 109_760),
        ({"model_type": "qwen3", "head_dim": 128, "attention_bias": True}, 371_072),
        (
            {"model_type": "mistral", "hidden_size": 60, "num_attention_heads": 8, "head_dim": 16},
            125_220,
        ),
    ],
)
def test_biases_and_heads_of_another_width_are_counted_as_transformers_makes_them(change, params):
    assert of_config(SMALL | change, "here").params == params


def test_of_experts_a_token_meets_those_it_is_sent_to():
    mixtral = of_config(MIXTRAL, "here")

    assert mixtral.active_params / 1e9 == pytest.approx(12.9 - 0.13, abs=0.1)  # no embedding


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "here: has no hidden_size, which a plan needs as a whole number"),
        ({"vocab_size": "many"}, "here: has 'many' as vocab_size"),
        ({"num_hidden_layers": 0}, "here: has '0' as num_hidden_layers"),
        ({"num_attention_heads": True}, "here: has 'True' as num_attention_heads"),
        ({"model_type": "t5"}, "here: the layout of model_type 't5' is not known"),
        ({"model_type": None}, "here: the layout of model_type 'None' is not known"),
        ({"num_attention_heads": 48}, "num_attention_heads 48 does not divide hidden_size 4096"),
    ],
)
def test_a_config_that_does_not_say_enough_is_refused(change, message):
    with pytest.raises(UsageError) as caught:
        of_config(LLAMA_7B | change, "here")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "count"), [("7B", 7_000_000_000), ("124m", 124_000_000), ("1.5e9", 1_500_000_000)]
)
def test_numbers_are_read_as_people_write_them(text, count):
    assert count_of(text, "--params") == count


@pytest.mark.parametrize("text", ["", "many", "-3B", "0", "7 billion", "1e99", "nan"])
def test_what_is_no_number_is_refused(text):
    with pytest.raises(UsageError, match="is no number of parameters; write 7B"):
        count_of(text, "--params")


def test_the_mlps_width_follows_from_the_parameters():
    facts = of_numbers(params=6_738_415_616, layers=32, hidden=4096, heads=32, vocab=32_000)

    assert facts.inner == 11_008
    assert facts.params == 6_738_415_616


def test_a_gpt2_whose_head_is_a_matrix_of_its_own_has_it_counted():
    tied, apart = (of_config(GPT2 | more, "gpt2") for more in ({}, {"tie_word_embeddings": False}))

    assert (tied.tied, apart.tied) == (True, False)
    assert apart.params - tied.params == 50_257 * 768
    assert apart.active_params < apart.params


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_other_layouts_follow_from_numbers_too(family):
    facts = of_numbers(
        params=None, layers=12, hidden=768, heads=12, vocab=50_257, family=family
    )  # fmt: skip

    assert facts.family == family
    assert facts.inner == 4 * 768
    assert facts.tied


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "--heads 3 does not divide --hidden 4096"),
        ({"params": 1_000_000}, "--params 1,000,000 is less than 32 layers of --hidden 4096"),
    ],
)
def test_numbers_that_do_not_fit_each_other_are_refused(change, message):
    sizes = {"params": None, "layers": 32, "hidden": 4096, "heads": 32, "vocab": 32_000}

    with pytest.raises(UsageError, match=message):
        of_numbers(**(sizes | change))

"""Hugging Face decoders under a pipeline train as one process trains them."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch

from hpctrain.core.settings.schema import EngineSettings
from hpctrain.core.world import World
from hpctrain.train.engines.engine import Microbatch
from hpctrain.train.engines.parallelize import parallelize
from hpctrain.train.joining_ranks import join_world
from tests.support import layouts
from tests.support.gloo import launch

ALONE = World(0, 0, 1, torch.device("cpu"))
STEPS, PASSES, LENGTH, SEED = 4, 2, 12, 5
SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 68,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
DECODERS = {
    "Llama": {},
    "Llama, tied": {"tie_word_embeddings": True, "num_hidden_layers": 4},
    "Llama, eager": {"attn_implementation": "eager"},
    "Qwen3": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "Mistral": {"sliding_window": 4},
    "Olmo2": {},
    "Gemma": {"num_hidden_layers": 4},
}
"""Gemma's head is tied to its embedding, as it comes."""


def make(name):
    import transformers

    family = name.partition(",")[0]
    config = getattr(transformers, f"{family}Config")(**SIZES | DECODERS[name])
    return getattr(transformers, f"{family}ForCausalLM")(config)


def adam(model):
    """Without weight decay for norms and for what is tied, as is usual."""
    named = dict(model.named_parameters())
    plain = [p for name, p in named.items() if "norm" in name or "embed" in name]
    rest = [p for name, p in named.items() if "norm" not in name and "embed" not in name]
    groups = [{"params": plain, "weight_decay": 0.0, "lr": 2e-3}, {"params": rest}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


def begun(name, *, whole=False, seed=SEED, **chosen):
    """An engine of one process; or, with `pp`, of this rank."""
    world = join_world() if chosen.keys() & {"kind", "pp"} else ALONE
    settings = EngineSettings(**{"kind": "fsdp2", "clip_norm": 0.5, **chosen})
    if not whole:
        return parallelize(functools.partial(make, name), adam, settings, world, seed=seed)
    torch.manual_seed(SEED)
    model = make(name)
    return parallelize(model, adam(model), settings, world)


def batch(engine, step):
    """A step's samples of this rank, `PASSES` microbatches."""
    ranks = engine.data_ranks
    each = 2 // ranks
    first = (step * ranks + engine.data_rank) * PASSES * each
    found = []
    for number in range(PASSES):
        starts = torch.arange(first + number * each, first + (number + 1) * each)
        tokens = (37 * starts[:, None] % 101 + 3 * torch.arange(LENGTH + 1)) % 61
        found.append(Microbatch(tokens[:, :-1], tokens[:, 1:]))
    return found


def share(output, targets):
    losses = torch.nn.functional.cross_entropy(
        output.logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
    )
    return losses / (2 * PASSES * LENGTH)


def gradients(engine):
    """By name, whole."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): getattr(
            parameter.grad, "full_tensor", lambda grad=parameter.grad: grad
        )().clone()
        for name, parameter in engine.model.named_parameters()
    }


def train(name, steps=STEPS, **chosen):
    engine = begun(name, **chosen)
    found: dict[str, Any] = {"begun": layouts.whole(engine), "steps": []}
    for step in range(steps):
        loss = engine.forward_backward(batch(engine, step), share)
        if step == 0:
            found["gradients"] = gradients(engine)
            found["groups"] = [
                (group["lr"], group["weight_decay"], len(group["params"]))
                for group in engine.optimizer.param_groups
            ]
        found["steps"].append((loss, engine.step()))
    found["evaluated"] = engine.evaluate(batch(engine, steps), share)
    own = {
        name.replace("_checkpoint_wrapped_module.", ""): parameter
        for name, parameter in engine.model.named_parameters()
    }
    found["own"] = {n: getattr(p, "full_tensor", lambda p=p: p)().detach() for n, p in own.items()}
    found["weights"] = layouts.whole(engine)
    return found


def train_all(names, **chosen):
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    return {name: train(name, **chosen) for name in names}


@pytest.fixture(scope="module")
def alone():
    return {name: train(name) for name in DECODERS}


@pytest.fixture(scope="module")
def spread(preloaded):
    import transformers  # noqa: F401 - once, before ranks are forked

    return launch(train_all, 4, names=list(DECODERS), pp="2")


def assert_alike(ranks, alone, steps=STEPS):
    stages = ranks[0], ranks[-1]
    for rank in ranks:
        assert rank["steps"] == ranks[0]["steps"]
    for (loss, norm), (its_loss, its_norm) in zip(
        ranks[0]["steps"], alone["steps"][:steps], strict=True
    ):
        assert loss == pytest.approx(its_loss, rel=1e-5)
        assert norm == pytest.approx(its_norm, rel=1e-4)
    assert {name for rank in stages for name in rank["own"]} == alone["own"].keys()
    for rank in stages:
        for name, gradient in rank["gradients"].items():
            expected = alone["gradients"][name]
            assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max(), name


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
@pytest.mark.parametrize("how", ["full", "selective"])
def test_a_block_that_is_recomputed_fills_no_cache_again(name, how, alone):
    engine = begun(name, activation_checkpointing=how)

    assert make(name).config.use_cache
    assert [take(engine, step) for step in range(2)] == alone[name]["steps"][:2]


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_under_a_pipeline_trains_as_in_one_process(name, alone, spread):
    ranks = [rank[name] for rank in spread]

    assert_alike(ranks, alone[name])
    assert ranks[0]["evaluated"] == pytest.approx(alone[name]["evaluated"], rel=1e-5)
    for key in ("begun", "weights"):
        assert ranks[0][key].keys() == alone[name][key].keys()
    for key, value in alone[name]["begun"].items():
        assert torch.equal(value, ranks[0]["begun"][key]), key
    for key, value in alone[name]["weights"].items():
        if key.endswith(".weight"):
            assert (value - ranks[0]["weights"][key]).abs().max() <= 1e-5, key
    twice = ranks[0]["own"].keys() & ranks[-1]["own"].keys()
    assert twice == ({"model.embed_tokens.weight"} if name in ("Llama, tied", "Gemma") else set())
    for key in twice:
        assert torch.equal(ranks[0]["own"][key], ranks[-1]["own"][key])
    for group in (0, 1):
        rates = {rank["groups"][group][:2] for rank in ranks}
        assert rates == {alone[name]["groups"][group][:2]}


SEVERAL = {"pp": "2", "pp_schedule": "interleaved", "pp_stages_per_rank": 2}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "interleaved": ("Llama, tied", SEVERAL),
    "whole, in halves": ("Gemma", {"whole": True, **SEVERAL, "pp_schedule": "zero_bubble"}),
    "recomputed and compiled": (
        "Qwen3",
        {"activation_checkpointing": "full", "compile": "aot_eager", "pp": "2"},
    ),
    "cut by tp": ("Llama, tied", {"pp": "2", "tp": "2"}),
}
"""Other ways to run, and to be given a model."""


def train_in(way):
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    name, chosen = WAYS[way]
    return train(name, steps=2, **chosen)


def save_after_a_step(root):
    """Which names are saved, and the step after that."""
    engine = begun("Llama, tied", **SEVERAL)
    take(engine, 0)
    state = engine.state()
    layouts.save(engine, root, 1)
    return sorted(state.shared), take(engine, 1)


def take(engine, step):
    return engine.forward_backward(batch(engine, step), share), engine.step()


def go_on(root):
    engine = begun("Llama, tied", kind="fsdp2")
    layouts.load(engine, root)
    return sorted(engine.state().shared), take(engine, 1)


@pytest.mark.parametrize(
    "way",
    [
        "interleaved",
        # Compiled stages are in test_pipeline.py too, stages cut by tp in test_decoders.py.
        *(pytest.param(way, marks=pytest.mark.soak) for way in WAYS if way != "interleaved"),
    ],
)
def test_other_ways_train_alike(way, alone):
    name, _ = WAYS[way]
    expected = train(name, steps=2, whole=True) if "whole" in way else alone[name]

    assert_alike(launch(train_in, 4, way=way), expected, steps=2)


def test_a_checkpoint_of_a_pipeline_goes_on_without_one(tmp_path):
    first, *_, last = launch(save_after_a_step, 4, root=tmp_path)
    (names, following), *_ = launch(go_on, 2, root=tmp_path)

    assert {*first[0], *last[0]} == set(names)
    assert {"model.lm_head.weight", "model.model.embed_tokens.weight"} <= set(names)
    assert first[1] == pytest.approx(following, rel=1e-5)

"""Hugging Face's decoders with their matrices cut over ranks: the numbers of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.errors import UsageError
from hpctrain.train.engines import state as names
from hpctrain.train.engines.deferred import DeferredModel
from tests.support import lm_training as lmt
from tests.support import sharded
from tests.support.gloo import launch
from tests.support.sampling import some

STEPS = 4
LOGIT, LOSS, NORM, WEIGHT = 1e-5, 5e-6, 5e-5, 1e-4
"""Largest difference in a logit, in a loss; in a norm, of itself; in a weight that some
steps have moved by up to 1e-2."""
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 260,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 7,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64, "initializer_range": 0.1,
}  # fmt: skip
SEED = 5
TIED = {"tie_word_embeddings": True}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", {"num_hidden_layers": 4}),
    "Llama, tied": ("LlamaConfig", "LlamaForCausalLM", TIED),
    "Mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 5}),
    "Qwen3, tied": ("Qwen3Config", "Qwen3ForCausalLM", TIED),
    "Olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "Gemma, tied": ("GemmaConfig", "GemmaForCausalLM", TIED),
    "Gemma2, tied": ("Gemma2Config", "Gemma2ForCausalLM", {"query_pre_attn_scalar": 8, **TIED}),
    "Gemma3, tied": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 5, **TIED}),
}


def build(family: str) -> Any:
    """A model of transformers' own, with norms that are no copies of each other, one frozen."""
    import transformers

    config, model, more = FAMILIES[family]
    made = getattr(transformers, model)(getattr(transformers, config)(**{**SIZES, **more}))
    made.config.use_cache = False
    made.model.norm.requires_grad_(family != "Mistral")
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn(weight.shape), alpha=0.3)
    return made


def groups(model: Any) -> Any:
    """AdamW without decay for norms."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    matrices = [weight for weight in trained if weight.ndim > 1]
    norms = [weight for weight in trained if weight.ndim == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": norms, "lr": 5e-3}],
        lr=1e-3,
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )


def engine_of(
    world: Any, family: str, *, whole: bool = False, plan: Any = None, **settings: Any
) -> Any:
    """An engine; its model given whole, or made by a function, with the same values."""
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.parallelize import parallelize

    given = EngineSettings(**{"kind": "fsdp2", "precision": "fp32", "clip_norm": 0.5, **settings})
    if not whole:
        return parallelize(lambda: build(family), groups, given, world, plan=plan, seed=SEED)
    deferred = DeferredModel(lambda: build(family), SEED)
    deferred.fill(deferred.model, _alone())
    return parallelize(deferred.model, groups(deferred.model), given, world, plan=plan)


def _alone() -> Any:
    from hpctrain.core.world import World

    return World(0, 0, 1, torch.device("cpu"))


def share(output: Any, targets: Any) -> Any:
    """A microbatch's share of the mean loss."""
    return lmt.share(output.logits, targets)


def gradients_of(model: Any) -> dict[str, Any]:
    """Gradients by the names that a checkpoint has, a tied parameter's once. Collective."""
    first: dict[Any, str] = {}
    for name, weight in names.parameters(model):
        if weight.requires_grad:
            first.setdefault(weight, name)
    return {name: lmt.arrays({name: weight.grad})[name] for weight, name in first.items()}


def seen(engine: Any) -> dict[str, Any]:
    """Logits, gradients of one step by name, some steps, and the state. Collective."""
    import logging

    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    tokens = torch.arange(2 * lmt.SEQ_LEN).view(2, -1) * 5 % 257
    with torch.no_grad():
        logits = lmt.arrays({"": engine.model(tokens).logits})[""]
    engine.forward_backward(lmt.microbatches(engine, 0), share)
    gradients = gradients_of(engine.model)
    steps = []
    engine.optimizer.zero_grad()
    for step in range(STEPS):
        loss = engine.forward_backward(lmt.microbatches(engine, step, per_rank=1), share)
        steps.append((loss, engine.step()))
    state = lmt.arrays(dict(engine.state().shared))
    return {"logits": logits, "gradients": gradients, "steps": np.array(steps), "state": state}


def _train_all(families: Any, **settings: Any) -> dict[str, Any]:
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    return {family: seen(engine_of(world, family, **settings)) for family in families}


def _train_alone() -> dict[str, Any]:
    return {family: seen(engine_of(_alone(), family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one process sees."""
    import transformers

    for _, model, _ in FAMILIES.values():  # the ranks, which are forked, need not import it again
        assert getattr(transformers, model)
    return launch(_train_alone, 1)[0]


def assert_alike(ours: Any, theirs: Any) -> None:
    """The numbers of one process, of all that `seen` tells."""
    assert np.abs(ours["logits"] - theirs["logits"]).max() < LOGIT
    assert ours["gradients"].keys() == theirs["gradients"].keys()
    for name, gradient in theirs["gradients"].items():
        far = np.abs(ours["gradients"][name] - gradient).max()
        assert far < 1e-4 * np.abs(gradient).max() + 1e-8, name
        assert np.abs(gradient).max() > 1e-5, name
    assert np.allclose(ours["steps"][:, 0], theirs["steps"][:, 0], rtol=0, atol=LOSS)
    assert np.allclose(ours["steps"][:, 1], theirs["steps"][:, 1], rtol=NORM, atol=0)
    assert ours["state"].keys() == theirs["state"].keys()
    for name, tensor in theirs["state"].items():
        assert np.allclose(ours["state"][name], tensor, rtol=0, atol=WEIGHT), name


WHOLE = ("Qwen3, tied", "Olmo2")
ELSEWHERE = ("Llama", "Gemma2, tied")
"""In a pipeline below, and with cut logits in test_loss.py."""


@pytest.mark.parametrize("sequence", some([False, True], 1))
def test_decoders_train_as_in_one_process(alone, sequence):
    families = [family for family in FAMILIES if family not in ELSEWHERE] if sequence else WHOLE
    settings = {"tp": "2", "sequence_parallel": sequence, "whole": not sequence}
    for ours in launch(_train_all, 4, families=families, **settings):
        assert list(ours) == list(families)
        for family, numbers in ours.items():
            assert_alike(numbers, alone[family])


def _recompute_and_compile(cases: Any) -> dict[str, Any]:
    import warnings

    from hpctrain.train.joining_ranks import join_world

    warnings.simplefilter("ignore")  # an error inside torch's compiler breaks it
    world = join_world()
    return {
        case: seen(engine_of(world, family, tp="2", **settings))
        for case, (family, settings) in cases.items()
    }


RECOMPUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "aot, sequence": ("Olmo2", {"compile": "aot_eager", "sequence_parallel": True}),
    "selective, sequence": (
        "Qwen3, tied",
        {"activation_checkpointing": "selective", "sequence_parallel": True},
    ),
    "full, aot": (
        "Qwen3, tied",
        {"activation_checkpointing": "full", "compile": "aot_eager", "sequence_parallel": False},
    ),
}


@pytest.mark.story(proved_by="tests/engines/test_recompute_compile.py")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("aot, sequence", "selective, sequence"), id="some"),
        pytest.param(("full, aot",), id="full, aot", marks=pytest.mark.soak),
    ],
)
def test_decoders_are_recomputed_and_compiled_at_any_shape(alone, names):
    cases = {name: RECOMPUTED[name] for name in names}
    for ours in launch(_recompute_and_compile, 2, cases=cases):
        for case, (family, _) in cases.items():
            assert_alike(ours[case], alone[family])


def _pipelined(cases: Any) -> dict[str, Any]:
    from hpctrain.train.engines.parallelize import ModelPlan
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    numbers = {}
    for family, (sequence, loss_parallel) in cases.items():
        settings = {"tp": "2", "pp": "2", "sequence_parallel": sequence}
        plan = ModelPlan(loss_parallel=loss_parallel)
        engine = engine_of(world, family, plan=plan, **settings)
        numbers[family] = (
            [
                (engine.forward_backward(lmt.microbatches(engine, step), share), engine.step())
                for step in range(STEPS)
            ],
            lmt.arrays(dict(engine.state().shared)),
        )
    return numbers


IN_STAGES = {"Llama": (True, False), "Qwen3, tied": (True, True), "Gemma3, tied": (False, True)}


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param({name: IN_STAGES[name] for name in ("Llama", "Gemma3, tied")}, id="some"),
        pytest.param({"Qwen3, tied": IN_STAGES["Qwen3, tied"]}, id="rest", marks=pytest.mark.soak),
    ],
)
def test_decoders_are_cut_over_stages_and_heads_at_once(alone, cases):
    ranks = launch(_pipelined, 4, cases=cases)

    for family in cases:
        theirs, names = alone[family], set()
        for ours in ranks:
            steps, state = ours[family]
            assert np.allclose(np.array(steps)[:, 0], theirs["steps"][:, 0], rtol=0, atol=LOSS)
            assert np.allclose(np.array(steps)[:, 1], theirs["steps"][:, 1], rtol=NORM, atol=0)
            names |= state.keys()
            for name, tensor in state.items():
                assert np.allclose(tensor, theirs["state"][name], rtol=0, atol=WEIGHT), name
        assert names == theirs["state"].keys()


def _uneven() -> None:
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    for engine in (engine_of(world, "Llama", tp="2"), lmt.engine_of(world, lmt.lm(), tp="2")):
        with pytest.raises(UsageError, match=r"2 ranks of engine\.tp cannot share .* of 5 posit"):
            engine.model(torch.arange(10).view(2, 5))


def test_a_sequence_without_equal_parts_is_refused_in_one_line():
    launch(_uneven, 2)


def _go_on(root: Any, family: str, layouts: list[dict[str, Any]]) -> list[float]:
    """A loss of each layout, which restores what the one before has saved."""
    from hpctrain.checkpoint.tensors.save import save
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    place = sharded.place(world, root)
    losses = []
    for step, settings in enumerate(layouts):
        engine = engine_of(world, family, **settings)
        assert sharded.restore_into(engine, place) == step
        losses.append(engine.forward_backward(lmt.microbatches(engine, step), share))
        engine.step()
        save(place, world, engine.state(), sharded.manifest(world, step + 1))
    return losses


@pytest.mark.parametrize("family", ["Qwen3, tied", pytest.param("Olmo2", marks=pytest.mark.soak)])
def test_tied_weights_and_norms_of_heads_go_from_engine_to_engine(alone, tmp_path, family):
    layouts = [{"tp": "2"}, {"kind": "ddp"}, {"tp": "2", "sequence_parallel": True}, {}]
    for losses in launch(_go_on, 4, root=tmp_path, family=family, layouts=layouts):
        assert np.allclose(losses, alone[family]["steps"][: len(layouts), 0], atol=LOSS)

"""Models that are made by a function: without memory first, then value by value."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.core.settings.schema import EngineSettings
from hpctrain.core.world import World
from hpctrain.errors import UsageError
from hpctrain.train.engines.deferred import DeferredModel, seed_of
from hpctrain.train.engines.parallelize import parallelize
from hpctrain.train.joining_ranks import join_world
from tests.support import layouts, zero
from tests.support.gloo import launch

ALONE = World(0, 0, 1, torch.device("cpu"))
SEED = 11


class Seeded(TorchDispatchMode):
    """Each random operation of an ordinary constructor gets the seed that it is promised."""

    draws = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws += 1
            torch.default_generator.manual_seed(seed_of(SEED, self.draws))
        return func(*args, **(kwargs or {}))


class Unruly(nn.Module):
    """What constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, padding_idx=0)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embedding.weight
        self.inits = nn.ParameterList(torch.empty(6, 4) for _ in range(4))
        nn.init.trunc_normal_(self.inits[0], std=0.02)
        nn.init.orthogonal_(self.inits[1])
        nn.init.kaiming_uniform_(self.inits[2])
        nn.init.sparse_(self.inits[3], sparsity=0.5)
        with torch.no_grad():
            self.inits[2][1:3] = 7.0
            self.inits[2].div_(self.inits[2].norm(dim=1, keepdim=True))
        self.rates = [float(rate) for rate in torch.linspace(0, 1, 3)]
        self.listed = torch.arange(3).mul(2).tolist()
        self.register_buffer("table", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("angles", 1.0 / 10000 ** (torch.arange(0, 4, 2).float() / 4))
        self.register_buffer("mask", torch.ones(3, 3).tril(), persistent=False)
        self.register_buffer("places", (torch.rand(9) > 0.5).nonzero().sum(1))
        self.register_buffer("given", torch.from_numpy(np.arange(4.0)))
        scale = torch.tensor([1.0, 2.0])
        self.register_buffer("scaled", torch.zeros(2) + scale)
        scale.add_(1)
        self.register_buffer("scaled_again", torch.zeros(2) + scale)
        self.plain = torch.full((2,), 5.0)
        self.narrow = nn.Linear(3, 3).to(torch.bfloat16)
        self.head.bias.data = torch.nn.functional.pad(self.head.bias.data, (0, 0), "constant", 0)
        self.head.bias.data = self.head.bias.data.clone().zero_()
        self.made_empty = nn.Linear(2, 2, device="meta").to_empty(device="cpu")
        nn.init.ones_(self.made_empty.weight)
        nn.init.eye_(self.made_empty.weight[:1])
        nn.init.zeros_(self.made_empty.bias)
        self.apply(lambda module: nn.init.ones_(module.bias) if module is self.narrow else None)


def tensors_of(model):
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def assert_the_same(model, reference):
    ours, theirs = tensors_of(model), tensors_of(reference)
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
        assert (ours[name].dtype, ours[name].stride()) == (tensor.dtype, tensor.stride()), name
        assert type(ours[name]) is type(tensor), name
        assert ours[name].requires_grad == tensor.requires_grad, name


def made_both_ways(build):
    deferred = DeferredModel(build, SEED)
    assert all(tensor.is_meta for tensor in tensors_of(deferred.model).values())
    deferred.fill(deferred.model, ALONE)
    with Seeded():
        reference = build()
    return deferred.model, reference


def test_values_are_the_constructors_own_bit_for_bit():
    model, reference = made_both_ways(Unruly)

    assert_the_same(model, reference)
    assert (model.rates, model.listed) == ([0.0, 0.5, 1.0], [0, 2, 4])
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.plain, reference.plain)


SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 99,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Olmo2", "Gemma"])
def test_hugging_face_decoders_are_made_as_transformers_makes_them(family):
    import transformers

    config = getattr(transformers, f"{family}Config")(**SIZES)
    model, reference = made_both_ways(lambda: getattr(transformers, f"{family}ForCausalLM")(config))

    assert_the_same(model, reference)
    tokens = torch.arange(16).view(2, 8)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, reference(tokens).logits)


def test_a_generator_of_the_programs_own_counts_by_its_seed():
    def build(seed):
        layer = nn.Linear(8, 8)
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(seed))
        return layer

    values = [
        DeferredModel(lambda seed=s: build(seed), run).value("weight")
        for s, run in ((1, 1), (1, 2), (2, 1))
    ]

    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_torchs_own_random_numbers_are_left_alone():
    before = torch.get_rng_state()

    deferred = DeferredModel(lambda: nn.Linear(4, 4), SEED)
    deferred.fill(deferred.model, ALONE)

    assert torch.equal(torch.get_rng_state(), before)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


def spread(layout, experts, seed=SEED):
    """First weights and three steps of the recipe's model, made by a function."""
    from hpctrain.recipes.lm.model import LM, LMConfig

    warnings.simplefilter("ignore")  # DeepSpeed's imports
    size, chosen = layouts.LAYOUTS[layout]
    world = join_world() if size > 1 else ALONE
    counts = {"experts": experts, "experts_per_token": 2} if experts else {}
    config = LMConfig(layers=4, dim=16, heads=4, seq_len=layouts.SEQ_LEN, **counts)
    settings = EngineSettings(**{"clip_norm": 0.5, **chosen})
    engine = parallelize(lambda: LM(config, seed=SEED), adam, settings, world, seed=seed)
    return layouts.whole(engine), layouts.steps(engine, 0, 3)


SHORT = {"FSDP2@3", "FSDP2xTP@4", "PPxFSDP2@4", "EPxFSDP2@4"}
LONG = [
    pytest.param(name, marks=() if name in SHORT else pytest.mark.soak)
    for name in layouts.LAYOUTS
    if name != "one process" and layouts.runs_here(name)
]


@pytest.mark.parametrize("layout", LONG)
def test_every_layout_begins_with_the_same_values_and_trains_alike(layout):
    experts = 4 if "EP" in layout else 0
    weights, steps = spread("one process", experts)

    for its_weights, its_steps in launch(
        spread, layouts.LAYOUTS[layout][0], layout=layout, experts=experts
    ):
        assert its_weights.keys() >= weights.keys()  # ZeRO has its moments already
        assert not [n for n in weights if not np.array_equal(weights[n], its_weights[n])]
        assert np.allclose(its_steps, steps, rtol=2e-5)


def peaks_of(layers, width):
    """How far this process's memory rose while models were made, in bytes."""
    from hpctrain.train.engines.zero import engine as zero

    warnings.simplefilter("ignore")  # DeepSpeed's imports
    world, peaks = join_world(), {}
    deepspeed = zero._import_deepspeed()
    hand_over = deepspeed.initialize

    def handed_over(**given):  # what DeepSpeed does with the model then is its own
        peaks[kind] = memory("VmHWM") - before
        return hand_over(**given)

    deepspeed.initialize = handed_over
    for kind, precision in KINDS:
        settings = EngineSettings(kind=kind, precision=precision)
        parallelize(lambda: tower(2, 8), adam, settings, world)  # what torch itself loads
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory("VmRSS")
        engine = parallelize(lambda: tower(layers, width), adam, settings, world)
        if not kind.startswith("zero"):
            peaks[kind] = memory("VmHWM") - before
        del engine
    return peaks


KINDS = (("fsdp2", "fp32"), ("zero3", "fp32"), ("ddp", "fp32"), ("zero2", "bf16"))


def tower(layers, width):
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(key))
    return int(line.split()[1]) * 1024


def test_no_rank_holds_more_than_its_part_and_one_tensor():
    layers, width, ranks = 3, 3072, 3  # glibc gives back at once what is larger than 32 MiB
    tensor = width * width * 4
    parts = {"fsdp2": layers / ranks, "zero3": layers / ranks, "ddp": layers, "zero2": layers / 2}

    for peaks in zero.launch(peaks_of, ranks, layers=layers, width=width):
        for kind, peak in peaks.items():
            assert peak < 1.2 * (parts[kind] + 1) * tensor, kind


def born(dtype):
    import transformers

    config = transformers.LlamaConfig(**SIZES, dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.lm_head.requires_grad_(requires_grad=False)
    return model


def masters():
    warnings.simplefilter("ignore")  # DeepSpeed's imports
    world = join_world()
    states = {}
    for kind in ("ddp", "fsdp2", "zero2", "zero3"):
        for dtype in ("bfloat16", "float32"):
            settings = EngineSettings(kind=kind, precision="bf16")
            engine = parallelize(
                lambda: born(dtype), adam_of_trained, settings, world, seed=SEED  # noqa: B023
            )  # fmt: skip
            held = engine.state(with_optimizer=False).shared
            state = zero.by_state(engine) if "zero" in kind else held
            states[kind, dtype] = {
                name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                for name, tensor in state.items()
                if name.startswith("model.")
            }
    return states


def adam_of_trained(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def test_masters_are_what_the_model_was_born_with_in_its_own_precision_widened():
    wanted = {}
    for dtype in (torch.bfloat16, torch.float32):
        with Seeded():
            reference = born(str(dtype).removeprefix("torch."))
        assert {parameter.dtype for parameter in reference.parameters()} == {dtype}
        values = {name: tensor.float() for name, tensor in reference.state_dict().items()}
        wanted[str(dtype).removeprefix("torch.")] = values

    for states in zero.launch(masters, 2):
        for (kind, dtype), state in states.items():
            assert state.keys() == {f"model.{name}" for name in wanted[dtype]}, kind
            for name, tensor in wanted[dtype].items():
                assert state[f"model.{name}"].dtype is torch.float32, (kind, name)
                assert torch.equal(state[f"model.{name}"], tensor), (kind, dtype, name)


@pytest.mark.parametrize(
    ("model", "optimizer", "said"),
    [
        (lambda: 3, adam, "makes a int; it has to return the model"),
        (lambda: nn.Linear(2, 2), lambda _: None, "makes a NoneType of the model"),
        (
            lambda: nn.Linear(2, 2),
            adam(nn.Linear(2, 2)),
            "the optimizer has other parameters; give it a function too: lambda model: AdamW(",
        ),
    ],
)
def test_functions_that_make_something_else_are_refused_in_one_line(model, optimizer, said):
    with pytest.raises(UsageError) as error:
        parallelize(model, optimizer, EngineSettings(), ALONE)
    assert said in str(error.value)
    assert "\n" not in str(error.value)

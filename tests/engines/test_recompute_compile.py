"""Recomputation and compilation under every native engine: the gradients of one plain process."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import flex_attention

from hpctrain.core.world import World
from hpctrain.errors import UsageError
from hpctrain.train.engines import blocks as blocks_module
from hpctrain.train.engines.blocks import compile_blocks, every_block, find_blocks, recompute_blocks
from hpctrain.train.joining_ranks import join_world
from tests.support import gloo
from tests.support import lm_training as lmt
from tests.support.gloo import launch

WAYS = {
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "aot": {"compile": "aot_eager"},
    "full aot": {"activation_checkpointing": "full", "compile": "aot_eager"},
    "selective aot": {"activation_checkpointing": "selective", "compile": "aot_eager"},
}
ALONE = World(0, 0, 1, torch.device("cpu"))
FEW = ("selective", "aot", "full aot")
ENGINES = {
    "plain": (1, {}, tuple(WAYS)),
    "ddp": (2, {"kind": "ddp"}, FEW),
    "fsdp2": (2, {}, FEW),
    "tp 2": (2, {"tp": "2"}, ("selective", "full aot")),
    "tp 2, whole sequence": (2, {"tp": "2", "sequence_parallel": False}, ("aot",)),
    "dp 2 tp 2": (4, {"tp": "2"}, ("selective aot",)),
    "copies 2 tp 2": (4, {"tp": "2", "dp_replicate": "2"}, ("selective",)),
}
CASES = [(engine, way) for engine, (_, _, ways) in ENGINES.items() for way in ways]


def _world():
    from hpctrain.train.joining_ranks import join_world

    if os.environ["WORLD_SIZE"] == "1":
        del os.environ["RANK"]
    return join_world()


def _each_way(engines):
    """Of each engine and way: gradients of the first step, how many parameters the optimizer
    updates, and how many pieces of Python were compiled; at last what was printed meanwhile."""
    import tempfile
    import warnings

    from torch._dynamo.utils import counters

    warnings.simplefilter("ignore")  # an error inside torch's compiler breaks it
    world = _world()
    found = {}
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 2)
        for engine, (settings, ways) in engines.items():
            for name, changes in ways.items():
                torch._dynamo.reset()
                counters.clear()
                made = lmt.engine_of(world, lmt.lm(), **settings, **changes)
                counts = [len(group["params"]) for group in made.optimizer.param_groups]
                found[engine, name] = (lmt.gradients(made), counts, dict(counters["frames"]))
        printed.seek(0)
        return found, printed.read().decode()


@pytest.fixture(scope="module")
def expected():
    return launch(_each_way, 1, engines={"plain": ({}, {"no": {}})})[0][0]["plain", "no"][0]


def _ranks(engine):
    size, settings, _ = ENGINES[engine]
    return _together(size, "tp" in settings)


@functools.cache
def _together(size, tp):
    """The same ranks run one engine after the other, since each start of them costs seconds."""
    engines = {
        engine: (settings, {way: WAYS[way] for way in ways})
        for engine, (ranks, settings, ways) in ENGINES.items()
        if (ranks, "tp" in settings) == (size, tp)
    }
    return launch(_each_way, size, engines=engines)


@pytest.mark.parametrize(("engine", "way"), CASES)
def test_every_parameter_gets_the_gradient_of_one_process(expected, engine, way):
    for found, _ in _ranks(engine):
        gradients, updated, frames = found[engine, way]
        assert frames.get("ok") == frames.get("total")
        assert bool(frames.get("ok")) == ("compile" in WAYS[way])
        assert gradients.keys() == expected.keys()
        assert updated == [len(expected)]
        for name, gradient in expected.items():
            assert gradients[name] is not None, name
            scale = np.abs(gradient).max()
            assert scale > 0
            assert np.abs(gradients[name] - gradient).max() < 1e-4 * scale, name


def test_ddp_prints_nothing_that_nobody_could_act_on():
    """Torch's advice not to look for unused parameters, on each rank."""
    for _, printed in _ranks("ddp"):
        assert "unused parameters" not in printed


KINDS = ("ddp", "fsdp2")


def _with_inductor():
    """Losses, norms and weights after some steps, and what was compiled, of some engines."""
    import warnings

    from torch._dynamo.utils import counters

    warnings.simplefilter("ignore")  # an error inside torch's compiler breaks it
    world = _world()
    found = {}
    for kind, backend in [(kind, backend) for kind in KINDS for backend in ("no", "inductor")]:
        torch._dynamo.reset()
        counters.clear()
        engine = lmt.engine_of(world, lmt.lm(), kind=kind, compile=backend)
        found[kind, backend] = (lmt.train(engine, 4), counters["frames"]["ok"])
    return found


@pytest.mark.soak
def test_kernels_of_inductor_train_as_no_compiler_does(tmp_path, monkeypatch):
    """Marked since g++ takes 40 s of CPU time for the first."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gloo, "TIMEOUT_S", 900)

    ranks = launch(_with_inductor, 2)

    assert list(tmp_path.rglob("*.so"))
    for found in ranks:
        for kind in KINDS:
            (expected, none), (ours, compiled) = found[kind, "no"], found[kind, "inductor"]
            assert (none, bool(compiled)) == (0, True)
            assert ours.losses == pytest.approx(expected.losses, rel=1e-5)
            assert ours.norms == pytest.approx(expected.norms, rel=1e-4)
            for name, weight in expected.weights.items():
                assert np.abs(ours.weights[name] - weight).max() < 1e-5, name


@pytest.mark.parametrize(
    ("compiler", "headers", "says"),
    [
        ("c++-of-nobody", None, "with c[+][+]-of-nobody .* is not on this node's PATH"),
        (sys.executable, "nowhere", "Python's headers, and nowhere/Python.h is not there"),
    ],
)
def test_inductor_without_what_it_builds_with_is_refused_beforehand(
    monkeypatch, compiler, headers, says
):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: headers)

    with pytest.raises(UsageError, match=says) as refused:
        compile_blocks([], "inductor", torch.device("cpu"))

    assert str(refused.value).endswith("or set engine.compile = aot_eager or no")
    compile_blocks([], "aot_eager", torch.device("cpu"))
    compile_blocks([], "inductor", torch.device("cuda"))


def _operations(settings):
    """How often a step computes matrix products, activations, attention, and sums over ranks."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = {}

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            name = operator.overloadpacket.__name__
            self.seen[name] = self.seen.get(name, 0) + 1
            return operator(*args, **(kwargs or {}))

    world = _world()
    found = {}
    for how in ("no", "selective", "full"):
        engine = lmt.engine_of(world, lmt.lm(), activation_checkpointing=how, **settings)
        with Counting() as counting:
            engine.forward_backward(lmt.microbatches(engine, 0, per_rank=1), lmt.share)
        found[how] = [counting.seen.get(name, 0) for name in COUNTED]
    return found


COUNTED = (
    "mm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "silu",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
)


@pytest.mark.parametrize("engine", ["plain", "fsdp2", "tp 2"])
def test_selective_recomputes_all_but_the_costly_and_full_recomputes_that_too(engine):
    size, settings, _ = ENGINES[engine]
    tp = engine == "tp 2"

    for ours in launch(_operations, size, settings=settings):
        # Two blocks of seven products, and the head; each costs two more in the backward pass.
        # Along `tp` an attention and an MLP gather their input once, not once for each matrix.
        assert ours["no"] == [45, 2, 2, 10 * tp, 11 * tp]
        assert ours["selective"] == [45, 2, 4, 10 * tp, 15 * tp]
        # Torch stops before a block's last product, whose result nothing needs.
        assert ours["full"] == [45 + 2 * 6, 4, 4, 12 * tp, 15 * tp]


class _Nested(nn.Module):
    """Three blocks, each with a longer list of small ones inside."""

    def __init__(self, wrap):
        super().__init__()
        self.front = nn.Sequential(*(nn.Dropout() for _ in range(9)))
        self.layers = nn.ModuleDict({str(number): wrap(_Experts()) for number in range(3)})


class _Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))
        self.router = nn.Linear(2, 8)


@pytest.mark.parametrize("wrap", [lambda block: block, checkpoint_wrapper], ids=["bare", "wrapped"])
def test_blocks_are_the_list_that_holds_most_and_not_the_longest(wrap):
    model = _Nested(wrap)

    assert list(find_blocks(model)) == list(model.layers.values())


def test_a_model_without_a_list_has_no_blocks():
    assert not find_blocks(nn.Linear(2, 2))


class _Mixer(nn.Linear):
    """A layer of another class."""


def _hybrid():
    model = nn.Module()
    model.embed = nn.Embedding(9, 2)
    model.layers = nn.ModuleList([nn.Linear(2, 2), _Mixer(2, 2), nn.Linear(2, 2)])
    return model, list(model.layers)


def _two_stacks():
    model = nn.Module()
    for name in ("encoder", "decoder"):
        stack = nn.Module()
        stack.layers = nn.ModuleList(_Experts() for _ in range(2))
        model.add_module(name, stack)
    return model, [*model.encoder.layers, *model.decoder.layers]


def _stacks_in_a_list():
    model, _ = _two_stacks()
    encoder, decoder = model.encoder, nn.Sequential(model.decoder.layers)
    return nn.ModuleList([encoder, decoder]), [*encoder.layers, *decoder[0]]


def _parts_by_name():
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    parts = {"wte": nn.Embedding(9, 2), "drop": nn.Dropout(), "h": layers, "ln": nn.LayerNorm(2)}
    return nn.ModuleDict(parts), list(layers)


def _a_network():
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.LayerNorm(2)), []


@pytest.mark.parametrize(
    "build", [_hybrid, _two_stacks, _stacks_in_a_list, _parts_by_name, _a_network]
)
def test_blocks_of_all_stacks_are_found_and_those_of_several_classes_too(build):
    model, expected = build()

    assert list(map(id, every_block(model))) == list(map(id, expected))


@pytest.mark.parametrize(
    "changes", [{"activation_checkpointing": "full"}, {"compile": "aot_eager"}], ids=str
)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero1"])
def test_a_setting_that_would_find_no_blocks_is_refused(changes, kind):
    (key,) = changes
    model, _ = _a_network()

    with pytest.raises(UsageError, match=rf"engine\.{key} .* Sequential has no list of blocks"):
        lmt.engine_of(ALONE, model, kind=kind, **changes)


class Attending(nn.Module):
    """A block whose attention is an operator that a package has registered."""

    def __init__(self, attention):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = attention

    def forward(self, x):
        return self.attention(self.norm(x))[0]


@pytest.mark.parametrize(("how", "times"), [("no", 1), ("selective", 1), ("full", 2)])
def test_attention_of_the_flash_attn_package_is_not_computed_again(how, times):
    calls = []

    def attention(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(how)
        return x * 2, x * 3

    library = torch.library.Library("flash_attn", "FRAGMENT")
    library.define("_flash_attn_forward(Tensor x) -> (Tensor, Tensor)")
    library.impl("_flash_attn_forward", attention, "CPU")
    torch.library.register_autograd(
        "flash_attn::_flash_attn_forward",
        lambda ctx, first, _: first * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
        lib=library,
    )
    model = nn.Module()
    model.layers = nn.ModuleList([Attending(torch.ops.flash_attn._flash_attn_forward)])
    if how != "no":
        recompute_blocks(model, how)

    model.layers[0](torch.ones(2, 8)).sum().backward()

    assert len(calls) == times
    library._destroy()


def test_a_keyword_that_only_has_the_name_of_a_cache_reaches_its_block():
    """transformers calls its own `cache` since 5.24; it is told by its class."""

    class Turned(nn.Linear):
        def forward(self, x, cache=None):
            return super().forward(x) * cache

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Turned(4, 4) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(x, cache=torch.full((4,), 2.0))
            return x

    net = Net()
    x = torch.ones(3, 4)
    want = net(x)
    recompute_blocks(net, "full")
    found = net(x)
    found.sum().backward()
    assert torch.equal(found, want)


def test_flex_attention_is_kept_too():
    """On a CPU it has no backward pass: so the pass that keeps and the one that reads are run."""
    heads = torch.randn(1, 2, 128, 16)
    others = torch.randn(1, 2, 128, 16)
    keeping, reading = blocks_module._contexts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        with keeping:
            kept = flex_attention(heads, heads, heads)
        with reading:
            read = flex_attention(others, heads, heads)

    assert read.equal(kept)


def _sharded(blocks):
    world = join_world()
    model = _hybrid()[0] if blocks else _a_network()[0]
    lmt.engine_of(world, model)
    return sum(isinstance(module, FSDPModule) for module in model.modules())


def test_fsdp2_shards_layers_of_several_classes_one_by_one_and_says_where_there_are_none(capfd):
    assert launch(_sharded, 1, blocks=True) == [4]
    assert not capfd.readouterr().err
    assert launch(_sharded, 1, blocks=False) == [1]
    said = capfd.readouterr().err
    assert "Sequential has no list of blocks: each pass gathers the whole model at once" in said

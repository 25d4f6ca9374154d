"""Matrices cut over ranks: the numbers of one process, the same everywhere, saved by every rank."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.train.engines import layouts
from tests.support import lm_training as lmt
from tests.support import sharded
from tests.support.gloo import launch

STEPS = 4
LOSS, NORM, WEIGHT = 5e-6, 5e-5, 1e-5
"""Largest difference in a loss; in a norm, of itself; in a weight after all, at rate 1e-3."""
HALF = {"bf16": 2e-2, "fp16": 4e-3}
"""Largest difference in a loss after three steps, by precision."""

CASES = {
    f"dp {dp} tp {tp}{' sequence' if sequence else ''}": (
        dp * tp,
        {"tp": str(tp), "sequence_parallel": sequence},
    )
    for dp, tp in ((1, 2), (2, 2))
    for sequence in (True, False)
}


def _train_all(cases, steps):
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    return {
        name: lmt.train(lmt.engine_of(world, lmt.lm(), **settings), steps)
        for name, settings in cases.items()
    }


@pytest.fixture(scope="module")
def alone():
    """The same steps by one process, in each precision."""
    return launch(_alone, 1)[0]


def _alone():
    import os

    from hpctrain.train.joining_ranks import join_world

    del os.environ["RANK"]
    world = join_world()
    return {
        precision: lmt.train(lmt.engine_of(world, lmt.lm(), precision=precision), steps)
        for precision, steps in {"fp32": STEPS, "bf16": 3, "fp16": 3}.items()
    }


@pytest.fixture(scope="module")
def trained():
    found = {}
    for size in sorted({size for size, _ in CASES.values()}):
        cases = {name: settings for name, (ranks, settings) in CASES.items() if ranks == size}
        ranks = launch(_train_all, size, cases=cases, steps=STEPS)
        found |= {name: [rank[name] for rank in ranks] for name in cases}
    return found


@pytest.mark.parametrize("case", CASES)
def test_training_goes_as_in_one_process(trained, alone, case):
    alone = alone["fp32"]
    for ours in trained[case]:
        assert np.allclose(ours.losses, alone.losses, rtol=0, atol=LOSS)
        assert np.allclose(ours.norms, alone.norms, rtol=NORM, atol=0)
        assert max(alone.norms) > 0.5  # so that clipping did something
        assert ours.weights.keys() == alone.weights.keys()
        for name, weight in alone.weights.items():
            assert np.allclose(ours.weights[name], weight, rtol=0, atol=WEIGHT), name


@pytest.mark.parametrize("case", CASES)
def test_losses_and_norms_are_the_same_bits_on_every_rank(trained, case):
    assert len({(tuple(ours.losses), tuple(ours.norms)) for ours in trained[case]}) == 1


@pytest.mark.parametrize("bf16_cuts_sequences", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_half_precision_stays_near_that_of_one_process(alone, bf16_cuts_sequences):
    cases = {
        precision: {
            "tp": "2",
            "precision": precision,
            "sequence_parallel": bf16_cuts_sequences is (precision == "bf16"),
        }
        for precision in HALF
    }
    for case, ours in launch(_train_all, 4, cases=cases, steps=3)[0].items():
        precision = cases[case]["precision"]
        expected = alone[precision]
        assert np.allclose(ours.losses, expected.losses, rtol=0, atol=HALF[precision]), case
        assert np.allclose(ours.norms, expected.norms, rtol=5e-2, atol=0), case


# ---- what is equal on ranks that share matrices


def _equal_parts():
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    return {sequence: _digests(world, sequence_parallel=sequence) for sequence in (True, False)}


def _digests(world, **settings):
    """Digests of what must be the same along `tp` after four steps with dropout."""
    import torch

    model = lmt.lm(dropout=0.2)
    engine = lmt.engine_of(world, model, tp="2", **settings)
    torch.manual_seed(7 + engine.random_rank)
    lmt.train(engine, 4)
    seen = {}
    for name, parameter in engine.model.named_parameters():
        if parameter.placements[-1].is_replicate():
            seen[name] = parameter.to_local()
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _, __, out, n=number: seen.update({f"out {n}": out}))
    (batch, *_) = lmt.microbatches(engine, 0)
    with torch.no_grad():
        seen["logits"] = engine.model(batch.inputs)
    return {
        name: hashlib.sha256(value.detach().clone().numpy().tobytes()).hexdigest()
        for name, value in seen.items()
    }


def test_copies_along_tp_stay_equal_under_dropout():
    found = launch(_equal_parts, 4)

    for sequence_parallel in (True, False):
        ranks = [ours[sequence_parallel] for ours in found]
        assert len(ranks[0]) == 5 + 2 + 1  # norms, blocks, logits
        for one, other in ((ranks[0], ranks[1]), (ranks[2], ranks[3])):
            same = [name for name in one if one[name] == other[name]]
            outputs = [] if not sequence_parallel else ["out 0", "out 1"]
            assert [name for name in one if name not in same] == outputs
        assert ranks[0]["logits"] != ranks[2]["logits"]  # other samples


def _logits_changed_in_place():
    from hpctrain.train.joining_ranks import join_world

    engine = lmt.engine_of(join_world(), lmt.lm(), tp="2")
    with pytest.raises(RuntimeError, match=r"view .* modified inplace"):
        engine.model(lmt.microbatches(engine, 0)[0].inputs).mul_(2)


def test_logits_changed_in_place_are_an_error_and_not_a_lost_gradient():
    launch(_logits_changed_in_place, 2)


# ---- checkpoints


def _carry(root, first, meshes):
    """From one mesh to the next; digests of the whole state on each."""
    import os

    from hpctrain.train.joining_ranks import join_world

    if meshes == [None]:
        del os.environ["RANK"]
    world = join_world()
    return [
        _step(world, root, number, **settings or {})
        for number, settings in enumerate(meshes, first)
    ]


def _step(world, root, step, **settings):
    """Restore the newest checkpoint, or train where there is none; save."""
    from hpctrain.checkpoint.tensors.save import save

    place = sharded.place(world, root)
    engine = lmt.engine_of(world, lmt.lm(), **settings)
    assert sharded.restore_into(engine, place) == step - 1
    if step == 1:
        lmt.train(engine, 3)
    state = engine.state()
    save(place, world, state, sharded.manifest(world, step))
    return {
        name: hashlib.sha256(array.tobytes()).hexdigest()
        for name, array in lmt.arrays(dict(state.shared)).items()
    }


def test_a_state_goes_through_other_meshes_and_back_bit_for_bit(tmp_path):
    root = tmp_path / "run"
    groups = [
        (4, [{"tp": "2"}]),
        (1, [None]),
        (6, [{"tp": "2", "sequence_parallel": False}]),  # parts of three unequal sizes
        (2, [{}]),
        (4, [{"tp": "4"}, {"tp": "2", "dp_replicate": "2"}, {"tp": "2"}]),
    ]
    first, step = None, 1
    for size, meshes in groups:
        for ours in launch(_carry, size, root=root, first=step, meshes=meshes):
            assert len(ours) == len(meshes)
            for settings, state in zip(meshes, ours, strict=True):
                first = first or state
                assert state == first, settings
        step += len(meshes)
    assert len(first) == 21 * 4


# ---- layouts


class _Attention(nn.Module):
    """Query, key and value by Llama's names; heads counted by a number that it keeps."""

    def __init__(self, names, dim, heads, kv_heads):
        super().__init__()
        self.names, self.n_heads, self.n_kv_heads, self.head_dim = names, heads, kv_heads, 8
        for name, width in zip(names, (heads, kv_heads, kv_heads), strict=False):
            setattr(self, name, nn.Linear(dim, width * 8, bias=True))
        setattr(self, names[3], nn.Linear(heads * 8, dim, bias=True))

    def forward(self, hidden_states, position=None):
        from torch.nn import functional

        q, k, v = (getattr(self, name)(hidden_states) for name in self.names[:3])
        shape = hidden_states.shape[:2]
        q = q.view(*shape, self.n_heads, -1).transpose(1, 2)
        k, v = (x.view(*shape, self.n_kv_heads, -1).transpose(1, 2) for x in (k, v))
        k, v = (x.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1) for x in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return getattr(self, self.names[3])(mixed.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, names, dim):
        super().__init__()
        self.names = names
        setattr(self, names[0], nn.Linear(dim, 64))
        setattr(self, names[1], nn.Linear(dim, 64))
        setattr(self, names[2], nn.Linear(64, dim))

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(nn.functional.silu(gate(x)) * up(x))


LLAMA = {
    "trunk": "model",
    "embedding": "embed_tokens",
    "layers": "layers",
    "attention": ("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
    "mlp": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "norms": ("input_layernorm", "post_attention_layernorm"),
    "norm": "norm",
    "head": "lm_head",
}
TITAN = {
    "trunk": "",
    "embedding": "tok_embeddings",
    "layers": "layers",
    "attention": ("attention", ("wq", "wk", "wv", "wo")),
    "mlp": ("feed_forward", ("w1", "w3", "w2")),
    "norms": ("attention_norm", "ffn_norm"),
    "norm": "norm",
    "head": "output",
}


class _Block(nn.Module):
    def __init__(self, names, dim):
        super().__init__()
        self.names = names
        attention, inside = names["attention"]
        setattr(self, attention, _Attention(inside, dim, heads=4, kv_heads=2))
        setattr(self, names["mlp"][0], _MLP(names["mlp"][1], dim))
        for norm in names["norms"]:
            setattr(self, norm, nn.LayerNorm(dim))

    def forward(self, hidden_states):
        first, second = (getattr(self, name) for name in self.names["norms"])
        attention = getattr(self, self.names["attention"][0])
        mlp = getattr(self, self.names["mlp"][0])
        x = hidden_states + attention(hidden_states=first(hidden_states), position=None)
        return x + mlp(second(x))


class _Trunk(nn.Module):
    def __init__(self, names, dim=32):
        super().__init__()
        self.names = names
        setattr(self, names["embedding"], nn.Embedding(320, dim))
        blocks = [_Block(names, dim) for _ in range(2)]
        setattr(self, names["layers"], nn.ModuleList(blocks))
        setattr(self, names["norm"], nn.LayerNorm(dim))
        if not names["trunk"]:
            setattr(self, names["head"], nn.Linear(dim, 320))

    def forward(self, tokens):
        x = getattr(self, self.names["embedding"])(tokens)
        for block in getattr(self, self.names["layers"]):
            x = block(x)
        x = getattr(self, self.names["norm"])(x)
        return x if self.names["trunk"] else getattr(self, self.names["head"])(x)


class _Headed(nn.Module):
    def __init__(self, names, dim=32):
        super().__init__()
        setattr(self, names["trunk"], _Trunk(names, dim))
        setattr(self, names["head"], nn.Linear(dim, 320))
        self.names = names

    def forward(self, tokens):
        trunk, head = getattr(self, self.names["trunk"]), getattr(self, self.names["head"])
        return head(trunk(tokens))


def build(names):
    import torch

    torch.manual_seed(11)
    return (_Headed if names["trunk"] else _Trunk)(names)


def _foreign():
    import torch

    from hpctrain.core.world import World
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    by_itself = World(0, 0, 1, torch.device("cpu"))
    found = {}
    for title, names in (("llama", LLAMA), ("torchtitan", TITAN)):
        expected = lmt.gradients(lmt.engine_of(by_itself, build(names)))
        for sequence in (True, False):
            engine = lmt.engine_of(world, build(names), tp="2", sequence_parallel=sequence)
            found[f"{title} {sequence}"] = _far(lmt.gradients(engine), expected)
    plan = {"layers.*.feed_forward.w[13]": "colwise", "layers.*.feed_forward.w2": "rowwise"}
    engine = lmt.engine_of(world, build(TITAN), tp="2", plan=_plan(plan))
    assert {parameter.device_mesh.ndim for parameter in engine.model.parameters()} == {2}
    found["a plan of the user's"] = _far(lmt.gradients(engine), expected)
    return found


def _plan(names):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from hpctrain.train.engines.parallelize import ModelPlan

    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    return ModelPlan(tensor_parallel={name: styles[how]() for name, how in names.items()})


def _far(ours, expected):
    """Names of gradients that are missing or not those of one process."""
    assert ours.keys() == expected.keys()
    return [
        name
        for name, gradient in expected.items()
        if ours[name] is None
        or np.abs(ours[name] - gradient).max() > 1e-4 * np.abs(gradient).max() + 1e-9
    ]


def test_models_of_other_layouts_get_the_gradients_of_one_process():
    for ours in launch(_foreign, 2):
        assert len(ours) == 5
        assert [name for name, far in ours.items() if far] == []


def _change(**names):
    return build({**TITAN, **names})


def _tied():
    model = build(TITAN)
    model.output.weight = model.tok_embeddings.weight
    return model


def _fused():
    model = build(TITAN)
    model.layers[1].attention.qkv = nn.Linear(32, 96)
    return model


def _with(name, module):
    model = build(TITAN)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
    return model


def _sinks():
    model = build(TITAN)
    model.layers[0].attention.sinks = nn.Parameter(model.norm.weight.detach().clone())
    return model


def _parameter():
    model = build(TITAN)
    model.scale = nn.Parameter(model.norm.weight.detach().clone())
    return model


REFUSED = {
    "shared, cut in two ways": (
        _tied,
        {"plan": {"tok_embeddings": "colwise", "output": "colwise"}},
        "tok_embeddings.weight and output.weight are one parameter, and plan.tensor_parallel",
    ),
    "shared, half of it planned": (
        _tied,
        {"plan": {"output": "colwise"}},
        "tok_embeddings.weight and output.weight are one parameter, and plan.tensor_parallel",
    ),
    "fused": (_fused, {}, "layers.1.attention.qkv holds query, key and value in one matrix"),
    "fused, gate and up": (
        lambda: _with("layers.0.feed_forward.gate_up_proj", nn.Linear(32, 128)),
        {},
        "layers.0.feed_forward.gate_up_proj holds gate and up in one matrix",
    ),
    "experts": (
        lambda: _with("layers.0.feed_forward.experts", nn.Linear(32, 64)),
        {},
        "layers.0.feed_forward.experts are experts, which .* set engine.tp to 1",
    ),
    "no blocks": (lambda: nn.Linear(4, 4), {}, "Linear has no list of blocks"),
    "another mlp": (
        lambda: _change(mlp=("experts", TITAN["mlp"][1])),
        {},
        r"layers.0 \(_Block\) has no mlp \(known names: mlp, feed_forward\)",
    ),
    "one more in a block": (
        lambda: _with("layers.1.attention.v_norm", nn.LayerNorm(8)),
        {},
        r"layers.1.attention.v_norm \(LayerNorm\) has parameters and is no part",
    ),
    "a parameter beside an attention's matrices": (
        _sinks,
        {"sequence": True},
        r"layers.0.attention \(_Attention\) has parameters and is no part",
    ),
    "a norm of two heads": (
        lambda: _with("layers.1.attention.q_norm", nn.LayerNorm(16)),
        {},
        r"layers.1.attention.q_norm has parameters of the shapes \[\(16,\)\], .* the 32 of .*wq",
    ),
    "no matrix": (
        lambda: _with("layers.0.feed_forward.w1", nn.Bilinear(4, 4, 4)),
        {},
        "layers.0.feed_forward.w1 is a Bilinear, not an nn.Linear",
    ),
    "heads": (lambda: build(TITAN), {"tp": 4}, "engine.tp 4 does not divide the 2 heads of .*wk"),
    "width": (
        lambda: _with("layers.0.feed_forward.w3", nn.Linear(32, 63)),
        {},
        "engine.tp 2 does not divide dimension 0 of layers.0.feed_forward.w3.weight, which is 63",
    ),
    "outside, with sequence parallelism": (
        lambda: _with("extra", nn.LayerNorm(4)),
        {"sequence": True},
        r"extra \(LayerNorm\) has parameters and is no part of a common decoder",
    ),
    "of the model itself": (_parameter, {}, "scale belongs to a _Trunk with modules inside"),
    "wrong name": (
        lambda: build(TITAN),
        {"plan": {"layers.*.atention.wq": "colwise"}},
        r"names 'layers\.\*\.atention\.wq', and the model has no such module",
    ),
    "wrong style": (
        lambda: build(TITAN),
        {"plan": {"norm": "colwise"}},
        "norm is a LayerNorm, and ColwiseParallel cuts",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_cut_is_refused_in_one_line_and_left_alone(case):
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.tensor_parallel import tensor_parallelize

    make, given, said = REFUSED[case]
    model = make()
    before = [(name, id(parameter)) for name, parameter in model.named_parameters()]
    plan = _plan(given["plan"]).tensor_parallel if "plan" in given else None
    settings = EngineSettings(sequence_parallel=given.get("sequence", False))

    with pytest.raises(UsageError, match=said) as error:
        tensor_parallelize(model, _Axis(given.get("tp", 2)), settings, plan)

    assert "\n" not in str(error.value)
    assert [(name, id(parameter)) for name, parameter in model.named_parameters()] == before


class _Axis:
    """A mesh that nobody speaks over."""

    mesh_dim_names = ("tp",)

    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size

    def _get_root_mesh(self):
        return self


def test_the_table_of_names_has_no_name_twice_in_one_place():
    around, block = ("embedding", "norm", "head"), ("attention", "mlp")
    inside = (
        ("query", "key", "value", "mix", "query_norm", "key_norm"),
        ("gate", "up", "down"),
    )
    for roles in (around, block, *inside):
        names = [name for role in roles for name in layouts.NAMES[role]]
        assert len(names) == len(set(names))

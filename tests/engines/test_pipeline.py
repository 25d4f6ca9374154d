"""Pipelines: cutting a model into stages, and training in them as one process does."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from hpctrain.core.settings.schema import EngineSettings
from hpctrain.errors import UsageError
from hpctrain.recipes.lm.model import LM, LMConfig, token_loss
from hpctrain.train.engines.engine import Microbatch
from hpctrain.train.engines.stages import chain, cut
from tests.support import layouts
from tests.support.gloo import launch

CONFIG = LMConfig(layers=4, dim=16, heads=4, seq_len=8)
STEPS, GLOBAL_BATCH, MICRO_BATCH = 8, 13, 3
INTERLEAVED = {"pp_schedule": "interleaved", "pp_stages_per_rank": 2}


# ---- cutting


def _parts(make, pp, order=None, **chosen):
    """The stages of all ranks of a pipeline, in their order."""
    options = EngineSettings(kind="fsdp2", **chosen)
    found = {}
    for rank in range(pp):
        stages = cut(make(), rank, pp, options, order)
        found |= dict(zip(stages.numbers, stages.parts, strict=True))
        held = {name for name, _ in stages.model.named_parameters()}
        assert held == {n for part in stages.parts for n, _ in part.named_parameters()}
    assert sorted(found) == list(range(stages.count))
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize(("pp", "chosen"), [(2, {}), (4, {}), (2, INTERLEAVED), (1, INTERLEAVED)])
def test_the_stages_one_after_the_other_are_the_model(pp, chosen):
    whole = LM(CONFIG, seed=1)
    tokens = torch.arange(16).view(2, 8)

    parts = _parts(lambda: LM(CONFIG, seed=1), pp, **chosen)

    x = tokens
    for part in parts:
        x = part(x)
    assert torch.equal(x, whole(tokens))
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    state = whole.state_dict()
    assert all(p.equal(state[n]) for part in parts for n, p in part.named_parameters())


def test_what_a_rank_does_not_keep_is_freed():
    model = LM(CONFIG, seed=1)
    optimizer_like = {name: weakref.ref(p) for name, p in model.named_parameters()}

    stages = cut(model, 0, 2, EngineSettings(kind="fsdp2"))
    gc.collect()

    kept = {name for name, _ in stages.model.named_parameters()}
    assert stages.model is model
    assert {name for name, ref in optimizer_like.items() if ref() is not None} == kept
    assert "head.weight" not in kept
    assert "embedding.weight" in kept


class _Nested(nn.Module):
    """A decoder as Hugging Face lays it out, its children named in another order than called."""

    def __init__(self, scale=1.0, tied=False, loose=None, two=False, twice=False):
        super().__init__()
        self.lm_head = nn.Linear(8, 32, bias=False)
        self.model = nn.Module()
        self.model.norm = nn.LayerNorm(8)
        self.model.layers = nn.ModuleDict({str(n): nn.Linear(8, 8) for n in range(3)})
        self.model.embed = nn.Embedding(32, 8)
        self.scale, self.two = scale, two
        if tied:
            self.lm_head.weight = self.model.embed.weight
        if twice:
            self.model.layers["3"] = self.model.layers["0"]
        if loose == "parameter":
            self.position = nn.Parameter(torch.zeros(8))
        elif loose == "buffer":
            self.register_buffer("position", torch.zeros(8))

    def forward(self, tokens):
        torch.rand(())
        x = self.model.embed(tokens) * self.scale
        for layer in self.model.layers.values():
            x = layer(x)
        x = self.lm_head(self.model.norm(x))
        return (x, x) if self.two else x


ORDER = ["model.embed", "model.layers", "model.norm", "lm_head"]


def test_a_model_with_its_blocks_further_inside_is_cut_in_the_order_that_is_given():
    torch.manual_seed(0)
    whole = _Nested()
    tokens = torch.arange(6).view(2, 3)

    def make():
        copy = _Nested()
        copy.load_state_dict(whole.state_dict())
        return copy

    parts = _parts(make, 3, ORDER)

    x = tokens
    for part in parts:
        x = part(x)
    assert torch.equal(x, whole(tokens))
    hollow = cut(make(), 0, 3, EngineSettings(kind="fsdp2"), ORDER).hollow
    random = torch.get_rng_state()
    for _ in range(2):
        hollow.check(tokens)
    assert torch.equal(torch.get_rng_state(), random)


def test_without_a_list_of_blocks_each_module_may_be_a_stage():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2))

    first, second = _parts(make, 2)

    x = torch.linspace(-1, 1, 6).view(2, 3)
    assert torch.equal(second(first(x)), make()(x))
    assert [name for name, _ in second.named_parameters()] == [
        "2.weight",
        "2.bias",
        "3.weight",
        "3.bias",
    ]


def test_one_parameter_may_be_used_twice_in_a_stage():
    model = _Nested(tied=True, twice=True)

    stages = cut(model, 0, 1, EngineSettings(kind="fsdp2"), ORDER)

    (part,) = stages.parts
    assert part.lm_head.weight is part.model.embed.weight
    assert part.model.layers["3"] is part.model.layers["0"]


@pytest.mark.parametrize(
    ("options", "order", "pp", "says"),
    [
        ({}, None, 4, r"engine.pp 4 asks for 4 pipeline stages, and the model has 3 blocks"),
        ({"twice": True}, ORDER, 2, r"layers.0.weight and model.layers.3.weight are one parameter"),
        ({"twice": True}, ORDER, 2, r"outside the blocks may be on two stages, as an embedding"),
        ({"loose": "parameter"}, ORDER, 2, r"position is in none of the modules .*model.embed"),
        ({"loose": "buffer"}, ORDER, 2, r"position is in none of the modules .*model.embed"),
        ({}, ["model.embed", "model.layers", "lm_head"], 2, r"model.norm.weight is in none"),
        ({}, [*ORDER, "head"], 2, r"stage_order names 'head', which the model has not"),
        ({}, [*ORDER, "model.norm"], 2, r"stage_order has 'model.norm' twice"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_in_one_line(options, order, pp, says):
    with pytest.raises(UsageError, match=says) as refused:
        cut(_Nested(**options), 0, pp, EngineSettings(kind="fsdp2"), order)

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "order", "says"),
    [
        ({}, None, r"in the order lm_head, model.norm, .*calls model.embed, .*stage_order"),
        ({"scale": 2.0}, ORDER, r"its forward does more than to pass one tensor"),
        ({"two": True}, ORDER, r"its forward does more than to pass one tensor"),
    ],
)
def test_a_forward_that_does_more_than_to_call_its_layers_is_refused(options, order, says):
    stages = cut(_Nested(**options), 0, 2, EngineSettings(kind="fsdp2"), order)

    with pytest.raises(UsageError, match=says):
        stages.hollow.check(torch.linspace(-1, 1, 48).view(2, 3, 8))


class _Turned(nn.Module):
    """It hands what it makes of a table to its blocks, and may add it too."""

    def __init__(self, add=False):
        super().__init__()
        self.rotary = _Table()
        self.layers = nn.ModuleList(_Handed(8) for _ in range(2))
        self.layers[1].kind = "sliding"
        self.head = nn.Linear(8, 3)
        self.add = add

    def forward(self, x):
        table = self.rotary(x)
        x = x + table if self.add else x
        for layer in self.layers:
            x = layer(x, -table if layer.kind == "sliding" else table)
        return {"logits": self.head(x), "cache": None}


class _Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.arange(8.0), persistent=False)

    def forward(self, x):
        return self.angles.to(x.dtype)


class _Handed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.kind = "full"
        self.inner = nn.Linear(width, width)

    def forward(self, x, given):
        return x + self.inner(x * given)


def test_each_stage_makes_for_itself_what_blocks_are_given_beside_their_tensor():
    def make():
        torch.manual_seed(0)
        return _Turned()

    whole, parts = make(), _parts(make, 2)

    assert [link.name for link in chain(whole)] == ["layers.0", "layers.1", "head"]
    x = torch.linspace(-1, 1, 24).view(3, 8)
    assert torch.equal(parts[1](parts[0](x)["logits"])["logits"], whole(x)["logits"])
    cut(make(), 0, 2, EngineSettings(kind="fsdp2")).hollow.check(x)


class _Beside(nn.Module):
    """The table that its blocks are given is its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(8), persistent=False)
        self.layers = nn.ModuleList(_Handed(8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, self.table)
        return x


def test_a_table_of_a_model_without_memory_is_filled_for_the_check_too():
    stages = cut(_Beside().to("meta"), 0, 2, EngineSettings(kind="fsdp2"))

    stages.parts[0].to_empty(device="cpu")
    stages.hollow.check(torch.linspace(-1, 1, 24).view(3, 8))


def test_a_table_that_the_tensor_passes_through_has_to_be_named():
    hollow = cut(_Turned(add=True), 0, 2, EngineSettings(kind="fsdp2")).hollow

    with pytest.raises(UsageError, match=r"passes through rotary, name it in a ModelPlan"):
        hollow.check(torch.linspace(-1, 1, 24).view(3, 8))
    table = chain(nn.Sequential(nn.Linear(8, 8), _Table()))
    assert [link.name for link in table] == ["0", "1"]
    named = chain(_Turned(), ["rotary", "layers", "head"])
    assert named[0].name == "rotary"


def test_a_parameter_outside_the_blocks_may_be_on_two_stages_under_both_names():
    stages = [
        cut(_Nested(tied=True), rank, 3, EngineSettings(kind="fsdp2"), ORDER) for rank in range(3)
    ]

    both = {"lm_head.weight", "model.embed.weight"}
    names = [{name for name in part.model.state_dict() if name in both} for part in stages]
    assert names == [both, set(), both]
    assert [next(part.model.named_parameters())[0] for part in stages[::2]] == [
        "lm_head.weight"
    ] * 2
    for part in (stages[0], stages[2]):
        ((tied,), (inner,)) = part.tied, part.parts
        assert ({*tied.names}, tied.stages) == (both, (0, 2))
        assert inner.lm_head.weight is inner.model.embed.weight
        assert part.model.lm_head.weight is inner.lm_head.weight
    assert not stages[1].tied


def test_the_chain_has_blocks_in_the_place_of_their_list():
    names = [link.name for link in chain(LM(CONFIG, seed=1))]

    assert names == ["embedding", "dropout", *[f"blocks.{n}" for n in range(4)], "norm", "head"]


# ---- training


def _build(*, dropout=0.0, model=None, **chosen):
    """A pipeline; or, without `pp`, what one process trains with."""
    from dataclasses import replace

    from hpctrain.core.world import World
    from hpctrain.train.engines.parallelize import parallelize
    from hpctrain.train.joining_ranks import join_world

    model = model or LM(replace(CONFIG, dropout=dropout), seed=1)
    named = dict(model.named_parameters())
    last = [named.pop(next(iter(named)))]  # a group that is empty on all stages but one
    groups = [{"params": list(named.values())}, {"params": last, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    world = join_world() if chosen else World(0, 0, 1, torch.device("cpu"))
    options = EngineSettings(**{"kind": "fsdp2", "clip_norm": 0.5, **chosen})
    return parallelize(model, optimizer, options, world)


def _batch(engine, step, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH):
    from hpctrain.train.data.batches import cut_step

    positions = range(step * global_batch, (step + 1) * global_batch)
    ranks = (engine.data_rank, engine.data_ranks)
    cuts = cut_step(positions, *ranks, micro_batch, index=int, passes=engine.passes)
    found = []
    for piece in cuts.pieces:
        tokens = _tokens(piece.indices)
        weights = torch.tensor(piece.weights)
        found.append(Microbatch(tokens[:, :-1], (tokens[:, 1:], weights)))
    return found


def _tokens(indices):
    starts = torch.tensor([[37 * index % 101] for index in indices])
    return (starts + 3 * torch.arange(CONFIG.seq_len + 1)) % 257


def _share(logits, targets):
    following, weights = targets
    return (token_loss(logits, following) * weights).sum() / (GLOBAL_BATCH * CONFIG.seq_len)


def _alone():
    """Losses and norms of each step, an evaluation, and the weights: by torch alone."""
    model = LM(CONFIG, seed=1)
    groups = [{"params": [p for n, p in model.named_parameters() if not n.startswith("embedding")]}]
    groups.append({"params": [model.embedding.weight], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    found = []
    for step in range(STEPS):
        loss = _of_batch(model, step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    with torch.no_grad():
        evaluated = _of_batch(model, STEPS).item()
    return found, evaluated, {name: p.detach().clone() for name, p in model.named_parameters()}


def _of_batch(model, step):
    tokens = _tokens(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))
    weights = torch.ones(GLOBAL_BATCH)
    return _share(model(tokens[:, :-1]), (tokens[:, 1:], weights))


@pytest.fixture(scope="module")
def alone():
    return launch(_alone, 1)[0]


def _train(steps=STEPS, **chosen):
    """The same under a pipeline, with what each rank has of the model."""
    import warnings

    from torch._dynamo.utils import counters
    from torch.distributed.fsdp import FSDPModule

    # torch's compiler asks for a gradient where there is none, and warns of it
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    engine = _build(**chosen)
    found, grown, order = [], [], []
    engine._schedule(_batch(engine, 0), training=True)
    traced = counters["frames"]["total"]
    _assert_nothing_gathered(engine)
    for step in range(steps):
        loss = engine.forward_backward(
            _batch(engine, step), _noting(engine, order) if step == 0 else _share
        )
        if step == 0:
            grown = [n for n, p in engine.model.named_parameters() if _has_gradient(p)]
        found.append((loss, engine.step()))
    evaluated = engine.evaluate(_batch(engine, steps), _share)
    weights = {
        name.removesuffix(".weight"): value
        for name, value in layouts.whole(engine).items()
        if name.endswith(".weight.weight")
    }
    parts = [module for part in engine._stages.parts for module in part.modules()]
    return {
        "steps": found,
        "evaluated": evaluated,
        "weights": weights,
        "with gradient": grown,
        "order": "".join(order),
        "compiled to find shapes": traced,
        "held": [name for name, _ in engine.model.named_parameters()],
        "sharded": sum(isinstance(module, FSDPModule) for module in parts),
        "recomputed": sum("CheckpointWrapper" in type(module).__name__ for module in parts),
        "compiled": sum(module._compiled_call_impl is not None for module in parts),
    }


def _noting(engine, order):
    """The loss, with a note of each forward pass that it ends and backward pass that it begins."""
    last = [*engine._stages.parts[-1].parameters()]

    def loss(logits, targets):
        if engine.mesh.tp == 1:
            gathered = {*engine._stages.parts[-1].parameters()}
            assert gathered.isdisjoint(last), "each microbatch would gather it twice"
        order.append("F")
        logits.register_hook(lambda _: order.append("B"))
        return _share(logits, targets)

    return loss


def _assert_nothing_gathered(engine):
    """What is gathered would outlive a load of other weights."""
    assert all(hasattr(parameter, "to_local") for parameter in engine.model.parameters())


def _has_gradient(parameter):
    return parameter.grad is not None and bool(parameter.grad.to_local().any())


def _assert_trained_as(ranks, alone, *, within, steps=STEPS):
    expected, evaluated, weights = alone
    for rank in ranks:
        assert rank["steps"] == ranks[0]["steps"]
    assert {name for rank in ranks for name in rank["with gradient"]} == weights.keys()
    for (loss, norm), (its_loss, its_norm) in zip(
        ranks[0]["steps"][:steps], expected[:steps], strict=True
    ):
        assert loss == pytest.approx(its_loss, rel=within)
        assert norm == pytest.approx(its_norm, rel=10 * within)
    if steps < STEPS:
        return
    assert ranks[0]["evaluated"] == pytest.approx(evaluated, rel=within)
    assert ranks[0]["weights"].keys() == weights.keys()
    for name, value in ranks[0]["weights"].items():
        assert (value - weights[name]).abs().max() <= within, name


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [
        (2, {"pp_schedule": "gpipe"}),
        (2, {"pp_schedule": "1f1b"}),
        (2, INTERLEAVED),
        (4, {**INTERLEAVED, "pp_schedule": "zero_bubble"}),
        (4, {"pp_schedule": "1f1b"}),
        (4, {"pp_schedule": "gpipe", "dp_replicate": "2"}),
    ],
    ids=[
        "gpipe@2",
        "1f1b@2",
        "interleaved@2",
        "zero_bubblexFSDP2@4",
        "1f1bxFSDP2@4",
        "gpipexcopies@4",
    ],
)
def test_a_pipeline_trains_as_one_process_does(alone, ranks, chosen):
    found = launch(_train, ranks, pp="2", **chosen)

    _assert_trained_as(found, alone, within=1e-5)
    blocks = [sum(n.endswith("mlp.up.weight") for n in rank["held"]) for rank in found]
    assert blocks == [2] * ranks
    parts = chosen.get("pp_stages_per_rank", 1)
    # blocks one by one, and the last stage's norm and head
    expected = [2 + parts + 2 * ("head.weight" in rank["held"]) for rank in found]
    assert [rank["sharded"] for rank in found] == expected
    orders = {rank["order"] for rank in found}
    passes = max(map(len, orders)) // 2
    assert passes > 1
    gpipe = chosen["pp_schedule"] == "gpipe"
    assert orders == {"", "F" * passes + "B" * passes if gpipe else "FB" * passes}


def _halves(**chosen):
    """A step's gradients, and the order of its passes, under schedules of both kinds."""
    from hpctrain.train.engines import pipeline

    noted = []

    class Noting(pipeline._Stage):
        def forward_one_chunk(self, number, *args, **kwargs):
            noted.append(f"F{number}")
            return super().forward_one_chunk(number, *args, **kwargs)

        def backward_one_chunk(self, number, *args, full_backward=True, **kwargs):
            noted.append(f"{'B' if full_backward else 'I'}{number}")
            super().backward_one_chunk(number, *args, full_backward=full_backward, **kwargs)

        def backward_weight_one_chunk(self, number, *args, **kwargs):
            noted.append(f"W{number}")
            super().backward_weight_one_chunk(number, *args, **kwargs)

    pipeline._Stage = Noting
    found = []
    for schedule in ("1f1b", "zero_bubble"):
        noted.clear()
        engine = _build(pp="2", pp_schedule=schedule, **chosen)
        loss = engine.forward_backward(_batch(engine, 0, 8, 2), _share)
        grown = {name: p.grad.full_tensor() for name, p in engine.model.named_parameters()}
        norm = engine.step()
        found.append(
            (loss, norm, grown, " ".join(noted), engine.evaluate(_batch(engine, 1, 8, 2), _share))
        )
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_backward_pass_in_two_halves_gives_the_same_gradients_bit_for_bit(precision):
    ranks = launch(_halves, 2, precision=precision, pp_stages_per_rank=1)

    for plain, halves in ranks:
        assert (halves[0], halves[1], halves[4]) == (plain[0], plain[1], plain[4])
        assert halves[2].keys() == plain[2].keys()
        assert [n for n, grown in plain[2].items() if not torch.equal(grown, halves[2][n])] == []
    assert [rank[1][3] for rank in ranks] == [
        "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3",
        "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3",
    ]


def test_a_pipeline_of_sharded_matrices_trains_as_one_process_does(alone):
    found = launch(_train, 8, steps=3, pp="2", tp="2")

    _assert_trained_as(found, alone, within=1e-5, steps=3)


def test_blocks_that_are_recomputed_and_compiled_train_the_same(alone):
    chosen = {"activation_checkpointing": "full", "compile": "aot_eager", **INTERLEAVED}
    found = launch(_train, 2, steps=2, pp="2", **chosen)

    _assert_trained_as(found, alone, within=1e-5, steps=2)
    assert [(rank["recomputed"], rank["compiled"]) for rank in found] == [(2, 2)] * 2
    assert [rank["compiled to find shapes"] for rank in found] == [0, 0]


def test_activations_of_bf16_train_to_the_same_loss(alone):
    found = launch(_train, 2, pp="2", precision="bf16")

    _assert_trained_as(found, alone, within=3e-2, steps=STEPS - 1)


def _scaled():
    engine = _build(pp="2", precision="fp16")
    engine.loss_scale.scale = 2.0**100
    loss = engine.forward_backward(_batch(engine, 0), _share)
    before = [p.to_local().clone() for p in engine.model.parameters()]
    norm = engine.step()
    same = all(
        p.to_local().equal(b) for p, b in zip(engine.model.parameters(), before, strict=True)
    )
    engine.loss_scale.scale = 1024.0
    return loss, norm, same, engine.forward_backward(_batch(engine, 0), _share), engine.step()


def test_in_fp16_losses_are_told_unscaled_and_an_overflow_anywhere_skips_the_step(alone):
    (loss, norm, same, again, clean), other = launch(_scaled, 2)

    expected, expected_norm = alone[0][0]
    assert other == (loss, pytest.approx(norm, nan_ok=True), same, again, clean)
    assert (loss, same) == (again, True)
    assert not norm < float("inf")
    assert (loss, clean) == (
        pytest.approx(expected, rel=1e-3),
        pytest.approx(expected_norm, rel=0.03),
    )


# ---- saving


def _go_on(root, first, **chosen):
    """Load what is there at step `first`, train two steps, save, train one more; what was found."""
    engine = _build(**chosen)
    found = layouts.load(engine, root) if first else 0
    loaded = layouts.whole(engine)
    losses = [_step(engine, first), _step(engine, first + 1)]
    layouts.save(engine, root, first + 2)
    return found, loaded, layouts.whole(engine), [*losses, _step(engine, first + 2)]


def _step(engine, step):
    return engine.forward_backward(_batch(engine, step), _share), engine.step()


def test_a_pipeline_saves_what_one_process_and_another_pipeline_load_bit_equal(tmp_path):
    kinds = [(4, {"pp": "2"}), (1, {}), (2, {"pp": "2", **INTERLEAVED}), (4, {"pp": "4"})]

    saved, following = {}, None
    for number, (ranks, chosen) in enumerate(kinds):
        options = {"root": tmp_path / "run", "first": 2 * number}
        found, loaded, after, steps = launch(_go_on, ranks, **options, **chosen)[0]
        assert found == 2 * number
        if saved:
            assert loaded.keys() == saved.keys()
            assert [name for name in saved if not loaded[name].equal(saved[name])] == []
            assert steps[0] == pytest.approx(following, rel=1e-5)
        saved, following = after, steps[-1]


# ---- calls


def _call():
    """What happens to calls that fit and to others, one after the other."""
    engine = _build(pp="2", dropout=0.5)
    good, said, alive = _batch(engine, 0), [], []

    def loss(logits, targets):
        assert not logits.requires_grad
        alive.append(weakref.ref(logits))
        kept.append(sum(ref() is not None for ref in alive))
        return _share(logits, targets)

    kept = []
    random = torch.get_rng_state()
    evaluated = engine.evaluate(good, loss)
    assert torch.equal(torch.get_rng_state(), random)
    _assert_nothing_gathered(engine)
    assert all(module.training for part in engine._stages.parts for module in part.modules())
    forms = dict(engine._forms)
    smaller, other = good[1].inputs[:1], good[1].inputs.int()
    mixed = [[good[0], Microbatch(inputs, good[1].targets)] for inputs in (smaller, other)]
    for wrong in (good[:1], [], *mixed):
        with pytest.raises(UsageError) as refused:
            engine.forward_backward(wrong, _share)
        said.append(str(refused.value))
    with pytest.raises(UsageError) as refused, engine.microbatch(last=True):
        pass
    said.append(str(refused.value))
    with pytest.raises(UsageError):
        engine.backward(torch.zeros(()))
    engine.forward_backward(good, _share)  # it has not suffered
    assert engine._schedule(good, training=True) is engine._schedule(good, training=True)
    assert all(engine._forms[form] is known for form, known in forms.items())
    engine.step()
    again = engine.evaluate(good, _share)
    others = [engine.evaluate(good[:1], _share), engine.evaluate(_batch(engine, 0, 8, 2), _share)]
    larger = engine.forward_backward(_batch(engine, 0, 16, 4), _share)
    return evaluated, again, others, larger, said, max(kept, default=0)


def test_calls_of_any_form_may_follow_each_other_and_wrong_ones_are_refused_on_every_rank(alone):
    ranks = launch(_call, 2)

    assert [rank[:5] for rank in ranks] == [ranks[0][:5]] * 2
    evaluated, again, (first, eight), larger, said, _ = ranks[0]
    assert evaluated == pytest.approx(alone[0][0][0], rel=1e-5)  # no dropout
    assert again < evaluated
    assert 0 < first < eight < again
    assert larger > evaluated
    assert (
        "1f1b at engine.pp 2 needs at least 2 microbatches in each step, this one has 1" in said[0]
    )
    assert "this one has 0" in said[1]
    alike = "have one shape and dtype, and this step's have "
    assert alike + "[1, 8] torch.int64 and [3, 8] torch.int64" in said[2]
    assert alike + "[3, 8] torch.int32 and [3, 8] torch.int64" in said[3]
    assert "call engine.forward_backward" in said[4]
    assert [rank[5] for rank in ranks] == [0, 1]  # logits at a time


class _Folded(LM):
    """Its forward does something beside calling its layers, and that to logits alone."""

    def forward(self, tokens):
        x = super().forward(tokens)
        return x.abs() if x.is_floating_point() else x


class _Broken(nn.Module):
    def forward(self, x):
        raise RuntimeError("no such kernel\nand more lines")


class _Masked(nn.Module):
    """Its blocks are given what is made of the tokens; or it returns two tensors."""

    def __init__(self, several=False):
        super().__init__()
        self.embedding = nn.Embedding(257, 8)
        self.blocks = nn.ModuleList(_Handed(8) for _ in range(2))
        self.head = nn.Linear(8, 257)
        self.several = several

    def forward(self, tokens):
        x = self.embedding(tokens)
        given = torch.ones(8) if self.several else (tokens.reshape(-1)[:8] > 3).float()
        for block in self.blocks:
            x = block(x, given)
        x = self.head(x)
        return {"logits": x, "again": x} if self.several else x


def _refused():
    """What a fitting model is told, and others: of each what its class says."""
    models = [LM(CONFIG, seed=1), _Folded(CONFIG, seed=1), LM(CONFIG, seed=1)]
    models[2].norm = _Broken()
    models += [_Masked(), _Masked(several=True)]
    return [_said(_build(model=model, pp="2")) for model in models]


def _said(engine):
    try:
        return engine.forward_backward(_batch(engine, 0), _share)
    except UsageError as error:
        return str(error)


def test_what_one_stage_finds_wrong_with_the_model_is_raised_on_every_rank():
    (loss, folded, broken, masked, several), other = launch(_refused, 2)

    assert [loss, folded, broken, masked, several] == other
    assert loss > 0
    assert "engine.pp cannot cut _Folded: its forward does more" in folded
    assert "pipeline stage 1 fails on a tensor of shape [3, 8, 16]: " in broken
    assert "no such kernel" in broken
    assert "cannot cut _Masked: what its forward hands to blocks.1 beside the tensor" in masked
    assert "stage 0 of this model returns none, or several" in several
    assert "\n" not in folded + broken + masked + several


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_several_stages_ask_for_a_multiple_of_the_ranks(schedule):
    (said, loss), other = launch(_odd, 2, schedule=schedule)

    assert (said, loss) == other
    assert f"{schedule} at engine.pp 2 needs a multiple of 2 microbatches" in said
    assert loss > 0


def _odd(schedule):
    engine = _build(pp="2", pp_schedule=schedule, pp_stages_per_rank=2)
    odd = _batch(engine, 0, 12, 2)[:3]
    with pytest.raises(UsageError) as refused:
        engine.forward_backward(odd, _share)
    loss = engine.evaluate(odd, _share)
    _assert_nothing_gathered(engine)
    return str(refused.value), loss

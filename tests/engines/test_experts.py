"""Experts on several ranks train as those of one process do, whatever the tokens choose.

Losses are about 5, gradient norms about 0.4; weights are compared where Adam has moved them by
about 0.01. Whole tensors come from DTensor's own gathering.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from hpctrain.errors import UsageError
from tests.support import layouts
from tests.support.gloo import launch

EXPERTS, STEPS = 4, 4
LOSS, NORM, WEIGHT = 2e-6, 1e-6, 8e-6
"""Farthest that a run may be from one process: fp32 sums over some steps, in another order."""

ON_2 = {
    "FSDP2, no ep": {},
    "ep": {"ep": "2"},
}
ON_4 = {
    "ep 2 of 4": {"ep": "2"},
    "copies and ep": {"dp_replicate": "2", "ep": "2"},
    "pipeline and ep": {"pp": "2", "ep": "2"},
}
MORE_ON_4 = {
    "ep 4": {"ep": "4"},
    "copies": {"dp_replicate": "2"},
}
SAME_BITS = {
    "full recomputation": {"activation_checkpointing": "full"},
    "selective recomputation": {"activation_checkpointing": "selective"},
    "offload": {"offload": "cpu"},
    "parameters kept gathered": {"reshard_after_forward": False},
}
COMPILED = {"compiled": {"compile": "aot_eager"}}


def build(layout="FSDP2@4", experts=EXPERTS, **settings):
    return layouts.build(layout, experts=experts, **settings)


def train(steps=STEPS, change=None, **settings):
    """Losses and norms of some steps, and then everything whole."""
    engine = build(**settings)
    if change is not None:
        change(engine)
    return layouts.steps(engine, 0, steps), whole(engine)


def whole(engine):
    """Weights and moments of all stages by the names that they have in a checkpoint."""
    found = {}
    for name, tensor in engine.state().shared.items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = full.detach().clone()
    if engine.mesh.pp == 1:
        return found
    stages = [None] * engine.world.world_size
    torch.distributed.all_gather_object(stages, found)
    return {name: tensor for stage in stages for name, tensor in stage.items()}


def several(cases, **options):
    """The same ranks train one after the other under several settings."""
    return {name: train(**options, **settings) for name, settings in cases.items()}


@pytest.fixture(scope="module")
def alone():
    return launch(train, 1, layout="one process")[0]


def assert_alike(found, expected, steps=STEPS):
    numbers, tensors = found
    assert len(numbers) == len(expected[0]) == steps
    for (loss, norm), (its_loss, its_norm) in zip(numbers, expected[0], strict=True):
        assert loss == pytest.approx(its_loss, abs=LOSS)
        assert norm == pytest.approx(its_norm, abs=NORM)
    assert tensors.keys() == expected[1].keys()
    far = {
        name: away
        for name, tensor in tensors.items()
        if not (away := (tensor - expected[1][name]).abs().max().item()) <= WEIGHT
    }
    assert not far


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, ON_2, id="2"),
        pytest.param(4, ON_4, id="4"),
        pytest.param(4, MORE_ON_4, id="4, more", marks=pytest.mark.soak),
    ],
)
def test_experts_on_several_ranks_train_as_in_one_process(alone, ranks, cases):
    for found in launch(several, ranks, cases=cases):
        assert found.keys() == cases.keys()
        for name in cases:
            assert_alike(found[name], alone)


def test_copies_of_a_dense_model_train_as_one_process():
    (expected,) = launch(train, 1, layout="one process", experts=0)

    for found in launch(train, 4, experts=0, dp_replicate="2", offload="cpu"):
        assert_alike(found, expected)


def several_with_ep(cases):
    warnings.simplefilter("ignore")  # torch's own while it compiles: of a tensor that is no leaf
    return train(steps=3, ep="2"), several(cases, steps=3, ep="2")


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SAME_BITS, id="as it comes"),
        pytest.param(COMPILED, id="compiled", marks=pytest.mark.soak),
    ],
)
def test_what_only_changes_when_things_are_computed_changes_no_bit(cases):
    plain, others = launch(several_with_ep, 2, cases=cases)[0]

    assert others.keys() == cases.keys()
    for name, (numbers, tensors) in others.items():
        assert numbers == plain[0], name
        assert tensors.keys() == plain[1].keys(), name
        assert not [key for key in tensors if not tensors[key].equal(plain[1][key])], name


def all_to_the_first(engine):
    """Equal scores: every token chooses experts 0 and 1, which lie on the first ranks."""
    for name, weight in engine.model.named_parameters():
        if "router" in name:
            getattr(weight, "_local_tensor", weight).detach().zero_()


def train_unevenly(**settings):
    """One step in which some experts get no token and some rank has no sample, and two more."""
    layouts.GLOBAL_BATCH = 3
    first = train(steps=1, change=all_to_the_first, **settings)
    return first, train(steps=3, change=all_to_the_first, **settings)


def test_ranks_without_tokens_or_samples_take_part_and_change_nothing():
    ((one, three),) = launch(train_unevenly, 1, layout="one process")

    for first, all_three in launch(train_unevenly, 4, ep="4"):
        assert_alike(first, one, 1)
        assert_alike(all_three, three, 3)
        for name in ("gate", "up", "down"):
            # Unused experts have had one update, of a gradient of zeros: they have decayed.
            moments = first[1][f"optim.blocks.0.mlp.experts.{name}.exp_avg"]
            assert moments[0].any()
            assert moments[1].any()
            assert not moments[2:].any()
            assert first[1][f"optim.blocks.0.mlp.experts.{name}.step"] == 1


def test_bf16_stays_close_to_one_process_in_bf16(alone):
    ((expected, _),) = launch(train, 1, layout="one process", precision="bf16", steps=4)

    for numbers, tensors in launch(train, 2, ep="2", precision="bf16", steps=4):
        assert len(numbers) == 4
        assert all(
            abs(loss - other) > LOSS
            for (loss, _), (other, _) in zip(numbers, alone[0], strict=False)
        )
        for (loss, norm), (its_loss, its_norm) in zip(numbers, expected, strict=True):
            assert loss == pytest.approx(its_loss, rel=2e-3)
            assert norm == pytest.approx(its_norm, rel=3e-2)
        assert all(tensor.dtype.itemsize == 4 for tensor in tensors.values())


def train_and_save(root, **settings):
    engine = build(**settings)
    layouts.steps(engine, 0, 2)
    layouts.save(engine, root, 2)
    boxes = [
        len(tensor.__create_chunk_list__())
        for tensor in engine.state().shared.values()
        if hasattr(tensor, "__create_chunk_list__")
    ]
    assert set(boxes) <= {1}, "not one box"
    return whole(engine), layouts.steps(engine, 2, 3)


def train_and_save_all(cases):
    return [train_and_save(**settings) for settings in cases]


def load(roots, cases):
    """What each case finds in each checkpoint, and how it goes on."""
    found = []
    for settings in cases:
        for root in roots:
            engine = build(**settings)
            assert layouts.load(engine, root) == 2
            found.append((root, whole(engine), layouts.steps(engine, 2, 3)))
    return found


PIPELINE = {"pp": "2", "ep": "2"}
SEVERAL_COPIES = {"dp_replicate": "2", "ep": "2", "offload": "cpu"}


def test_experts_saved_on_some_ranks_load_bit_equal_on_others(tmp_path):
    """Between other pairs of layouts: below, and test_every_engine.py."""
    stages = tmp_path / "stages"
    saved = {stages: launch(train_and_save, 4, root=stages, **PIPELINE)[0]}

    assert_loaded(saved, [launch(load, 4, roots=[stages], cases=[SEVERAL_COPIES])[0]])


@pytest.mark.soak
def test_experts_saved_on_any_ranks_load_bit_equal_on_others(tmp_path):
    spread, stages, fewer = (tmp_path / name for name in ("spread", "stages", "fewer"))
    on_4 = [{"root": spread, "ep": "2", "offload": "cpu"}, {"root": stages, **PIPELINE}]
    saved = dict(zip((spread, stages), launch(train_and_save_all, 4, cases=on_4)[0], strict=True))
    saved[fewer] = launch(train_and_save, 2, root=fewer)[0]
    cases = [{"ep": "4"}, SEVERAL_COPIES, PIPELINE]

    loaded = [
        launch(load, 1, roots=[spread, fewer], cases=[{"layout": "one process"}])[0],
        launch(load, 2, roots=[spread, stages], cases=[{}])[0],
        launch(load, 4, roots=[spread, fewer], cases=cases)[0],
    ]

    assert_loaded(saved, loaded)


def assert_loaded(saved, loaded):
    """Each checkpoint has been found as it was saved, and training went on from it."""
    for found in loaded:
        for root, tensors, following in found:
            before, undisturbed = saved[root]
            assert tensors.keys() == before.keys()
            assert not [name for name in tensors if not tensors[name].equal(before[name])]
            for numbers, its_numbers in zip(following, undisturbed, strict=True):
                assert numbers == pytest.approx(its_numbers, abs=LOSS)


class Biased(nn.Module):
    """A user's own experts: biases, a module inside, and no word of ranks."""

    tokens_by_expert = True

    def __init__(self, dim, experts):
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.randn(experts, dim, dim) / dim)
        self.inner.weight.requires_grad_(requires_grad=False)
        self.bias = nn.Parameter(torch.randn(experts, dim))

    def forward(self, tokens, counts):
        parts = tokens.split(counts.tolist())
        each = zip(parts, self.inner.weight, self.bias, strict=True)
        return torch.cat([rows @ weight + bias for rows, weight, bias in each])


class Own(nn.Module):
    """Token n goes to expert 3n modulo 4; there are no blocks."""

    def __init__(self, experts=4, dim=6):
        super().__init__()
        torch.manual_seed(3)
        self.experts = Biased(dim, experts)
        self.scale = nn.Parameter(torch.rand(dim))

    def forward(self, x):
        chosen = torch.arange(len(x)) * 3 % 4
        order = chosen.argsort(stable=True)
        done = self.experts(x[order] * self.scale, chosen.bincount(minlength=4))
        return x + done[order.argsort()]


def meshes_of(**axes):
    from hpctrain.core.base.mesh import Mesh
    from hpctrain.train.engines.layouts import make_meshes
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    return world, make_meshes(Mesh(**axes), world.device)


def train_own():
    """Outputs and gradients of a user's model with ep, and without it on all ranks' tokens."""
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.experts import expert_parallelize
    from hpctrain.train.engines.native import shard

    world, meshes = meshes_of(dp_shard=2, ep=2)
    inputs = [torch.randn(5 + 4 * rank, 6) for rank in range(2)]
    model, same = Own(), Own()
    expert_parallelize(model, meshes.ep)
    shard(model, meshes, torch.float32, EngineSettings(kind="fsdp2"))

    out = model(inputs[world.rank])
    out.square().sum().backward()
    sum(same(x).square().sum() for x in inputs).backward()
    return {
        "out": (out.detach(), same(inputs[world.rank]).detach()),
        **{
            name: (parameter.grad.full_tensor(), whole.grad)
            for (name, parameter), whole in zip(
                model.named_parameters(), same.parameters(), strict=True
            )
            if whole.requires_grad
        },
        "frozen": (model.experts.inner.weight.full_tensor(), same.experts.inner.weight),
    }


def test_a_model_of_ones_own_needs_a_mark_and_nothing_else():
    for found in launch(train_own, 2):
        assert found.keys() == {"out", "experts.bias", "scale", "frozen"}
        for name, (ours, expected) in found.items():
            assert torch.allclose(ours, expected, atol=1e-5), name


def refusals():
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.experts import expert_parallelize
    from hpctrain.train.engines.native import shard

    _, meshes = meshes_of(dp_shard=4, ep=2)
    router_inside = Own()
    router_inside.experts.router = nn.Linear(6, 3)
    uncut = Own(dim=5)

    def cut_further():
        expert_parallelize(uncut, meshes.ep)
        shard(uncut, meshes, torch.float32, EngineSettings(kind="fsdp2"))

    acts = [
        lambda: expert_parallelize(nn.Linear(2, 2), meshes.ep),
        lambda: expert_parallelize(Own(experts=3), meshes.ep),
        lambda: expert_parallelize(router_inside, meshes.ep),
        cut_further,
    ]
    found = []
    for act in acts:
        with pytest.raises(UsageError) as refused:
            act()
        found.append(str(refused.value))
    return found


def test_what_cannot_be_shared_is_refused_with_what_to_do():
    for none, number, mixed, uncut in launch(refusals, 4):
        assert "engine.ep 2 needs a model with experts" in none
        assert "experts has 3 experts, which 2 ranks (engine.ep) cannot share" in number
        assert "set engine.ep to a divisor of 3" in number
        assert "router.weight [3, 6]" in mixed
        assert "experts.inner.weight of shape [4, 5, 5] has no dimension" in uncut
        assert "2 equal parts" in uncut


def held_of_few_experts():
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.native import shard

    _, meshes = meshes_of(dp_shard=3)
    model = Own()
    shard(model, meshes, torch.float32, EngineSettings(kind="fsdp2"))
    return model.experts.inner.weight.to_local().numel()


def test_experts_that_ranks_cannot_share_equally_are_cut_within():
    assert launch(held_of_few_experts, 3) == [4 * 6 * 6 // 3] * 3

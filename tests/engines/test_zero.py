"""DeepSpeed's engine trains as one process does, and saves what all other engines load, and back.

The awkward model of tests/support/zero.py has sizes that no number of ranks divides, tied weights,
a part that is not trained, a buffer, and two groups with rates and decays of their own.
"""

from __future__ import annotations

import math
import sys

import pytest

from tests.support import layouts, zero

SAVED_AT, LAST = 3, 6
LONG = 20
LAYOUTS = {
    "plain@1": (1, "plain", {}),
    "FSDP2@2": (2, "fsdp2", {}),
    "ZeRO-0@2": (2, "zero0", {}),
    "ZeRO-1@2": (2, "zero1", {}),
    "ZeRO-2@3": (3, "zero2", {}),
    "ZeRO-3@3": (3, "zero3", {"sub_groups": True}),
    "ZeRO-2 on CPU@2": (2, "zero2", {"offload": "cpu"}),
    "ZeRO-3 on CPU@2": (2, "zero3", {"offload": "cpu", "sub_groups": True}),
}
SAVERS = ["plain@1", "FSDP2@2", "ZeRO-1@2", "ZeRO-2@3", "ZeRO-3@3", "ZeRO-3 on CPU@2"]
LOADERS = [
    "plain@1", "ZeRO-0@2", "ZeRO-1@2", "ZeRO-2@3", "ZeRO-3@3", "ZeRO-2 on CPU@2", "ZeRO-3 on CPU@2"
]  # fmt: skip


# ---- the same training


def _long(layout):
    engine = layouts.build(layout, clip_norm=0.2)
    return layouts.steps(engine, 0, LONG), layouts.whole(engine)


@pytest.fixture(scope="module")
def alone():
    return layouts.run("one process", _long)


@pytest.mark.parametrize("layout", ["ZeRO-1@2", "ZeRO-2@3", "ZeRO-3@4"])
def test_losses_norms_and_weights_are_those_of_one_process(alone, layout):
    zero.preload()
    steps, whole = layouts.run(layout, _long)

    wanted, its_whole = alone
    for (loss, norm), (its_loss, its_norm) in zip(steps, wanted, strict=True):
        assert loss == pytest.approx(its_loss, rel=2e-5)
        assert norm == pytest.approx(its_norm, rel=1e-4)
    assert min(norm for _, norm in wanted) > 0.2  # so that every step was clipped
    assert whole.keys() == its_whole.keys()
    for name, tensor in whole.items():
        assert tensor.sub(its_whole[name]).abs().max() < 2e-4, name
        assert name.endswith(".step") or tensor.any(), name  # all got gradients


# ---- the same checkpoints


def _build(layout, folder, **more):
    _, kind, settings = LAYOUTS[layout]
    return zero.build(kind, **settings, **more)


def _train(layout, root):
    engine = _build(layout, root.parent)
    before = zero.steps(engine, 0, SAVED_AT)
    zero.save(engine, root, SAVED_AT)
    whole = zero.whole(engine)
    return before, whole, zero.steps(engine, SAVED_AT, LAST)


def _load_all(layout, roots):
    engine = _build(layout, next(iter(roots.values())).parent, frozen=0.5)
    found = {}
    for name, root in roots.items():
        assert zero.load(engine, root) == SAVED_AT
        whole = zero.whole(engine)
        found[name] = whole, zero.steps(engine, SAVED_AT, LAST)
    return found


def _saved(layout, folder):
    root = folder / layout
    return root, *zero.launch(_train, LAYOUTS[layout][0], layout=layout, root=root)[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return _saved("plain@1", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def saved(plain, tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero")
    return {"plain@1": plain, **{name: _saved(name, folder) for name in SAVERS[1:]}}


@pytest.mark.parametrize("layout", SAVERS[2:])
def test_groups_keep_the_rates_that_the_program_sets_and_their_decay(saved, layout):
    _, steps, whole, following = saved[layout]
    _, its_steps, its_whole, its_following = saved["plain@1"]

    for (loss, norm), (its_loss, its_norm) in zip(
        steps + following, its_steps + its_following, strict=True
    ):
        assert loss == pytest.approx(its_loss, rel=1e-5)
        assert norm == pytest.approx(its_norm, rel=1e-5)
    assert whole.keys() == its_whole.keys()
    for name in whole.keys() - {"model.seen"}:  # counts a rank's passes
        assert whole[name].sub(its_whole[name]).abs().max() < 1e-5, name


@pytest.mark.parametrize("layout", LOADERS)
def test_a_checkpoint_of_any_engine_is_loaded_bit_equal_and_trained_on(saved, layout):
    roots = {name: root for name, (root, *_) in saved.items()}
    loaded = zero.launch(_load_all, LAYOUTS[layout][0], layout=layout, roots=roots)[0]

    assert loaded.keys() == saved.keys()
    for name, (whole, following) in loaded.items():
        _, _, before, undisturbed = saved[name]
        assert whole.keys() == before.keys()
        assert not [key for key in whole if not whole[key].equal(before[key])], name
        if name == layout:
            assert following == undisturbed
        for (loss, norm), (its_loss, its_norm) in zip(following, undisturbed, strict=True):
            assert loss == pytest.approx(its_loss, rel=1e-5), name
            assert norm == pytest.approx(its_norm, rel=1e-4), name


# ---- 16 bits


LOW = {
    "bf16": ("zero1", {"precision": "bf16"}),
    "fp16": ("zero2", {"precision": "fp16"}),
    "bf16, parameters spread": ("zero3", {"precision": "bf16"}),
}  # fmt: skip


def _sixteen_bits(folder):
    zero.allow_fp16()
    found = {}
    for low, (kind, settings) in LOW.items():
        precision = settings["precision"]
        engine = zero.build(kind, **settings)
        begun = zero.by_state(engine)
        if precision == "fp16":
            engine.loss_scale.load_state_dict({"scale": 256.0, "good_steps": 0})
        before = zero.steps(engine, 0, SAVED_AT)
        zero.save(engine, folder / low, SAVED_AT)
        after = zero.by_state(engine)
        following = zero.steps(engine, SAVED_AT, LAST)
        fresh = zero.build(kind, frozen=0.5, **settings)
        if precision == "fp16":
            fresh.loss_scale.load_state_dict(engine.loss_scale.state_dict())
        zero.load(fresh, folder / low)
        loaded = zero.by_state(fresh)
        found[low] = begun, before, after, following, loaded, zero.steps(fresh, SAVED_AT, LAST)
    return found


def _load_in_fp32(folder):
    engine = zero.build("plain")
    found = {}
    for kind in LOW:
        zero.load(engine, folder / kind)
        found[kind] = zero.whole(engine)
    return found


def test_sixteen_bits_keep_fp32_masters_of_every_weight_and_go_on_bit_equal(plain, tmp_path):
    found = zero.launch(_sixteen_bits, 2, folder=tmp_path)[0]
    in_fp32 = zero.launch(_load_in_fp32, 1, folder=tmp_path)[0]

    original = {f"model.{name}": tensor for name, tensor in zero.net().state_dict().items()}
    _, plain_steps, *_ = plain
    for kind, (begun, before, after, following, loaded, again) in found.items():
        for name, tensor in begun.items():
            if name.startswith("model."):  # not rounded to 16 bits, trained or not
                assert tensor.equal(original[name]), (kind, name)
            else:
                assert not tensor.any(), (kind, name)  # as before the first step
        for (loss, norm), (its_loss, its_norm) in zip(before, plain_steps, strict=True):
            assert loss == pytest.approx(its_loss, rel=5e-3), kind
            assert norm == pytest.approx(its_norm, rel=5e-2), kind
        assert not [name for name in after if not after[name].equal(loaded[name])], kind
        assert again == following, kind
        assert in_fp32[kind].keys() == after.keys()
        assert not [n for n in after if not after[n].equal(in_fp32[kind][n])], kind


def _overflow():
    from hpctrain.train.engines.norm import LossScale

    zero.allow_fp16()
    engine = zero.build("zero2", precision="fp16")
    began = engine.loss_scale.state_dict()
    engine.loss_scale.load_state_dict({"scale": 2.0**100, "good_steps": 7})
    told = engine.loss_scale.state_dict()
    before = zero.by_state(engine)
    ((_, norm),) = zero.steps(engine, 0, 1)
    after = zero.by_state(engine)
    engine.loss_scale.load_state_dict({"scale": 256.0, "good_steps": 1998})
    steps = zero.steps(engine, 0, 1)
    grown_once = engine.loss_scale.state_dict()
    zero.steps(engine, 1, 3)
    other = LossScale()
    other.load_state_dict(engine.loss_scale.state_dict())
    changed = [name for name in before if not before[name].equal(after[name])]
    return began, told, norm, changed, steps, grown_once, other.state_dict()


def test_an_fp16_step_that_overflows_is_left_out_and_its_scale_is_every_engines():
    ranks = zero.launch(_overflow, 2)
    began, told, _, changed, steps, grown_once, elsewhere = ranks[0]

    assert began == {"scale": 65536.0, "good_steps": 0}
    assert told == {"scale": 2.0**100, "good_steps": 7}
    assert [math.isinf(rank[2]) for rank in ranks] == [True, True]
    assert changed == ["model.seen"]  # the forward pass counts there
    assert math.isfinite(steps[0][1])
    assert grown_once == {"scale": 256.0, "good_steps": 1999}
    assert elsewhere == {"scale": 512.0, "good_steps": 1}  # DeepSpeed doubles after 2001 good ones


# ---- what DeepSpeed would do wrong


def _selective(*, efficient):
    import hpctrain.train.engines.zero.engine as module

    real = module.engine_config

    def config(*args, **kwargs):
        made = real(*args, **kwargs)
        if efficient:
            made["zero_optimization"]["memory_efficient_linear"] = True
        return made

    module.engine_config = config
    engine = zero.build("zero3", activation_checkpointing="selective")
    return zero.steps(engine, 0, 2)


def test_selective_recomputation_has_right_gradients_at_stage_3(plain):
    """And would not, were DeepSpeed's own linear function left on."""
    _, wanted, *_ = plain

    right = zero.launch(_selective, 2, efficient=False)[0]
    wrong = zero.launch(_selective, 2, efficient=True)[0]

    for (_, norm), (_, its_norm), (_, bad) in zip(right, wanted, wrong, strict=False):
        assert norm == pytest.approx(its_norm, rel=1e-5)
        assert bad != pytest.approx(its_norm, rel=1e-4)


def _compiled():
    import warnings

    from torch._dynamo.utils import counters

    warnings.simplefilter("ignore")  # an error inside torch's compiler breaks it
    # As tests leave one in their process: torch compiles it too, into no graph.
    sys.addaudithook(lambda *_: None)
    found = {}
    for kind in ("zero1", "zero3"):
        plain = zero.steps(zero.build(kind), 0, 2)
        counters.clear()
        compiled = zero.steps(zero.build(kind, compile="aot_eager"), 0, 2)
        found[kind] = (plain, compiled, counters["stats"]["unique_graphs"])
    return found


def test_compiled_blocks_train_the_same_from_one_graph_each():
    """At stage 3 DeepSpeed's hooks on every submodule would cut them into dozens."""
    for plain, compiled, graphs in zero.launch(_compiled, 2)[0].values():
        assert compiled == [pytest.approx(pair, rel=1e-6) for pair in plain]
        assert graphs == 1


def _used_once(folder):
    found = []
    for kind, offload in (("zero3", "no"), ("zero1", "cpu"), ("zero2", "cpu"), ("zero3", "cpu")):
        engine = zero.build(kind, offload=offload, sub_groups=True)
        zero.steps(engine, 0, 1)
        first = zero.by_state(engine)
        engine.model.module.uses_gain = engine.model.module.blocks_count = False
        zero.steps(engine, 1, 2)
        found.append((kind, offload, first, zero.by_state(engine)))
    return found


def test_a_parameter_that_gets_no_gradient_is_not_given_the_last_steps_again(tmp_path):
    import torch

    unused = ["gain", "blocks.0.inner.weight", "blocks.1.outer.bias"]

    for kind, offload, first, second in zero.launch(_used_once, 2, folder=tmp_path)[0]:
        for name in unused:
            before, after = (state[f"optim.{name}.exp_avg"] for state in (first, second))
            assert before.any()
            assert torch.allclose(after, before * 0.9, rtol=1e-5, atol=0), (kind, offload, name)


# ---- refusals, before anything collective


def _refused(model=None, groups=None, **settings):
    import torch

    from hpctrain.core.base.mesh import Mesh
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.core.world import World
    from hpctrain.errors import UsageError
    from hpctrain.train.engines.engine import EngineInputs
    from hpctrain.train.engines.zero.engine import Zero

    model = model or torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(groups or model.parameters())
    world = World(0, 0, 1, torch.device("cpu"))
    with pytest.raises(UsageError) as caught:
        Zero(model, optimizer, EngineInputs(EngineSettings(**settings), world, Mesh(), frozenset()))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_stage_0_is_refused_in_sixteen_bits():
    assert "Adam at step 1" in _refused(kind="zero0", precision="bf16")
    assert "engine.precision fp16" in _refused(kind="zero0", precision="fp16")


def test_fp16_is_refused_on_a_device_that_has_none(monkeypatch):
    zero.preload()
    from deepspeed import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda _: False)

    assert "engine.precision fp16" in _refused(kind="zero2", precision="fp16")


def test_without_deepspeed_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)

    assert "pip install 'hpctrain[deepspeed]'" in _refused(kind="zero2")


def test_a_group_without_anything_trained_is_refused():
    import torch

    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(requires_grad=False)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    zero.preload()

    assert "group 1 of the optimizer" in _refused(model, groups, kind="zero2")

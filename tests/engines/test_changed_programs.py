"""A checkpoint and a program that do not hold the same state: what each of the two has alone.

What the checkpoint has is loaded, also into what the program makes later. What it lacks begins
fresh, and the log says so. A change of the program that would be lost without a word is refused.
"""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from torch import nn

from hpctrain.errors import CheckpointError
from tests.support.resumed import resumed, start, undisturbed, values

pytestmark = pytest.mark.quick


def trained(run, total, model, optimizer, loss, **tracked):
    """A plain loop; returns weights and counts of the end."""
    run.track(model=model, optimizer=optimizer, **tracked)
    for step in run.steps(total):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    steps = {n: optimizer.state[p].get("step") for n, p in model.named_parameters()}
    return values(model), {n: float(s) for n, s in steps.items() if s is not None}


class Unused(nn.Module):
    """A model with a layer that no forward pass uses."""

    def __init__(self):
        super().__init__()
        self.used, self.pooler = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


def with_unused(run, total):
    model = Unused()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return trained(run, total, model, optimizer, lambda m, _: m(torch.randn(1, 2)).sum())


def test_a_parameter_that_never_gets_a_gradient_is_resumed_without_state(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hpctrain")

    end = resumed(tmp_path, with_unused, 3, 6)

    assert end == undisturbed(tmp_path, with_unused, 6)
    assert sorted(end[1]) == ["used.bias", "used.weight"]
    (line,) = [r.message for r in caplog.records if "no optimizer state" in r.message]
    assert "2 parameters (pooler.weight, pooler.bias)" in line


def unfrozen_on_the_way(run, total):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def loss(model, step):
        model[0].requires_grad_(step >= 3)
        return ((model(torch.randn(4, 2)) - 1) ** 2).mean()

    return trained(run, total, model, optimizer, loss)


def test_layers_unfrozen_on_the_way_keep_their_moments(tmp_path):
    end = resumed(tmp_path, unfrozen_on_the_way, 5, 8)

    assert end == undisturbed(tmp_path, unfrozen_on_the_way, 8)
    assert end[1]["0.weight"] == 5.0


def unfrozen_at_a_resume(run, total):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(total > 3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    return trained(run, total, model, optimizer, lambda m, _: m(torch.randn(4, 2)).mean())


def test_layers_that_are_trainable_from_a_resume_on_begin_without_moments(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hpctrain")

    _, steps = resumed(tmp_path, unfrozen_at_a_resume, 3, 5)

    assert steps == {"0.weight": 2.0, "0.bias": 2.0, "1.weight": 5.0, "1.bias": 5.0}
    (line,) = [r.message for r in caplog.records if "no optimizer state" in r.message]
    assert "2 parameters (0.weight, 0.bias)" in line


def added_on_the_way(run, total):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.05)

    def loss(model, step):
        if step >= 2 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
        return ((model(torch.randn(4, 2)) - 1) ** 2).mean()

    return trained(run, total, model, optimizer, loss)


def test_state_of_parameters_that_the_loop_adds_waits_for_them(tmp_path):
    end = resumed(tmp_path, added_on_the_way, 4, 7)

    assert end == undisturbed(tmp_path, added_on_the_way, 7)
    assert end[1]["0.weight"] == 5.0


def added_late(run, total):
    """The parameters come back to the optimizer three steps after the resume."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    first = run.settings.train.steps == 0
    groups = [{"params": list(layer.parameters())} for layer in model]
    optimizer = torch.optim.AdamW(groups if first else groups[1:], lr=0.05)

    def loss(model, step):
        if not first and step >= 7 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group(groups[0])
        return ((model(torch.randn(4, 2)) - 1) ** 2).mean()

    return trained(run, total, model, optimizer, loss)


def test_state_that_still_waits_goes_through_the_saves_in_between(tmp_path):
    start(tmp_path, added_late, 4, train__steps=0)
    start(tmp_path, added_late, 6, train__steps=1)  # nobody has asked for it

    _, steps = start(tmp_path, added_late, 9, train__steps=1)

    assert steps["1.weight"] == 9.0
    assert steps["0.weight"] == 4.0 + 2.0


class ScaledByItsFirstBatch(nn.Module):
    """A buffer that the first forward pass makes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("scale", None)

    def forward(self, x):
        if self.scale is None:
            self.scale = x.std().detach()
        return self.layer(x) * self.scale


def scaled_by_its_first_batch(run, total):
    model = ScaledByItsFirstBatch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return trained(run, total, model, optimizer, lambda m, _: m(torch.randn(4, 2)).sum())


def test_a_buffer_that_the_first_pass_makes_takes_the_saved_value(tmp_path):
    end = resumed(tmp_path, scaled_by_its_first_batch, 3, 6)

    assert end == undisturbed(tmp_path, scaled_by_its_first_batch, 6)


class Growing(nn.Module):
    """A buffer that has a row more after each step."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(0, 2))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.mean(0, keepdim=True).detach()])
        return self.layer(x - self.seen.mean(0))


def growing(run, total):
    model = Growing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return trained(run, total, model, optimizer, lambda m, _: m(torch.randn(4, 2)).sum())


def test_a_buffer_that_grows_takes_the_saved_shape_and_that_is_said(tmp_path, caplog):
    end = resumed(tmp_path, growing, 3, 6)

    assert end == undisturbed(tmp_path, growing, 6)
    lines = [record.message for record in caplog.records]
    assert any("buffer seen is F32[3,2]" in line and "F32[0,2]" in line for line in lines)


def with_head(run, total, *, width=1, name="head", allow=()):
    torch.manual_seed(total)  # another start has other values
    model = nn.Sequential()
    model.add_module("body", nn.Linear(2, 2))
    model.add_module(name, nn.Linear(2, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    begun = {n: p.detach().clone() for n, p in model.named_parameters()}
    run.track(allow=allow)
    return *trained(run, total, model, optimizer, lambda m, _: m(torch.ones(1, 2)).sum()), begun


BOTH = ("new-parameters", "dropped-parameters")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"width": 3}, "head.weight .*has shape \\[1, 2\\] in the checkpoint and \\[3, 2\\]"),
        ({"name": "top"}, "top.weight .*is in the model and not in the checkpoint"),
    ],
)
def test_a_replaced_head_is_refused_and_the_rest_is_loaded_where_it_is_allowed(
    tmp_path, change, said
):
    weights, *_ = start(tmp_path, with_head, 3)
    for allow in ((), BOTH[:1], BOTH[1:]):
        changed = partial(with_head, **change, allow=allow)
        with pytest.raises(CheckpointError, match=r"resume\.allow") as refusal:
            start(tmp_path, changed, 3)
        missing = [flag for flag in BOTH if flag not in allow]
        assert all(flag in str(refusal.value) for flag in missing)
    with pytest.raises(CheckpointError, match=said):
        start(tmp_path, lambda run, total: with_head(run, total, **change), 3)

    now, _, begun = start(
        tmp_path, lambda run, total: with_head(run, total, **change, allow=BOTH), 3
    )

    assert now["0.body.weight"] == weights["0.body.weight"]
    head = f"{change.get('name', 'head')}.weight"
    assert now[f"0.{head}"] == begun[head].tolist()
    _, steps, _ = start(tmp_path, partial(with_head, **change, allow=BOTH), 5)
    assert (steps["body.weight"], steps[head]) == (5.0, 2.0)


def test_the_setting_allows_the_same(tmp_path):
    start(tmp_path, with_head, 3)

    _, steps, _ = start(
        tmp_path,
        lambda run, total: with_head(run, total, name="top"),
        5,
        resume__allow=list(BOTH),
    )

    assert steps == {"body.weight": 5.0, "body.bias": 5.0, "top.weight": 2.0, "top.bias": 2.0}


def test_a_change_that_cannot_be_allowed_is_refused_by_name(tmp_path):
    from hpctrain.errors import UsageError

    with pytest.raises(UsageError, match=r"allow.*'everything'.*new-parameters"):
        start(tmp_path, lambda run, total: with_head(run, total, allow=["everything"]), 3)


def with_optimizer(run, total, make, allow=()):
    model = nn.Linear(2, 2)
    run.track(allow=allow)
    optimizer = make(model.parameters())
    return trained(run, total, model, optimizer, lambda m, _: m(torch.randn(1, 2)).sum())


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=0.1, **options)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (adamw, sgd, "state of AdamW, .* by SGD"),
        (sgd, adamw, "state of SGD, .* by AdamW"),
        (adamw, lambda p: adamw(p, amsgrad=True), "max_exp_avg_sq"),
    ],
)
def test_another_optimizer_is_refused_and_begins_fresh_where_it_is_allowed(
    tmp_path, first, second, said
):
    start(tmp_path, lambda run, total: with_optimizer(run, total, first), 3)
    with pytest.raises(CheckpointError, match=said) as refusal:
        start(tmp_path, lambda run, total: with_optimizer(run, total, second), 4)
    assert "optimizer-changed" in str(refusal.value)

    _, steps = start(
        tmp_path,
        lambda run, total: with_optimizer(run, total, second, allow=["optimizer-changed"]),
        4,
    )

    assert set(steps.values()) <= {1.0}


class Odd(torch.optim.Optimizer):
    """Keeps in its state what torch's own optimizers do not."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            held = self.state[parameter]
            if not held:
                held |= {"mask": None, "count": 0, "rate": 0.1, "seen": [], "on": True, "k.j": 1.5}
            held["count"] += 1
            held["rate"] *= 1.1  # 53 bits
            held["seen"] = [*held["seen"][-2:], parameter.grad.clone()]
            parameter.sub_(held["rate"] * sum(held["seen"]))


def by_odd(run, total):
    model = nn.Linear(2, 1)
    optimizer = Odd(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(total):
        optimizer.zero_grad()
        model(torch.randn(1, 2)).sum().backward()
        optimizer.step()
    return values(model), [{k: (type(v), v) for k, v in h.items() if k != "seen"}
                           for h in optimizer.state.values()]  # fmt: skip


def test_what_is_no_tensor_in_an_optimizers_state_comes_back_as_it_was(tmp_path):
    end = resumed(tmp_path, by_odd, 3, 4, 6)

    assert end == undisturbed(tmp_path, by_odd, 6)
    assert end[1][0]["mask"] == (type(None), None)


def test_lbfgs_goes_on(tmp_path):
    def program(run, total):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
        run.track(model=model, optimizer=optimizer)
        for _ in run.steps(total):
            x = torch.randn(4, 2)

            def closure(x=x):
                optimizer.zero_grad()
                loss = (model(x) - 1).pow(2).mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        return values(model)

    assert resumed(tmp_path, program, 3, 6) == undisturbed(tmp_path, program, 6)


class Experts(nn.Module):
    """A step uses one of four experts; each has its first gradient at another step."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 1) for _ in range(4))


def experts(run, total):
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def loss(model, step):
        return model.experts[step // 2 % 4](torch.randn(3, 2)).pow(2).mean()

    return trained(run, total, model, optimizer, loss)


@pytest.mark.parametrize("stops", [(1, 10), (3, 10), (2, 5, 7, 10)])
def test_experts_without_a_gradient_so_far_begin_when_they_have_one(tmp_path, stops):
    assert resumed(tmp_path, experts, *stops) == undisturbed(tmp_path, experts, 10)


def test_an_optimizer_of_a_part_of_the_model_goes_on(tmp_path):
    def program(run, total):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.1)
        return trained(run, total, model, optimizer, lambda m, _: m(torch.randn(4, 2)).mean())

    assert resumed(tmp_path, program, 3, 6) == undisturbed(tmp_path, program, 6)


class Adapted(nn.Module):
    """A layer with a low-rank adapter, if there is one."""

    def __init__(self, rank):
        super().__init__()
        self.base = nn.Linear(2, 2)
        self.base.requires_grad_(requires_grad=not rank)
        if rank:
            self.down, self.up = nn.Linear(2, rank), nn.Linear(rank, 2)

    def forward(self, x):
        return self.base(x) + (self.up(self.down(x)) if hasattr(self, "up") else 0)


def adapted(run, total, *, rank, allow=()):
    model = Adapted(rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    run.track(allow=allow)
    return trained(run, total, model, optimizer, lambda m, _: m(torch.randn(4, 2)).pow(2).mean())


def test_adapters_on_a_trained_base_are_new_parameters(tmp_path):
    base, _ = start(tmp_path, lambda run, total: adapted(run, total, rank=0), 3)
    with pytest.raises(CheckpointError, match=r"down\.weight .*is in the model.*new-parameters"):
        start(tmp_path, lambda run, total: adapted(run, total, rank=1), 5)

    now, steps = start(
        tmp_path, lambda run, total: adapted(run, total, rank=1, allow=["new-parameters"]), 5
    )

    assert now["0.base.weight"] == base["0.base.weight"]
    assert {steps[n] for n in steps if "up" in n or "down" in n} == {2.0}
    # The base's moments are still there for a program that trains it again.
    _, steps = start(tmp_path, lambda run, total: adapted(
        run, total, rank=0, allow=["dropped-parameters"]), 6)  # fmt: skip
    assert steps == {"base.weight": 4.0, "base.bias": 4.0}


def test_a_layer_that_is_left_out_takes_its_moments_along(tmp_path):
    def program(run, total, *, names=("a", "b"), allow=()):
        model = nn.Sequential()
        for name in names:
            model.add_module(name, nn.Linear(2, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run.track(allow=allow)
        return trained(run, total, model, optimizer, lambda m, _: m(torch.ones(1, 2)).sum())

    start(tmp_path, program, 3)
    with pytest.raises(CheckpointError, match=r"b\.weight .*not in the model.*dropped-parameters"):
        start(tmp_path, lambda *a: program(*a, names=("a",)), 4)

    _, steps = start(
        tmp_path, lambda *a: program(*a, names=("a",), allow=["dropped-parameters"]), 4
    )

    assert steps == {"a.weight": 4.0, "a.bias": 4.0}
    (tmp_path / "renamed").mkdir()
    start(tmp_path / "renamed", lambda *a: program(*a, names=("a", "b")), 3)
    with pytest.raises(CheckpointError, match=r"c\.weight .*in the model.*b\.weight"):
        start(tmp_path / "renamed", lambda *a: program(*a, names=("a", "c")), 3)


def test_a_head_of_the_same_name_and_shape_is_loaded(tmp_path):
    """Nobody can see that it was replaced; docs/checkpoints.md says so."""
    before, *_ = start(tmp_path, with_head, 3)

    after, *_ = start(tmp_path, with_head, 3)

    assert after == before


def test_lazy_layers_get_the_shape_that_they_had(tmp_path):
    def program(run, total):
        model = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d(), nn.Linear(2, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(total):
            optimizer.zero_grad()
            torch.manual_seed(step)  # a lazy layer draws its values in the first pass
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        return values(model)

    assert resumed(tmp_path, program, 3, 6) == undisturbed(tmp_path, program, 6)


class WithExtraState(nn.Linear):
    """Has state that only its state_dict knows."""

    calls = 0

    def get_extra_state(self):
        return torch.tensor(self.calls)

    def set_extra_state(self, state):
        self.calls = int(state)

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


def test_extra_state_of_a_module_goes_on(tmp_path):
    def program(run, total):
        model = WithExtraState(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return trained(run, total, model, optimizer, lambda m, _: m(torch.ones(1, 2)).sum())

    assert resumed(tmp_path, program, 3, 6) == undisturbed(tmp_path, program, 6)


class WithHistory(nn.Linear):
    """As TransformerEngine's layers: its extra state is a dictionary with lists and tensors."""

    def __init__(self):
        super().__init__(2, 1)
        self.history, self.amax = [1.0], torch.ones(2)

    def get_extra_state(self):
        return {"history": self.history, 1: {"amax": self.amax}}

    def set_extra_state(self, state):
        self.history, self.amax = state["history"], state[1]["amax"]

    def forward(self, x):
        self.history.append(self.history[-1] / 3)
        self.amax += 1
        return super().forward(x * self.history[-1] + self.amax)


class Derived(nn.Linear):
    """Keeps a copy of its weight, which it makes anew at a load."""

    def __init__(self):
        super().__init__(2, 1)
        self.refresh()
        self.register_load_state_dict_post_hook(lambda module, _: module.refresh())

    def refresh(self):
        self.copied = self.weight.detach().clone()

    def forward(self, x):
        return super().forward(x) + x @ self.copied.T


def spread_buffer(model, step):
    """One element that stands for three, as torch.expand gives it."""
    model.some = torch.full((1,), float(step + 1)).expand(3)


def other_type(model, step):
    """A count that has become a fraction."""
    model.some = model.some.double() + 0.1


MODULES = {
    "extra state that is a dictionary": (WithHistory, lambda *_: None),
    "copies made by a hook": (Derived, lambda model, _: model.refresh()),
    "an expanded buffer": (lambda: with_buffer(torch.zeros(1).expand(3)), spread_buffer),
    "a buffer whose type changes": (lambda: with_buffer(torch.zeros(3).long()), other_type),
}


def with_buffer(value):
    model = nn.Linear(2, 1)
    model.register_buffer("some", value)
    return model


@pytest.mark.parametrize(("make", "change"), MODULES.values(), ids=MODULES)
def test_what_a_module_makes_of_its_state_goes_on(tmp_path, make, change):
    def program(run, total):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(total):
            optimizer.zero_grad()
            (
                model(torch.ones(1, 2)) * getattr(model, "some", torch.ones(1)).sum()
            ).square().sum().backward()
            optimizer.step()
            change(model, step)
        buffers = [(buffer.dtype, buffer.tolist()) for buffer in model.buffers()]
        return [parameter.tolist() for parameter in model.parameters()], buffers

    assert resumed(tmp_path, program, 2, 4, 7) == undisturbed(tmp_path, program, 7)


def test_a_buffer_of_another_type_is_named_with_both(tmp_path, caplog):
    def program(run, total):
        model = with_buffer(torch.zeros(3).long())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss = lambda model, step: other_type(model, step) or model(torch.ones(1, 2)).sum()  # noqa: E731
        return trained(run, total, model, optimizer, loss)

    resumed(tmp_path, program, 2, 3)

    assert "buffer some is F64[3] in the checkpoint and I64[3] in the model" in caplog.text


def test_moments_lie_in_memory_as_their_parameter_does(tmp_path):
    """Optimizers take a slow path where they do not, which torch says to nobody."""

    def program(run, total):
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for _ in run.steps(total):
            model(torch.ones(1, 3, 4, 4)).square().sum().backward()
            optimizer.step()
        return values(model), [state["exp_avg"].stride() for state in optimizer.state.values()]

    assert resumed(tmp_path, program, 2, 4) == undisturbed(tmp_path, program, 4)


def on_shards(root, total):
    """A layer that is unfrozen on the way, sharded; weights and counts of the end."""

    def program(run, total):
        from torch.distributed.fsdp import fully_shard

        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        model[0].requires_grad_(requires_grad=False)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(total):
            model[0].requires_grad_(step >= 2)
            optimizer.zero_grad()
            model(torch.full((2, 4), float(step + 1))).pow(2).mean().backward()
            optimizer.step()
        return {
            name: (parameter.full_tensor().tolist(), float(optimizer.state[parameter]["step"]))
            for name, parameter in model.named_parameters()
        }

    return start(root, program, total)


def test_layers_unfrozen_on_the_way_go_on_at_another_number_of_ranks(tmp_path):
    from tests.support.gloo import launch

    launch(on_shards, 2, root=tmp_path / "run", total=4)
    (end,) = launch(on_shards, 1, root=tmp_path / "run", total=6)
    (expected,) = launch(on_shards, 1, root=tmp_path / "whole", total=6)

    assert {name: step for name, (_, step) in end.items()} == {
        name: step for name, (_, step) in expected.items()
    }
    assert end["0.weight"][1] == 4.0
    for name, (weight, _) in end.items():
        assert torch.allclose(torch.tensor(weight), torch.tensor(expected[name][0]), atol=1e-5)


def test_adafactors_state_of_other_shapes_goes_on(tmp_path):
    def program(run, total):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        return trained(
            run, total, model, optimizer, lambda m, _: m(torch.randn(4, 4)).pow(2).mean()
        )

    assert resumed(tmp_path, program, 3, 6) == undisturbed(tmp_path, program, 6)


def tracking(run, total, **others):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer, **others)
    for _step in run.steps(total=total):
        optimizer.step()


def test_what_only_one_side_tracks_is_said_in_a_line_each(tmp_path, caplog):
    before = {"average": nn.Linear(1, 1), "noise": torch.Generator()}
    after = {"mean": nn.Linear(1, 1), "order": torch.Generator()}
    start(tmp_path, lambda run, total: tracking(run, total, **before), 3)
    start(tmp_path, lambda run, total: tracking(run, total, **before), 4)
    assert not [r for r in caplog.records if "checkpoint" in r.message]

    start(tmp_path, lambda run, total: tracking(run, total, **after), 5)

    lines = [r.message for r in caplog.records if "checkpoint" in r.message]
    assert lines == [
        "average, noise: in the checkpoint, and not tracked by this program",
        "mean, order: not in the checkpoint, begins as the program has made it",
    ]


class Position:
    """Data that knows where it is."""

    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def reads(run, total, *, has_data):
    model, data = nn.Linear(2, 1), Position()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, _step):
        data.at += 1
        return model(torch.ones(1, 2)).sum()

    trained(run, total, model, optimizer, loss, **({"data": data} if has_data else {}))
    return data.at


@pytest.mark.parametrize(
    ("has_data", "at", "line"),
    [
        ((True, True), 5, ""),
        ((True, False), 2, "data: in the checkpoint, and not tracked by this program"),
        ((False, True), 2, "data: not in the checkpoint, begins as the program has made it"),
    ],
)
def test_data_that_only_one_of_both_has_begins_anew(tmp_path, caplog, has_data, at, line):
    first, second = (partial(reads, has_data=has) for has in has_data)
    assert start(tmp_path / "run", first, 3) == 3

    assert start(tmp_path / "run", second, 5) == at

    said = [message for message in caplog.messages if message.startswith("data: ")]
    assert said == [line] * bool(line)

"""A step that is not finite: left out on every rank, named, computed again, and counted."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from hpctrain.core.settings.schema import GuardSettings
from hpctrain.train.data.batches import cut_step
from hpctrain.train.engines.step_guard import LARGE, KeptState, StepGuard
from tests.support import layouts, zero

pytestmark = pytest.mark.quick

STEPS, BAD = 5, 2
SAMPLE = BAD * layouts.GLOBAL_BATCH + 17
"""In the last quarter but one of its step: one rank has it, at any number of ranks."""
QUICK = ["one process", "DDP@2", "FSDP2@4", "PPxFSDP2@4", "ZeRO-1@2"]
LONG = ["HSDP@4", "FSDP2xTP@4", "CPxFSDP2@4", "ZeRO-2@3", "ZeRO-3@4"]
LAYOUTS = [
    *filter(layouts.runs_here, QUICK),
    *(pytest.param(name, marks=pytest.mark.soak) for name in filter(layouts.runs_here, LONG)),
]
NAN = float("nan")


class Spoilt(torch.autograd.Function):
    """A number as it is, whose gradient is not one."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * NAN


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self, engine):
        self.engine, self.bad, self.spikes = engine, [], []

    def samples_of(self, microbatch):
        engine, batch = self.engine, layouts.GLOBAL_BATCH
        first = engine.begun * batch
        cut = cut_step(
            range(first, first + batch),
            engine.data_rank,
            engine.data_ranks,
            layouts.MICRO_BATCH,
            index=lambda position: position,
            passes=engine.passes,
        )
        return cut.pieces[microbatch].indices

    def not_finite(self, bad, *, must_stop):
        assert not must_stop
        self.bad.append(SimpleNamespace(**asdict(bad)))

    def spiked(self, step, spike, *, is_left_out):
        self.spikes.append((step, spike, is_left_out))


def holds(microbatch):
    """Whether a microbatch has the sample, told by its text."""
    text = torch.cat([microbatch.inputs, microbatch.targets[0][:, -1:]], 1)
    return any(torch.equal(row, layouts.sample(SAMPLE)) for row in text)


def bad_loss(logits, targets):
    return layouts.share(logits, targets) * NAN


def bad_gradient(logits, targets):
    return Spoilt.apply(layouts.share(logits, targets))


def always(loss):
    """The loss, but for passes with the sample."""

    def of(engine, step):
        here = [i for i, each in enumerate(layouts.microbatches(engine, step)) if holds(each)]
        marked = [layouts.microbatches(engine, step)[i].targets[0] for i in here]

        def spoilt(logits, targets):
            own = targets[0]  # with engine.cp a part of it
            parts = [part for text in marked for part in text.split(own.shape[1], dim=1)]
            same = any(part.shape == own.shape and torch.equal(part, own) for part in parts)
            return (loss if same else layouts.share)(logits, targets)

        return spoilt if step == BAD else layouts.share

    return of


def once(loss):
    """The same, the first time alone: what a fault of the machine does."""
    calls = []

    def of(engine, step):
        spoilt = always(loss)(engine, step)

        def first(logits, targets):
            is_first = not any(torch.equal(targets[0], each) for each in calls)
            calls.append(targets[0].clone())
            return (spoilt if is_first else layouts.share)(logits, targets)

        return first if step == BAD else layouts.share

    return of


def clean(engine, step):
    return layouts.share


def trained(layout, *, loss=clean, without=None, guard=None, **settings):
    """Some steps; what was heard, what was left out, and the weights."""
    engine = layouts.build(layout, **settings)
    heard = Heard(engine)
    if guard is not None:
        engine.guard = StepGuard(engine, guard, heard)
    left_out, numbers = [], []
    for step in range(STEPS):
        if step == without:
            continue
        engine.at_step(step)
        value = engine.forward_backward(layouts.microbatches(engine, step), loss(engine, step))
        numbers.append((value, engine.step()))
        left_out.append(engine.left_out)
    engine.guard = None
    whole = layouts.whole(engine)
    own = engine.world.rank, [holds(m) for m in layouts.microbatches(engine, BAD)]
    return heard.bad, left_out, numbers, whole, own


def on_all(layout, **kwargs):
    """The same of every rank."""
    if layout.startswith("ZeRO"):
        zero.preload()
    return layouts.launch(trained, layouts.LAYOUTS[layout][0], layout=layout, **kwargs)


@functools.cache
def reference(layout, without):
    return on_all(layout, without=without)


def same(whole, other):
    assert whole.keys() == other.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, other[name]), name
        assert torch.isfinite(tensor).all(), name


SKIP = GuardSettings(nonfinite="skip", spike="off")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_ranks_bad_batch_is_left_out_by_all_and_named(layout):
    ranks = on_all(layout, loss=always(bad_loss), guard=SKIP)
    without = reference(layout, BAD)

    guilty = [own[0] for *_, own in ranks if any(own[1])]
    for (bad, left_out, _, whole, _), other in zip(ranks, without, strict=True):
        assert left_out == [step == BAD for step in range(STEPS)]
        same(whole, other[3])
        (one,) = bad
        assert str(one) == str(ranks[0][0][0])  # every rank has the same word
        assert one.step == BAD + 1
        assert one.rank in guilty
        assert SAMPLE in one.samples
        assert one.parameter
        assert one.transient is False
        assert one.left_out
        assert not one.in_weights
        assert math.isnan(one.grad_norm) or math.isinf(one.grad_norm)


@pytest.mark.parametrize("layout", ["DDP@2", "FSDP2@4", "ZeRO-3@4"])
def test_a_gradient_that_is_none_is_named_before_it_has_travelled(layout):
    ranks = on_all(layout, loss=always(bad_gradient), guard=SKIP)

    (guilty,) = [own[0] for *_, own in ranks if any(own[1])]
    for (bad, _, _, whole, _), other in zip(ranks, reference(layout, BAD), strict=True):
        same(whole, other[3])
        (one,) = bad
        assert one.rank == guilty
        assert one.ranks == (guilty,)
        assert SAMPLE in one.samples
        assert one.parameter == "head.weight"  # the first that a backward pass comes to
        assert math.isfinite(one.loss)


@pytest.mark.parametrize(
    ("loss", "layout"),
    [
        (bad_loss, "DDP@2"),
        (bad_gradient, "FSDP2@4"),
        (bad_loss, "ZeRO-1@2"),
        *(
            pytest.param(loss, layout, marks=pytest.mark.soak)
            for loss in (bad_loss, bad_gradient)
            for layout in ("one process", "PPxFSDP2@4", *LONG)
            if layouts.runs_here(layout)
        ),
    ],
)
def test_a_fault_that_is_gone_when_computed_again_costs_no_step(layout, loss):
    ranks = on_all(layout, loss=once(loss), guard=SKIP)

    for (bad, left_out, numbers, whole, _), other in zip(
        ranks, reference(layout, None), strict=True
    ):
        assert left_out == [False] * STEPS
        same(whole, other[3])
        (one,) = bad
        assert one.transient is True
        assert not one.left_out
        assert numbers[BAD][1] == other[2][BAD][1]  # the norm of what was applied
    guilty = [own[0] for *_, own in ranks if any(own[1])]
    assert one.rank in (guilty if loss is bad_loss else [None])


def test_an_exact_run_leaves_out_and_tries_again_too():
    exact = {"exact": True}
    spoilt = on_all("DDP@2", loss=always(bad_loss), guard=SKIP, **exact)
    repaired = on_all("DDP@2", loss=once(bad_loss), guard=SKIP, **exact)
    whole = on_all("DDP@2", **exact)

    assert [r[1][BAD] for r in spoilt] == [True, True]
    assert SAMPLE in spoilt[0][0][0].samples
    same(spoilt[0][3], on_all("DDP@2", without=BAD, **exact)[0][3])
    same(repaired[0][3], whole[0][3])


def test_with_the_guard_off_or_only_telling_the_update_is_applied():
    off = GuardSettings(nonfinite="off", spike="off")
    for guard in (off, replace(off, nonfinite="tell")):
        ranks = on_all("DDP@2", loss=always(bad_loss), guard=guard)
        for bad, left_out, _, whole, _ in ranks:
            assert not any(left_out)
            assert not all(torch.isfinite(each).all() for each in whole.values())
            assert len(bad) == (guard.nonfinite == "tell")  # of all that follow nothing is said
            assert all(one.transient is None and not one.left_out for one in bad)


def test_a_guard_changes_no_bit_of_a_clean_run():
    on = GuardSettings(nonfinite="skip", spike="skip")
    for layout in ("DDP@2", "FSDP2@4"):
        for (*_, numbers, whole, _), other in zip(
            on_all(layout, guard=on), reference(layout, None), strict=True
        ):
            assert numbers == other[2]
            same(whole, other[3])


def test_overflows_of_fp16_are_no_incident_until_they_do_not_end():
    """Half a dozen while the scale falls, and one that is the data's."""
    engine = layouts.build("one process", precision="fp16")
    engine.loss_scale.scale = 2.0**40
    heard = Heard(engine)
    engine.guard = StepGuard(engine, SKIP, heard)
    left_out = []
    while not left_out or left_out[-1]:
        engine.forward_backward(layouts.microbatches(engine, 0), layouts.share)
        engine.step()
        left_out.append(engine.left_out)
        if len(left_out) == 5:
            engine.loss_scale.scale = 1024.0

    assert left_out == [True] * 5 + [False]
    assert heard.bad == []

    engine.at_step(BAD)
    engine.loss_scale.scale = 2.0
    engine.forward_backward(layouts.microbatches(engine, BAD), always(bad_loss)(engine, BAD))
    engine.step()
    (one,) = heard.bad
    assert (one.rank, one.transient, one.left_out) == (0, False, True)
    assert SAMPLE in one.samples


def test_running_means_are_put_back_though_torch_counts_no_change_of_them():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4))
    large = torch.zeros(LARGE + 1)
    model.register_buffer("table", large)
    kept = KeptState(model, torch.device("cpu"))
    for step in range(3):
        kept.keep()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model(torch.randn(8, 4))
        large.add_(1.0)
        changed = dict(model.named_buffers())
        assert all(not torch.equal(changed[name], value) for name, value in before.items())

        if step != 1:  # a step that is kept is what the next one goes back to
            kept.put_back_buffers()
            after = dict(model.named_buffers())
            assert all(torch.equal(after[name], value) for name, value in before.items())

"""A rank that computes a wrong gradient is named at the next audit that meets it."""

from __future__ import annotations

import json

import pytest
import torch

from hpctrain.engines.gradient_audit import GradientAudit
from hpctrain.errors import UsageError
from hpctrain.guards.audits import AuditVerdict
from hpctrain.recipes.lm import train as recipe
from hpctrain.run import events as ledger
from hpctrain.settings.check import check_engine
from hpctrain.settings.schema import Settings, replaced
from hpctrain.status.event_lines import in_words
from tests.support import layouts
from tests.support.gloo import launch
from tests.support.ledger_runs import all_fields
from tests.support.recipe import assert_same_bits, full_state, make_run, train

EVERY, SICK = 3, 1
SICK_STEPS = {2, 5, 6}
"""The audits are of steps 3, 6, 9, ...: of these the second meets the fault, in steps from 0 on."""


def plant(engine, steps, rank=SICK, bit=0):
    """One bit of one element of one gradient of a rank is wrong in these steps."""
    weights = [weight for weight in engine.model.parameters() if weight.requires_grad]

    def wrong(gradient):
        if engine.begun not in steps:
            return gradient
        spoilt = gradient.clone()
        spoilt.view(-1).view(torch.int32)[7] ^= 1 << bit
        return spoilt

    if engine.world.rank == rank:
        weights[4].register_hook(wrong)


def count_pass(model, *_):
    model.passes.add_(1)


def audited(layout, *, steps, sick=(), every=EVERY):
    """Train; what was heard, losses, the weights, and how many passes a buffer has counted."""
    engine = layouts.build(layout, exact=True, layers=2)
    engine.model.register_buffer("passes", torch.zeros(()))
    engine.model.register_forward_hook(count_pass)
    heard = []
    if every:
        engine.audit = GradientAudit(engine, every, lambda *what: heard.append(what))
    plant(engine, sick)
    numbers = []
    for step in range(steps):
        engine.at_step(step)
        pieces = layouts.microbatches(engine, step)
        numbers.append((engine.forward_backward(pieces, layouts.share), engine.step()))
    engine.audit = None
    return heard, numbers, layouts.whole(engine), engine.model.passes.item()


@pytest.fixture
def three(monkeypatch):
    monkeypatch.setitem(layouts.LAYOUTS, "DDP@3", (3, {"kind": "ddp"}))
    return lambda **options: layouts.launch(audited, 3, layout="DDP@3", **options)


def test_a_wrong_bit_is_named_at_the_audit_that_meets_it_and_at_no_other(three):
    ranks = three(steps=10, sick=SICK_STEPS)
    verdict = [AuditVerdict((SICK,), is_certain=True)]
    for heard, *_ in ranks:
        assert heard == [(step + 1, verdict) for step in sorted(SICK_STEPS) if (step + 1) % 3 == 0]
    assert [step for step, _ in ranks[0][0]] == [3, 6]
    weights = [whole for _, _, whole, _ in ranks]
    for other in weights[1:]:  # all copies are wrong alike: nothing else shows it
        assert all(torch.equal(weights[0][name], other[name]) for name in other)


def test_an_audit_changes_no_bit_of_a_clean_run(three):
    for (heard, *seen), (_, *other) in zip(
        three(steps=6, every=1), three(steps=6, every=0), strict=True
    ):
        assert heard == []
        assert seen[0] == other[0]
        assert seen[2] == other[2] > 0
        assert_same_bits(seen[1], other[1])


@pytest.mark.soak
def test_a_thousand_audits_cry_wolf_never(three):
    assert [heard for heard, *_ in three(steps=1000, every=1)] == [[], [], []]


def facts(run, kind):
    return [all_fields(event) for event in ledger.read(run) if event.kind == kind]


@pytest.fixture
def sick(monkeypatch):
    """The recipe with a rank whose device is wrong from step 5 on."""
    real = recipe.make_batches

    def make_batches(tokens, settings, engine):
        plant(engine, range(4, 100), bit=20)
        return real(tokens, settings, engine)

    monkeypatch.setattr(recipe, "make_batches", make_batches)


EXACT = {
    "engine__kind": "ddp",
    "engine__exact": True,
    "train__micro_batch": 6,
    "guard__audit": EVERY,
    "train__steps": 8,
}


def test_a_run_says_whose_gradient_is_wrong_and_ends(tmp_path, sick):
    run = make_run(tmp_path / "run", **EXACT)
    with pytest.raises(AssertionError) as failed:
        train(run, 3)
    assert str(failed.value).count("GuardStopped: guard.audit: step 6: rank 1 on ") >= 3
    (wrong,) = facts(run, "audit_failed")
    assert (wrong["step"], wrong["ranks"], wrong["certain"]) == (6, [SICK], True)
    assert len(wrong["nodes"]) == 1
    assert json.loads(run.outcome(1).read_text())["outcome"] == "failed"
    (line,) = [in_words(e) for e in ledger.read(run) if e.kind == "audit_failed"]
    assert line.startswith("step 6: rank 1 on ")
    assert line.endswith(" computed a wrong gradient, a third rank says so")


def test_a_run_that_is_only_to_tell_goes_on_and_of_two_nobody_knows_who(tmp_path, sick):
    run = make_run(tmp_path / "run", **EXACT, guard__disputed="tell")
    train(run, 2)
    (wrong,) = facts(run, "audit_failed")
    assert (wrong["ranks"], wrong["certain"]) == ([0, 1], False)
    assert facts(run, "done")
    (line,) = [in_words(e) for e in ledger.read(run) if e.kind == "audit_failed"]
    assert line.endswith(" computed different gradients, and nobody knows who is wrong")


def test_a_clean_run_is_audited_and_ends_as_without(tmp_path):
    runs = [make_run(tmp_path / name, **{**EXACT, "guard__audit": k}) for name, k in NAMED]
    for run in runs:
        train(run, 2)
        assert facts(run, "audit_failed") == []
    assert_same_bits(*(full_state(run, 8) for run in runs))


NAMED = [("audited", 1), ("not", 0)]


@pytest.mark.parametrize(
    "engine", [{"engine.kind": "fsdp2", "engine.exact": True}, {"engine.kind": "ddp"}]
)
def test_what_cannot_be_audited_is_refused_at_submit_in_one_line(engine):
    settings = replaced(Settings(), {"guard.audit": 10, **engine})
    with pytest.raises(
        UsageError, match=r"run\.toml: guard\.audit is 10, which needs the same bits"
    ):
        check_engine(settings, {"guard.audit": "run.toml"})
    exact = replaced(settings, {"engine.kind": "ddp", "engine.exact": True})
    check_engine(exact, {})


def not_exact():
    import hpctrain
    from hpctrain.recipes.lm.train import make_model

    run = hpctrain.init()
    settings = replaced(run.settings, {"guard.audit": 5})
    run._guards._settings = settings.guard
    run.parallelize(*make_model(settings.train))


def test_an_engine_that_is_not_exact_is_refused_where_it_is_made():
    with pytest.raises(AssertionError, match=r"UsageError: guard\.audit needs engine\.kind ddp"):
        launch(not_exact, 2)

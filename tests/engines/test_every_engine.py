"""One format for every engine: each saves, each loads what each has saved, and training goes on.

What is whole is told by torch's and DeepSpeed's own ways of gathering (tests/support/layouts.py),
never by our checkpoints.
"""

from __future__ import annotations

import pytest

from tests.support import layouts, zero

SAVED_AT = 3
FOLLOWING = {"quick": 2, "soak": 10}
"""Steps after the load that are held against the run that never changed."""
PARTNERS = {"quick": (1, 3, 4), "soak": range(8)}
"""Whose checkpoints each loads: of the savers so far behind it in the list, itself being 0."""
DENSE = [
    "DDP@2", "FSDP2@4", "FSDP2@3", "FSDP2xTP@4", "PPxFSDP2@4", "ZeRO-1@2", "ZeRO-2@3", "ZeRO-3@4",
]  # fmt: skip
WITH_EXPERTS = ["DDP@2", "FSDP2@3", "EPxFSDP2@4", "ZeRO-1@2", "ZeRO-3@4"]
EXPERTS = 4


def _train(layout, root, experts, steps):
    engine = layouts.build(layout, experts=experts)
    layouts.steps(engine, 0, SAVED_AT)
    layouts.save(engine, root, SAVED_AT)
    whole = layouts.whole(engine)
    return whole, layouts.steps(engine, SAVED_AT, SAVED_AT + steps)


def _load_all(layout, roots, experts, steps):
    engine = layouts.build(layout, experts=experts)
    found = {}
    for name, root in roots.items():
        assert layouts.load(engine, root) == SAVED_AT
        whole = layouts.whole(engine)
        found[name] = (whole, layouts.steps(engine, SAVED_AT, SAVED_AT + steps))
    return found


def _saved(names, folder, **options):
    zero.preload()
    return {
        name: (folder / name, *layouts.run(name, _train, root=folder / name, **options))
        for name in names
    }


@pytest.fixture(scope="module", params=["quick", pytest.param("soak", marks=pytest.mark.soak)])
def campaign(request):
    return request.param


@pytest.fixture(scope="module")
def dense(tmp_path_factory, campaign):
    options = {"experts": 0, "steps": FOLLOWING[campaign]}
    return campaign, _saved(DENSE, tmp_path_factory.mktemp("dense"), **options), options


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory, campaign):
    options = {"experts": EXPERTS, "steps": FOLLOWING[campaign]}
    return campaign, _saved(WITH_EXPERTS, tmp_path_factory.mktemp("experts"), **options), options


def _assert_loads(layout, campaign, saved, options):
    names = list(saved)
    own = names.index(layout)
    chosen = {names[(own + behind) % len(names)] for behind in PARTNERS[campaign]}
    roots = {name: saved[name][0] for name in chosen}
    loaded = layouts.run(layout, _load_all, roots=roots, **options)
    assert loaded.keys() == chosen
    for name, (whole, following) in loaded.items():
        _, before, undisturbed = saved[name]
        assert whole.keys() == before.keys()
        assert not [key for key in whole if not whole[key].equal(before[key])], name
        assert len(following) == options["steps"]
        for (loss, norm), (its_loss, its_norm) in zip(following, undisturbed, strict=True):
            assert loss == pytest.approx(its_loss, rel=2e-5), name
            assert norm == pytest.approx(its_norm, rel=1e-3), name


@pytest.mark.parametrize("layout", DENSE)
def test_what_any_engine_saved_loads_bit_equal_and_trains_on(dense, layout):
    _assert_loads(layout, *dense)


@pytest.mark.parametrize("layout", WITH_EXPERTS)
def test_the_same_for_a_model_with_experts(with_experts, layout):
    _assert_loads(layout, *with_experts)

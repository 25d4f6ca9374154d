"""One format for every engine: each saves, each loads what others have saved, and training goes on.

What is whole is told by torch's and DeepSpeed's own ways of gathering (tests/support/layouts.py),
never by our checkpoints. Pairs that a quick run leaves out are in `test_zero.py` (each stage of
ZeRO from each other and from one process), `test_resume.py` (DDP and FSDP2) and `test_experts.py`
(experts spread otherwise); `make soak` tries all.
"""

from __future__ import annotations

import pytest

from tests.support import layouts, zero

SAVED_AT, LAYERS = 2, 2
FOLLOWING = {"quick": 2, "soak": 10}
"""Steps after the load that are held against the undisturbed run; the second needs the moments."""
DENSE = {
    "DDP@2": ("FSDP2xTP@4", "PPxFSDP2@4"),
    "FSDP2@4": ("PPxFSDP2@4", "ZeRO-2@3"),
    "FSDP2@3": ("ZeRO-1@2", "ZeRO-3@4"),
    "FSDP2xTP@4": ("PPxFSDP2@4", "ZeRO-3@4"),
    "PPxFSDP2@4": ("FSDP2xTP@4", "ZeRO-1@2"),
    "ZeRO-1@2": ("FSDP2@3", "PPxFSDP2@4"),
    "ZeRO-2@3": ("DDP@2", "FSDP2xTP@4"),
    "ZeRO-3@4": ("FSDP2@4", "FSDP2xTP@4"),
}
"""Whose checkpoints each loads in a quick run."""
WITH_EXPERTS = {
    "DDP@2": ("EPxFSDP2@4", "ZeRO-3@4"),
    "FSDP2@3": ("EPxFSDP2@4", "ZeRO-1@2"),
    "EPxFSDP2@4": ("DDP@2", "ZeRO-3@4"),
    "ZeRO-1@2": ("EPxFSDP2@4", "FSDP2@3"),
    "ZeRO-3@4": ("EPxFSDP2@4", "FSDP2@3"),
}
WITH_EXPERTS = {
    name: tuple(filter(layouts.runs_here, others))
    for name, others in WITH_EXPERTS.items()
    if layouts.runs_here(name)
}
EXPERTS = 4


def _train(layout, root, experts, steps):
    engine = layouts.build(layout, experts=experts, layers=LAYERS)
    layouts.steps(engine, 0, SAVED_AT)
    layouts.save(engine, root, SAVED_AT)
    whole = layouts.whole(engine)
    return whole, layouts.steps(engine, SAVED_AT, SAVED_AT + steps)


def _load_all(layout, roots, experts, steps):
    engine = layouts.build(layout, experts=experts, layers=LAYERS)
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


def _assert_loads(layout, quick, campaign, saved, options):
    chosen = list(saved) if campaign == "soak" else quick[layout]
    roots = {name: saved[name][0] for name in chosen}
    loaded = layouts.run(layout, _load_all, roots=roots, **options)
    assert loaded.keys() == set(chosen)
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
    _assert_loads(layout, DENSE, *dense)


@pytest.mark.parametrize("layout", WITH_EXPERTS)
def test_the_same_for_a_model_with_experts(with_experts, layout):
    _assert_loads(layout, WITH_EXPERTS, *with_experts)

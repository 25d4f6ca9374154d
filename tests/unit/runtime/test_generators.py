"""Each rank's generators go on where they were; on another mesh the program's choice is kept."""

# ruff: noqa: NPY002 - numpy's global generator is what is held here
from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from numpy import random as numpy_random

from hpctrain.checkpoint.format.manifest import Manifest, TensorEntry
from hpctrain.core.world import World
from hpctrain.errors import CheckpointError
from hpctrain.train.runtime import generators as under_test
from hpctrain.train.runtime.generators import Generators

WORDS = {torch.uint8: "U8", torch.int64: "I64", torch.float64: "F64"}
KINDS = {
    "PCG64": np.random.default_rng,
    "Philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "RandomState": np.random.RandomState,
    "Random": random.Random,
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}


def draw(generator):
    """Some numbers, which leave half of a word behind where the generator keeps one."""
    if isinstance(generator, random.Random):
        return [generator.random(), generator.gauss(0, 1)]
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    if isinstance(generator, np.random.Generator):
        return [*generator.integers(99, size=3, dtype=np.int32), generator.random()]
    return [generator.standard_normal(), generator.rand()]


def rank(number, of, **tracked):
    made = Generators(World(number, number, of, torch.device("cpu")))
    made.tracked = tracked
    return made


def manifest(*states):
    """A checkpoint with these ranks' states, and the states by name."""
    together = {name: tensor for state in states for name, tensor in state.items()}
    entries = [TensorEntry(n, WORDS[t.dtype], tuple(t.shape)) for n, t in together.items()]
    made = Manifest(
        run_id="", name="r", step=1, world_size=len(states), mesh={}, engine="own", tensors=entries
    )
    return made, together


def load(live, saved, *, is_same_mesh=True):
    found, tensors = saved
    wanted = live.wanted(found, is_same_mesh=is_same_mesh)
    for name, tensor in wanted.items():
        tensor.copy_(tensors[name])
    live.apply(wanted, is_same_mesh=is_same_mesh, seed=5, step=7)


@pytest.fixture
def ranks_say(monkeypatch):
    """Answers of the other ranks, given this rank's."""

    def say(others):
        monkeypatch.setattr(under_test, "gather", lambda _, mine: [mine, *others(mine)])

    say(lambda _: [])
    return say


@pytest.mark.parametrize("kind", KINDS)
def test_a_tracked_generator_of_a_rank_goes_on_where_it_was(kind):
    generator = KINDS[kind](3)
    draw(generator)
    saved = manifest(rank(0, 2, g=KINDS[kind](9)).capture(), rank(1, 2, g=generator).capture())
    following = draw(generator)

    again = KINDS[kind](3)
    load(rank(1, 2, g=again), saved)

    assert draw(again) == following


def test_numpys_global_generator_goes_on_where_it_was():
    numpy_random.seed(1)
    numpy_random.standard_normal()
    saved = manifest(rank(0, 1).capture())
    following = numpy_random.standard_normal(3).tolist()

    numpy_random.seed(1)
    load(rank(0, 1), saved)

    assert numpy_random.standard_normal(3).tolist() == following


def test_a_checkpoint_of_before_numpy_was_saved_leaves_it_as_the_program_made_it():
    state = rank(0, 1).capture()
    del state["rng.rank-00000.numpy"]
    numpy_random.seed(4)
    expected = numpy_random.RandomState(4).rand()

    load(rank(0, 1), manifest(state))

    assert numpy_random.rand() == expected


def test_what_ranks_have_made_alike_stays_alike_on_another_mesh(ranks_say):
    """It may shuffle the data: each rank must draw the same order."""
    ranks_say(lambda mine: [mine, mine])
    sampler = np.random.default_rng(3)
    sampler.random()
    saved = manifest(rank(0, 2, g=sampler).capture(), rank(1, 2, g=sampler).capture())
    following = sampler.random()

    for number in range(3):
        again = np.random.default_rng(3)
        load(rank(number, 3, g=again), saved, is_same_mesh=False)
        assert again.random() == following


@pytest.mark.parametrize("kind", KINDS)
def test_what_differs_between_ranks_begins_anew_on_another_mesh(ranks_say, kind):
    ranks_say(lambda mine: [tuple(number + 1 for number in mine)])
    saved = manifest(rank(0, 1, g=KINDS[kind](0)).capture())
    drawn = []
    for number in (0, 1, 1):
        again = KINDS[kind](number)
        load(rank(number, 2, g=again), saved, is_same_mesh=False)
        drawn.append((draw(again), numpy_random.rand()))

    assert drawn[1] == drawn[2]
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] != drawn[1][1]
    assert drawn[0][0] != draw(KINDS[kind](0))


def test_a_generator_of_another_kind_is_refused():
    saved = manifest(rank(0, 1, g=np.random.default_rng(0)).capture())

    with pytest.raises(
        CheckpointError, match=r"generator tracked\.g cannot continue .* make it as"
    ):
        load(rank(0, 1, g=np.random.Generator(np.random.Philox(0))), saved)
    with pytest.raises(CheckpointError, match=r"generator tracked\.g cannot continue"):
        load(rank(0, 1, g=random.Random(0)), saved)


def test_children_are_spawned_on_from_where_they_were():
    parent = np.random.default_rng(3)
    parent.spawn(2)
    saved = manifest(rank(0, 1, g=parent).capture())
    child = parent.spawn(1)[0].random()

    again = np.random.default_rng(3)
    load(rank(0, 1, g=again), saved)
    assert again.spawn(1)[0].random() == child

    with pytest.raises(CheckpointError, match="was made from another seed"):
        load(rank(0, 1, g=np.random.default_rng(4)), saved)


def test_a_states_text_has_the_same_length_at_every_step():
    """Memory for copies is taken once, after the first step."""
    tracked = {kind: make(1) for kind, make in KINDS.items()}
    generators = rank(0, 1, **tracked)
    lengths = {name: len(text) for name, text in generators.texts().items()}
    for _ in range(200):
        for generator in tracked.values():
            draw(generator)
        numpy_random.standard_normal()
        assert {name: len(text) for name, text in generators.texts().items()} == lengths

"""States that are not on every rank alike: flat ranges, stages that hold different tensors."""

from __future__ import annotations

import pytest

from tests.support.gloo import launch
from tests.support.sharded import SHAPES, content, manifest, place

STEP = 3
FLAT = [name for name, (_, shape) in SHAPES.items() if shape and 0 not in shape]


def _state(world, how, step):
    """All tensors as this rank holds them; filled with zeros where there is no step."""
    import torch

    from hpctrain.checkpoint.tensors.boxes import Flat, State

    shared, copies, known = {}, {}, set()
    for number, name in enumerate(SHAPES):
        whole = content(name, STEP)
        filled = whole if step else torch.zeros_like(whole)
        if how == "flat" and name in FLAT:
            first, last = (
                len(whole.view(-1)) * (world.rank + k) // world.world_size for k in (0, 1)
            )
            if first < last:
                shared[name] = Flat(
                    filled.reshape(-1)[first:last].clone(), first, tuple(whole.shape)
                )
            else:
                known.add(name)
        elif how == "stages" and number % 2 != world.rank % 2:
            known.add(name)
        else:
            shared[name] = filled.clone()
            if how == "stages":
                copies[name] = (world.rank // 2, world.world_size // 2)
    return State(shared, copies=copies, elsewhere=frozenset(known))


def _wrong(state):
    from hpctrain.checkpoint.tensors.boxes import Flat

    bad = []
    for name, tensor in state.shared.items():
        whole = content(name, STEP)
        if isinstance(tensor, Flat):
            count = tensor.local.numel()
            if not tensor.local.equal(whole.reshape(-1)[tensor.first : tensor.first + count]):
                bad.append(name)
        elif not tensor.equal(whole):
            bad.append(name)
    return bad


def _save_all(folder, hows):
    """Save a run for each way of holding a state; the bytes of each."""
    from hpctrain.checkpoint.tensors.save import save
    from hpctrain.train.joining_ranks import join_world

    world, size = join_world(), {}
    for how in hows:
        place_of = place(world, folder / how)
        state = _state(world, how, STEP)
        size[how] = save(place_of, world, state, manifest(world, STEP)).bytes
    return size


def _load_all(cases):
    """Load each run in its way; what is wrong, and how many tensors were held."""
    from hpctrain.checkpoint.tensors.restore import Wanted, restore
    from hpctrain.train.joining_ranks import join_world

    world, found = join_world(), []
    for root, how in cases:
        state = _state(world, how, None)
        restored = restore(place(world, root), world, lambda _, state=state: Wanted(state))
        assert restored.step == STEP
        found.append((_wrong(state), len(state.shared)))
    return found


SAVED = {1: ["plain"], 2: ["plain", "stages", "flat"], 3: ["flat"], 4: ["stages"]}
"""Ways of holding a state, by the ranks that save it."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where each was saved, by way and ranks, and its bytes."""
    folder = tmp_path_factory.mktemp("saved")
    found = {}
    for ranks, hows in SAVED.items():
        size = launch(_save_all, ranks, folder=folder / str(ranks), hows=hows)[0]
        found |= {(how, ranks): (folder / str(ranks) / how, size[how]) for how in hows}
    return found


@pytest.mark.parametrize(
    ("to_ranks", "cases"),
    [
        (1, [(("stages", 4), "plain")]),
        (2, [(("flat", 3), "plain"), (("plain", 1), "stages")]),
        (3, [(("plain", 2), "flat")]),
        (4, [(("flat", 3), "flat"), (("stages", 2), "flat"), (("flat", 2), "stages")]),
    ],
)
def test_any_spread_loads_into_any_other(saved, to_ranks, cases):
    roots = [(saved[one][0], loaded_as) for one, loaded_as in cases]

    for ours in launch(_load_all, to_ranks, cases=roots):
        assert [bad for bad, _ in ours] == [[]] * len(cases)
        assert all(count for _, count in ours)


def test_what_two_ranks_of_a_stage_hold_is_written_once(saved):
    assert saved["stages", 4][1] < 1.5 * saved["plain", 1][1]


def test_a_weight_that_no_rank_knows_is_refused(saved):
    with pytest.raises(
        AssertionError, match=r"model\.[a-z.]+.* is in the checkpoint and not in the model"
    ):
        launch(_load_half, 2, root=saved["stages", 2][0])


def _load_half(root):
    from dataclasses import replace

    from hpctrain.checkpoint.tensors.restore import Wanted, restore
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    state = replace(_state(world, "stages", None), elsewhere=frozenset())
    restore(place(world, root), world, lambda _: Wanted(state))

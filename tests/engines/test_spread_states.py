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

    from hpctrain.checkpoint.boxes import Flat, State

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
    return State(shared, copies=copies, known=frozenset(known))


def _wrong(state):
    from hpctrain.checkpoint.boxes import Flat

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


def _save(root, how):
    from hpctrain.checkpoint.save import save
    from hpctrain.world import join_world

    world = join_world()
    return save(place(world, root), world, _state(world, how, STEP), manifest(world, STEP)).bytes


def _load(root, how):
    from hpctrain.checkpoint.restore import Wanted, restore
    from hpctrain.world import join_world

    world = join_world()
    state = _state(world, how, None)
    restored = restore(place(world, root), world, lambda _: Wanted(state))
    assert restored.step == STEP
    return _wrong(state), len(state.shared)


@pytest.mark.parametrize(
    ("saved_as", "ranks", "loaded_as", "to_ranks"),
    [
        ("flat", 3, "plain", 2),
        ("flat", 3, "flat", 4),
        ("plain", 2, "flat", 3),
        ("stages", 4, "plain", 1),
        ("plain", 1, "stages", 2),
        ("stages", 2, "flat", 4),
        ("flat", 2, "stages", 4),
    ],
)
def test_any_spread_loads_into_any_other(tmp_path, saved_as, ranks, loaded_as, to_ranks):
    launch(_save, ranks, root=tmp_path / "run", how=saved_as)

    answers = launch(_load, to_ranks, root=tmp_path / "run", how=loaded_as)

    assert [bad for bad, _ in answers] == [[]] * to_ranks
    assert all(count for _, count in answers)


def test_what_two_ranks_of_a_stage_hold_is_written_once(tmp_path):
    once = launch(_save, 1, root=tmp_path / "one", how="plain")[0]

    twice = launch(_save, 4, root=tmp_path / "four", how="stages")[0]

    assert twice < 1.5 * once


def test_a_weight_that_no_rank_knows_is_refused(tmp_path):
    launch(_save, 2, root=tmp_path / "run", how="stages")

    with pytest.raises(
        AssertionError, match=r"model\.[a-z.]+.* is in the checkpoint and not in the model"
    ):
        launch(_load_half, 2, root=tmp_path / "run")


def _load_half(root):
    from dataclasses import replace

    from hpctrain.checkpoint.restore import Wanted, restore
    from hpctrain.world import join_world

    world = join_world()
    state = replace(_state(world, "stages", None), known=frozenset())
    restore(place(world, root), world, lambda _: Wanted(state))

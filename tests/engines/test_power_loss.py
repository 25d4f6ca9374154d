"""Power is lost at any moment of saves and prunes: what is committed is whole, and stays.

The changes of real saves (one rank, `save` with its whole way to the commit) are recorded; then
what a disk might hold behind each of them is laid out and read by the product.
"""

from __future__ import annotations

import functools
import hashlib

import pytest

from hpctrain.checkpoint.store import find, retention, verify
from hpctrain.ledger.run.layout import RunDir
from tests.support import sharded
from tests.support.loading import loaded
from tests.support.memory import folder_in_memory
from tests.support.power_loss import Flushed, Reached, Recorder, lay_out, states

STEPS = (10, 20, 30)
KEEP_LAST = 2


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The changes of three saves, each followed by a prune, from the folder's making on."""
    import torch

    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.save import save
    from hpctrain.core.world import World

    world = World(0, 0, 1, torch.device("cpu"))
    root = tmp_path_factory.mktemp("recorded") / "run"
    recorder = Recorder(root, "checkpoints")
    with recorder.watching():
        place = sharded.place(world, root)  # the attempt makes the folder
        for step in STEPS:
            state = State(sharded.spread(world, "ddp", step), sharded.own(world, step))
            save(place, world, state, sharded.manifest(world, step))
            recorder.reached(step)
            retention.prune(place.run, retention.Rules(KEEP_LAST), attempt=place.attempt)
    assert find.steps(place.run) == [30, 20]
    return recorder.changes


@functools.cache
def right(step):
    """Every tensor's bytes at a step."""
    import torch

    whole = {name: sharded.content(name, step) for name in sharded.SHAPES}
    whole["rng.rank-00000.torch"] = torch.full((5,), step % 251, dtype=torch.uint8)
    return {n: bytes(t.contiguous().view(-1).view(torch.uint8).numpy()) for n, t in whole.items()}


def problem_of(tree, told, folder):
    """What is wrong with what a power loss has left; "" if nothing is."""
    lay_out(tree, folder)
    run = RunDir(folder)
    there = find.candidates(run)
    for one in there:
        for why in verify.verify(one):
            return f"{one.name} is torn: {why}"
        if loaded(one) != right(one.step):
            return f"{one.name} is a mix"
    chosen = find.choose(run).checkpoint
    newest = -1 if chosen is None else chosen.step
    return f"step {told} was committed and is lost, {newest} is taken" if newest < told else ""


def problems(changes, *, parts, since=0, most=None):
    """What goes wrong, and how many states were looked at."""
    found, count = [], 0
    known = {}
    with folder_in_memory() as memory:
        for end, tree in states(changes, parts=parts, since=since):
            told = max((c.what for c in changes[:end] if isinstance(c, Reached)), default=-1)
            count += 1
            key = hashlib.sha256(repr(tree).encode()).digest()
            if known.get(key, -2) >= told:  # was right when as much had been committed
                continue
            problem = problem_of(tree, told, memory / f"{count}")
            if problem:
                found.append(f"behind change {end} of {len(changes)}: {problem}")
                if most is not None and len(found) >= most:
                    break
            known[key] = told
    return found, count


def test_no_power_loss_costs_a_committed_checkpoint_or_leaves_a_torn_one(recorded):
    found, count = problems(recorded, parts=20)

    assert found == []
    assert count > 250


def flushes(changes):
    """Each flush of a save: its number, and what it flushes."""
    return [(n, c.path) for n, c in enumerate(changes) if isinstance(c, Flushed)]


def test_every_flush_is_needed(recorded):
    """The model would notice if any of them were left out, wherever it stands."""
    needed = set()
    of_root = [number for number, path in flushes(recorded) if path == "."]
    for number, path in flushes(recorded):
        if number in of_root[1:]:  # the folder's name stands since the first save
            continue
        without = recorded[:number] + recorded[number + 1 :]
        found, _ = problems(without, parts=2, since=number, most=1)
        assert found, f"nothing goes wrong without the flush of {path} (change {number})"
        needed.add(path.rsplit("/", 1)[-1])

    files = {"shard-00000.safetensors", "chunks.table", "MANIFEST.json"}
    assert needed == {*files, ".", "checkpoints", *(f"step-{s:010d}.staged-0001" for s in STEPS)}


@pytest.mark.soak
def test_no_power_loss_of_very_many_costs_a_committed_checkpoint(recorded):
    found, count = problems(recorded, parts=3000)

    print(f"{count} states")
    assert found == []

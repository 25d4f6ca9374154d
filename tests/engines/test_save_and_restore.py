"""Saves and restores of real gloo ranks: any world size to any other, read once, proved, agreed."""

from __future__ import annotations

import errno
import itertools
import json
import re
import shutil
from dataclasses import asdict

import pytest
import safetensors

from hpctrain.checkpoint.format.manifest import MANIFEST_NAME
from hpctrain.checkpoint.format.reader import CheckpointSource
from hpctrain.checkpoint.store import find
from hpctrain.errors import CheckpointError
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from tests.support import sharded
from tests.support.checkpoints import flip_bit
from tests.support.gloo import launch
from tests.support.ledger_runs import all_fields

pytestmark = pytest.mark.quick

ENGINES = ["ddp", "fsdp2"]
SIZES = [(1, 2), (2, 1), (2, 4), (4, 3), (3, 5), (8, 2)]


def save_rank(folder, engines=ENGINES, steps=(10,), mode="sync"):
    """Save a run of each engine, in a folder of its name."""
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    for engine in engines:
        _save(world, folder / engine, engine, steps, mode)


def _save(world, root, engine, steps, mode):
    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.save import Saver, save

    mesh = sharded.mesh_of(world, engine)
    place = sharded.place(world, root)
    saver = Saver(place, world) if mode == "async" else None
    for step in steps:
        state = State(sharded.spread(world, engine, step, mesh), sharded.own(world, step))
        manifest = sharded.manifest(world, step)
        if saver is None:
            save(place, world, state, manifest)
            continue
        saver.begin(state, manifest)
        for tensor in state.shared.values():  # training goes on, and overwrites what was copied
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            local.zero_()
        outcome = saver.land()
        assert outcome.error is None
    if saver is not None:
        saver.close()


def load_rank(cases):
    """`_load` for each (run, engine, settings of it)."""
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    return [_load(world, root, engine, **settings) for root, engine, settings in cases]


def _load(world, root, engine, **settings):
    """What was restored, which tensors are wrong, and what was touched that must not be."""
    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.restore import Wanted, restore

    mesh = sharded.mesh_of(world, engine)
    place = sharded.place(world, root, **settings)
    tensors = sharded.spread(world, engine, None, mesh)
    names = frozenset(name for name in tensors if name.startswith("optim."))
    before = {name: tensor.clone() for name, tensor in tensors.items()}

    def wanted(manifest):
        same = manifest.world_size == world.world_size
        return Wanted(State(tensors, sharded.own(world, None) if same else {}), names)

    try:
        restored = restore(place, world, wanted)
    except CheckpointError as error:
        return {"error": str(error), "touched": _touched(before, tensors, names)}
    return {
        "step": restored.step,
        "wrong": sharded.wrong(tensors, restored.step) if restored.step else None,
        "skipped": [asdict(row) for row in restored.skipped],
        "read": restored.bytes_read,
        "touched": _touched(before, tensors, names),
    }


def _touched(before, after, fresh):
    import torch

    def bits(tensor):
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    return [
        n for n in before if n not in fresh and not torch.equal(bits(before[n]), bits(after[n]))
    ]


@pytest.mark.parametrize(("saved_on", "loaded_on"), SIZES)
def test_what_n_ranks_saved_m_ranks_load_bit_equal(tmp_path, saved_on, loaded_on):
    launch(save_rank, saved_on, folder=tmp_path, mode="async")

    cases = [(tmp_path / engine, engine, {}) for engine in ENGINES]
    for ours in launch(load_rank, loaded_on, cases=cases):
        assert [(got["step"], got["wrong"]) for got in ours] == [(10, [])] * len(ENGINES)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    """A run of each engine that four ranks have saved."""
    folder = tmp_path_factory.mktemp("of_four")
    launch(save_rank, 4, folder=folder, engines=[*ENGINES, "hsdp", "hsdp 4x1"])
    return folder


def test_what_one_engine_saved_another_loads(of_four):
    pairs = [("ddp", "fsdp2"), ("fsdp2", "ddp"), ("hsdp", "fsdp2")]
    cases = [(of_four / saved, loaded, {}) for saved, loaded in pairs]

    for ours in launch(load_rank, 3, cases=cases):
        assert [(got["step"], got["wrong"]) for got in ours] == [(10, [])] * len(pairs)


def load_slowly_rank(root):
    """What a rank says while it loads, with a clock that is 11 s on whenever it is looked at."""
    import contextlib
    import io
    from types import SimpleNamespace

    from hpctrain.checkpoint.tensors import restore
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    restore.clock = SimpleNamespace(monotonic=itertools.count(0, 11).__next__)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        got = _load(world, root, "ddp")
    assert got["wrong"] == []
    return said.getvalue().splitlines()


def test_a_long_restore_is_told_by_one_rank_every_ten_seconds(of_four):
    said, silent = launch(load_slowly_rank, 2, root=of_four / "ddp")

    assert silent == []
    line = (
        r"hpctrain: restoring step-0000000010: this rank has read .* of .* \(.* %\), .*/s, .* left"
    )
    assert said
    assert all(re.fullmatch(line, one) for one in said), said
    assert len(said) <= len(list((of_four / "ddp").rglob("shard-*"))) * 4


@pytest.mark.parametrize("engine", [*ENGINES, "hsdp"])
def test_each_byte_is_written_once_and_by_all_ranks_alike(of_four, engine):
    found = find.look(RunDir(of_four / engine), 10)
    shards = sorted(found.path.glob("shard-*"))
    data = [path.stat().st_size - _header(path) - _proof(path) for path in shards]
    whole = sum(_nbytes(name) for name in sharded.SHAPES) + 4 * 5
    assert len(list(found.path.iterdir())) <= 4 + 3
    assert sum(data) == whole
    # 257 rows over 2 or 4 ranks are uneven by themselves: torch gives the last one fewer
    assert max(data) <= 1.1 * sum(data) / 4 + 4 * 12 * 4


@pytest.mark.parametrize("engine", ["ddp", "hsdp", "hsdp 4x1"])
def test_what_several_ranks_hold_is_read_once(of_four, engine):
    root = of_four / engine
    size = find.look(RunDir(root), 10).manifest.size

    ranks = launch(load_rank, 4, cases=[(root, engine, {})])

    assert sum(got["read"] for (got,) in ranks) <= 1.1 * size
    assert [got["wrong"] for (got,) in ranks] == [[]] * 4


@pytest.mark.parametrize("saved", ["ddp", "fsdp2"])
def test_copies_of_shards_are_handed_on_whoever_has_saved(of_four, saved):
    root = of_four / saved
    size = find.look(RunDir(root), 10).manifest.size

    ranks = launch(load_rank, 4, cases=[(root, "hsdp", {})])

    assert [got["wrong"] for ours in ranks for got in ours] == [[]] * 4
    # Ranks' parts do not begin and end with blocks: those at the seams are read by both.
    assert sum(got["read"] for ours in ranks for got in ours) <= 1.5 * size


def test_a_flipped_bit_on_one_rank_makes_all_ranks_fall_back(tmp_path):
    engines = [*ENGINES, "hsdp"]
    launch(save_rank, 4, folder=tmp_path, steps=(10, 20), engines=engines)
    for engine in engines:
        _flip_in(tmp_path / engine, 20, "model.embed.weight")

    cases = [(tmp_path / engine, engine, {}) for engine in engines]
    for got in itertools.chain(*launch(load_rank, 4, cases=cases)):
        assert (got["step"], got["wrong"]) == (10, [])
        assert got["skipped"][0]["step"] == 20
        assert "model.embed.weight" in got["skipped"][0]["reason"]
    for run in (RunDir(tmp_path / engine) for engine in engines):
        assert [one.step for one in find.set_aside(run)] == [20]
        (event,) = [e for e in ledger.read(run) if e.kind == "checkpoint_set_aside"]
        assert "model.embed.weight" in all_fields(event)["reason"]


def test_nothing_of_value_is_touched_by_a_damaged_checkpoint(of_four, tmp_path):
    names = ["model.embed.weight", "optim.embed.weight.exp_avg"]
    for name in names:
        shutil.copytree(of_four / "fsdp2", tmp_path / name)
        _flip_in(tmp_path / name, 10, name)

    cases = [(tmp_path / name, "fsdp2", {}) for name in names]
    for got in itertools.chain(*launch(load_rank, 2, cases=cases)):
        assert "has saved up to step 10, and none of its checkpoints can be loaded" in got["error"]
        assert got["touched"] == []


def test_a_checkpoint_that_does_not_fit_is_refused_on_every_rank_and_kept(of_four, monkeypatch):
    root = of_four / "fsdp2"
    changed = {**sharded.SHAPES, "model.embed.weight": ("float32", (257, 13))}
    monkeypatch.setattr(sharded, "SHAPES", changed)

    for (got,) in launch(load_rank, 3, cases=[(root, "fsdp2", {})]):
        assert "model.embed.weight" in got["error"]
        assert "[257,12]" in got["error"]
        assert got["touched"] == []
    assert find.look(RunDir(root), 10).problem is None


def test_a_background_save_holds_the_state_of_its_step_and_not_of_later_ones(tmp_path):
    launch(save_rank, 2, folder=tmp_path, engines=["fsdp2"], steps=(10, 20, 30), mode="async")

    root = tmp_path / "fsdp2"
    assert [found.step for found in find.candidates(RunDir(root))] == [30, 20, 10]
    for (got,) in launch(load_rank, 2, cases=[(root, "fsdp2", {})]):
        assert (got["step"], got["wrong"]) == (30, [])


def plain_dcp_rank(folder):
    import warnings

    import torch.distributed.checkpoint as dcp

    from hpctrain.checkpoint.tensors.dcp import Reader, Writer
    from hpctrain.train.joining_ranks import join_world

    warnings.simplefilter("ignore")
    world, found = join_world(), []
    for engine in ENGINES:
        mesh = sharded.mesh_of(world, engine)
        path = folder / engine / "step-0000000007"
        state = {"tensors": sharded.spread(world, engine, 7, mesh), "lr": 0.5, "words": ["a", 1]}
        dcp.save(state, storage_writer=Writer(path, step=7))
        back = {"tensors": sharded.spread(world, engine, None, mesh), "lr": 0.0, "words": []}
        dcp.load(back, storage_reader=Reader(path))
        found.append((sharded.wrong(back["tensors"], 7), back["lr"], back["words"]))
    return found


def test_torch_dcp_saves_and_loads_through_our_storage(tmp_path):
    for found in launch(plain_dcp_rank, 2, folder=tmp_path):
        assert found == [([], 0.5, ["a", 1])] * len(ENGINES)
    for engine in ENGINES:
        written = tmp_path / engine / "step-0000000007" / MANIFEST_NAME
        assert json.loads(written.read_text())["step"] == 7


def _nbytes(name):
    import torch

    dtype, shape = sharded.SHAPES[name]
    return torch.empty(shape, dtype=getattr(torch, dtype)).nbytes


def _proof(path) -> int:
    with safetensors.safe_open(path, "np") as file:
        return len(file.get_tensor(f"digests@{path.stem}"))


def _header(path):
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def _flip_in(root, step, name):
    """Turn one bit in the last chunk of a tensor."""

    found = find.look(RunDir(root), step)
    chunks = CheckpointSource.open(found.path, found.manifest).rows
    number = [entry.name for entry in found.manifest.tensors].index(name)
    row = chunks.rows_of(number)[-1]
    path = found.path / found.manifest.files[chunks.file[row]].name
    flip_bit(path, (int(chunks.offset[row]) + 1) * 8)


def load_where_one_rank_cannot_read(root, rank):
    """`_load` of shards with copies; every read of one rank is refused."""
    import os

    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    if world.rank == rank:

        def refused(*_):
            raise OSError(errno.EIO, "Input/output error")

        os.preadv = refused
    return _load(world, root, "hsdp", patience_s=0.0)


@pytest.mark.parametrize("rank", [0, 3])
def test_where_the_reader_of_a_copy_fails_all_ranks_say_so_and_none_waits(of_four, rank):
    answers = launch(load_where_one_rank_cannot_read, 4, root=of_four / "hsdp", rank=rank)

    assert len({got["error"] for got in answers}) == 1
    assert f"cannot be read now, and stays: rank {rank}: shard" in answers[0]["error"]
    assert [got["touched"] for got in answers] == [[]] * 4


def load_small_ones_apart(root, together):
    """`_load` of shards with copies; how many bytes of small tensors travelled at a time."""
    from hpctrain.checkpoint.tensors import restore
    from hpctrain.train.joining_ranks import join_world

    sizes, real = [], restore._broadcast_together

    def broadcast(views, *where):
        sizes.append(sum(view.nbytes for view in views))
        real(views, *where)

    restore._broadcast_together, restore.SMALL_TOGETHER_BYTES = broadcast, together
    got = _load(join_world(), root, "hsdp")
    return got["wrong"], sizes


def test_small_tensors_travel_together_in_bounded_memory(of_four):
    largest = 129 * 12 * 4  # the longer half of the largest tensor
    (apart, some), (together, all_of_them) = (
        launch(load_small_ones_apart, 4, root=of_four / "hsdp", together=limit)[0]
        for limit in (1000, 1 << 20)
    )

    assert (apart, together) == ([], [])
    assert max(some) < 1000 + largest
    assert len(all_of_them) == 4 + 2  # each rank of all, each rank of two
    assert len(all_of_them) < len(some) <= len(all_of_them) + sum(some) // 1000
    assert sum(some) == sum(all_of_them)

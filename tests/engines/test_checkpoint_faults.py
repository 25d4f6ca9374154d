"""What damaged other checkpoint formats silently, tried on ours with real ranks; and the 12 traps.

Each damage must be found before any of the model's state is touched, and by all ranks alike. Where
each trap is tried:

 1. published before every rank's bytes are durable: here
 2. the same step saved again: here; `unit/checkpoint/test_damage.py`
 3. errors in helper threads and processes: here; `test_save_behind.py`
 4. state that changes under a save: here; the same bits twice: `test_save_behind.py`
 5. rename without flush: `unit/checkpoint/test_commit.py`; ranks that see different files: here
 6. one rank fails to load: here
 7. retention: `unit/checkpoint/test_retention.py`; after a failed save: here
 8. regions that no chunk covers: here; `unit/checkpoint/test_reader.py`, `test_assemble.py`
 9. uneven, empty and scalar tensors, columns: here; `test_save_and_restore.py`
10. identity of the optimizer's state, dtypes: here
11. order of the data: `test_resume.py`
12. dying in the middle: `test_kill_during_save.py`, `unit/checkpoint/test_every_call.py`; an old
    attempt's save: here
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from hpctrain.checkpoint.format import shard, table
from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, TABLE_NAME
from hpctrain.checkpoint.format.reader import CheckpointSource, open_chunks
from hpctrain.checkpoint.store import commit, find
from hpctrain.core.testing import faults, points
from hpctrain.errors import CheckpointError
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.ledger.run.layout import RunDir
from tests.support import sharded
from tests.support.checkpoints import flip_bit
from tests.support.gates import Gate
from tests.support.gloo import launch
from tests.support.ledger_runs import all_fields

pytestmark = pytest.mark.quick

OLD, NEW = 10, 20
SHARDS = [shard.file_name(0), shard.file_name(1)]
FILES = [*SHARDS, TABLE_NAME, MANIFEST_NAME]
CAREFUL = tuple(name for name in sharded.SHAPES if not name.startswith("optim."))
"""What holds something of value before a restore."""


# ---- in the ranks


def _state(world, engine, step, mesh):
    from hpctrain.checkpoint.tensors.boxes import State

    return State(sharded.spread(world, engine, step, mesh), sharded.own(world, step))


def _save_rank(root, steps, mode="sync", engine="fsdp2", gates=None, **settings):
    """Save steps; what came of each: its step, or the error's text."""
    from hpctrain.checkpoint.tensors.save import Saver, save
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    mesh = sharded.mesh_of(world, engine)
    place = sharded.place(world, root, **settings)
    saver = Saver(place, world) if mode == "async" else None
    said = []
    for step in steps:
        state, manifest = _state(world, engine, step, mesh), sharded.manifest(world, step)
        try:
            if saver is None:
                said.append(save(place, world, state, manifest).step)
                continue
            saver.begin(state, manifest)
            for tensor in [*state.shared.values(), *state.own.values()]:
                (tensor.to_local() if hasattr(tensor, "to_local") else tensor).zero_()
            if gates:
                gates[world.rank].open()
            outcome = saver.land()
            said.append(str(outcome.error) if outcome.saved is None else outcome.saved.step)
        except CheckpointError as error:
            said.append(str(error))
    if saver is not None:
        saver.close()
    return said


def _load_rank(roots, engine="fsdp2", spoil=None):
    """Restore from each run; see `_load`."""
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    mesh = sharded.mesh_of(world, engine)
    if spoil is not None:
        spoil(world)
    return {root.name: _load(world, mesh, engine, root) for root in roots}


def _load(world, mesh, engine, root):
    """What was restored or refused, what is wrong, and what was touched that holds a value."""
    import torch

    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.restore import Wanted, restore

    place = sharded.place(world, root)
    tensors = sharded.spread(world, engine, None, mesh)
    before = {name: _bits(tensors[name]).clone() for name in CAREFUL if name in tensors}
    fresh = frozenset(name for name in tensors if name.startswith("optim."))
    own = sharded.own(world, None)

    def wanted(manifest):
        return Wanted(State(tensors, own if manifest.world_size == world.world_size else {}), fresh)

    answer = {}
    try:
        restored = restore(place, world, wanted)
    except CheckpointError as error:
        answer["error"] = str(error)
    else:
        answer["step"] = restored.step
        answer["wrong"] = sharded.wrong(tensors, restored.step) if restored.step else []
        answer["skipped"] = [row.step for row in restored.skipped]
    answer["touched"] = [
        name for name, bits in before.items() if not torch.equal(bits, _bits(tensors[name]))
    ]
    return answer


def _bits(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# ---- tables 4c and 4d: damage


def _cut(name, keep):
    def damage(path):
        file = path / name
        size = file.stat().st_size
        os.truncate(file, max(0, size - 1 if keep == "all but 1 byte" else size // 2 * keep))

    return damage


def _missing(*names):
    def damage(path):
        for name in names:
            (path / name).unlink()

    return damage


def _flipped(name, bit=0):
    """A bit of the last chunk of a tensor; of its last element with `bit` from the end."""

    def damage(path):
        found = find.look(RunDir(path.parent.parent), NEW)
        chunks = CheckpointSource.open(path, found.manifest).rows
        number = [entry.name for entry in found.manifest.tensors].index(name)
        row = chunks.rows_of(number)[-1]
        end = int(chunks.offset[row] + chunks.nbytes[row])
        flip_bit(path / found.manifest.files[chunks.file[row]].name, end * 8 - 1 - bit)

    return damage


def _zeroed(path):
    with (path / SHARDS[0]).open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))


def _swapped(path):
    one, other, aside = path / SHARDS[0], path / SHARDS[1], path / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def _stale(*names):
    def damage(path):
        for name in names:
            shutil.copy2(path.with_name(f"step-{OLD:010d}") / name, path / name)

    return damage


def _flips(path):
    dice = random.Random(5)
    for name in FILES:
        flip_bit(path / name, dice.randrange((path / name).stat().st_size * 8))


DAMAGE = {
    "shard 0 lacks its last byte": _cut(SHARDS[0], "all but 1 byte"),
    "shard 1 lacks its last byte": _cut(SHARDS[1], "all but 1 byte"),
    "shard 1 is cut in half": _cut(SHARDS[1], 1),
    "shard 0 is empty": _cut(SHARDS[0], 0),
    "first shard is missing": _missing(SHARDS[0]),
    "last shard is missing": _missing(SHARDS[1]),
    "all shards are missing": _missing(*SHARDS),
    "bit of a weight": _flipped("model.embed.weight"),
    "bit of an exponent": _flipped("model.embed.weight", 2),
    "bit of a moment": _flipped("optim.embed.weight.exp_avg"),
    "bit of a scalar": _flipped("optim.embed.weight.step"),
    "bit of a generator": _flipped("rng.rank-00001.torch"),
    "page of zeros": _zeroed,
    "shards swapped": _swapped,
    "stale shard": _stale(SHARDS[1]),
    "stale shards and table": _stale(*SHARDS, TABLE_NAME),
    "stale manifest": _stale(MANIFEST_NAME),
    "table is missing": _missing(TABLE_NAME),
    "table is cut": _cut(TABLE_NAME, 1),
    "table is empty": _cut(TABLE_NAME, 0),
    "manifest is missing": _missing(MANIFEST_NAME),
    "manifest is cut": _cut(MANIFEST_NAME, 1),
    "manifest is empty": _cut(MANIFEST_NAME, 0),
    "a bit in every file": _flips,
}


@pytest.fixture(scope="module")
def saved(memory):
    """A run with two checkpoints of two ranks."""
    root = memory / "saved" / "run"
    assert launch(_save_rank, 2, root=root, steps=(OLD, NEW)) == [[OLD, NEW]] * 2
    return root


@pytest.fixture(scope="module")
def outcomes(saved, memory):
    """What each rank got from each damage, with an older checkpoint to fall back to and without."""
    folder = memory / "damaged"
    roots = [folder / "undamaged"]
    shutil.copytree(saved, roots[0])
    for name, damage in DAMAGE.items():
        for suffix in ("", " alone"):
            root = folder / f"{name}{suffix}"
            shutil.copytree(saved, root)
            damage(root / "checkpoints" / f"step-{NEW:010d}")
            if suffix:
                shutil.rmtree(root / "checkpoints" / f"step-{OLD:010d}")
            roots.append(root)
    return launch(_load_rank, 2, roots=roots)


def test_what_is_not_damaged_is_loaded(outcomes):
    for ours in outcomes:
        got = ours["undamaged"]
        assert (got["step"], got["wrong"], got["skipped"]) == (NEW, [], [])
        assert "model.embed.weight" in got["touched"]  # so that "untouched" below says something


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_makes_all_ranks_load_the_one_before(outcomes, name):
    for ours in outcomes:
        assert (ours[name]["step"], ours[name]["wrong"]) == (OLD, [])
        assert NEW in ours[name]["skipped"]


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_before_any_state_of_value_is_touched(outcomes, name):
    for ours in outcomes:
        alone = ours[f"{name} alone"]
        assert "does not start over by itself" in alone["error"]
        assert alone["touched"] == []


# ---- tables 4c and 4d: what does not fit


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("model.embed.weight", ("bfloat16", (257, 12))),
        ("model.embed.weight", ("int32", (257, 12))),
        ("optim.block.weight.exp_avg", ("float64", (10, 3, 5))),
        ("model.block.bias", ("float32", (8,))),
        ("model.one_more", ("float32", (3,))),
    ],
    ids=["to bf16", "to int32", "moment to f64", "other shape", "not there"],
)
def test_what_the_program_wants_otherwise_is_refused_on_every_rank(
    saved, tmp_path, monkeypatch, name, now
):
    root = shutil.copytree(saved, tmp_path / "run")
    monkeypatch.setattr(sharded, "SHAPES", {**sharded.SHAPES, name: now})
    monkeypatch.setattr(sharded, "wrong", lambda state, step: [])

    for ours in launch(_load_rank, 2, roots=[root]):
        assert name in ours["run"]["error"]
        assert ours["run"]["touched"] == []
    assert find.look(RunDir(root), NEW).problem is None  # whole, and so it stays


def test_what_the_program_no_longer_has_is_refused_on_every_rank(saved, tmp_path, monkeypatch):
    root = shutil.copytree(saved, tmp_path / "run")
    fewer = {k: v for k, v in sharded.SHAPES.items() if k != "model.block.bias"}
    monkeypatch.setattr(sharded, "SHAPES", fewer)

    for ours in launch(_load_rank, 2, roots=[root]):
        assert "model.block.bias" in ours["run"]["error"]
        assert ours["run"]["touched"] == []


# ---- traps


def _save_watched(root):
    """Save one step; the steps that were committed when this rank had not reported yet."""
    import time

    from hpctrain.checkpoint.tensors.save import save
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    place = sharded.place(world, root)
    seen = []

    def look(reached):
        if reached.point == "report.gather" and world.rank == 1:
            time.sleep(0.5)  # rank 0 could have gone on meanwhile
            seen.append(find.steps(place.run))

    points.handler = look
    save(place, world, _state(world, "ddp", NEW, None), sharded.manifest(world, NEW))
    return seen, find.steps(place.run)


def test_nothing_is_committed_before_every_rank_has_flushed_and_reported(tmp_path):
    """`latest` was visible 3 s before the last shard."""
    _, (seen, after) = launch(_save_watched, 2, root=tmp_path / "run")

    assert seen == [[]]
    assert after == [NEW]


FAILING = {20: "shard.flush", 40: "report.gather", 60: "shard.open"}
"""Where the saves of these steps fail."""


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_nothing_is_published(tmp_path, mode):
    """One rank raised; whatever the others have written, there is neither `latest` nor a commit."""
    steps = range(10, 80, 10)
    points_of = FAILING.items()
    with faults.armed(";".join(f"fail:{p},rank=1,step={s},error=EIO" for s, p in points_of)):
        said = launch(_save_rank, 2, root=tmp_path / "run", steps=steps, mode=mode)

    for ours in said:
        for step, what in zip(steps, ours, strict=True):
            assert "rank 1" in what if step in FAILING else what == step
    assert find.steps(RunDir(tmp_path / "run")) == [70, 50, 30, 10]
    assert not find.staged(RunDir(tmp_path / "run"))


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("threads", [2, 4])
def test_an_error_in_a_thread_that_writes_fails_the_save(tmp_path, threads, mode):
    """DCP committed it and said that all was well."""
    with faults.armed("fail:shard.write,rank=0,hit=1,error=EIO"):
        said = launch(
            _save_rank, 2, root=tmp_path / "run", steps=(NEW,), mode=mode, write_threads=threads
        )

    assert all("rank 0" in ours[0] for ours in said)
    assert find.steps(RunDir(tmp_path / "run")) == []


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_committed_step_that_is_saved_again_is_refused_on_all_and_stays_as_it_was(
    saved, tmp_path, mode
):
    """A rank that died while it overwrote left a mix that loaded."""
    root = shutil.copytree(saved, tmp_path / "run")
    path = find.step_path(RunDir(root), NEW)
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    said = launch(_save_rank, 2, root=root, steps=(NEW, 30), mode=mode, engine="ddp")

    for ours in said:
        assert "already committed" in ours[0]
        assert ours[1] == 30
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_state_that_changes_while_it_is_written_is_saved_as_it_was(tmp_path):
    """The writer waits until training has overwritten everything."""
    gates = [Gate(tmp_path / f"gate-{rank}") for rank in range(2)]
    held = (f"hold:writer.request,rank={rank},{gate.until}" for rank, gate in enumerate(gates))
    settings = {"root": tmp_path / "run", "steps": (NEW,), "mode": "async", "engine": "ddp"}
    with faults.armed(";".join(held)):
        launch(_save_rank, 2, gates=gates, **settings)

    for ours in launch(_load_rank, 2, roots=[tmp_path / "run"]):
        assert (ours["run"]["step"], ours["run"]["wrong"]) == (NEW, [])


def _see_only_the_old_one(world):
    from unittest import mock

    if world.rank == 1:
        mock.patch.object(find, "steps", return_value=[OLD]).start()


def test_a_rank_that_sees_other_files_loads_what_rank_0_chose(saved, tmp_path):
    """On NFS a rename may not be seen everywhere yet."""
    root = shutil.copytree(saved, tmp_path / "run")

    for ours in launch(_load_rank, 2, roots=[root], spoil=_see_only_the_old_one):
        assert (ours["run"]["step"], ours["run"]["wrong"]) == (NEW, [])


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_that_one_rank_alone_meets_makes_all_fall_back(saved, tmp_path, rank):
    """One rank raised, the other went on, and the job hung."""
    root = shutil.copytree(saved, tmp_path / "run")

    def spoil(world):
        if world.rank == rank:  # its memory, its wire: what it gets is not what lies on the disk
            real = os.preadv

            def preadv(file, buffers, position):
                count = real(file, buffers, position)
                if f"step-{NEW:010d}" in str(Path(f"/proc/self/fd/{file}").readlink()):
                    buffers[0][0] ^= 1
                return count

            os.preadv = preadv

    answers = launch(_load_rank, 2, roots=[root], spoil=spoil)

    for ours in answers:
        assert (ours["run"]["step"], ours["run"]["wrong"]) == (OLD, [])
    (event,) = [e for e in ledger.read(RunDir(root)) if e.kind == "checkpoint_set_aside"]
    assert f"rank {rank}" in all_fields(event)["reason"]


def test_a_region_that_no_chunk_covers_is_never_left_as_it_was(saved, tmp_path, monkeypatch):
    """A checkpoint that proves itself and yet lacks a part, as a wrong writer could do."""
    from dataclasses import replace

    from hpctrain.checkpoint.format import manifest

    root = shutil.copytree(saved, tmp_path / "run")
    path = find.step_path(RunDir(root), NEW)
    listed = find.look(RunDir(root), NEW).manifest
    chunks = open_chunks(path, listed)
    number = [entry.name for entry in listed.tensors].index("model.embed.weight")
    piece = [at for at, tensor in enumerate(chunks.tensor.tolist()) if tensor == number][-1]
    pair = int(chunks.first_dim[piece])
    begin = int(chunks.whole().boxes(chunks.whole().rows_of(number))[0][-1, 0])
    layout = int(chunks.layout[piece])
    # A number of its own: one row twice, another one never.
    at = int(chunks.first_number[layout + 1])
    chunks.numbers[layout] += 1
    chunks.unit[pair], chunks.source[pair] = 0, chunks.numbers[layout]
    moved = np.insert(chunks.number, at, begin - 1)
    chunks = replace(chunks, number=moved)
    with pytest.raises(CheckpointError, match=r"model\.embed\.weight"):
        chunks.require_cover(listed.tensors)
    content = chunks.dump()
    (path / TABLE_NAME).write_bytes(content)
    listed.files[-1] = table.entry_of(content)
    (path / MANIFEST_NAME).unlink()
    manifest.dump(replace(listed, self_digest=""), path / MANIFEST_NAME)
    assert find.look(RunDir(root), NEW).problem is None

    for ours in launch(_load_rank, 2, roots=[root]):
        assert "model.embed.weight has elements that are in two chunks" in ours["run"]["error"]
        assert ours["run"]["touched"] == []


def _save_columns(root):
    """Tensor parallel; each rank holds columns, one of them fewer."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.save import save
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    mesh = dist.init_device_mesh("cpu", (world.world_size,))
    state = {}
    for name in sharded.SHAPES:
        whole = sharded.content(name, NEW)
        cut = whole.dim() > 1 and whole.numel()
        state[name] = distribute_tensor(whole, mesh, [Shard(1)]) if cut else whole
    place = sharded.place(world, root)
    save(place, world, State(state, sharded.own(world, NEW)), sharded.manifest(world, NEW))


@pytest.mark.parametrize("ranks", [(2, 3), (3, 2), (5, 1)])
def test_columns_saved_by_some_ranks_are_loaded_as_rows_by_others(tmp_path, ranks):
    """Boxes that are strided in the tensor, uneven, and of ranks that hold nothing."""
    launch(_save_columns, ranks[0], root=tmp_path / "run")

    for ours in launch(_load_rank, ranks[1], roots=[tmp_path / "run"]):
        assert (ours["run"]["step"], ours["run"]["wrong"]) == (NEW, [])


def test_an_optimizers_state_goes_by_name_and_each_group_keeps_its_own_settings():
    """All groups came back with the first one's weight decay and rate."""
    import torch

    from hpctrain.checkpoint.format.manifest import TensorEntry
    from hpctrain.checkpoint.tensors.boxes import DTYPES
    from hpctrain.train.engines import state as engine_state

    def made(order, rate):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
        groups = {
            "matrices": {"params": [model[0].weight], "weight_decay": 0.1, "lr": rate},
            "rest": {
                "params": [model[0].bias, model[1].weight, model[1].bias],
                "weight_decay": 0.0,
                "lr": rate / 2,
            },
        }
        return model, torch.optim.AdamW([groups[name] for name in order])

    model, optimizer = made(("matrices", "rest"), 0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).pow(2).sum().backward()
        optimizer.step()
    saved_bits = {k: v.clone() for k, v in engine_state.collect(model, optimizer).items()}
    other, fresh = made(("rest", "matrices"), 0.7)  # the program was changed meanwhile
    entries = {
        name: TensorEntry(name, DTYPES[bits.dtype], tuple(bits.shape))
        for name, bits in saved_bits.items()
    }
    wanted = engine_state.wanted(other, fresh, entries)
    assert wanted.keys() == saved_bits.keys()
    for name, tensor in wanted.items():
        tensor.copy_(saved_bits[name])

    engine_state.apply(other, fresh, wanted)

    back = engine_state.collect(other, fresh)
    assert [n for n in saved_bits if not torch.equal(saved_bits[n], back[n])] == []
    settings = [(group["weight_decay"], group["lr"]) for group in fresh.param_groups]
    assert settings == [(0.0, 0.35), (0.1, 0.7)]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    ("kind", "settings", "in_tensor"),
    [
        ("AdamW", {"betas": (0.85, 0.97), "eps": 1e-7, "weight_decay": 0.03}, False),
        ("AdamW", {"amsgrad": True}, True),
        ("SGD", {"weight_decay": 0.03}, False),
        ("SGD", {"momentum": 0.9, "nesterov": True}, False),
    ],
    ids=["adamw", "rate in a tensor", "sgd", "momentum"],
)
def test_a_restore_leaves_every_setting_of_every_group_as_the_program_made_it(
    kind, settings, in_tensor, trained
):
    """Torch makes a fresh optimizer's state by a step of rate 0; none of it may stay."""
    import torch

    from hpctrain.train.engines import state as engine_state

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    rate = torch.tensor(0.25) if in_tensor else 0.25
    groups = [
        {"params": list(model[0].parameters()), **settings, "lr": rate},
        {"params": list(model[1].parameters()), "lr": rate / 3},
        {"params": [], "lr": rate / 5},
    ]
    optimizer = getattr(torch.optim, kind)(groups, lr=rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    for _ in range(3 if trained else 0):
        model(torch.ones(2, 4)).pow(2).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    def settings_now():
        return [
            {
                name: [id(one) for one in value] if name == "params" else exactly(value)
                for name, value in group.items()
            }
            for group in optimizer.param_groups
        ]

    def exactly(value):
        return (value.dtype, value.item()) if isinstance(value, torch.Tensor) else value

    before = settings_now()
    weights = [one.clone() for one in model.parameters()]
    wanted = engine_state.collect(model, optimizer)
    assert settings_now() == before
    engine_state.apply(model, optimizer, wanted)

    assert settings_now() == before
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), weights, strict=True))
    assert all("initial_lr" in group for group in optimizer.param_groups)


def _fenced_rank(root):
    """Save; a newer attempt begins while this rank writes."""
    from hpctrain.checkpoint.tensors.save import save
    from hpctrain.errors import Fenced
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    place = sharded.place(world, root)

    def take_over(reached):
        if reached.point == "shard.flush" and world.rank == 1:
            take_attempt(place.run, job_id="test", restarts=1)

    points.handler = take_over
    try:
        save(place, world, _state(world, "ddp", NEW, None), sharded.manifest(world, NEW))
    except Fenced as error:
        return str(error)
    return "saved"


def test_a_save_of_an_attempt_that_was_taken_over_meanwhile_is_refused_on_all(tmp_path):
    """The old allocation's ranks go on beside the new one's."""
    for said in launch(_fenced_rank, 2, root=tmp_path / "run"):
        assert "may not write any more" in said

    assert find.steps(RunDir(tmp_path / "run")) == []


def test_a_failed_save_takes_no_older_checkpoint_away(tmp_path):
    """Room is made only behind a commit."""
    from tests.support.recipe import make_run, train

    run = make_run(
        tmp_path / "run",
        train__steps=4,
        checkpoint__interval_steps=1,
        checkpoint__keep_last=1,
        checkpoint__mode="sync",
    )
    with faults.armed("fail:manifest.flush,step=3,error=ENOSPC;kill:report.gather,step=4,rank=1"):
        train(run, 2, kill_at=10**6)

    assert [found.step for found in find.candidates(run) if found.problem is None] == [2]
    assert [one.step for one in find.staged(run)] == [4]


def _watching_rank(root):
    """Load; what was loaded, and what lay in the folder of checkpoints each time it was listed."""
    seen = []

    def look(reached):
        if reached.point == "choose.list":
            seen.append(sorted(path.name for path in (root / "checkpoints").iterdir()))

    points.handler = look
    try:
        return _load_rank([root])["run"], seen
    finally:
        points.handler = None


def test_nothing_is_chosen_while_an_older_attempt_could_still_commit(tmp_path):
    """Its rename may be held up, and its lock be on another node than ours."""
    root = tmp_path / "run"
    launch(_save_rank, 1, root=root, steps=[OLD])
    run = RunDir(root)
    staged = commit.stage(run, NEW, take_attempt(run, job_id="test", restarts=0))

    ((loaded, seen),) = launch(_watching_rank, 1, root=root)

    assert loaded["step"] == OLD
    assert loaded["skipped"] == [NEW]
    assert staged.name in seen[0], "nothing was staged: this shows nothing"
    assert staged.name not in seen[-1]

"""An evaluation's model holds the bits that training saved, on any ranks; its run is untouched."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
import torch

from hpctrain.checkpoint.format import manifest
from hpctrain.checkpoint.store import find
from hpctrain.core.settings.spec import Evaluates, load_spec
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.results import read_results
from tests.support.checkpoints import flip_bit
from tests.support.gloo import launch
from tests.support.recipe import assert_same_bits, full_state, make_run, train

STEP = 2
HOW = ["plain", "ddp", "fsdp2", "engine"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two steps of the recipe on two ranks, under each engine."""
    folder = tmp_path_factory.mktemp("trained")
    made = {}
    for engine in ("ddp", "fsdp2"):
        made[engine] = make_run(folder / engine, engine__kind=engine, train__steps=STEP)
        train(made[engine], 2)
    return made


@pytest.fixture
def checkpoint(runs, monkeypatch):
    """Names a run's checkpoint as an evaluation's job does."""

    def name(engine):
        path = find.step_path(runs[engine], STEP)
        monkeypatch.setenv("HPCTRAIN_CHECKPOINT", str(path))
        return path

    return name


def files_of(run):
    """Every file of a run's directory with its bytes and its time."""
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(run.root.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("trained_on", ["ddp", "fsdp2"])
def test_a_model_is_filled_with_what_training_saved(runs, checkpoint, trained_on, world_size):
    checkpoint(trained_on)
    saved = full_state(runs[trained_on], STEP)
    weights = {n: value for n, value in saved.items() if n.startswith("model.")}
    before = files_of(runs[trained_on])

    for loaded in launch(load_rank, world_size, ways=HOW):
        for way in HOW:
            assert_same_bits(weights, loaded[way])

    assert files_of(runs[trained_on]) == before


def test_a_program_without_a_process_group_loads_on_each_rank_alone(runs, checkpoint):
    checkpoint("fsdp2")
    weights = full_state(runs["fsdp2"], STEP)

    for loaded in launch(load_alone, 2):
        assert_same_bits(loaded, {n: v for n, v in weights.items() if n.startswith("model.")})


def test_damage_that_one_rank_sees_fails_on_all_and_nothing_is_set_aside(
    runs, tmp_path, monkeypatch
):
    path = tmp_path / "checkpoints" / find.step_path(runs["fsdp2"], STEP).name
    shutil.copytree(find.step_path(runs["fsdp2"], STEP), path)
    monkeypatch.setenv("HPCTRAIN_CHECKPOINT", str(path))
    shard = path / "shard-00000.safetensors"
    content = shard.read_bytes()
    head = 8 + int.from_bytes(content[:8], "little")
    entry = json.loads(content[8:head])
    weight = next(name for name in entry if name.startswith("model."))
    flip_bit(shard, 8 * (head + entry[weight]["data_offsets"][0]))

    said = launch(fail_rank, 2, sharded=True)

    assert said[0] == said[1]
    assert re.fullmatch(
        rf"TornCheckpoint: {path} is damaged: rank 0: shard-0.*damaged bytes\)", said[0]
    )
    shard.unlink()
    missing = f"TornCheckpoint: {path} is no whole checkpoint: shard {shard.name} is missing"
    assert launch(fail_rank, 2) == [missing] * 2
    assert list(path.parent.iterdir()) == [path]


OTHERS = {
    "dim": (
        {"dim": 32},
        "model.blocks.0.attention.query.weight is F32[16,16] in the checkpoint, F32[32,32]",
    ),
    "layers": ({"layers": 1}, "is in the checkpoint and not in the model"),
    "more layers": ({"layers": 3}, "model.blocks.2.attention.key.weight is not in the checkpoint"),
}


@pytest.mark.parametrize(("changes", "why"), OTHERS.values(), ids=OTHERS)
def test_another_model_is_one_line_on_every_rank(checkpoint, changes, why):
    path = checkpoint("fsdp2")

    said = launch(fail_rank, 2, **changes)

    assert said[0] == said[1]
    assert said[0].startswith(f"CheckpointError: {path} is whole but does not fit this program: ")
    assert why in said[0]
    assert "\n" not in said[0]


def load_rank(ways):
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.parallelize import parallelize
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    loaded = {}
    for way in ways:
        model = engine = _lm()
        if way == "fsdp2" and world.is_distributed:
            from torch.distributed.fsdp import fully_shard

            fully_shard(model)
        elif way == "ddp" and world.is_distributed:
            model = engine = torch.nn.parallel.DistributedDataParallel(model)
        elif way == "engine":
            optimizer = torch.optim.AdamW(model.parameters())
            engine = parallelize(model, optimizer, EngineSettings(kind="fsdp2"), world)
            model = engine.model
        _evaluation().load(engine)
        loaded[way] = _whole(model)
    return loaded


def fail_rank(*, sharded=False, **changes):
    from torch.distributed.fsdp import fully_shard

    from hpctrain.errors import CheckpointError
    from hpctrain.train.joining_ranks import join_world

    join_world()
    model = _lm(**changes)
    if sharded:
        fully_shard(model)
    try:
        _evaluation().load(model)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def load_alone():
    assert not torch.distributed.is_initialized()
    model = _lm()
    _evaluation().load(model)
    assert not torch.distributed.is_initialized()
    return _whole(model)


def _evaluation():
    import hpctrain

    return hpctrain.evaluation()


def _lm(**changes):
    from hpctrain.recipes.lm.model import LM, LMConfig

    return LM(LMConfig(**{"layers": 2, "dim": 16, "heads": 2, "seq_len": 16} | changes), seed=99)


def _whole(model):
    from hpctrain.train.engines import state

    held = state.collect(model, None)
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in held.items()}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_the_recipe_finds_the_loss_that_its_training_had(
    runs, checkpoint, tmp_path, engine, world_size
):
    path = checkpoint(engine)
    child = RunDir(tmp_path / "child")
    child.root.mkdir()
    spec = load_spec(runs[engine].spec)
    spec.evaluates = Evaluates(str(runs[engine].root), STEP, str(path))
    spec.dump(child.spec)

    launch(recipe_rank, world_size, child=child)

    results = read_results(child.results)
    assert results.why == ""
    trained = manifest.load(path / manifest.MANIFEST_NAME).metrics["val_loss"]
    assert results.metrics == {"loss": pytest.approx(trained, rel=1e-5)}
    ends = [event.kind for event in ledger.read(child)]
    assert ends[-1] == "done"


def recipe_rank(child):
    os.environ["HPCTRAIN_RUN_DIR"] = str(child.root)
    os.environ["HPCTRAIN_RESULTS"] = str(child.results)
    from hpctrain.recipes.lm import evaluate

    evaluate.main()

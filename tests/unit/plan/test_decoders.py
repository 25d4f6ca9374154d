"""What cannot be done with a folder's model is refused at submit, by its config.json alone."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.core.settings.check import engine_flags
from hpctrain.core.settings.schema import EngineSettings
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.launch.change import ResumeRequest, change_spec
from hpctrain.launch.checks import plan_meshes
from hpctrain.launch.prepare import prepare
from hpctrain.ledger.plan.mesh import FAMILIES, plan_mesh, shape_of_config
from tests.support import fuzzing
from tests.support.submit_requests import request_of

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 48, "num_attention_heads": 12,
    "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 60, "use_cache": False,
    "tie_word_embeddings": False,
}  # fmt: skip
TP, PP = "engine.tp 3 (flag --mesh)", "engine.pp 8 (flag --mesh)"


@pytest.fixture(autouse=True)
def table(monkeypatch):
    """One family that everything takes: what the engines take today is another test's."""
    monkeypatch.setattr(
        "hpctrain.ledger.plan.mesh.FAMILIES",
        {"tp": frozenset({"llama"}), "pp": frozenset({"llama"}), "ep": frozenset()},
    )
    monkeypatch.setattr("hpctrain.ledger.plan.mesh.TIES", frozenset())


@pytest.fixture
def hub(tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    (tmp_path / "train.py").write_text("print('hi')\n")
    return folder


def write(hub, **changes):
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    (hub / "config.json").write_text(json.dumps(config))
    return hub


def submit(hub, mesh="", sets=(), folder="hub", **changes):
    given = {
        "cwd": hub.parent, "environ": {"PATH": "/nowhere"}, "runs": Path("runs"),
        "command": ["train.py"], "engine": "fsdp2", "ranks_per_node": 24,
        "mesh": dict(axis.split("=") for axis in mesh.split(",") if axis),
        "sets": [f"engine.pretrained={folder}", *sets],
    }  # fmt: skip
    return prepare(request_of(**{**given, **changes}))


def refused(*args, **changes):
    with pytest.raises(HpctrainError) as error:
        submit(*args, **changes)
    assert "\n" not in str(error.value)
    return error.value


def test_the_folders_whole_path_goes_with_the_run(hub):
    prepared = submit(write(hub), "tp=2,pp=4")

    assert prepared.spec.settings.engine.pretrained == str(hub)
    assert prepared.meshes[1].as_dict() == {"pp": 4, "dp_shard": 3, "tp": 2}


@pytest.mark.parametrize(
    ("mesh", "config", "said"),
    [
        ("tp=8", {}, "engine.tp 8 (flag --mesh) does not divide num_attention_heads 12 of"),
        ("tp=3", {}, f"{TP} does not divide num_key_value_heads 4 of"),
        ("tp=3", {"num_key_value_heads": 3, "hidden_size": 49}, "does not divide hidden_size 49"),
        ("tp=3", {"num_key_value_heads": None, "intermediate_size": 97},
         f"{TP} does not divide intermediate_size 97 of"),
        ("tp=3", {"num_key_value_heads": 3, "vocab_size": 61}, f"{TP} does not divide vocab_size"),
        ("pp=8", {}, f"{PP} needs 8 layers, and num_hidden_layers 4 of"),
        ("pp=8", {"model_type": "mamba"}, f"{PP} cannot cut a model of type 'mamba'"),
        ("tp=3", {"model_type": None}, f"{TP} cannot cut a model of type ''"),
        ("tp=3", {"tie_word_embeddings": True}, f"{TP} cannot cut a model whose embedding is its"),
        ("pp=8", {"tie_word_embeddings": True}, f"{PP} cannot cut a model whose embedding is its"),
        ("ep=2", {}, "engine.ep 2 (flag --mesh) cannot cut a model of type 'llama'"),
        ("tp=2", {"vocab_size": "many"}, "config.json has vocab_size = 'many', which is no size"),
    ],
)  # fmt: skip
def test_what_the_model_cannot_be_cut_into_is_refused(hub, mesh, config, said):
    error = refused(write(hub, **config), mesh)

    assert said in str(error)
    assert str(hub / "config.json") in str(error)
    assert error.exit_code == 2


def test_of_a_range_the_sizes_that_fit_are_taken_and_the_ranks_take_the_same(hub):
    prepared = submit(write(hub, num_key_value_heads=12), "tp=5-9,pp=1-8")
    engine = prepared.spec.settings.engine

    assert prepared.meshes[1].tp == 6
    config = CONFIG | {"num_key_value_heads": 12}
    assert plan_mesh(engine, 24, 24, shape=shape_of_config(config, "")) == prepared.meshes[1]


def test_any_model_is_taken_by_engines_that_cut_no_layer(hub):
    write(hub, model_type="mamba", num_attention_heads=None, tie_word_embeddings=True)

    for engine in ("ddp", "fsdp2", "zero3"):
        assert submit(hub, engine=engine).meshes


def test_a_folder_that_is_missing_or_has_no_weights_is_refused(hub):
    gone = refused(write(hub), folder="meta/llama")
    assert (gone.exit_code, "download it first" in str(gone)) == (4, True)
    (hub / "model.safetensors").unlink()
    assert "has no *.safetensors in it" in str(refused(hub))
    (hub / "config.json").unlink()
    assert "has no config.json" in str(refused(hub))
    assert "has no effect in the recipe" in str(refused(hub, command=()))


def test_a_run_that_goes_on_does_not_need_the_folder(hub):
    spec = submit(write(hub), "tp=2").spec
    (hub / "config.json").unlink()
    (hub / "model.safetensors").unlink()
    hub.rmdir()

    fresh, notes = change_spec(spec, ResumeRequest({"slurm.nodes": ("--nodes", "2")}))

    assert fresh.settings.engine == spec.settings.engine
    assert f"{hub} is gone: the ranks will see whether the mesh fits" in notes


def test_a_run_that_goes_on_in_another_mesh_is_held_against_the_model_too(hub):
    spec = submit(write(hub), "tp=2").spec

    with pytest.raises(UsageError, match="does not divide num_attention_heads 12"):
        change_spec(spec, ResumeRequest(engine_flags(None, {"tp": "8"})))


@fuzzing.cases(300, 6000)
def test_odd_configs_are_read_or_refused_in_one_line(hub, begin, end):
    settings = EngineSettings(kind="fsdp2", tp="2", pretrained=str(hub))
    settings = replace(submit(write(hub)).spec.settings, engine=settings)
    refusals = list[str]()
    for number in range(begin, end):
        dice = random.Random(number)
        config = CONFIG | {dice.choice(sorted(CONFIG)): fuzzing.odd(dice)}
        text = json.dumps(config).encode()
        (hub / "config.json").write_bytes(text if number % 5 else dice.choice(fuzzing.RAW))
        try:
            plan_meshes(settings, {}, Path("/"), is_recipe=False)
        except HpctrainError as error:
            refusals.append(str(error))
    assert len(refusals) > (end - begin) // 3
    assert all(line.isprintable() and len(line) < 500 for line in refusals)


def test_every_axis_has_its_row():
    assert FAMILIES.keys() == {"tp", "pp", "ep", "cp"}

"""What is imported is the source, bit for bit, under our names; or nothing is there."""

from __future__ import annotations

import errno
import json
import os
import pickle
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from hpctrain.checkpoint.exchange import (
    contents as source_contents,
)
from hpctrain.checkpoint.exchange import (
    export,
    import_into,
    safetensors,
    to_torch,
    untrusted,
)
from hpctrain.checkpoint.exchange.naming import NameRequest, name_all
from hpctrain.checkpoint.format import shard
from hpctrain.checkpoint.store import commit, find, verify
from hpctrain.cli.main import main
from hpctrain.core.base.records import JobInfo, JobState
from hpctrain.launch import live_job
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.fence import take_attempt
from tests.support.exchange import (
    bits,
    loaded,
    made_run,
    model_of,
    names_in,
    save,
    some,
    steps,
)
from tests.support.ledger_runs import all_fields

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 5)
        self.norm = nn.LayerNorm(5)
        self.fc = nn.Linear(5, 5)

    def forward(self, x):
        return self.fc(self.norm(self.emb(x)))


def trained():
    """A model and its optimizer after two steps, and what both should be called here."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.arange(11)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            wanted[f"optim.{name}.{key}"] = value
    return model, optimizer, wanted


def weights_of(wanted):
    return {name: tensor for name, tensor in wanted.items() if name.startswith("model.")}


def test_safetensors_become_weights(run, call, tmp_path):
    save_file(model_of(some()), tmp_path / "a.safetensors")

    code, out, err = call("import", tmp_path / "a.safetensors", "--run", run.name, "--step", 5)

    assert code == 0, err
    assert bits(loaded(run, 5)) == bits(
        {name: tensor for name, tensor in some().items() if name.startswith("model.")}
    )
    assert "from safetensors, each read back and the same" in out
    assert "no optimizer state was found" in err
    assert verify.verify(find.look(run, 5)) == []


def test_weights_become_what_the_run_trains_in(run, call, tmp_path):
    save_file({"a": torch.randn(9).bfloat16(), "n": torch.arange(3)}, tmp_path / "a.safetensors")
    words = ("import", tmp_path / "a.safetensors", "--run", run.name, "--step", 5)

    assert call(*words, "--dtype", "fp32")[0] == 0

    found = loaded(run, 5)
    assert (found["model.a"].dtype, found["model.n"].dtype) == (torch.float32, torch.int64)


def test_a_sharded_folder_of_safetensors_is_one_model(run, call, tmp_path):
    tensors = {f"model.w{n}": torch.full((250,), float(n)) for n in range(5)}
    save(run, 7, tensors)
    call("export", run.name, 7, tmp_path / "out", "--max-shard-gb", 2.1e-6)

    assert call("import", tmp_path / "out", "--run", run.name, "--step", 8)[0] == 0
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert call("import", index, "--run", run.name, "--step", 9)[0] == 0

    assert bits(loaded(run, 8)) == bits(loaded(run, 9)) == bits(tensors)


@pytest.mark.parametrize(("kind", "name"), [("safetensors", "all"), ("torch", "all.pt")])
def test_an_export_of_everything_comes_back_as_it_was(run, call, tmp_path, kind, name):
    extra = {"sched": {"best": float("inf"), "w": {"__tensor__": "tracked.ema.w"}}}
    save(run, 7, some(), ranks=2, extra=extra)
    other = made_run(tmp_path, "lm-2")
    dest = tmp_path / name

    call("export", run.name, 7, dest, "--to", kind, "--what", "all", "--max-shard-gb", 1e-6)
    code, _, err = call("import", dest, "--run", other.name, "--step", 7)

    assert (code, err) == (0, "")
    before, after = find.look(run, 7).manifest, find.look(other, 7).manifest
    assert bits(loaded(other, 7)) == bits(some())
    for field in ("data", "rng", "extra", "world_size", "mesh"):
        assert getattr(after, field) == getattr(before, field)
    assert after.run_id == "id-of-lm-2"


def test_another_runs_checkpoint_is_taken_as_it_is(run, call, tmp_path):
    path = save(run, 7, some(), ranks=3)
    other = made_run(tmp_path, "lm-2")

    assert call("import", path, "--run", other.name, "--step", 9)[0] == 0

    assert bits(loaded(other, 9)) == bits(some())
    before, after = find.look(run, 7).manifest, find.look(other, 9).manifest
    for field in ("data", "rng", "extra"):
        assert getattr(after, field) == getattr(before, field)


def test_weights_alone_of_our_own_come_without_the_rest(run, call, tmp_path):
    extra = {"sched": {"w": {"__tensor__": "tracked.ema.w"}}}
    path = save(run, 7, some(), ranks=3, extra=extra)
    other = made_run(tmp_path, "lm-2")

    call("import", path, "--run", other.name, "--step", 0, "--what", "model")

    weights = {name: one for name, one in some().items() if name.startswith("model.")}
    manifest = find.look(other, 0).manifest
    assert bits(loaded(other, 0)) == bits(weights)
    assert (manifest.data, manifest.extra, manifest.world_size) == ({}, {}, 0)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old pickle"])
@pytest.mark.parametrize("key", [None, "model", "state_dict", "model_state_dict", "module"])
def test_state_dicts_of_torch_save_become_weights(run, call, tmp_path, key, zipped):
    model, _, wanted = trained()
    tree = model.state_dict() if key is None else {key: model.state_dict(), "epoch": 3}
    torch.save(tree, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)

    code, _, err = call("import", tmp_path / "a.pt", "--run", run.name, "--step", 5)

    assert code == 0, err
    assert bits(loaded(run, 5)) == bits(weights_of(wanted))
    assert ("epoch (1)" in err) == (key is not None)


def optimizer_trees():
    model, optimizer, _ = trained()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    named = torch.optim.AdamW(model.named_parameters())
    named.load_state_dict(optimizer.state_dict())
    return {
        "by number": optimizer.state_dict(),
        "with names in the groups": named.state_dict(),
        "by name": get_optimizer_state_dict(model, optimizer),
        "flat": get_optimizer_state_dict(model, optimizer, options=flat),
    }


@pytest.mark.parametrize("how", ["by number", "with names in the groups", "by name", "flat"])
@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_the_optimizers_state_comes_by_name_however_it_was_saved(run, call, tmp_path, how, kind):
    model, _, wanted = trained()
    tree = {"model": model.state_dict(), "optimizer": optimizer_trees()[how]}
    if kind == "torch":
        torch.save(tree, tmp_path / "a")
    else:
        dcp.save(tree, checkpoint_id=tmp_path / "a")

    code, _, err = call("import", tmp_path / "a", "--run", run.name, "--step", 5)

    assert code == 0, err
    assert bits(loaded(run, 5)) == bits(wanted)
    assert ("goes by number; taken in the weights' order" in err) == (how == "by number")


def test_numbers_count_in_the_order_of_the_program_not_of_the_ranks_that_wrote(run, call, tmp_path):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(tree, checkpoint_id=tmp_path / "a")
    metadata = dcp.FileSystemReader(tmp_path / "a").read_metadata()
    entries = metadata.state_dict_metadata  # several ranks share replicated tensors among them
    metadata.state_dict_metadata = dict(reversed(entries.items()))
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))

    assert call("import", tmp_path / "a", "--run", run.name, "--step", 5)[0] == 0

    found = loaded(run, 5)
    for name, parameter in model.named_parameters():
        moment = optimizer.state[parameter]["exp_avg"]
        assert torch.equal(found[f"optim.{name}.exp_avg"], moment)


def test_what_is_no_tensor_is_left_out_with_a_note(run, call, tmp_path):
    weight = torch.arange(3.0)
    state = {"w": {"exp_avg": weight, "Q": [weight], "deep": {"er": 1}, "none": None, "step": 3}}
    tree = {"model": {"w": weight, "extra": b"a"}, "optimizer": {"state": state}, "lr": 1}
    torch.save(tree, tmp_path / "a")

    code, _, err = call("import", tmp_path / "a", "--run", run.name, "--step", 5)

    assert code == 0
    assert "number of values: model (1), lr (1)" in err
    assert "optimizer's state, since no tensors: Q, deep" in err
    assert loaded(run, 5).keys() == {"model.w", "optim.w.exp_avg", "optim.w.step"}


@pytest.mark.parametrize(
    ("tree", "help_words"),
    [
        (("model", "state_dict"), ("--weights", "model")),
        (("model", "optim", "optimizer"), ("--what", "model")),
    ],
)
def test_of_several_sections_the_advice_takes_one(run, call, tmp_path, tree, help_words):
    torch.save({key: {"w": torch.arange(3.0)} for key in tree}, tmp_path / "a")
    words = ("import", tmp_path / "a", "--run", run.name, "--step", 5)

    assert " ".join(help_words)[:9] in call.refused(*words)
    assert call(*words, *help_words)[0] == 0
    assert loaded(run, 5).keys() == {"model.w"}


def test_a_folder_in_which_two_models_may_be_meant_is_refused_and_a_file_is_not(
    run, call, tmp_path
):
    for name in ("model", "part"):
        save_file({"w": torch.arange(3.0)}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "part.safetensors"}}))
    words = ("--run", run.name, "--step")

    assert "name the one that is meant" in call.refused("import", tmp_path, *words, 5)
    assert call("import", tmp_path / "model.safetensors", *words, 5)[0] == 0
    assert call("import", index, *words, 6)[0] == 0


def test_other_files_of_a_folder_of_safetensors_do_not_matter(run, call, tmp_path):
    hub = tmp_path / "hub"
    (hub / "latest").mkdir(parents=True)
    weight = torch.ones(3, dtype=torch.float8_e8m0fnu)
    save_file({"w": weight}, hub / "model-00001-of-00001.safetensors")
    (hub / "._model-00001-of-00001.safetensors").write_bytes(bytes(50))  # macOS leaves it

    assert call("import", hub, "--run", run.name, "--step", 5)[0] == 0
    assert torch.equal(loaded(run, 5)["model.w"].view(torch.uint8), weight.view(torch.uint8))


def test_numbers_of_several_groups_are_refused_and_weights_alone_are_not(run, call, tmp_path):
    model, _, wanted = trained()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest}])
    model(torch.arange(11)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a")
    words = ("import", tmp_path / "a", "--run", run.name, "--step", 5)

    assert "by number, not by name, and has 2 groups" in call.refused(*words)
    assert names_in(run) == []
    assert call(*words, "--what", "model")[0] == 0
    assert loaded(run, 5).keys() == weights_of(wanted).keys()


def test_numbers_that_some_shape_contradicts_are_refused(run, call, tmp_path):
    model, _, _ = trained()
    optimizer = torch.optim.AdamW(list(model.parameters())[::-1])
    model(torch.arange(11)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a")

    line = call.refused("import", tmp_path / "a", "--run", run.name, "--step", 5)

    assert "where the weights' order has none" in line


def test_tied_weights_count_once_in_the_optimizers_order(run, call, tmp_path):
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7, bias=False), nn.Linear(7, 2))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(7)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a")

    assert call("import", tmp_path / "a", "--run", run.name, "--step", 5)[0] == 0

    found = loaded(run, 5)
    state = optimizer.state[model[2].weight]["exp_avg"]
    assert torch.equal(found["optim.2.weight.exp_avg"], state)
    assert torch.equal(found["model.0.weight"], found["model.1.weight"])
    assert "optim.1.weight.exp_avg" not in found


def test_dcp_is_read_by_its_paths_and_under_one_outer_key(run, call, tmp_path):
    model, optimizer, wanted = trained()
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save({"app": state}, checkpoint_id=tmp_path / "nested")
    flat = {**model.state_dict(), "optimizer": optimizer_trees()["flat"], "lr_scheduler": {"a": 1}}
    dcp.save(flat, checkpoint_id=tmp_path / "flat")

    assert call("import", tmp_path / "nested", "--run", run.name, "--step", 5)[0] == 0
    code, _, err = call("import", tmp_path / "flat", "--run", run.name, "--step", 6)

    assert code == 0, err
    assert "lr_scheduler (1)" in err
    assert bits(loaded(run, 5)) == bits(loaded(run, 6)) == bits(wanted)


def test_names_are_changed_in_weights_and_optimizer_alike(run, call, tmp_path):
    model, _, wanted = trained()
    wrapped = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    states = optimizer_trees()["by name"]["state"]
    state = {f"module.{name}": value for name, value in states.items()}
    torch.save({"model": wrapped, "optimizer": {"state": state}}, tmp_path / "a")
    (tmp_path / "map.json").write_text(json.dumps({"module.fc.bias": "out.b"}))
    words = ("--rename", "module.=", "--map", tmp_path / "map.json")

    code, _, err = call("import", tmp_path / "a", "--run", run.name, "--step", 5, *words)

    assert code == 0, err
    changed = {name.replace("fc.bias", "out.b"): tensor for name, tensor in wanted.items()}
    assert bits(loaded(run, 5)) == bits(changed)


def test_a_map_can_leave_tensors_out_and_a_prefix_can_be_put_before(run, call, tmp_path):
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "a.safetensors")
    (tmp_path / "map.json").write_text('{"b": null}')
    words = ("--prefix", "model.net.", "--map", tmp_path / "map.json")

    call("import", tmp_path / "a.safetensors", "--run", run.name, "--step", 5, *words)
    save_file({"model.a": torch.ones(2)}, tmp_path / "b.safetensors")
    call("import", tmp_path / "b.safetensors", "--run", run.name, "--step", 6)
    call("import", tmp_path / "b.safetensors", "--run", run.name, "--step", 7, "--prefix", "")

    assert list(loaded(run, 5)) == ["model.net.a"]
    assert list(loaded(run, 6)) == ["model.model.a"]
    assert list(loaded(run, 7)) == ["model.a"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--rename", "a=b"), "two tensors would be called model.b: F32[2] and F32[3]"),
        (("--rename", "x=b"), "no name is 'x'; there are a, b"),
        (("--rename", "x.=b"), "no name is 'x.' or starts so"),
        (("--rename", "x"), "OLD=NEW is wanted"),
        (("--rename", "a=\n"), "cannot be a tensor's name here"),
        (("--prefix", "net."), "does not start with model."),
        (("--prefix", ""), "names start with model. already; a does not"),
        (("--map", "map.json"), "--map names 'c', which is not in the source"),
        (("--map", "list.json"), "is not a JSON object"),
        (("--map", "none.json"), "cannot be read"),
        (("--weights", "net"), "no weights where they were looked for; its keys are a, b"),
    ],
)
def test_names_that_do_not_fit_are_refused(call, tmp_path, monkeypatch, words, why):
    run = made_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "a.safetensors")
    (tmp_path / "map.json").write_text('{"c": "d"}')
    (tmp_path / "list.json").write_text("[]")

    assert why in call.refused("import", "a.safetensors", "--run", run.name, "--step", 5, *words)
    assert names_in(run) == []


def test_moments_that_do_not_fit_their_weights_are_refused(run, call, tmp_path):
    state = {"w": {"exp_avg": torch.ones(3)}}
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": {"state": state}}, tmp_path / "a")
    torch.save({"model": {"v": torch.ones(2)}, "optimizer": {"state": state}}, tmp_path / "b")

    clash = call.refused("import", tmp_path / "a", "--run", run.name, "--step", 5)
    unknown = call.refused("import", tmp_path / "b", "--run", run.name, "--step", 5)

    assert "optim.w.exp_avg is F32[3] and model.w is F32[2]" in clash
    assert "optimizer state for w, and no weights of that name" in unknown


def test_weights_under_another_key_are_named(run, call, tmp_path):
    torch.save({"net": {"a": torch.ones(2)}, "ema": {"a": torch.zeros(2)}}, tmp_path / "a")
    words = ("import", tmp_path / "a", "--run", run.name, "--step", 5)

    assert "its keys are net, ema: name theirs with --weights KEY" in call.refused(*words)
    assert call(*words, "--weights", "net")[0] == 0
    assert torch.equal(loaded(run, 5)["model.a"], torch.ones(2))


def test_what_cannot_be_stored_is_refused(run, call, tmp_path):
    bits = torch.zeros(2, dtype=torch.uint8).view(torch.bits8)
    torch.save({"a": bits}, tmp_path / "a")
    torch.save({"a": torch.ones(2, 2).to_sparse()}, tmp_path / "b")
    torch.save([torch.ones(2)], tmp_path / "c")
    torch.save({"a": torch.ones(2, device="meta")}, tmp_path / "d")

    for name, why in {"a": "bits8", "b": "sparse", "c": "holds a list", "d": "meta"}.items():
        assert why in call.refused("import", tmp_path / name, "--run", run.name, "--step", 5)


def test_a_live_run_and_a_taken_step_are_refused(run, call, tmp_path, monkeypatch):
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    words = ("import", tmp_path / "a.safetensors", "--run", run.name, "--step", 5)
    assert call(*words)[0] == 0

    assert "step 5 of lm-1 is there already" in call.refused(*words)
    monkeypatch.setattr(
        live_job,
        "live_job",
        lambda *_: JobInfo("77", JobState.RUNNING, alive=True),
    )
    words = (*words[:-1], 6)
    assert "lm-1 has job 77 (running), which may still write" in call.refused(*words)
    assert steps(run) == [5]


def test_a_run_that_starts_meanwhile_fences_the_import_off(run, call, tmp_path, monkeypatch):
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    write = shard.write

    def started_meanwhile(*args, **kwargs):
        take_attempt(run, job_id="77", restarts=0)
        return write(*args, **kwargs)

    monkeypatch.setattr(shard, "write", started_meanwhile)

    line = call.refused("import", tmp_path / "a.safetensors", "--run", run.name, "--step", 5)

    assert "may not write any more" in line
    assert names_in(run) == []


def test_bits_that_the_disk_turns_are_found_before_the_commit(run, call, tmp_path, monkeypatch):
    save_file({"a": torch.ones(1000)}, tmp_path / "a.safetensors")
    table = commit.write_table

    def turned(staged, *rest):
        path = staged / shard.file_name(0)
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
        table(staged, *rest)

    monkeypatch.setattr(commit, "write_table", turned)

    line = call.refused("import", tmp_path / "a.safetensors", "--run", run.name, "--step", 5)

    assert "shard-00000.safetensors" in line
    assert names_in(run) == []


def test_a_source_that_changes_while_it_is_read_is_not_committed(run, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    contents = import_into.read(path)
    tensors, _ = name_all(contents, NameRequest())

    def on_bytes(_):
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)

    with pytest.raises(
        import_into.CheckpointError, match=r"model\.a is not what it was when read back"
    ):
        import_into.write(run, "id", 5, contents, tensors, on_bytes=on_bytes)
    assert names_in(run) == []


def test_an_interrupted_import_leaves_nothing(run, tmp_path):
    save_file({"a": torch.ones(10), "b": torch.ones(10)}, tmp_path / "a.safetensors")
    contents = import_into.read(tmp_path / "a.safetensors")
    tensors, _ = name_all(contents, NameRequest())
    told = iter(range(9))

    def on_bytes(_):
        if next(told) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_into.write(run, "id", 5, contents, tensors, on_bytes=on_bytes)
    assert names_in(run) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(run, call, tmp_path, monkeypatch):
    save_file({"a": torch.ones(10)}, tmp_path / "a.safetensors")
    words = ("import", tmp_path / "a.safetensors", "--run", run.name, "--step", 5)
    stat = os.statvfs(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: os.statvfs_result((*stat[:3], 0, 0, *stat[5:])))
        assert "free" in call.refused(*words)

    def no_space(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard, "write", no_space)
    assert "disk full" in call.refused(*words)
    assert names_in(run) == []


def test_the_import_is_in_the_ledger_and_status_and_list_work(run, call, tmp_path, capsys):
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    call("import", tmp_path / "a.safetensors", "--run", run.name, "--step", 5)

    (event,) = ledger.read(run)
    runs = str(tmp_path / "runs")
    assert (event.kind, all_fields(event)["step"]) == ("imported", 5)
    assert all_fields(event)["source"] == str(tmp_path / "a.safetensors")
    assert main(["status", run.name, "--runs", runs, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "created"
    assert call("list", run.name)[0] == 0
    assert call("verify", run.name)[0] == 0
    assert main(["resume", run.name, "--dry-run", "--runs", runs]) == 0
    assert "step-0000000005" in capsys.readouterr().out


def test_a_large_tensor_is_read_once_to_be_written_and_once_to_be_compared(run, tmp_path):
    save_file({"a": torch.ones(3 << 20), "b": torch.ones(2)}, tmp_path / "a.safetensors")
    contents = import_into.read(tmp_path / "a.safetensors")
    tensors, _ = name_all(contents, NameRequest())
    reads = []

    def counted(one):
        return replace(one, read=lambda: reads.append(one.name) or one.read())

    import_into.write(run, "id", 5, contents, [counted(one) for one in tensors])

    assert sorted(reads) == ["model.a", "model.a", "model.b", "model.b"]


def test_memory_holds_the_largest_tensor_not_the_checkpoint(run, tmp_path):
    size = 4 << 20
    save_file({f"w{n}": torch.full((size // 4,), float(n)) for n in range(10)}, tmp_path / "a")
    contents = import_into.read(tmp_path / "a", "safetensors")
    tensors, _ = name_all(contents, NameRequest())

    tracemalloc.start()
    try:
        import_into.write(run, "id", 5, contents, tensors)
        imported = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        back = export.chosen(
            *source_contents.committed(run, 5), everything=False, dtype="BF16", strip=""
        )
        safetensors.write(tmp_path / "out", back)
        to_torch.write(tmp_path / "a.pt", back, step=5)
        exported = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert size < imported < 3.5 * size
    assert size < exported < 6.5 * size


def test_torch_files_stay_on_disk_until_they_are_read(tmp_path):
    torch.save({"a": torch.ones(1000)}, tmp_path / "a")

    contents = untrusted.read(tmp_path / "a")

    assert contents.leaves[0].tensor is not None
    assert str(tmp_path / "a") in Path("/proc/self/maps").read_text()

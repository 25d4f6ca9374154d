"""What is exported is what other programs read, bit for bit, or nothing is there."""

from __future__ import annotations

import errno
import functools
import json
import os
import subprocess
import sys
import tracemalloc
import zipfile
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hpctrain.checkpoint.exchange import contents, safetensors, to_torch
from hpctrain.checkpoint.exchange import export as exports
from hpctrain.checkpoint.exchange import export as places
from hpctrain.checkpoint.exchange.contents import Tensor, committed, to_dtype
from hpctrain.checkpoint.tensors.values import encode
from hpctrain.core.settings.schema import replaced
from hpctrain.core.settings.spec import load_spec
from hpctrain.errors import HpctrainError
from tests.support.exchange import bits, loaded, made_run, model_of, save, some
from tests.support.refused_imports import refuse_imports


def test_safetensors_reads_the_weights_of_any_number_of_ranks(run, call, tmp_path):
    save(run, 100, some(), ranks=3)

    code, out, _ = call("export", run.name, 100, tmp_path / "out")

    assert code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors"]
    assert bits(load_file(tmp_path / "out" / "model.safetensors")) == bits(model_of(some()))
    assert "each read back and the same" in out


def test_large_ones_are_cut_as_hugging_face_does_it(run, call, tmp_path):
    tensors = {f"model.w{n}": torch.full((250,), float(n)) for n in range(5)}
    save(run, 7, tensors)

    call("export", run.name, 7, tmp_path / "out", "--max-shard-gb", 2.1e-6)

    there = sorted(path.name for path in (tmp_path / "out").iterdir())
    shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert there == [*shards, "model.safetensors.index.json"]
    assert index["metadata"] == {"total_size": 5000}
    assert index["weight_map"] == {f"w{n}": shards[n // 2] for n in range(5)}
    found = {}
    for name in shards:
        found |= load_file(tmp_path / "out" / name)
    assert bits(found) == bits(model_of(tensors))


def hub_of(tmp_path, **config):
    folder = tmp_path / "hub"
    folder.mkdir()
    config = {"model_type": "llama", "torch_dtype": "bfloat16", "dtype": "bfloat16", **config}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"max_length": 7}')
    (folder / "modeling_own.py").write_text("raise SystemExit")
    return folder


def test_config_and_tokenizer_of_a_folder_go_along(run, call, tmp_path):
    hub = hub_of(tmp_path)
    save(run, 3, {"model.w": torch.ones(2)})

    code, out, _ = call("export", run.name, 3, tmp_path / "out", "--like", hub)

    assert (code, "tokenizer.json" in out) == (0, True)
    there = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert there.keys() == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    written = json.loads(there["config.json"].read_text())
    assert written == {"model_type": "llama", "dtype": "float32"}  # else loaded as bf16 again
    assert there["generation_config.json"].read_text() == '{"max_length": 7}'


def test_the_folder_that_the_run_began_with_is_taken_while_it_is_there(run, call, tmp_path):
    hub = hub_of(tmp_path)
    spec = load_spec(run.spec)
    spec.settings = replaced(spec.settings, {"engine.pretrained": str(hub)})
    spec.dump(run.spec)
    save(run, 3, {"model.w": torch.ones(2)})

    call("export", run.name, 3, tmp_path / "out", "--dtype", "fp16")
    (hub / "config.json").unlink()
    call("export", run.name, 3, tmp_path / "bare")

    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["dtype"] == "float16"
    assert [path.name for path in (tmp_path / "bare").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("case", [(True, 1, False), (True, 2, True), (False, 1, True)])
def test_a_head_that_is_the_embedding_is_written_once(run, call, tmp_path, case):
    tied, head, kept = case
    embedding = torch.ones(3, 2)
    names = {"model.model.embed_tokens.weight": embedding, "model.lm_head.weight": embedding * head}
    save(run, 3, names)

    call(
        "export",
        run.name,
        3,
        tmp_path / "out",
        "--like",
        hub_of(tmp_path, tie_word_embeddings=tied),
    )

    there = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in there) == kept


def test_a_folder_that_cannot_be_followed_is_refused_and_nothing_is_written(run, call, tmp_path):
    save(run, 3, {"model.w": torch.ones(2)})
    words = ("export", run.name, 3, tmp_path / "out", "--like")
    hub = hub_of(tmp_path)

    assert "gone has no config.json" in call.refused(*words, tmp_path / "gone")
    for more in (("--what", "all"), ("--to", "torch")):
        assert "goes with --to safetensors" in call.refused(*words, hub, *more)
    (hub / "config.json").write_text("[")
    assert "config.json is no JSON" in call.refused(*words, hub)
    assert not (tmp_path / "out").exists()


def test_torch_opens_the_export_with_weights_only(run, call, tmp_path):
    save(run, 100, some(), ranks=2)

    assert call("export", run.name, 100, tmp_path / "w.pt", "--to", "torch")[0] == 0
    assert (
        call("export", run.name, 100, tmp_path / "a.pt", "--to", "torch", "--what", "all")[0] == 0
    )

    for mapped in (True, False):
        weights = torch.load(tmp_path / "w.pt", weights_only=True, mmap=mapped)
        everything = torch.load(tmp_path / "a.pt", weights_only=True, mmap=mapped)
        assert weights["step"] == everything["step"] == 100
        assert list(weights) == ["model", "step"]
        assert bits(weights["model"]) == bits(everything["model"]) == bits(model_of(some()))
        moments = everything["optimizer"]["emb.weight"]
        names = {
            key: some()[f"optim.emb.weight.{key}"] for key in ("exp_avg", "exp_avg_sq", "step")
        }
        assert bits(moments) == bits(names)
        assert everything["state"]["data"] == {"samples_consumed": 800}
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None
    reader = torch._C.PyTorchFileReader(str(tmp_path / "a.pt"))
    starts = [reader.get_record_offset(name) for name in reader.get_all_records()]
    assert [start % 64 for start in starts] == [0] * len(starts)


def with_objects():
    """State as an optimizer and a module with Python objects in theirs have it in a checkpoint."""
    tensors = {"model.layer.weight": torch.ones(2, 3), "model.layer.w.x": torch.ones(1)}
    history = {
        "seen": [1, 2.5, torch.arange(3.0), (True, None)],
        7: 2**70,
        "odd": Counter("ab"),
        "seen.2": torch.ones(1),
    }
    for name, value in (("optim.layer.weight.history", history), ("model.layer._extra_state", [0])):
        form, parts = encode(value, name)
        text = torch.frombuffer(bytearray(json.dumps(form).encode()), dtype=torch.uint8)
        tensors |= {**parts, f"{name}:json": text}
    tensors["optim.layer.weight.exp_avg"] = torch.ones(2, 3) / 3
    tensors["optim.layer.weight.step:int"] = torch.tensor(41)
    tensors["optim.layer.weight.rate:float"] = torch.tensor(0.1, dtype=torch.float64)
    tensors["optim.layer.weight.is_warm:bool"] = torch.tensor(data=True)
    return tensors


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_objects_come_back_by_an_import_as_they_were(run, call, tmp_path, kind):
    path = tmp_path / ("all.pt" if kind == "torch" else "all")
    save(run, 5, with_objects())
    call("export", run.name, 5, path, "--to", kind, "--what", "all")
    if kind == "torch":  # numbers and objects are no tensors of the optimizer's
        whole = torch.load(path, weights_only=True)
        assert {key: [*state] for key, state in whole["optimizer"].items()} == {
            "layer.weight": ["exp_avg"]
        }
    other = made_run(tmp_path, "lm-2")

    assert call("import", path, "--run", other.name, "--step", 5)[0] == 0

    assert bits(loaded(other, 5)) == bits(with_objects())


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_objects_of_a_module_are_no_weights(run, call, tmp_path, kind):
    save(run, 5, with_objects())
    call("export", run.name, 5, tmp_path / "out", "--to", kind)

    weights = (
        torch.load(tmp_path / "out", weights_only=True)["model"]
        if kind == "torch"
        else load_file(tmp_path / "out" / "model.safetensors")
    )
    assert sorted(weights) == ["layer.w.x", "layer.weight"]


def test_weights_are_writable_and_trainable_after_torch_load(run, call, tmp_path):
    save(run, 1, {"model.weight": torch.ones(2, 3), "model.bias": torch.zeros(2)})
    call("export", run.name, 1, tmp_path / "w.pt", "--to", "torch")

    layer = torch.nn.Linear(3, 2)
    layer.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True)["model"])
    layer(torch.ones(1, 3)).sum().backward()

    assert layer.weight.grad is not None
    assert torch.equal(layer.weight, torch.ones(2, 3))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_weights_are_rounded_as_torch_does_it(run, call, tmp_path, dtype):
    odd = torch.tensor(
        [1.0, -0.0, 1 / 3, 1e-40, 6e4, float("inf"), -float("inf"), 1 + 2**-8, 2**-25]
    )
    tensors = some() | {"model.odd": odd, "model.many": torch.randn(4096)}
    save(run, 100, tensors)
    target = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]

    call("export", run.name, 100, tmp_path / "out", "--dtype", dtype)

    whole = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    wanted = {k: v.to(target) if v.dtype in whole else v for k, v in model_of(tensors).items()}
    assert bits(load_file(tmp_path / "out" / "model.safetensors")) == bits(wanted)


def test_not_a_number_stays_one_when_rounded():
    worst = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], "<u4").view(np.uint8)
    rounded = to_dtype(Tensor("x", "F32", (3,), lambda: worst), "BF16").read()

    assert np.isnan((rounded.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")).all()


@pytest.mark.parametrize(("dtype", "target"), [("F32", "BF16"), ("F32", "F16"), ("BF16", "F32")])
def test_rounding_takes_no_more_memory_than_both_tensors(monkeypatch, dtype, target):
    monkeypatch.setattr(contents, "AT_ONCE", 1 << 12)
    words = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    values = torch.randn(32 * contents.AT_ONCE + 5).to(words[dtype])
    raw = values.view(torch.uint8).numpy()
    tensor = Tensor("x", dtype, tuple(values.shape), lambda: raw)

    tracemalloc.start()
    rounded = to_dtype(tensor, target).read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert rounded.tobytes() == values.to(words[target]).view(torch.uint8).numpy().tobytes()
    assert peak < rounded.nbytes + 32 * contents.AT_ONCE


def test_what_fp16_cannot_hold_is_refused_by_name(run, call, tmp_path):
    save(run, 1, {"model.big": torch.tensor([1.0, 7e4])})

    line = call.refused("export", run.name, 1, tmp_path / "out", "--dtype", "fp16")

    assert line.startswith("model.big has 1 values that F16 cannot hold (largest 7e+04)")
    assert not (tmp_path / "out").exists()


def test_a_prefix_is_taken_off(run, call, tmp_path):
    save(run, 1, {"model.net.a": torch.ones(2), "model.net.b.c": torch.ones(3)})

    call("export", run.name, 1, tmp_path / "out", "--strip-prefix", "net.")

    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"a", "b.c"}


@pytest.mark.parametrize(
    ("names", "prefix", "why"),
    [
        (("model.a", "model.b"), "net.", "no weight's name starts so, e.g. a"),
        (("model.net.a", "model.a"), "net.", "several weights would be called 'a'"),
        (("model.net",), "net", "several weights would be called ''"),
    ],
)
def test_a_prefix_that_does_not_fit_is_refused(run, call, names, prefix, why):
    save(run, 1, {name: torch.ones(2) for name in names})

    assert why in call.refused("export", run.name, 1, "nowhere", "--strip-prefix", prefix)


def test_an_existing_file_is_never_touched_nor_is_anything_written(
    run, call, tmp_path, monkeypatch
):
    save(run, 1, some())
    for module in (safetensors, to_torch):
        monkeypatch.setattr(module, "_write", lambda *_: pytest.fail("it was written"))
    out = tmp_path / "out"
    out.mkdir()
    for name, words in {
        "model.safetensors": (out,),
        "a.pt": (out / "a.pt", "--to", "torch"),
    }.items():
        (out / name).write_text("mine")
        assert "exists and is left as it is" in call.refused("export", run.name, 1, *words)
        assert (out / name).read_text() == "mine"
    assert sorted(path.name for path in out.iterdir()) == ["a.pt", "model.safetensors"]


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path):
    def write():
        with places.placing(tmp_path / "out", ["w", "x"], 0) as place:
            for name in ("w", "x"):
                place(name).write_text("new")
            (tmp_path / "out" / "x").write_text("mine")

    with pytest.raises(places.UsageError, match="exists"):
        write()
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {"x": "mine"}


def test_where_links_are_not_possible_a_name_is_given_by_renaming(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    with places.placing(tmp_path, ["x"], 0) as place:
        place("x").write_text("new")

    assert [path.name for path in tmp_path.iterdir()] == ["x"]


class Stopped(BaseException):
    """As Ctrl-C is: not an Exception."""


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
@pytest.mark.parametrize("at", ["write", "compare", "name"])
def test_an_interrupted_export_leaves_nothing(run, tmp_path, monkeypatch, kind, at):
    path = save(run, 1, {f"model.w{n}": torch.full((250,), float(n)) for n in range(5)})
    tensors = exports.chosen(path, committed(run, 1)[1], everything=False, dtype=None, strip="")
    told = iter(range(100))
    limit = {"write": 2, "compare": 7, "name": 99}[at]

    def on_bytes(_):
        if next(told) == limit:
            raise Stopped

    if at == "name":
        monkeypatch.setattr(places, "flush_directory", lambda _: (_ for _ in ()).throw(Stopped))
    if kind == "torch":
        write = functools.partial(to_torch.write, tmp_path / "out" / "a.pt", tensors, step=1)
    else:
        write = functools.partial(
            safetensors.write, tmp_path / "out", tensors, max_shard_bytes=2100
        )
    with pytest.raises(Stopped):
        write(on_bytes=on_bytes)

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_bit_that_the_disk_turns_is_found_before_the_file_has_its_name(
    run, call, tmp_path, monkeypatch, kind
):
    save(run, 1, {"model.w": torch.ones(1000)})

    def flush(path):
        content = bytearray(path.read_bytes())
        content[content.index(b"\0\0\x80\x3f" * 100) + 50] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr({"safetensors": safetensors, "torch": to_torch}[kind], "flush", flush)
    dest = tmp_path / "out" / ("w.pt" if kind == "torch" else "")

    assert "w is not what it was when read back" in call.refused(
        "export", run.name, 1, dest, "--to", kind
    )
    assert not (tmp_path / "out").exists()


def test_a_tensor_too_many_is_not_the_same():
    one = Tensor("x", "U8", (3,), lambda: np.zeros(3, np.uint8))

    assert exports.compare([one], {"x": one}, lambda _: None) == 1
    with pytest.raises(HpctrainError, match="1 tensors were written and 2 are there"):
        exports.compare([one], {"x": one, "y": one}, lambda _: None)
    with pytest.raises(HpctrainError, match=r"was written as U8\[3\] and is missing"):
        exports.compare([one], {"y": one}, lambda _: None)


def test_a_damaged_checkpoint_is_not_exported(run, call, tmp_path):
    path = save(run, 1, {"model.w": torch.ones(1000)})
    shard = path / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-9] ^= 4
    shard.write_bytes(content)

    line = call.refused("export", run.name, 1, tmp_path / "out")

    assert "shard-00000.safetensors" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_full_disk_is_one_line_and_leaves_nothing(run, call, tmp_path, monkeypatch, kind):
    save(run, 1, {"model.w": torch.ones(1000)})
    stat = os.statvfs(tmp_path)
    full = os.statvfs_result((*stat[:3], 0, 0, *stat[5:]))
    dest = tmp_path / "out" / ("w.pt" if kind == "torch" else "")
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: full)
        assert "0 B free" in call.refused("export", run.name, 1, dest, "--to", kind)

    def no_space(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    module = to_torch if kind == "torch" else safetensors
    monkeypatch.setattr(module, "_write", no_space)
    assert "No space left on device" in call.refused("export", run.name, 1, dest, "--to", kind)
    assert not (tmp_path / "out").exists()


def test_bad_words_are_one_line_each(run, call, tmp_path):
    save(run, 1, {"optim.w.step": torch.ones(1)})
    (tmp_path / "file").write_text("x")

    assert "has no checkpoint of step 2; there are: 1" in call.refused("export", run.name, 2, "o")
    assert "holds no weights" in call.refused("export", run.name, 1, tmp_path / "o")
    save(run, 3, some())
    assert "is a file" in call.refused("export", run.name, 3, tmp_path / "file")
    assert "is a folder" in call.refused("export", run.name, 3, tmp_path, "--to", "torch")
    assert "no run or job" in call.refused("export", "nobody", 3, tmp_path / "o")


def test_json_tells_the_files(run, call, tmp_path):
    save(run, 1, {"model.w": torch.ones(10)})

    told = json.loads(call("export", run.name, 1, tmp_path / "out", "--json")[1])

    path = tmp_path / "out" / "model.safetensors"
    assert told == {
        "checkpoint": "step-0000000001",
        "files": [{"path": str(path), "size_bytes": path.stat().st_size}],
        "tensors": 1,
        "tensor_bytes": 40,
        "verified": 1,
    }


def test_safetensors_need_no_torch_and_the_other_says_that_it_does(run, tmp_path):
    save(run, 1, some())
    refuse_imports(tmp_path, "torch")

    def call(*words):
        command = [sys.executable, "-m", "hpctrain", "checkpoints", *map(str, words)]
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    written = call("export", run.name, 1, tmp_path / "out", "--dtype", "bf16")
    refused = call("export", run.name, 1, tmp_path / "w.pt", "--to", "torch")

    assert written.returncode == 0, written.stderr
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(model_of(some()))
    assert refused.returncode == 3
    assert refused.stderr.count("\n") == 1
    assert "--to torch needs torch" in refused.stderr

"""Whoever wrote a source, nothing in it is run, and whatever is wrong with it is one line."""

from __future__ import annotations

import argparse
import ast
import collections
import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import hpctrain
from hpctrain.checkpoint.exchange import from_dcp, import_into, safetensors
from hpctrain.checkpoint.exchange.naming import NameRequest, name_all
from hpctrain.checkpoint.exchange.untrusted import unpickled
from hpctrain.cli.main import main
from hpctrain.errors import CheckpointError, HpctrainError
from tests.support.exchange import made_run, names_in, save, some

PACKAGE = Path(hpctrain.__file__).parent
PICKLES = {"pickle", "cloudpickle", "marshal", "shelve", "dill"}
OWN_PIPES = {"writer.py", "writer_process.py", "client.py"}
"""Between a process and those that it has started itself, and between the ranks of an attempt,
whose nodes let in nobody without its secret; no file that anybody else can write."""

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def weights():
    return {"a": torch.ones(4, 3), "b": torch.arange(5)}


def in_torch_save(folder, evil):
    torch.save({"model": weights(), "args": evil}, folder / "a.pt")
    return folder / "a.pt"


def in_old_torch_save(folder, evil):
    tree = {"model": weights(), "args": evil}
    torch.save(tree, folder / "a.pt", _use_new_zipfile_serialization=False)
    return folder / "a.pt"


def in_a_plain_pickle(folder, evil):
    (folder / "a.pkl").write_bytes(pickle.dumps({"model": {}, "args": evil}, protocol=2))
    return folder / "a.pkl"


def in_dcp_metadata(folder, evil):
    dcp.save({"model": weights()}, checkpoint_id=folder / "dcp")
    path = folder / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - our own
    metadata.planner_data = {"evil": evil}
    path.write_bytes(pickle.dumps(metadata))
    return folder / "dcp"


def in_a_dcp_item(folder, evil):
    """In the groups of the optimizer: the one item that is no tensor and is read."""
    state = {0: {"step": torch.ones(())}}
    tree = {"model": weights(), "optim": {"state": state, "param_groups": [{"params": evil}]}}
    dcp.save(tree, checkpoint_id=folder / "dcp")
    return folder / "dcp"


def in_a_dcp_tensor(folder, evil):
    dcp.save({"model": {"a": torch.ones(400)}}, checkpoint_id=folder / "dcp")
    content = io.BytesIO()
    torch.save(evil, content)
    path = folder / "dcp" / "__0_0.distcp"
    # Within the tensor's own record, whose length the metadata has.
    path.write_bytes(content.getvalue().ljust(path.stat().st_size, b"\0"))
    return folder / "dcp"


def in_deepspeed_model_states(folder, evil):
    folder = folder / "ds"
    folder.mkdir()
    torch.save({"module": evil}, folder / "mp_rank_00_model_states.pt")
    torch.save({}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return folder


def in_deepspeed_optim_states(folder, evil):
    folder = folder / "ds"
    folder.mkdir()
    torch.save({"module": {}}, folder / "mp_rank_00_model_states.pt")
    torch.save({"ds": evil}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return folder


@pytest.mark.parametrize(
    "where",
    [
        in_torch_save,
        in_old_torch_save,
        in_a_plain_pickle,
        in_dcp_metadata,
        in_a_dcp_item,
        in_deepspeed_model_states,
        in_deepspeed_optim_states,
    ],
)
def test_a_malicious_pickle_is_refused_in_one_line_and_nothing_is_run(run, call, tmp_path, where):
    marker = tmp_path / "marker"
    source = where(tmp_path, Evil(marker))

    line = call.refused("import", source, "--run", run.name, "--step", 1)

    assert "posix.system" in line
    assert "refused, and nothing of it was run" in line
    assert not marker.exists()
    assert names_in(run) == []


def test_what_torch_does_not_load_is_named(run, call, tmp_path):
    torch.save({"model": weights(), "args": argparse.Namespace(lr=1)}, tmp_path / "a.pt")

    line = call.refused("import", tmp_path / "a.pt", "--run", run.name, "--step", 1)

    assert "asks for argparse.Namespace while" in line


def test_a_pickle_in_place_of_a_dcp_tensor_is_refused(run, call, tmp_path):
    marker = tmp_path / "marker"
    source = in_a_dcp_tensor(tmp_path, Evil(marker))

    call.refused("import", source, "--run", run.name, "--step", 1)

    assert not marker.exists()


def test_a_plain_pickle_is_refused(run, call, tmp_path):
    marker = tmp_path / "marker"
    (tmp_path / "a").write_bytes(pickle.dumps(Evil(marker)))

    assert "no torch.save file" in call.refused(
        "import", tmp_path / "a", "--run", run.name, "--step", 1
    )
    assert not marker.exists()


def test_the_marker_would_be_made(tmp_path):
    pickle.loads(pickle.dumps(Evil(tmp_path / "marker")))  # noqa: S301 - our own

    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "thing",
    [os.system, eval, getattr, collections.Counter, torch.load, Path.unlink, dcp.FileSystemReader],
    ids=lambda value: getattr(value, "__qualname__", str(value)),
)
def test_the_metadata_reader_knows_only_what_metadata_needs(tmp_path, thing):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(thing))

    with pytest.raises(HpctrainError, match="which a checkpoint need not"):
        unpickled(tmp_path / ".metadata", from_dcp._NAMES)


def test_nothing_in_the_package_unpickles_without_a_list_of_names():
    """`pickle.load` is not there; torch.load says weights_only; Unpicklers have find_class."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if _is_of(node, PICKLES) and path.name not in OWN_PIPES:
                assert node.attr in {"Unpickler", "Pickler", "UnpicklingError"}, path
                found.append(node.attr)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"torch.load", "np.load"}:
                words = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert words.get("weights_only") == "True", path
                found.append("torch.load")
            if isinstance(node, ast.ImportFrom) and node.module == "pickle":
                pytest.fail(f"{path} hides pickle behind a name")
            if isinstance(node, ast.ClassDef) and "Unpickler" in ast.unparse(node):
                methods = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
                assert "find_class" in methods, path
    assert sorted(set(found)) == ["Pickler", "Unpickler", "UnpicklingError", "torch.load"]


def _is_of(node, modules):
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
    )


def sources(folder):
    """One small source of each kind."""
    save_file(weights(), folder / "a.safetensors")
    torch.save({"model": weights(), "step": 3}, folder / "a.pt")
    dcp.save({"model": weights(), "optimizer": {"state": {}}}, checkpoint_id=folder / "dcp")
    return {
        "a.safetensors": folder / "a.safetensors",
        "a.pt": folder / "a.pt",
        ".metadata": folder / "dcp" / ".metadata",
        "__0_0.distcp": folder / "dcp" / "__0_0.distcp",
    }


def read_all(source):
    tensors, _ = name_all(import_into.read(source), NameRequest())
    return [one.read() for one in tensors]


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", ".metadata", "__0_0.distcp"])
def test_a_cut_source_is_an_error_of_one_line_wherever_it_is_cut(tmp_path, name):
    path = sources(tmp_path)[name]
    source = path.parent if path.parent.name == "dcp" else path
    content = path.read_bytes()
    # What follows the last record of torch's archive is empty padding that nobody misses.
    last = content.rindex(b"PK\x05\x06") if b"PK\x05\x06" in content else len(content)
    for size in {*range(0, last, max(1, last // 97)), last - 1}:
        path.write_bytes(content[:size])
        with pytest.raises(HpctrainError) as caught:
            read_all(source)
        assert "\n" not in str(caught.value)
        assert str(path.parent) in str(caught.value)


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", ".metadata", "__0_0.distcp"])
def test_flipped_bits_are_read_or_refused_and_never_anything_else(tmp_path, name):
    path = sources(tmp_path)[name]
    source = path.parent if path.parent.name == "dcp" else path
    content = path.read_bytes()
    dice = random.Random(5)
    refused = []
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(dice.choice([1, 1, 8])):
            damaged[dice.randrange(min(len(damaged), 1500))] ^= 1 << dice.randrange(8)
        path.write_bytes(bytes(damaged))
        try:
            read_all(source)
        except HpctrainError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert not [line for line in refused if "\n" in line]


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x00", b"p16777215\n"], ids=["binary", "text"])
def test_a_memo_of_any_size_is_refused_before_memory_is_taken_for_it(tmp_path, put):
    """Python's unpickler makes room for any index; a flipped bit asked for 22 GB."""
    path = tmp_path / ".metadata"
    path.write_bytes(b"\x80\x02]" + put + b".")

    with pytest.raises(CheckpointError, match=r"cut or damaged: .*memo index 16777215"):
        unpickled(path, {})


def header(entries):
    text = json.dumps(entries).encode() if not isinstance(entries, bytes) else entries
    return struct.pack("<Q", len(text)) + text


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cut or no safetensors file"),
        (b"\xff" * 20, "cut or no safetensors file"),
        (header(b"[1, 2]") + bytes(8), "no safetensors file"),
        (header({"a": GOOD}), "counts 77 bytes, the file has 69"),
        (header({"a": GOOD}) + bytes(9), "counts 77 bytes, the file has 78"),
        (header({"a": GOOD | {"dtype": "F31"}}) + bytes(8), "dtype F31"),
        (header({"a": GOOD | {"shape": [3]}}) + bytes(8), "which is not F32[3]"),
        (header({"a": GOOD | {"shape": [-1, -2]}}) + bytes(8), "no whole number"),
        (header({"a": GOOD | {"shape": [True, 2]}}) + bytes(8), "no whole number"),
        (header({"a": GOOD, "b": GOOD}) + bytes(8), "overlap or leave gaps"),
        (header({"a": GOOD | {"data_offsets": [8, 16]}}) + bytes(16), "overlap or leave gaps"),
        (header(b'{"a": {}, "a": {}}') + bytes(8), "a name stands twice"),
        (header({"a": GOOD, "__metadata__": {"DCP_SHARDING_INFO": ""}}) + bytes(8), "one rank's"),
        (header({"a": GOOD, "__metadata__": {"hpctrain": "{"}}) + bytes(8), "is not ours"),
        (header({"a": GOOD, "__metadata__": {"hpctrain": '{"step": 1, "data": 3}'}}) + bytes(8),
         "has data = 3, not ours"),
    ],
)  # fmt: skip
def test_what_is_no_safetensors_file_is_refused(run, call, tmp_path, content, why):
    (tmp_path / "a.safetensors").write_bytes(content)

    assert why in call.refused("import", tmp_path / "a.safetensors", "--run", run.name, "--step", 1)


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ({"weight_map": {"a": "../a.safetensors"}}, "which is no file of its directory"),
        ({"weight_map": {"a": "b.safetensors"}}, "which is missing"),
        ({"weight_map": {"a": "a.safetensors", "c": "a.safetensors"}}, "names c, which none"),
        ({"weight_map": {"a": "a.safetensors"}}, "does not name b"),
        ({}, "no index of safetensors"),
        ([], "no index of safetensors"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(run, call, tmp_path, index, why):
    hub = tmp_path / "hub"
    hub.mkdir()
    save_file(weights(), hub / "a.safetensors")
    (hub / "model.safetensors.index.json").write_text(json.dumps(index))

    assert why in call.refused("import", hub, "--run", run.name, "--step", 1)


def test_one_name_in_two_files_is_refused(run, call, tmp_path):
    for name in ("a", "b"):
        save_file(weights(), tmp_path / f"{name}.safetensors")

    assert ", as another file does" in call.refused(
        "import", tmp_path, "--run", run.name, "--step", 1
    )


def test_what_is_no_checkpoint_is_refused(run, call, tmp_path):
    (tmp_path / "text").write_text("hello, this is text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "zip.zip").write_bytes(b"")
    with zipfile.ZipFile(tmp_path / "zip.zip", "w") as archive:
        archive.writestr("a", "b")
    words = ("--run", run.name, "--step", 1)

    assert "is not there" in call.refused("import", tmp_path / "nothing", *words)
    assert "no checkpoint that is known here" in call.refused("import", tmp_path / "text", *words)
    assert "no checkpoint that is known here" in call.refused("import", tmp_path / "empty", *words)
    assert "no torch.save file" in call.refused("import", tmp_path / "zip.zip", *words)
    for kind in ("dcp", "torch", "safetensors", "deepspeed", "hpctrain"):
        for name in ("text", "empty"):
            call.refused("import", tmp_path / name, *words, "--from", kind)


def test_a_torn_checkpoint_of_ours_is_refused(run, call, tmp_path):
    path = save(run, 7, some())
    other = made_run(tmp_path, "lm-2")
    words = ("import", path, "--run", other.name, "--step", 1)
    shard = path / "shard-00000.safetensors"
    content = shard.read_bytes()

    shard.write_bytes(content[:-1])
    assert "is torn: shard shard-00000.safetensors is" in call.refused(*words)
    shard.write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
    assert "shard-00000.safetensors" in call.refused(*words)
    assert names_in(other) == []


def changed_dcp(folder, change):
    dcp.save({"model": {"a": torch.ones(4, 3)}}, checkpoint_id=folder / "dcp")
    path = folder / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - our own
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return folder / "dcp"


def outside(metadata):
    next(iter(metadata.storage_data.values())).relative_path = "../../etc/passwd"


def compressed(metadata):
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


def smaller(metadata):
    metadata.state_dict_metadata["model.a"].chunks[0].sizes = torch.Size([3, 3])


def twice(metadata):
    chunks = metadata.state_dict_metadata["model.a"].chunks
    half = type(chunks[0])(torch.Size([0, 0]), torch.Size([2, 3]))
    lower = type(chunks[0])(torch.Size([1, 0]), torch.Size([2, 3]))
    metadata.state_dict_metadata["model.a"].chunks = [half, lower]
    (index,) = metadata.storage_data
    again = type(index)("model.a", (1, 0), 1)
    metadata.storage_data[again] = metadata.storage_data[index]


def unwritten(metadata):
    metadata.storage_data.clear()


def beyond(metadata):
    metadata.state_dict_metadata["model.a"].chunks[0].offsets = torch.Size([1, 0])


def longer(metadata):
    next(iter(metadata.storage_data.values())).length += 10_000


def another_dtype(metadata):
    metadata.state_dict_metadata["model.a"].properties.dtype = torch.int32


def unknown_dtype(metadata):
    metadata.state_dict_metadata["model.a"].properties.dtype = torch.qint8


def no_tensors(metadata):
    metadata.state_dict_metadata = 7


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (outside, "outside of the directory"),
        (compressed, "which is not read here"),
        (smaller, "do not make up"),
        (twice, "do not make up"),
        (unwritten, "nobody wrote the part"),
        (beyond, "does not lie in it"),
        (longer, "is cut"),
        (another_dtype, "not the part"),
        (unknown_dtype, "qint8, which cannot be stored"),
        (no_tensors, "is not torch DCP's"),
    ],
)
def test_dcp_metadata_that_does_not_fit_is_refused(run, call, tmp_path, change, why):
    source = changed_dcp(tmp_path, change)

    assert why in call.refused("import", source, "--run", run.name, "--step", 1)
    assert names_in(run) == []


def test_a_dcp_file_that_is_missing_is_refused(run, call, tmp_path):
    source = changed_dcp(tmp_path, lambda _: None)
    (source / "__0_0.distcp").unlink()

    line = call.refused("import", source, "--run", run.name, "--step", 1)

    assert "__0_0.distcp cannot be read: No such file" in line
    shutil.rmtree(source)


@pytest.mark.parametrize(
    ("name", "version", "told"),
    [
        ("x.pt", "2.6.0", True),
        ("x.pt", "2.9.1+cu128", True),
        ("x.pt", "2.10.0", False),
        ("x.pt", "2.13.0a0+git1", False),
        ("x.pt", "3.0", False),
        ("x.safetensors", "2.6.0", False),
        ("missing.pt", "2.6.0", False),
    ],
)
def test_what_an_older_torch_risks_is_told_of_files_that_it_reads(
    tmp_path, monkeypatch, name, version, told
):
    monkeypatch.setattr(import_into.metadata, "version", lambda _: version)
    (tmp_path / "x.pt").write_bytes(b"PK\3\4" + b"\0" * 20)
    (tmp_path / "x.safetensors").write_bytes(b"\2" + b"\0" * 7 + b"{}")

    risk = import_into.risk(tmp_path / name)

    assert ("CVE-2026-24747" in risk and version in risk) if told else risk == ""


def test_the_risk_is_told_before_anything_is_read(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(import_into.metadata, "version", lambda _: "2.9.0")
    (tmp_path / "x.pt").write_bytes(b"PK\3\4" + b"\0" * 20)
    heard = []
    monkeypatch.setattr(import_into, "read", lambda *_: heard.append(capsys.readouterr().err))
    words = ["checkpoints", "import", str(tmp_path / "x.pt"), "--run", str(run.root), "--step", "7"]

    with pytest.raises(AttributeError):  # nothing was read
        main(words)

    assert "torch 2.9.0 reads pickles with a fault" in heard[0]


def test_a_read_that_fails_is_no_file_that_was_cut():
    """The kernel refuses to read there (EIO), as a disk may."""
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error"):
        safetensors._read(Path("/proc/self/mem"), 0, 8)

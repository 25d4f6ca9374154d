"""Sources of an import by the thousand that hold what nobody meant: taken, or one line."""

from __future__ import annotations

import json
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from hpctrain.checkpoint.exchange import import_into
from hpctrain.checkpoint.exchange.naming import NameRequest, name_all
from hpctrain.checkpoint.store import find
from hpctrain.errors import HpctrainError
from tests.support.exchange import made_run
from tests.support.fuzzing import Faults, cases, chances, damaged, odd
from tests.support.loading import loaded
from tests.support.memory import folder_in_memory

NUMBERS = (-1, 0, 1, 2**31, 2**62, 2**63, 2**64, 2**70, 1.5, "x", None, True, [1], (1,))
SIZES = ((), (0,), (4, 3), (3, 4), (2**62, 4), (2**70, 1), (0, 2**63), (-1, 3), (4,), (4, 3, 1),
         (1,) * 70, ("x", 3), (1.5, 3), None, 7, (2**31, 2**31, 4))  # fmt: skip
PATHS = ("\0", "a\0b", "..", ".", "", "../x", "/etc/passwd", "x" * 5000, 7, None, b"x", "pipe")
KEYS = ("", "\0", ".", "..", "a..b", ".a", "a.", "x" * 4000, "\ud800", "\x1b[2J", "a\nb", 0, -1,
        2**70, True, None, 1.5, ("a",), "model", "optimizer", "__tensor__", "PINNED")  # fmt: skip
TENSORS = (
    torch.ones(4, 3), torch.ones(()), torch.ones(0, 3), torch.ones(3).to(torch.complex128),
    torch.ones(2, 2).to_sparse(), torch.zeros(1).expand(2**20), torch.ones([1] * 40),
    torch.empty(3, device="meta"),
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def plain():
    """A checkpoint of torch DCP."""
    with folder_in_memory() as folder:
        state = {"model": {"a": torch.ones(4, 3), "b": torch.arange(5)}, "step": 3}
        dcp.save(state, checkpoint_id=folder / "dcp")
        yield folder


def odd_dcp(path, chance):
    metadata = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301 - our own
    entry = metadata.state_dict_metadata["model.a"]
    stored = chance.choice(list(metadata.storage_data.values()))
    kind = chance.randrange(9)
    if kind == 0:
        stored.length = chance.choice(NUMBERS)
    elif kind == 1:
        stored.offset = chance.choice(NUMBERS)
    elif kind == 2:
        stored.relative_path = chance.choice(PATHS)
    elif kind == 3:
        entry.size = chance.choice(SIZES)
    elif kind == 4:
        setattr(entry.chunks[0], chance.choice(["sizes", "offsets"]), chance.choice(SIZES))
    elif kind == 5:
        entry.size = entry.chunks[0].sizes = chance.choice(SIZES)
    elif kind == 6:
        setattr(metadata, chance.choice(["storage_data", "planner_data"]), odd(chance))
    elif kind == 7:
        where = metadata.state_dict_metadata
        where[chance.choice([k for k in KEYS if k is not None])] = where.pop("model.a")
    else:
        thing, name = chance.choice(
            [(entry, "chunks"), (entry.properties, "dtype"), (stored, "transform_descriptors")]
        )
        setattr(thing, name, odd(chance))
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def odd_tree(chance):
    tree = {"model": {"a": torch.ones(4, 3), "b": torch.ones(2)}, "optimizer": {"state": {}}}
    for _ in range(chance.choice((1, 1, 2, 3))):
        where = chance.choice([tree, tree["model"], tree["optimizer"]])
        if not isinstance(where, dict):
            continue
        value = chance.choice([chance.choice(TENSORS), odd(chance), {"": torch.ones(1)}])
        where[chance.choice(KEYS)] = value
        if chance.random() < 0.1:
            deep = torch.ones(1)
            for _ in range(chance.choice((30, 300))):
                deep = {"x": deep}
            tree["model"] = deep
            break
    return tree


def imported(run, source):
    """What `checkpoints import` does; what it has committed can be loaded."""
    contents = import_into.read(source, None)
    tensors, _ = name_all(contents, NameRequest(None, [], None, None, model_only=False))
    import_into.write(run, "id", 7, contents, tensors)
    loaded(find.look(run, 7))


def tried(faults, what, folder, source):
    run = made_run(folder)
    faults.of(what, lambda: imported(run, source))
    left = [name.name for name in run.checkpoints.iterdir()] if run.checkpoints.exists() else []
    if any("staged" in name for name in left):
        faults.found.append(f"{what}: left {left}")


@cases(short=60, long=2500)
def test_an_odd_dcp_source_is_taken_or_refused_in_one_line(plain, begin, end):
    faults = Faults(HpctrainError)
    for number, chance in chances(begin, end):
        folder = plain / f"{number}"
        source = shutil.copytree(plain / "dcp", folder / "dcp")
        odd_dcp(source, chance)
        tried(faults, f"case {number}", folder, source)
        shutil.rmtree(folder)
    assert faults.found == []


@cases(short=60, long=2500)
def test_an_odd_tree_of_torch_is_taken_or_refused_in_one_line(plain, begin, end):
    faults = Faults(HpctrainError)
    for number, chance in chances(begin, end):
        folder = plain / f"tree-{number}"
        folder.mkdir()
        try:
            torch.save(odd_tree(chance), folder / "a.pt")
        except Exception:  # noqa: BLE001, S112 - torch itself cannot save it
            continue
        tried(faults, f"case {number}", folder, folder / "a.pt")
        shutil.rmtree(folder)
    assert faults.found == []


INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def hub_folder(path):
    """A model as Hugging Face's libraries save one whose tensors lie in two files."""
    path.mkdir(parents=True)
    tensors = {"model.a.weight": torch.ones(4, 3), "model.b.weight": torch.arange(6.0)}
    for shard, (name, tensor) in zip(SHARDS, tensors.items(), strict=True):
        save_file({name: tensor}, path / shard, metadata={"format": "pt"})
    weights = dict(zip(tensors, SHARDS, strict=True))
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 72}, "weight_map": weights}))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "float32"}))
    return path


def odd_index(text, chance):
    """Another entry of the index, another value, or a text that is damaged."""
    if chance.random() < 0.3:
        return damaged(text, chance)
    index = json.loads(text)
    weights = index["weight_map"]
    kind = chance.randrange(6)
    if kind == 0:
        weights[chance.choice(list(weights))] = chance.choice([*PATHS[:-2], {}, [], 1.5])
    elif kind == 1:
        weights[chance.choice([str(key) for key in KEYS])] = chance.choice(SHARDS)
    elif kind == 2:
        index[chance.choice(list(index))] = odd(chance)
    elif kind == 3:
        weights[chance.choice(list(weights))] = chance.choice((INDEX, "config.json", ".", *SHARDS))
    elif kind == 4:
        del weights[chance.choice(list(weights))]
    else:
        index = odd(chance)
    return json.dumps(index)


def odd_shard(raw, chance):
    """A file of safetensors whose header says something else, or that is cut or longer."""
    length = int.from_bytes(raw[:8], "little")
    header, content = raw[8 : 8 + length], raw[8 + length :]
    kind = chance.randrange(5)
    if kind == 0:
        return raw[: chance.randrange(len(raw))]
    if kind == 1:
        return raw + chance.randbytes(9)
    if kind == 2:
        size = chance.choice((0, 1, 2**31, 2**63, 2**64 - 1, length + 1))
        return size.to_bytes(8, "little") + header + content
    if kind == 3:
        text = damaged(header.decode(), chance).encode("utf-8", "replace")
    else:
        facts = json.loads(header)
        entry = facts[chance.choice([name for name in facts if name != "__metadata__"])]
        entry[chance.choice(list(entry))] = odd(chance)
        text = json.dumps(facts).encode()
    return len(text).to_bytes(8, "little") + text + content


@cases(short=60, long=2500)
def test_an_odd_folder_of_hugging_faces_is_taken_or_refused_in_one_line(plain, begin, end):
    faults = Faults(HpctrainError)
    for number, chance in chances(begin, end):
        folder = plain / f"hub-{number}"
        source = hub_folder(folder / "source")
        name = chance.choice((INDEX, INDEX, "config.json", *SHARDS))
        if name in SHARDS:
            (source / name).write_bytes(odd_shard((source / name).read_bytes(), chance))
        else:
            odd_text = odd_index if name == INDEX else damaged
            text = odd_text((source / name).read_text(), chance)
            (source / name).write_bytes(text.encode("utf-8", "replace"))
        tried(faults, f"case {number} ({name})", folder, source)
        shutil.rmtree(folder)
    assert faults.found == []


def test_a_folder_of_hugging_faces_as_it_is_saved_is_taken(plain):
    """Or the odd ones would be refused for another reason."""
    source = hub_folder(plain / "whole" / "source")

    imported(made_run(plain / "whole"), source)

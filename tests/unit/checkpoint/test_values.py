"""Tracked objects come back with the same types, values, bits and order, or are refused by path."""

from __future__ import annotations

import enum
import json
import random
import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from hpctrain.checkpoint.tensors.value_reading import decode, placeholders
from hpctrain.checkpoint.tensors.values import encode
from hpctrain.errors import CheckpointError
from tests.support.value_trees import TREES, Colour, Pair, Settings, facts


def through(value):
    """The value as a checkpoint holds it: JSON, and tensors in new memory."""
    form, tensors = encode(value, "tracked.thing")
    form = json.loads(json.dumps(form))
    loaded = placeholders(form)
    assert loaded.keys() == tensors.keys()
    for name, tensor in loaded.items():
        assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape)
        if tensor.is_contiguous() and tensor.numel():
            source = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
            tensor.reshape(-1).view(torch.uint8).copy_(source)
        elif tensor.numel():
            tensor.copy_(tensors[name].detach())
    return decode(form, loaded)


@settings(max_examples=200, deadline=None)
@given(TREES)
def test_any_tree_of_the_closed_set_comes_back_as_it_was(tree):
    assert facts(through(tree.value)) == facts(tree.value)


# ---- what is refused


class Attributes(dict):
    """A dictionary of the program's own."""


def _local_enum():
    class Inside(enum.Enum):
        ONE = 1

    return Inside.ONE


def _cycle():
    inner = []
    inner.append({"again": inner})
    return inner


def _deep():
    value = 0
    for _ in range(200):
        value = [value]
    return value


def _beside():
    settings = Settings(1)
    settings.more = 2
    return settings


BASE = torch.zeros(8)
REFUSED = {
    "iterator": ({"milestones": [1, iter("ab")]}, r"thing\.milestones\[1\] holds a str_.*: an it"),
    "function": ([len], r"thing\[0\] holds a builtin_function_or_method: code cannot be saved"),
    "lambda": ({"a b": lambda: 0}, r"thing\['a b'\] holds a function: code cannot be saved"),
    "class": ({"kind": Colour}, r"thing\.kind holds an EnumType: code cannot be saved"),
    "module": ({"net": torch.nn.Linear(1, 1)}, r"thing\.net holds a Linear: put its state_dict"),
    "dict's child": ({"c": Attributes()}, "its class would be lost; save a plain dict"),
    "object": ({"o": object()}, "neither a tensor nor of a type that is saved"),
    "array of objects": ({"a": np.array([None])}, "numpy's object is not saved"),
    "array of texts": ({"a": np.array(["a"], np.dtypes.StringDType())}, "not saved; save a list"),
    "masked array": ({"a": np.ma.zeros(2)}, "save a plain ndarray"),
    "sparse": ({"t": torch.eye(2).to_sparse()}, r"thing\.t holds a Tensor: a tensor of layout"),
    "meta": ({"t": torch.empty(2, device="meta")}, "has no values yet"),
    "lazy": ({"t": torch.nn.UninitializedParameter()}, "run one forward pass before run.track"),
    "local class": ({"e": _local_enum()}, "define it at the top of a module"),
    "cycle": (_cycle(), r"thing\[0\]\.again holds a list: it contains itself"),
    "depth": (_deep(), "nested deeper than 100 levels"),
    "field beside": (_beside(), "it has 'more' beside its fields; make it a field"),
    "factory": ({"d": defaultdict(lambda: 0)}, "its factory is none of list, dict, set"),
    "tensor as key": ({"k": {torch.ones(1): 1}}, "a key by its identity"),
    "generator as key": ({"k": {random.Random(1): 1}}, "a key by its identity"),
    "part of memory": ({"a": BASE[:5], "b": BASE[3:]}, r"thing\.b shares .* with thing\.a,"),
    "memory of an array": ({"a": BASE, "b": BASE.numpy()}, "shares a part of its memory"),
}  # fmt: skip


@pytest.mark.parametrize(("value", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_saved_is_refused_with_its_path_and_the_way_out(value, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        encode(value, "tracked.thing")
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_are_refused():
    assert "quantized tensors are not saved; save int_repr" in said(quantized())


def quantized():
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def said(value):
    with pytest.raises(CheckpointError) as caught:
        encode(value, "tracked.thing")
    return str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_the_page_has_the_message_of_everything_that_cannot_be_saved():
    page = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    table = page[page.index("| what cannot be saved |") :].split("\n\n")[0].splitlines()[2:]
    parts = [part for row in table for part in re.split(r"[;,] ", row.split("|")[2].strip())]
    library = torch.Tensor._make_subclass(type("Library", (torch.Tensor,), {}), torch.ones(1))
    texts = "\n".join(map(said, [*(value for value, _ in REFUSED.values()), quantized(), library]))

    assert len(table) >= len(set(REFUSED)) // 2
    assert [part for part in parts if part != "..." and part not in texts] == []


def test_parts_of_one_memory_that_do_not_overlap_are_taken():
    whole = torch.arange(8.0)
    assert facts(through([whole[:4], whole[4:]])) == facts([whole[:4], whole[4:]])


def test_one_object_in_two_places_comes_back_as_one():
    tensor, shared, array = torch.zeros(2), [1], np.zeros(2)
    tied = {"a": tensor, "b": tensor.detach(), "c": tensor.view(2)}
    tree = {"t": tied, "l": [shared, (shared,)], "n": [array, array], "twin": [[1], [1]]}

    found = through(tree)

    found["t"]["a"].add_(1)
    assert found["t"]["b"].tolist() == found["t"]["c"].tolist() == [1, 1]
    assert found["l"][0] is found["l"][1][0]
    assert found["n"][0] is found["n"][1]
    assert found["twin"][0] is not found["twin"][1]


def test_names_of_tensors_never_meet_although_keys_hold_dots():
    tree = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "c": {1: torch.ones(2), "1": BASE}}
    assert facts(through(tree)) == facts(tree)


# ---- reading with distrust


def test_nothing_is_imported_and_no_constructor_is_run():
    settings = Settings(1)
    settings.rate = "text"  # with which __post_init__ fails
    assert facts(through(settings)) == facts(settings)

    form = {"__hpctrain__": "dataclass", "module": "this", "class": "C", "fields": {}}
    with pytest.raises(CheckpointError, match="a C of module this, which this program has not imp"):
        decode(form, {})
    assert "this" not in sys.modules


def test_a_field_that_was_never_set_stays_so():
    bare = Settings(1)
    del bare.rate

    assert not hasattr(through(bare), "rate")


def test_an_array_without_its_bytes_is_refused():
    form, tensors = encode(np.arange(3), "tracked.thing")
    form["data"] = ""

    with pytest.raises(CheckpointError, match="cannot be read back"):
        decode(form, tensors)


def test_a_class_with_other_fields_is_refused():
    form, tensors = encode(Settings(1), "tracked.thing")
    form["fields"]["gone"] = 1
    with pytest.raises(CheckpointError, match="class of that name has other fields or members"):
        decode(form, tensors)
    form, tensors = encode(Settings(1), "tracked.thing")
    del form["fields"]["rate"]  # as a class that has got this field since
    with pytest.raises(CheckpointError, match="class of that name has other fields or members"):
        decode(form, tensors)
    form, tensors = encode([Colour.RED, Pair(1)], "tracked.thing")
    form[0]["names"] = ["GREEN"]
    with pytest.raises(CheckpointError, match=r"Colour of module .* has other fields or members"):
        decode(form[0], tensors)
    form[1]["fields"] = {"left": 1}
    with pytest.raises(CheckpointError, match=r"Pair of module .* has other fields or members"):
        decode(form[1], tensors)


WRONG = [
    {"__hpctrain__": "evil"}, {"__hpctrain__": "value"}, {"__hpctrain__": ["a"]},
    {"__hpctrain__": "same", "number": 3}, {"__hpctrain__": "complex", "parts": [1, 2, 3]},
    {"__hpctrain__": "enum", "module": "os", "class": "system", "names": ["a"]},
    {"__hpctrain__": "dataclass", "module": "os", "class": "PathLike", "fields": {"a": 1}},
    {"__hpctrain__": "namedtuple", "module": "os", "class": "PathLike", "fields": {"a": 1}},
    {"__hpctrain__": "numpy.dtype", "parts": ["O"]}, {"__hpctrain__": "defaultdict", "items": []},
    {"__hpctrain__": "defaultdict", "items": [], "factory": "system"}, {"__items__": [[[], 1]]},
    {"__hpctrain__": "array", "dtype": "<f8", "shape": [9], "order": "C", "data": "AAAA"},
    {"__hpctrain__": "bytes", "data": "%"}, {"__tensor__": "absent"}, {"__tuple__": 3},
    {"__hpctrain__": "torch.dtype", "parts": ["load"]}, {"__hpctrain__": "PCG64", "parts": [{}, 0]},
]  # fmt: skip


@pytest.mark.parametrize("form", WRONG, ids=str)
def test_a_form_that_is_not_ours_is_refused_in_one_line(form):
    with pytest.raises(CheckpointError) as caught:
        decode(form, {})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("dtype", ["load", "float99", None, "__name__"])
def test_a_placeholder_of_no_dtype_is_refused(dtype):
    with pytest.raises(CheckpointError, match="cannot be read back"):
        placeholders({"__tensor__": "a", "shape": [1], "dtype": dtype})


# ---- old and new


def test_forms_of_format_3_are_read_and_written_as_they_were():
    """What an older hpctrain has written, and what it reads again where nothing else is there."""
    old = {
        "n": 1, "x": 0.5, "l": [1, {"__tuple__": [1, 2.5]}], "m": {"__items__": [[3, "a"], [8, 1]]},
        "w": {"__tensor__": "tracked.thing.w", "shape": [2], "dtype": "float32"},
    }  # fmt: skip
    value = decode(old, {"tracked.thing.w": torch.ones(2)})

    assert facts(value) == facts(
        {"n": 1, "x": 0.5, "l": [1, (1, 2.5)], "m": {3: "a", 8: 1}, "w": torch.ones(2)}
    )
    assert encode(value, "tracked.thing")[0] == old


def test_inline_forms_hold_their_bytes_themselves():
    form, tensors = encode({"b": bytes(500), "a": np.arange(500)}, "x", inline=True)
    assert tensors == {}
    assert facts(decode(json.loads(json.dumps(form)), {})) == facts(
        {"b": bytes(500), "a": np.arange(500)}
    )


def test_whole_numbers_of_any_length_are_written_so_that_every_reader_has_them():
    """Python reads no decimal number of 4,300 digits, and others none of more than 64 bits."""
    huge = 10**5000
    form = json.loads(json.dumps(encode([2**63 - 1, -(2**63), huge], "tracked.thing")[0]))
    assert form[0] == 2**63 - 1
    assert all(isinstance(each, dict) for each in form[1:])
    assert decode(form, {}) == [2**63 - 1, -(2**63), huge]


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.rand(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        np.asfortranarray(np.arange(24.0).reshape(4, 6)),
        np.arange(12, dtype=">i4").reshape(3, 4),
    ],
    ids=["grad", "parameter", "frozen", "transposed", "channels last", "Fortran", "big-endian"],
)
def test_the_kind_of_a_tensor_and_its_order_in_memory_are_kept(value):
    """The order decides which kernel torch takes, and so the last bits."""
    assert facts(through(value)) == facts(value)

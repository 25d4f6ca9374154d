"""The frozen sample of format 4: its types and dtypes come back."""

from __future__ import annotations

import datetime as dt
import re
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import safetensors
import torch

from hpctrain.checkpoint.format import manifest
from hpctrain.checkpoint.store import find, verify
from hpctrain.checkpoint.tensors.boxes import State
from hpctrain.checkpoint.tensors.restore import load_weights
from hpctrain.checkpoint.tensors.value_reading import decode, placeholders
from hpctrain.core.settings.schema import Settings
from hpctrain.core.world import World
from hpctrain.ledger.run.layout import RunDir
from tests.support.value_trees import facts

SAMPLE = RunDir(Path(__file__).parents[2] / "data" / "checkpoint-format-4")
DOCS = Path(__file__).parents[3] / "docs" / "development" / "checkpoint-format.md"
STEP = SAMPLE.checkpoints / "step-0000001000"
SHARED = [1.5]
TREE = {
    "numbers": (1, -0.0, float("inf"), 3**90, 1 - 2j, True, None),
    "keys": {1: "n", "1": "s", (2, None): "t"},
    "containers": [
        Counter(a=2), OrderedDict(b=1, a=2), defaultdict(list, x=[1]), {4}, frozenset([5]),
        deque([6, 7], 3), bytearray(b"ab"), bytes(100),
    ],
    "places": [SHARED, SHARED],
    "when": dt.datetime(2026, 11, 27, tzinfo=dt.UTC),
    "where": Path("out/x"),
    "numpy": [np.float32(0.1), np.arange(40, dtype=">i4").reshape(5, 8), np.array(["a", "längst"])],
    "torch": [torch.Size([2]), torch.bfloat16, torch.device("cpu"), torch.arange(3.0)],
    "generators": [np.random.default_rng(5), np.random.RandomState(5)],
}  # fmt: skip
TURN = torch.polar(torch.ones(3).double(), torch.arange(3.0).double())


def test_the_sample_is_read_with_its_types_and_dtypes():
    found = find.choose(SAMPLE).checkpoint
    assert verify.verify(found) == []
    assert found.manifest.format == 4
    form = found.manifest.extra["thing"]
    tracked = placeholders(form)
    model = {
        "model.turn": torch.zeros(3, dtype=torch.complex128),
        "model.packed": torch.zeros((2, 3), dtype=torch.uint8).view(torch.int4),
    }
    state = State({**tracked, **model})

    load_weights(found, World(0, 0, 1, torch.device("cpu")), state, Settings().checkpoint)

    value = decode(form, tracked)
    assert facts(value) == facts(TREE)
    assert value["places"][0] is value["places"][1]
    assert decode(found.manifest.data, {}) == {"samples_consumed": 7, "pair": (1, 2)}
    assert torch.equal(model["model.turn"], TURN)
    assert model["model.packed"].view(torch.uint8).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_its_shard_is_a_file_of_safetensors_under_the_dtypes_that_the_document_says():
    with safetensors.safe_open(STEP / "shard-00000.safetensors", "pt") as file:
        turn, packed = file.get_tensor("model.turn"), file.get_tensor("model.packed")
    assert torch.equal(torch.view_as_complex(turn), TURN)
    assert (packed.dtype, tuple(packed.shape)) == (torch.uint8, (2, 3))


def test_it_is_written_again_as_it_was(tmp_path):
    written = tmp_path / manifest.MANIFEST_NAME

    manifest.dump(manifest.load(STEP / manifest.MANIFEST_NAME), written)

    assert written.read_bytes() == (STEP / manifest.MANIFEST_NAME).read_bytes()


def test_the_document_names_every_word():
    text = DOCS.read_text()
    section = text[text.index("## Types") : text.index("## What is promised")]
    words = set(re.findall(r"[\w.]+", section))
    from hpctrain.checkpoint.format.shard import STORED
    from hpctrain.checkpoint.tensors import value_reading
    from hpctrain.checkpoint.tensors.value_types import SIMPLE

    readers = {
        name.removeprefix("_read_") for name in vars(value_reading._Decoder) if "_read_" in name
    }
    ranges = {f"{sign}INT{bits}" for sign in ("", "U") for bits in range(2, 7)}
    assert {*STORED} - ranges | readers | SIMPLE.keys() <= words

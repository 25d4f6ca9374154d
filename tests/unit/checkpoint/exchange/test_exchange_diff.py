"""What differs between two checkpoints is said; what does not is not read."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.exchange import diff
from hpctrain.checkpoint.format.reader import CheckpointSource
from tests.support.exchange import made_run, save, some


@pytest.fixture
def told(call):
    def tell(*words):
        code, out, _ = call("diff", *words, "--json")
        found = json.loads(out)
        assert code == (0 if found["same"] else 1)
        return found

    return tell


STATE = {"data": {"samples_consumed": 1}, "extra": {}}


def test_the_same_cut_alike_is_known_without_reading(run, told, monkeypatch):
    save(run, 1, some(), ranks=2, **STATE)
    save(run, 2, some(), ranks=2, **STATE)
    monkeypatch.setattr(CheckpointSource, "read", lambda *_, **__: pytest.fail("it was read"))

    assert told(run.name, 1, 2) == {
        "compared": ["lm-1:1", "lm-1:2"],
        "same": True,
        "added": [],
        "removed": [],
        "changed": [],
        "state": [],
        "equal": len(some()),
        "bytes_read": 0,
    }


@pytest.mark.parametrize("other", [{"ranks": 3}, {"block_bytes": 1024}])
def test_the_same_cut_in_another_way_is_found_by_reading(run, told, other):
    save(run, 1, some(), ranks=2, **STATE)
    save(run, 2, some(), **{"ranks": 2, **other, **STATE}, world_size=2)

    found = told(run.name, 1, 2)

    assert found["same"]
    assert found["bytes_read"] > 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_was_added_removed_and_changed_is_named(run, told, ranks):
    before = some()
    after = {name: tensor.clone() for name, tensor in before.items() if name != "model.long"}
    after["model.new"] = torch.ones(2)
    after["model.emb.weight"][3, 2] += 0.25
    after["model.emb.weight"][20, 0] -= 0.5
    after["model.blocks.0.w"][0, 0, 0] = before["model.blocks.0.w"][0, 0, 0].float() + 3
    after["model.mask"][0] = ~before["model.mask"][0]
    after["model.scalar"] = torch.ones(3)
    save(run, 1, before, ranks=2, **STATE)
    save(run, 2, after, ranks=ranks, **STATE)

    found = told(run.name, 1, 2)

    assert found["added"] == ["model.new"]
    assert found["removed"] == ["model.long"]
    changed = {row["name"]: row for row in found["changed"]}
    assert set(changed) == {"model.emb.weight", "model.blocks.0.w", "model.mask", "model.scalar"}
    assert changed["model.emb.weight"]["elements"] == 2
    assert changed["model.emb.weight"]["max_abs"] == pytest.approx(0.5, abs=1e-6)
    w = after["model.blocks.0.w"].double() - before["model.blocks.0.w"].double()
    assert changed["model.blocks.0.w"]["max_abs"] == float(w.abs().max())
    assert (changed["model.mask"]["elements"], changed["model.mask"]["max_abs"]) == (1, None)
    assert (changed["model.scalar"]["before"], changed["model.scalar"]["after"]) == (
        "F32[]",
        "F32[3]",
    )


def test_not_a_number_and_infinity_are_compared_for_what_they_are(run, told):
    odd = torch.tensor([float("nan"), float("inf"), 1.0])
    save(run, 1, {"model.a": odd, "model.b": odd}, **STATE)
    save(run, 2, {"model.a": odd + torch.tensor([0, 0, 1.0]), "model.b": torch.ones(3)}, **STATE)
    save(run, 3, {"model.a": odd, "model.b": odd}, ranks=3, **STATE)

    changed = {row["name"]: row for row in told(run.name, 1, 2)["changed"]}

    assert (changed["model.a"]["elements"], changed["model.a"]["max_abs"]) == (1, 1.0)
    assert (changed["model.b"]["elements"], changed["model.b"]["max_abs"]) == (2, "nan")
    assert not told(run.name, 1, 3)["changed"]


def test_state_beside_the_tensors_counts(run, told):
    save(run, 1, {"model.a": torch.ones(1)}, data={"n": 1, "d": {"x": [1, 2]}}, extra={"s": 1})
    save(
        run, 2, {"model.a": torch.ones(1)},
        data={"n": 1, "d": {"x": [1, 3]}}, extra={"s": 1, "best": float("inf")},
    )  # fmt: skip

    assert told(run.name, 1, 2)["state"] == [
        {"key": "data.d.x", "before": [1, 2], "after": [1, 3]},
        {"key": "extra.best", "before": None, "after": "inf"},
    ]


def test_quick_reads_nothing_where_digests_can_say(run, told, monkeypatch):
    save(run, 1, {"model.a": torch.ones(3)}, **STATE)
    save(run, 2, {"model.a": torch.zeros(3)}, **STATE)
    monkeypatch.setattr(CheckpointSource, "read", lambda *_, **__: pytest.fail("it was read"))

    (row,) = told(run.name, 1, 2, "--quick")["changed"]

    assert (row["name"], row["elements"], row["max_abs"]) == ("model.a", None, None)


def test_people_read_a_table(run, call):
    save(run, 1, {"model.a": torch.ones(3), "model.b": torch.ones(3)}, **STATE)
    save(run, 2, {"model.a": torch.full((3,), 1.5), "model.c": torch.ones(1)}, **STATE)

    code, out, _ = call("diff", run.name, 1, 2)

    assert code == 1
    assert [" ".join(line.split()) for line in out.splitlines()] == [
        "- model.b",
        "+ model.c",
        "CHANGED TYPE ELEMENTS MAX ABS",
        "model.a F32[3] 3 0.5",
        "0 tensors the same, 1 changed, 1 added, 1 removed; 24 B read",
    ]


def test_long_differences_are_cut_for_people(run, call):
    save(run, 1, {f"model.{n}": torch.ones(1) for n in range(30)}, **STATE)
    save(run, 2, {f"model.{n}": torch.zeros(1) for n in range(30)}, **STATE)

    out = call("diff", run.name, 1, 2)[1]

    assert "and 10 more (--json shows all)" in out
    assert out.count("model.") == 20


def test_two_runs_are_compared_and_bad_words_refused(run, call, tmp_path):
    other = made_run(tmp_path, "lm-2")
    save(run, 1, {"model.a": torch.ones(3)}, **STATE)
    save(other, 4, {"model.a": torch.ones(3)}, **STATE)

    assert call("diff", "lm-1:1", "lm-2:4")[0] == 0
    for words in (("lm-1", 1), ("lm-1", "x", 2), ("lm-1", "lm-2"), ("lm-1:", ":1"), (1, 2, 3, 4)):
        assert "RUN:STEP RUN:STEP is wanted" in call.refused("diff", *words)
    assert "has no checkpoint of step 9" in call.refused("diff", "lm-1", 1, 9)


def test_a_damaged_checkpoint_is_an_error_and_no_difference(run, call):
    save(run, 1, {"model.a": torch.ones(3)}, **STATE)
    path = save(run, 2, {"model.a": torch.zeros(3)}, **STATE)
    shard = path / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")

    code, _, err = call("diff", run.name, 1, 2)

    assert code == 7
    assert "shard-00000.safetensors" in err


@pytest.mark.parametrize("count", [1, 5])
def test_large_tensors_are_compared_in_parts(monkeypatch, count):
    monkeypatch.setattr(diff, "SLICE", 2)
    one = np.arange(count, dtype="<f4")
    other = one.copy()
    other[-1] += 7

    assert diff._distance(one.view(np.uint8), other.view(np.uint8), "F32", count) == (1, 7.0)

"""The engines' tests take a refusal for an answer on an old torch only, and nothing else ever."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

HELD = runpy.run_path(str(Path(__file__).parents[2] / "engines" / "conftest.py"))


@pytest.mark.parametrize(
    ("line", "is_refusal"),
    [
        ("engine.ep 2 needs torch 2.12 or newer, and this is torch 2.8.0+cu128; set", True),
        ("engine.exact with engine.kind fsdp2 needs torch 2.13, this is 2.8.0+cu128; use", True),
        ("engine.exact needs torch.x._y, which torch 2.8.0+cu128 has not; see", True),
        ("engine.ep needs DeviceMesh._unflatten, which torch 2.8.0+cu128 has not; see", True),
        ("rank 0: AssertionError: 3.0 != 4.0", False),
        ("engine.kind zero3 needs DeepSpeed 0.19.8 or newer, and this is 0.19.7", False),
    ],
)
def test_only_a_torch_that_is_too_old_is_a_refusal(line, is_refusal):
    assert any(refusal.search(line) for refusal in HELD["REFUSALS"]) is is_refusal


def test_versions_are_compared_by_their_numbers():
    assert HELD["numbers"]("2.8.0+cu128") < HELD["CI"] <= HELD["numbers"]("2.13.0+cpu")

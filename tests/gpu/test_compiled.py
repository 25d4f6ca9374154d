"""Compiled blocks on the GPU. They come last: compiling takes a while."""

from __future__ import annotations

import importlib.util

import pytest

from tests.gpu.training import run_until, settings_of

LAST = 4
SHAPE = {"layers": 2, "dim": 256, "heads": 4, "seq_len": 128}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_compiled_blocks_and_a_fused_optimizer_train_as_others(folder, kind, note):
    is_compiled = note.on_gpu("inductor and its kernels") and importlib.util.find_spec("triton")
    backend, shape = ("inductor", SHAPE) if is_compiled else ("no", {})
    more = {"engine__kind": kind, "engine__precision": "bf16"}
    plain, *_ = run_until(folder / "plain", LAST, settings_of(**more), shape=shape)
    settings = settings_of(**more, engine__compile=backend)
    compiled, *_ = run_until(folder / "compiled", LAST, settings, shape=shape, fused=True)

    assert compiled == pytest.approx(plain, rel=2e-2)

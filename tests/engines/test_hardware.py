"""What some hardware alone can do: refused elsewhere, and trained in torchao's emulation."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.train.engines import blocks
from tests.engines import test_decoders as decoders
from tests.support import lm_training as lmt
from tests.support.gloo import launch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HOPPER, AMPERE = (9, 0), (8, 0)
EIGHT = "Float8Linear"
FAR = 0.05
"""Of a loss, of itself: 8-bit floats of three bits' mantissa."""


def tower(width: int = 32) -> Any:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(width, width)}) for _ in range(2))
    model.head = nn.Linear(width, width)
    return model


@pytest.fixture
def gpu(monkeypatch):
    """`gpu(capability)`: torch says that the device is one of NVIDIA's."""

    def say(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    return say


@pytest.mark.parametrize(
    ("device", "capability", "said"),
    [
        (CPU, None, "from compute capability 8.9 on; this rank has cpu: set"),
        (GPU, AMPERE, "this rank has cuda of 8.0: set engine.float8 = false"),
        (torch.device("xpu", 0), None, "this rank has xpu: set"),
    ],
)
def test_a_device_that_lacks_it_is_told_in_one_line(gpu, device, capability, said):
    if capability:
        gpu(capability)
    with pytest.raises(UsageError) as caught:
        blocks.use_float8(tower(), device)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_torchao_it_says_what_to_install(gpu, monkeypatch):
    gpu(HOPPER)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UsageError, match=r"pip install 'hpctrain\[float8\]'"):
        blocks.use_float8(tower(), GPU)


def _converted() -> dict[str, Any]:
    warnings.simplefilter("ignore")  # torchao's, of libraries for GPUs
    blocks.nvidia_capability = lambda _: HOPPER
    model = tower()
    blocks.use_float8(model, CPU)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    try:
        blocks.use_float8(tower(width=24), CPU)
    except UsageError as error:
        kinds["odd"] = str(error)
    return kinds


def test_matrices_of_blocks_are_converted_and_no_others():
    (kinds,) = launch(_converted, 1)
    assert kinds.pop("odd").startswith("engine.float8: Module has no nn.Linear in its blocks whose")
    linear = {name: kind for name, kind in kinds.items() if "Linear" in kind}
    assert linear == {"layers.0.up": EIGHT, "layers.1.up": EIGHT, "head": "Linear"}


def _train(cases: Any) -> dict[str, Any]:
    from hpctrain.train.joining_ranks import join_world

    warnings.simplefilter("ignore")
    blocks.nvidia_capability = lambda _: HOPPER
    world, seen = join_world(), {}
    for case, settings in cases.items():
        engine = decoders.engine_of(world, "Llama", **settings)
        kinds = {type(module).__name__ for module in engine.model.modules()}
        losses = []
        for step in range(decoders.STEPS):
            batches = lmt.microbatches(engine, step, per_rank=1)
            losses.append(engine.forward_backward(batches, decoders.share))
            engine.step()
        state = {name: str(t.dtype) for name, t in engine.state().shared.items()}
        seen[case] = (EIGHT in " ".join(kinds), np.array(losses), state)
    return seen


IN_8_BITS: dict[str, dict[str, Any]] = {
    "fsdp2": {"kind": "fsdp2"},
    "fsdp2, whole, full": {"kind": "fsdp2", "whole": True, "activation_checkpointing": "full"},
    "fsdp2, cp": {"kind": "fsdp2", "cp": "2"},
    "ddp": {"kind": "ddp"},
}
COMPILED: dict[str, dict[str, Any]] = {"fsdp2, aot": {"kind": "fsdp2", "compile": "aot_eager"}}


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(IN_8_BITS, id="as it comes"),
        pytest.param(COMPILED, id="compiled", marks=pytest.mark.soak),
    ],
)
def test_a_decoder_trains_in_8_bits_with_the_same_masters(cases):
    in_8_bits = {
        name: {**case, "float8": True, "precision": "bf16"} for name, case in cases.items()
    }
    for seen in launch(_train, 2, cases={"plain": {"kind": "fsdp2"}, **in_8_bits}):
        assert seen.keys() == {"plain", *cases}
        is_eight, right, names = seen.pop("plain")
        assert not is_eight
        for case, (converted, losses, state) in seen.items():
            assert converted, case
            assert state == names, case
            assert np.abs(losses / right - 1).max() < FAR, case
            assert not np.allclose(losses, right, rtol=1e-5), case

"""Engines on one rank of NCCL: what is saved, restored and trained on is the same to the bit."""

from __future__ import annotations

import importlib.util
import shutil
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from hpctrain.checkpoint.store import find
from hpctrain.core.world import World
from hpctrain.ledger.run.layout import RunDir
from hpctrain.recipes.lm import model
from hpctrain.recipes.lm.model import Experts
from tests.gpu.training import Training, attempt, bits, different, run_until, settings_of

SAVED_AT, LAST = 2, 4
NO_DEEPSPEED = importlib.util.find_spec("deepspeed") is None
ZERO = pytest.mark.skipif(NO_DEEPSPEED, reason="DeepSpeed is not here")
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp bf16": {"engine__precision": "bf16"},
    "ddp fp16": {"engine__precision": "fp16"},
    "ddp exact": {"engine__exact": True, "train__micro_batch": 4, "train__global_batch": 8},
    "ddp bf16 full": {"engine__precision": "bf16", "engine__activation_checkpointing": "full"},
    "ddp selective": {"engine__activation_checkpointing": "selective"},
    "ddp sync": {"checkpoint__mode": "sync"},
    "fsdp2": {"engine__kind": "fsdp2"},
    "fsdp2 bf16": {"engine__kind": "fsdp2", "engine__precision": "bf16"},
    "fsdp2 fp16": {"engine__kind": "fsdp2", "engine__precision": "fp16"},
    "fsdp2 bf16 experts": {
        "engine__kind": "fsdp2", "engine__precision": "bf16", "shape": {"experts": 4},
    },
    "fsdp2 on the host": {"engine__kind": "fsdp2", "engine__offload": "cpu"},
    "zero1": {"engine__kind": "zero1", "engine__precision": "bf16"},
    "zero2": {"engine__kind": "zero2", "engine__precision": "bf16"},
    "zero3": {"engine__kind": "zero3", "engine__precision": "bf16"},
    "zero2 on the host": {
        "engine__kind": "zero2", "engine__precision": "bf16", "engine__offload": "cpu",
    },
}  # fmt: skip


@pytest.fixture
def exact(is_cuda):
    """Deterministic algorithms alone, as a bit-equal comparison needs on a GPU."""
    if is_cuda:
        torch.use_deterministic_algorithms(mode=True)
    yield
    if is_cuda:
        torch.use_deterministic_algorithms(mode=False)


@pytest.mark.usefixtures("exact", "world")
@pytest.mark.parametrize(
    "way", [pytest.param(name, marks=[ZERO] * name.startswith("zero")) for name in WAYS]
)
def test_a_run_that_was_restored_ends_with_the_same_bits(folder, way, note):
    given = dict(WAYS[way])
    shape = {"dropout": 0.1, **given.pop("shape", {})}  # the device's generator is state, too
    settings = settings_of(**given)
    losses, undisturbed, _ = run_until(folder / "run", LAST, settings, shape=shape)
    shutil.rmtree(find.step_path(RunDir(folder / "run"), LAST))
    following, restored, _ = run_until(folder / "run", LAST, settings, shape=shape)

    assert len(following) == LAST - SAVED_AT
    assert following == losses[SAVED_AT:]
    assert different(undisturbed, restored) == []
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_checkpoint_of_the_gpu_loads_on_a_cpu_and_one_of_the_cpu_on_the_gpu(folder, kind, world):
    shape = {"layers": 2, "dim": 256, "heads": 4, "seq_len": 64}
    there = Training.of(world, kind=kind, shape=shape)
    there.steps(0, 2)
    there.save(folder / "gpu", 2)
    here = Training.of(World(0, 0, 1, torch.device("cpu")), kind="ddp", shape=shape)
    assert here.load(folder / "gpu") == 2
    assert different(bits(there.engine), bits(here.engine)) == []

    here.steps(2, 3)
    here.save(folder / "cpu", 3)
    assert there.load(folder / "cpu") == 3
    assert different(bits(there.engine), bits(here.engine)) == []


class Averages:
    """Something of a user's that keeps a tensor on the device."""

    def __init__(self, device):
        self.mean = torch.zeros(4, device=device)

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


@pytest.mark.usefixtures("world")
def test_what_is_tracked_on_the_gpu_comes_back_there(folder, device):
    import hpctrain

    ends = []
    for total in (2, 3):
        with attempt(folder / "run"):
            run = hpctrain.init(settings_of())
            dice, averages = torch.Generator(device).manual_seed(3), Averages(device)
            run.track(averages=averages, dice=dice)
            for _ in run.steps(total=total):
                averages.mean += torch.rand(4, device=device, generator=dice)
            ends.append(averages.mean)
    dice = torch.Generator(device).manual_seed(3)
    drawn = [torch.rand(4, device=device, generator=dice) for _ in range(3)]
    assert ends[-1].device == device
    assert torch.equal(ends[-1], torch.zeros(4, device=device) + drawn[0] + drawn[1] + drawn[2])


@pytest.mark.usefixtures("world")
def test_loaders_hand_out_page_locked_batches(folder, note):
    import hpctrain

    with attempt(folder / "run"):
        run = hpctrain.init(settings_of())
        loader = run.loader(torch.arange(64), global_batch=8, workers=0)
        batch = next(iter(loader))
    assert sorted(batch.tolist()) == sorted(set(batch.tolist()))
    if note.on_gpu("pin_memory of run.loader"):
        assert batch.is_pinned()


class Samples:
    """A reader's share of a stream: numbers."""

    def __init__(self, reader: int, readers: int) -> None:
        self.left = range(reader, 64, readers)

    def __iter__(self) -> Any:
        while self.left:
            first, self.left = self.left[0], self.left[1:]
            yield torch.tensor(first)

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]


@pytest.mark.usefixtures("world")
def test_loaders_of_streams_hand_out_page_locked_batches(folder, note):
    import hpctrain

    with attempt(folder / "run"):
        run = hpctrain.init(settings_of())
        batch = next(iter(run.stream_loader(Samples, global_batch=8, workers=0)))
    assert batch.tolist() == list(range(8))
    if note.on_gpu("pin_memory of run.stream_loader"):
        assert batch.is_pinned()


@pytest.mark.parametrize("counts", [[48, 0, 80, 16], [0, 144, 0, 0]], ids=str)
def test_experts_in_one_call_compute_what_they_compute_one_by_one(monkeypatch, counts, world, note):
    torch.manual_seed(4)
    experts = Experts(64, 128, 4).to(world.device)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    tokens = torch.randn(sum(counts), 64, device=world.device, requires_grad=True)
    sizes, found = torch.tensor(counts, device=world.device), []
    for together in (True, False):
        if not together:
            monkeypatch.setattr(model, "can_group", lambda *_: False)
        with torch.autocast(world.device.type, torch.bfloat16):
            if together and note.on_gpu("experts in one call of torch"):
                is_new = TorchVersion(torch.__version__) >= "2.13"
                is_hopper = torch.cuda.get_device_capability() >= (9, 0)
                assert model.can_group(tokens, experts.gate) == (is_new and is_hopper)
            said = experts(tokens, sizes)
        inputs = (tokens, *experts.parameters())
        found.append((said, *torch.autograd.grad(said, inputs, torch.ones_like(said))))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)

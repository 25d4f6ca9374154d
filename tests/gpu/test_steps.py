"""Steps on the GPU: beside plain torch, against the GPU's peak, and against what `plan` says."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hpctrain.advise.strategy.facts import of_config
from hpctrain.advise.strategy.hardware import Accelerator
from hpctrain.advise.strategy.measure_child import builder
from hpctrain.advise.strategy.memory import Batch, Spread
from hpctrain.advise.strategy.strategies import Strategy
from hpctrain.advise.strategy.timing import Links, Traffic, step_time, work_of_step
from hpctrain.core.device import synchronize
from hpctrain.core.settings.schema import EngineSettings
from hpctrain.core.world import World
from hpctrain.ledger.history.progress import peak_flops
from hpctrain.recipes.lm.model import LM, LMConfig, flops_per_token, token_loss
from hpctrain.train.engines.engine import Microbatch
from hpctrain.train.engines.parallelize import parallelize
from tests.gpu.training import SMALL, attempt, settings_of
from tests.support import plan_cases

BILLION = {"layers": 20, "dim": 2048, "heads": 16, "seq_len": 2048}
"""1.0 B parameters."""
SEQUENCES, TURNS, CLIP = 4, 10, 1.0
STEP_GOAL, MEMORY_GOAL, TIME_GOAL = 1.01, 0.05, 0.25

COMBINATIONS = [
    (model, {**way, **again, "micro": 4, "seq": seq})
    for model, seq in (("llama-156M", 2048), ("gpt2-124M", 1024))
    for way in ({"kind": "single"}, {"kind": "ddp", "ranks": 1}, {"kind": "fsdp2", "ranks": 1})
    for again in ({}, {"recompute": True})
]
TIMED = [("llama-748M", {"kind": "single", "micro": micro, "seq": 2048}) for micro in (2, 4)]


TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 260,
}  # fmt: skip
"""For a rehearsal."""


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch):
    monkeypatch.setitem(plan_cases.MODELS, "tiny", TINY)
    yield
    gc.collect()


@pytest.mark.usefixtures("world")
def test_a_step_of_a_billion_parameters_costs_what_plain_torch_takes(folder, device, note):
    import hpctrain

    config = LMConfig(**(BILLION if note.is_cuda else SMALL))
    model = LM(config, seed=3)
    plain = plain_torch(copy.deepcopy(model).to(device))
    tokens = torch.randint(0, 257, (SEQUENCES, config.seq_len + 1), device=device)
    with attempt(folder / "run"):
        run = hpctrain.init(settings_of(engine__precision="bf16", engine__clip_norm=CLIP))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        engine = run.parallelize(model, optimizer)

        def ours() -> None:
            parts = [Microbatch(tokens[:, :-1], tokens[:, 1:])]
            engine.forward_backward(parts, lambda out, to: token_loss(out, to).sum() / to.numel())
            engine.step()

        took: dict[str, list[float]] = {"plain": [], "ours": []}
        for turn in range(2 + TURNS if note.is_cuda else 3):
            for name, act in {"plain": lambda: plain(tokens), "ours": ours}.items():
                seconds = timed(act, device)
                took[name] += [seconds] * (turn > 1)
    plain_s, ours_s = (statistics.median(took[name]) for name in ("plain", "ours"))
    note.at_most("step under run.parallelize", ours_s / plain_s, STEP_GOAL, "x plain torch")
    if note.on_gpu("step of 1 B parameters in bf16, and its MFU"):
        flops = flops_per_token(config) * SEQUENCES * config.seq_len
        peak = peak_flops(torch.cuda.get_device_name())
        assert peak, "the GPU's peak is not known"
        note.at_most("step of 1 B parameters", ours_s * 1e3, unit="ms")
        note.at_most("MFU", flops / ours_s / peak)


def plain_torch(model: torch.nn.Module) -> Any:
    """A step as torch's tutorials have it."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    kind = next(model.parameters()).device.type

    def step(tokens: torch.Tensor) -> tuple[float, float]:
        with torch.autocast(kind, dtype=torch.bfloat16):
            logits = wrapped(tokens[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm.item()

    return step


def timed(act: Any, device: torch.device) -> float:
    """Seconds until the device has done it."""
    synchronize(device)
    began = time.perf_counter()
    act()
    synchronize(device)
    return time.perf_counter() - began


def loss_of(out: Any, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(out.logits.float().flatten(0, 1), ids.flatten())


class Planned:
    """A combination of `plan` as it is trained: model, engine, batch."""

    def __init__(self, world: World, case: plan_cases.Case, *, small: bool) -> None:
        name, step = case
        self.case = ("tiny", {**step, "micro": 1, "seq": 16}) if small else (name, step)
        name, step = self.case
        with world.device:  # a CPU would take seconds to draw the weights
            model = builder(plan_cases.MODELS[name])().train()
        settings = EngineSettings(
            kind="fsdp2" if step["kind"] == "fsdp2" else "ddp",
            precision="bf16",
            activation_checkpointing="full" if step.get("recompute") else "no",
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        alone = World(0, 0, 1, world.device)
        here = alone if step["kind"] == "single" else world
        self._engine = parallelize(model, optimizer, settings, here)
        vocabulary = plan_cases.MODELS[name]["vocab_size"]
        shape = (step["micro"], step["seq"])
        self._ids = torch.randint(0, vocabulary, shape, device=world.device)

    def step(self) -> None:
        """One step."""
        self._engine.forward_backward([Microbatch(self._ids, self._ids)], loss_of)
        self._engine.step()


def is_again(case: plan_cases.Case) -> bool:
    """Return whether a rehearsal, which has one tiny model, has had such a step."""
    return case[0] != COMBINATIONS[0][0]


@pytest.mark.parametrize("case", COMBINATIONS, ids=plan_cases.title)
def test_plan_says_the_memory_of_a_step(case, world, note):
    if not note.on_gpu("plan's memory against torch.cuda.max_memory_allocated") and is_again(case):
        return
    gc.collect()
    before = torch.cuda.memory_allocated() if note.is_cuda else 0
    planned = Planned(world, case, small=not note.is_cuda)
    said = plan_cases.predicted(planned.case).nbytes
    planned.step()
    if note.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    planned.step()
    assert said > 0
    if note.is_cuda:
        peak = torch.cuda.max_memory_allocated() - before
        title = plan_cases.title(case)
        note.at_most(f"plan's memory, {title}", abs(said / peak - 1), MEMORY_GOAL, "off")


@pytest.mark.parametrize("case", TIMED, ids=plan_cases.title)
def test_plan_says_the_time_of_a_step(case, world, note):
    if not note.on_gpu("plan's step time") and case != TIMED[0]:
        return
    planned = Planned(world, case, small=not note.is_cuda)
    seconds = min(timed(planned.step, world.device) for _ in range(6 if note.is_cuda else 2))
    name, step = planned.case
    peak = peak_flops(torch.cuda.get_device_name()) if note.is_cuda else 1e12
    spread = Spread("single", low=2)
    way = Strategy("one", "one process", spread, data_ranks=1)
    work = work_of_step(
        of_config(plan_cases.MODELS[name], name), Batch(step["micro"], step["seq"], 1), way
    )
    gpu = Accelerator("it", 1, flops=peak)
    said = step_time(work, Traffic(0, 0), gpu, Links(None, None), spread)
    assert said.seconds
    title = plan_cases.title(case)
    off = abs(said.seconds / seconds - 1)
    note.at_most(f"plan's step time, {title}", off, TIME_GOAL, "off")

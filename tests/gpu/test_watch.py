"""What watches a training on the GPU: profiler, telemetry, and guards of steps that go wrong."""

from __future__ import annotations

import gc
import gzip
import json
import math
import pickle
import re

import pytest
import torch

from hpctrain.ledger.history.progress import rank_sample
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from hpctrain.observe.profile.trace import SNAPSHOT, TRACE, Kind, find
from hpctrain.observe.profile.verdict import examine
from hpctrain.train.engines.norm import LossScale
from tests.gpu.training import adamw, attempt, run_until, settings_of, share
from tests.support.ledger_runs import all_fields

LAST, BAD = 5, 2
ATTENTION = re.compile("flash|cudnn|fmha", re.IGNORECASE)
BUSY = {"layers": 8, "dim": 2048, "heads": 16, "seq_len": 1024}
"""A model with which a GPU has more to do than its host."""
MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def shape(is_cuda):
    return BUSY if is_cuda else {}


def test_a_profile_shows_kernels_memory_and_what_holds_training_up(folder, shape, note):
    settings = settings_of(
        profile__steps="3:4", profile__memory=True, engine__precision="bf16",
        checkpoint__interval_steps=1000,
    )  # fmt: skip
    run_until(folder / "run", LAST, settings, shape=shape)
    [profile] = find(RunDir(folder / "run").profile)
    report = examine(profile)
    files = profile.files[0]
    trace = json.loads(gzip.decompress(files[TRACE].read_bytes()))["traceEvents"]

    assert list(report.ranks[0].steps) == [3, 4]
    assert sum(report.ranks[0].shares.values()) == pytest.approx(1)
    if note.on_gpu("profiler: CUDA activities, memory history, verdict of a busy GPU"):
        kernels = [event["name"] for event in trace if event.get("cat") == "kernel"]
        assert report.ranks[0].device == "gpu"
        assert any(ATTENTION.search(name) for name in kernels), sorted(set(kernels))[:40]
        assert report.verdict.bound is Kind.COMPUTE, report.verdict
        note.at_least("share of kernels that compute", report.ranks[0].shares[Kind.COMPUTE], 0.5)
        snapshot = pickle.loads(files[SNAPSHOT].read_bytes())  # noqa: S301 - torch's, of just now
        assert snapshot["device_traces"]


def test_telemetry_tells_the_peak_that_torch_counts(folder, note):
    peaks = []
    run_until(
        folder / "run",
        LAST,
        settings_of(),
        at_end=lambda _run, engine: peaks.append(_peak(engine.world.device)),
    )
    lines = RunDir(folder / "run").rank_times(1).read_bytes().splitlines()
    sample = rank_sample(lines[-1], 1)
    assert sample.peak_bytes[0] > 0
    if note.on_gpu("telemetry: the allocator's peak in a run's samples"):
        told = sample.peak_bytes[0]
        note.at_most("telemetry's peak against torch's", abs(told / peaks[-1] - 1), 0.01)


def _peak(device):
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def spoilt(logits, targets):
    return share(logits, targets) * float("nan")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_step_that_is_not_finite_is_left_out_and_told(folder, kind, precision):
    scales = []
    losses, state, _ = run_until(
        folder / "run",
        LAST,
        settings_of(engine__kind=kind, engine__precision=precision),
        loss=lambda step: spoilt if step == BAD else share,
        at_end=lambda _run, engine: scales.append(engine.loss_scale and engine.loss_scale.scale),
    )
    facts = [all_fields(e) for e in ledger.read(RunDir(folder / "run"))]
    told = [fact for fact in facts if fact.get("step") == BAD + 1 and "transient" in fact]

    assert [math.isfinite(loss) for loss in losses] == [step != BAD for step in range(LAST)]
    assert all(tensor.isfinite().all() for tensor in state.values())
    if precision == "fp16":  # a scale that was too high looks the same, and is no news
        assert scales[-1] < LossScale().scale
    else:
        assert len(told) == 1


def test_guards_cost_no_memory_of_the_gpu(folder, note):
    peaks = {}
    for way, guards in {"off": "off", "on": "skip"}.items():
        settings = settings_of(
            engine__precision="bf16", guard__nonfinite=guards, guard__spike=guards,
            checkpoint__interval_steps=1000,
        )  # fmt: skip
        gc.collect()
        before = torch.cuda.memory_allocated() if note.is_cuda else 0
        if note.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        *_, peak = run_until(
            folder / way, LAST, settings, at_end=lambda _run, engine: _peak(engine.world.device)
        )
        peaks[way] = peak - before
    if note.on_gpu("peak memory of guards"):
        note.at_most("peak with guards, of one without", peaks["on"] / peaks["off"], 1.01)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_a_loop_of_ones_own_asks_run_guard(folder, device, precision):
    import hpctrain

    kept = []
    with attempt(folder / "run"):
        run = hpctrain.init(settings_of())
        model = torch.nn.Linear(64, 1).to(device)
        optimizer = adamw(model)
        is_scaled = precision is torch.float16
        scaler = torch.amp.GradScaler(device.type, init_scale=128.0, enabled=is_scaled)
        run.track(model=model, optimizer=optimizer, scaler=scaler)
        for step in run.steps(total=LAST):
            with torch.autocast(device.type, dtype=precision):
                loss = model(torch.ones(8, 64, device=device)).float().square().mean()
            scaler.scale(loss * float("nan") if step == BAD else loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            kept.append(run.guard(loss.item(), norm.item()))
            if kept[-1]:
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert kept == [step != BAD for step in range(LAST)]
    assert all(weight.isfinite().all() for weight in model.parameters())

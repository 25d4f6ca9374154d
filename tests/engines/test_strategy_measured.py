"""What `hpctrain plan` says of memory against what torch takes, byte by byte; no device needed."""

from __future__ import annotations

import sys

import pytest

from hpctrain.advise.strategy.facts import of_config
from hpctrain.advise.strategy.measure import ask
from hpctrain.errors import UsageError
from tests.support import plan_cases

MOST_S = 500.0
CLOSE, FAR = 0.05, 0.10


def _errors(cases, patience_s=MOST_S):
    """Predicted over measured, less 1, of each case."""
    peaks = plan_cases.measured(cases, patience_s)
    return {
        plan_cases.title(case): plan_cases.predicted(case).nbytes / peak - 1
        for case, peak in zip(cases, peaks, strict=True)
    }


@pytest.mark.timeout(600)  # 10 to 60 seconds alone
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(plan_cases.QUICK, id="quick"),
        pytest.param(plan_cases.MORE, id="more", marks=pytest.mark.soak),
    ],
)
def test_predicted_peaks_are_the_measured_ones(cases):
    errors = _errors(cases)

    assert {name: error for name, error in errors.items() if abs(error) > CLOSE} == {}


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_predicted_peak_is_near_the_measured_one():
    errors = _errors(plan_cases.ALL, patience_s=3400)

    close = sum(abs(error) <= CLOSE for error in errors.values())
    assert len(errors) >= 40
    assert close >= 0.9 * len(errors), errors
    assert {name: error for name, error in errors.items() if abs(error) > FAR} == {}


@pytest.mark.timeout(600)
def test_the_device_that_stands_in_has_what_a_cpu_has_but_what_rests_on_the_host():
    step = {**plan_cases.FSDP2, **plan_cases.SMALL}
    cases = [("llama-156M", step), ("llama-156M", {**step, "offload": True})]
    params = of_config(plan_cases.MODELS["llama-156M"], "llama").params

    kept, away = plan_cases.measured(cases, MOST_S)

    assert kept - away == pytest.approx(12 * params / 8, rel=0.02)


def test_parameters_are_counted_as_the_models_own_code_makes_them():
    names = [name for name in plan_cases.MODELS if name not in {"llama-7B", "llama-405B"}]
    each = [{"model": {"config": plan_cases.MODELS[name]}} for name in names]

    answers = ask({"model": {}, "each": each}, MOST_S)["each"]

    for name, said in zip(names, answers, strict=True):
        facts = of_config(plan_cases.MODELS[name], name)
        assert facts.params == said["params"], name
        assert {facts.block_params} == set(said["blocks"]), name


def test_the_tracker_counts_what_lives_and_forgets_what_is_gone():
    import torch

    from hpctrain.advise.strategy.stand_in_device import PeakTracker

    with PeakTracker() as tracker:
        kept = torch.zeros(1000)
        both = kept + torch.ones(1000)
        assert tracker.peak_bytes == 12_000
        assert tracker.live_bytes == 8_000
        view = both[:10]
        del both
        assert tracker.live_bytes == 8_000, "a view keeps its storage"
        del view
        tracker.restart()
        assert tracker.peak_bytes == tracker.live_bytes == 4_000
        kept.untyped_storage().resize_(0)
        assert tracker.live_bytes == 0
        kept.untyped_storage().resize_(8_000)
        assert tracker.peak_bytes == 8_000


def _sent(_state, bucket):
    """A bucket comes back as it was: the process group "fake" answers with nothing."""
    import torch

    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def test_what_stands_in_for_ddp_takes_what_ddp_takes():
    """The real one with real values, on a model that is small enough to be trained here."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from hpctrain.advise.strategy import measure_child
    from hpctrain.advise.strategy.stand_in_device import PeakTracker

    config = plan_cases.MODELS["gpt2-124M"] | {"n_layer": 2, "n_embd": 128, "n_head": 4}
    config |= {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
    build = measure_child.builder({"config": config})
    step = measure_child.Step("ddp", ranks=2, micro=2, seq=64)
    stood_in = measure_child.step(build, step, PeakTracker())

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        tracker = PeakTracker()
        with tracker:
            model = build()
            real = DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True)
            real.register_comm_hook(None, _sent)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
            for _ in range(3):  # DDP fills its buckets anew behind the first
                tracker.restart()
                measure_child._pass(real, step)
                passes = tracker.peak_bytes
                optimizer.step()
                optimizer.zero_grad()
    finally:
        dist.destroy_process_group()

    assert passes == pytest.approx(stood_in["passes"], rel=0.02)


def _module(folder, text):
    (folder / "own_model.py").write_text(text)


def test_a_strangers_module_is_built_on_no_device(tmp_path, monkeypatch):
    _module(
        tmp_path,
        "import torch\n"
        "def build():\n"
        "    assert torch.empty(0).device.type == 'meta'\n"
        "    print('chatter')\n"
        "    return torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 100))\n",
    )
    monkeypatch.chdir(tmp_path)

    said = ask({"model": {"callable": "own_model:build"}}, MOST_S)
    step = {"kind": "single", "micro": 2, "seq": 16}
    measured = ask({"model": {"callable": "own_model:build"}, "steps": [step]}, MOST_S)

    assert said["params"] == 100 * 8 + 8 * 100 + 100
    assert measured["steps"][0]["error"].startswith("AssertionError"), "made for a step, on a CPU"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('no\\nlicence')", "bad_one:build: RuntimeError: no licence"),
        ("build = 3", "bad_one:build is int, not a callable"),
        ("def build():\n    return 3", "it builds a int, not an nn.Module"),
        ("def build():\n    raise KeyError('size')", "KeyError: 'size'"),
    ],
)
def test_a_module_that_does_not_build_is_one_line(tmp_path, monkeypatch, text, message):
    from hpctrain.advise.strategy import measure_child

    (tmp_path / "bad_one.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bad_one", raising=False)

    with pytest.raises(measure_child.CannotBuild) as caught:
        measure_child.answer({"model": {"callable": "bad_one:build"}})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_module_that_ends_its_process_is_one_line(tmp_path, monkeypatch):
    _module(
        tmp_path,
        "import os, sys\nprint('licence server gone', file=sys.stderr, flush=True)\nos._exit(5)",
    )
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageError, match="the process that builds it ended: licence server gone"):
        ask({"model": {"callable": "own_model:build"}}, MOST_S)


def test_a_module_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    _module(tmp_path, "import threading\nthreading.Event().wait()")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageError, match="own_model:build: not built within 1 s"):
        ask({"model": {"callable": "own_model:build"}}, 1.0)

"""What `hpctrain plan` says of memory against what torch takes, byte by byte; no device needed."""

from __future__ import annotations

import sys

import pytest

from hpctrain.advise.strategy import measure
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
    answers = plan_cases.child([{"config": plan_cases.MODELS[name]} for name in names], MOST_S)

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
    build = measure_child.builder(config)
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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "warp"}, "transformers refuses the config: "),
        (plan_cases.MODELS["gpt2-124M"] | {"n_layer": "two"}, "transformers refuses the config: "),
    ],
)
def test_a_config_that_does_not_build_is_one_line(config, message):
    with pytest.raises(UsageError) as caught:
        ask(config, [], MOST_S)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_child_that_ends_or_takes_too_long_is_one_line(monkeypatch):
    def runs(program):
        monkeypatch.setattr(measure, "own_program", lambda *_: [sys.executable, "-c", program])

    runs("import sys; sys.exit('licence server gone')")
    with pytest.raises(UsageError, match="the process that builds the model ended: licence server"):
        ask({}, [], MOST_S)
    runs("import threading; threading.Event().wait()")
    with pytest.raises(UsageError, match="not built and measured within 1 s; give more with"):
        ask({}, [], 1.0)

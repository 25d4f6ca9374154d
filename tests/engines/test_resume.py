"""A resumed run on real ranks is bit-equal at the same world size, any engine to any other.

Two ranks are here in 16 bits, and in fp32 in `test_kill_during_save.py`.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import save_file

from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import Submitted
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.train.data.order import SampleOrder
from tests.support.gloo import launch
from tests.support.ledger_runs import all_fields
from tests.support.recipe import assert_same_bits, consumed, full_state, make_run, train

STEPS = 12


@pytest.mark.parametrize(("engine", "world_size"), [("ddp", 1), ("ddp", 3), ("fsdp2", 3)])
def test_a_stopped_and_resumed_run_ends_bit_equal(tmp_path, engine, world_size):
    quiet = make_run(tmp_path / "quiet", engine__kind=engine)
    disturbed = make_run(tmp_path / "disturbed", engine__kind=engine)

    train(quiet, world_size)
    train(disturbed, world_size, stop_at=3, victim=world_size - 1)
    train(disturbed, world_size, stop_at=7, victim=0)
    train(disturbed, world_size)

    restored = [all_fields(e)["step"] for e in ledger.read(disturbed) if e.kind == "restored"]
    assert restored[0] == 0
    assert 3 < restored[1] < restored[2] < STEPS  # it did stop, twice, and lost nothing
    assert_same_bits(full_state(quiet, STEPS), full_state(disturbed, STEPS))
    assert consumed(disturbed) == consumed(quiet)


CHANGES = [("ddp", 4, "fsdp2", 2), ("fsdp2", 4, "ddp", 3), ("fsdp2", 3, "fsdp2", 4)]


@pytest.mark.parametrize(("engine", "world_size", "to_engine", "to_world_size"), CHANGES)
def test_another_engine_and_world_size_restores_the_same_bits(
    tmp_path, engine, world_size, to_engine, to_world_size
):
    run = make_run(tmp_path / "run", engine__kind=engine, train__steps=2)
    train(run, world_size)
    saved = full_state(run, 2)
    _change(run, engine__kind=to_engine)

    restored = _restored_state(run, to_world_size)

    assert_same_bits(saved, restored)


def test_a_model_made_by_a_function_gets_no_values_but_the_checkpoints(tmp_path):
    run = make_run(tmp_path / "run", engine__kind="fsdp2", train__steps=2)
    train(run, 2)
    saved = full_state(run, 2)

    restored = _restored_state(run, 3, deferred=True)

    assert_same_bits(saved, restored)


def test_a_model_made_by_a_function_has_its_values_where_a_person_begins_anew(tmp_path):
    run = make_run(tmp_path / "run", engine__kind="fsdp2", train__steps=2)
    train(run, 2)
    ledger.append(run, Submitted(token="t", job_id="2", from_step=0))

    anew = _restored_state(run, 2, deferred=True, step=0)

    names = [name for name in anew if name.startswith("model.") and "norm" in name]
    assert names
    assert all((anew[name] == 1).all() for name in names)


def test_a_folders_weights_begin_a_run_and_are_not_asked_for_when_it_goes_on(tmp_path):
    run = make_run(tmp_path / "run", engine__kind="fsdp2", train__steps=2)
    weights = {name: torch.full_like(value, 0.5) for name, value in _lm().state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")

    begun = _restored_state(run, 2, deferred=True, step=0, pretrained=tmp_path)

    own = {name for name in begun if name.startswith("model.")}
    assert own == {f"model.{name}" for name in weights}
    assert all((begun[name] == 0.5).all() for name in own)
    train(run, 2)
    gone = _restored_state(run, 2, deferred=True, pretrained=tmp_path / "gone")
    assert_same_bits(gone, full_state(run, 2))


def test_every_sample_is_used_once_at_changing_world_sizes_and_engines(tmp_path):
    run = make_run(tmp_path / "run", train__global_batch=10)
    attempts = [("fsdp2", 4, 2), ("ddp", 3, 5), ("ddp", 1, 8), ("fsdp2", 2, None)]
    for engine, world_size, stop_at in attempts:
        _change(run, engine__kind=engine)
        train(run, world_size, stop_at=stop_at)

    manifest = ledger.read(run)
    size = _order_size(run)
    order = SampleOrder(size, 1234)
    expected = [order.index(position) for position in range(10 * STEPS)]
    done = consumed(run)
    assert manifest[-1].kind == "done"
    for step in range(STEPS):
        one = slice(10 * step, 10 * step + 10)
        assert sorted(done[one]) == sorted(expected[one])
    assert len(done) == len(expected)


def test_a_reshaped_run_stays_within_tolerance_of_the_undisturbed_one(tmp_path):
    quiet = make_run(tmp_path / "quiet", train__dropout=0.0)
    moved = make_run(tmp_path / "moved", train__dropout=0.0)
    train(quiet, 4)
    for world_size, stop_at in [(4, 3), (3, 7), (2, None)]:
        train(moved, world_size, stop_at=stop_at)

    ours, theirs = full_state(moved, STEPS), full_state(quiet, STEPS)

    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize(
    ("engine", "precision"),
    [
        ("ddp", "fp16"),
        ("fsdp2", "bf16"),
        pytest.param("ddp", "bf16", marks=pytest.mark.soak),
        pytest.param("fsdp2", "fp16", marks=pytest.mark.soak),
    ],
)
def test_mixed_precision_resumes_bit_equal(tmp_path, engine, precision):
    options = {
        "engine__kind": engine,
        "engine__precision": precision,
        "engine__activation_checkpointing": "full",
        "train__micro_batch": 6,
    }
    quiet = make_run(tmp_path / "quiet", **options)
    disturbed = make_run(tmp_path / "disturbed", **options)

    train(quiet, 2)
    train(disturbed, 2, stop_at=5, victim=1)
    train(disturbed, 2)

    assert_same_bits(full_state(quiet, STEPS), full_state(disturbed, STEPS))


@pytest.mark.parametrize("signum", [signal.SIGUSR2, signal.SIGTERM], ids=lambda s: s.name)
def test_a_signal_to_one_rank_between_two_exchanges_is_not_lost(tmp_path, signum):
    """Short steps exchange wishes every 0.25 s only; what comes in between must still be heard."""
    run = make_run(tmp_path / "run", train__steps=2000, run__log_every_s=5.0)

    train(run, 3, stop_at=40, victim=2, signum=signum)

    stopped = [all_fields(e)["step"] for e in ledger.read(run) if e.kind == "stopped"]
    assert len(stopped) == 1
    assert 40 < stopped[0] < 400


def _change(run, **changes):
    from hpctrain.core.settings.schema import replaced
    from hpctrain.core.settings.spec import load_spec

    spec = load_spec(run.spec)
    named = {name.replace("__", "."): value for name, value in changes.items()}
    spec.settings = replaced(spec.settings, named)
    spec.dump(run.spec)


def _order_size(run):
    from hpctrain.checkpoint.format.manifest import load

    return load(run.checkpoints / f"step-{STEPS:010d}" / "MANIFEST.json").data["size"]


def _restored_state(run, world_size, **options):
    """What every rank holds after the restore, before any step, as full tensors."""
    attempt = take_attempt(run, job_id="test", restarts=0)
    os.environ["HPCTRAIN_RUN_DIR"] = str(run.root)
    os.environ["HPCTRAIN_ATTEMPT"] = json.dumps(asdict(attempt))
    try:
        ranks = launch(_restore_rank, world_size, **options)
    finally:
        del os.environ["HPCTRAIN_RUN_DIR"], os.environ["HPCTRAIN_ATTEMPT"]
    for other in ranks[1:]:
        assert_same_bits(ranks[0], other)
    return ranks[0]


def _lm():
    from hpctrain.recipes.lm.model import LM, LMConfig

    return LM(LMConfig(layers=2, dim=16, heads=2, seq_len=16), seed=99)


def _restore_rank(*, deferred=False, step=2, pretrained=None):
    import hpctrain
    from hpctrain.train.engines import state
    from hpctrain.train.engines.deferred import DeferredModel

    run = hpctrain.init()
    if deferred:
        made = []
        value = DeferredModel.value
        DeferredModel.value = lambda self, name: made.append(name) or value(self, name)
        engine = run.parallelize(
            _lm, lambda model: torch.optim.AdamW(model.parameters(), lr=0.5), pretrained=pretrained
        )
        assert bool(made) == (step == 0 and pretrained is None)
    else:
        model = _lm()  # other weights than those that were saved
        engine = run.parallelize(model, torch.optim.AdamW(model.parameters(), lr=0.5))
    assert list(run.steps(total=step)) == []  # it only restores
    assert run.step == step
    live = state.collect(engine.model, engine.optimizer)
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in live.items()}

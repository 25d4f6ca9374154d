"""Copies that hide behind the next forward and backward pass: the bits of those made at once.

The copying thread is kept waiting, so that a copy is made while the next step computes or when the
optimizer is about to update; ranks hide tensors of any size.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from contextlib import ExitStack

import pytest

from hpctrain.checkpoint.store import find
from hpctrain.checkpoint.tensors import device_copy
from hpctrain.core.testing import faults
from hpctrain.ledger.run import events as ledger
from hpctrain.train.runtime import saves
from tests.support import gates, patience, zero
from tests.support.gates import Gate
from tests.support.gloo import launch
from tests.support.ledger_runs import all_fields
from tests.support.recipe import assert_same_bits, full_state, make_run, train

STEPS = 5
HELD_S = 0.2
EACH = {"train__steps": STEPS, "checkpoint__interval_steps": 1, "checkpoint__keep_last": STEPS}
ENGINES = {
    "ddp": (2, {}),
    "fsdp2": (2, {}),
    "zero1": (2, {}),
    "zero2": (2, {}),
    "zero3": (2, {}),
}
MORE = {
    "fsdp2 in bf16": (2, {"engine__precision": "bf16", "engine__kind": "fsdp2"}),
    "zero2 in bf16": (2, {"engine__precision": "bf16", "engine__kind": "zero2"}),
    "exact": (2, {"engine__exact": True, "engine__kind": "fsdp2"}),
    "tensor parallel": (4, {"engine__tp": "2", "engine__kind": "fsdp2"}),
    "pipeline": (4, {"engine__pp": "2", "engine__kind": "fsdp2"}),
    "recomputed": (2, {"engine__activation_checkpointing": "full", "engine__kind": "ddp"}),
}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(device_copy, "SMALL_BYTES", 1)


@pytest.fixture
def fault():
    """`fault(text)`: put a fault into all that this test starts."""
    with ExitStack() as stack:
        yield lambda text: stack.enter_context(faults.armed(text))


@pytest.fixture
def gate(tmp_path):
    with Gate(tmp_path / "gate") as gate:
        yield gate


def _open_where_training_waits(monkeypatch, gate, held_s=0.0):
    """Open the gate once training waits for the copies of a rank that is held there."""

    def opens(copies):
        def open_it():
            patience.until(lambda: copies._held_from is not None)
            if held_s:
                threading.Event().wait(held_s)
            gate.open()

        if gate.arrivals():
            threading.Thread(target=open_it, daemon=True).start()

    gates.before(monkeypatch, device_copy.CopyThread, "hold", opens)


def _events(run, kind):
    return [all_fields(event) for event in ledger.read(run) if event.kind == kind]


def _committed(run):
    return sorted(found.step for found in find.candidates(run) if found.problem is None)


def _run_of_recipe(folder, kind, **more):
    chosen = {"engine__kind": kind, "train__micro_batch": 4, **EACH}
    return make_run(folder / "run", **{**chosen, **more})


@pytest.mark.parametrize(
    "kind", [*ENGINES, *(pytest.param(name, marks=pytest.mark.soak) for name in MORE)]
)
def test_every_step_has_the_bits_of_a_save_that_training_waits_for(tmp_path, fault, kind):
    """Gradients of several microbatches are added up beside each copy."""
    zero.preload()
    ranks, settings = {**ENGINES, **MORE}[kind]
    at_once = _run_of_recipe(tmp_path / "at_once", kind, **settings, checkpoint__mode="sync")
    train(at_once, ranks)
    fault("delay:arena.behind,seconds=0.1")
    hidden = _run_of_recipe(tmp_path / "hidden", kind, **settings, checkpoint__overlap_copy=True)
    train(hidden, ranks)

    assert not _events(hidden, "save_failed")
    saved = _events(hidden, "saved")
    assert [data["step"] for data in saved] == list(range(1, STEPS + 1))
    assert all(data["stall_s"] <= data["seconds"] for data in saved)
    for step in range(1, STEPS + 1):
        assert_same_bits(full_state(at_once, step), full_state(hidden, step))


# ---- a program's own loop


def _own_loop(overlap_by, gate):
    """Batch norm's buffers, an average of the weights, two groups, two passes for each update."""
    import torch

    import hpctrain

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
    )
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1:].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    run = hpctrain.init()
    run.track(model=model, optimizer=optimizer, average=average)
    for step in run.steps(total=STEPS):
        if overlap_by is not None and step == overlap_by:
            _swap(model, average, gate)
        for half in range(2):
            torch.manual_seed(100 * step + half)
            model(torch.rand(12, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return [parameter.detach().clone() for parameter in model.parameters()]


def _swap(model, average, gate):
    """Validate with the averaged weights, as many programs do: put in through `.data`, and back.

    The copy is made meanwhile: it is held until the weights are exchanged.
    """
    kept = [parameter.data.clone() for parameter in model.parameters()]
    for parameter, other in zip(model.parameters(), average.module.parameters(), strict=True):
        parameter.data.copy_(other.data)
    gate.open()
    for thread in threading.enumerate():
        if thread.name == "hpctrain-copy":
            thread.join()
    for parameter, own in zip(model.parameters(), kept, strict=True):
        parameter.data.copy_(own)


def _train_own(run, monkeypatch, **given):
    monkeypatch.setenv("HPCTRAIN_RUN_DIR", str(run.root))
    return launch(_own_loop, 1, **{"overlap_by": None, "gate": None, **given})


@pytest.fixture(scope="module")
def own_at_once(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("own") / "run", **EACH, checkpoint__mode="sync")
    with pytest.MonkeyPatch.context() as patch:
        weights = _train_own(run, patch)
    return run, weights


def test_an_own_loop_with_buffers_and_an_average_saves_the_same_bits(
    tmp_path, fault, monkeypatch, own_at_once
):
    fault("delay:arena.behind,seconds=0.1")
    run = make_run(tmp_path / "run", **EACH, checkpoint__overlap_copy=True)
    (weights,) = _train_own(run, monkeypatch)

    (right,) = own_at_once[1]
    assert all(mine.equal(its) for mine, its in zip(weights, right, strict=True))
    assert _committed(run) == list(range(1, STEPS + 1))
    for step in _committed(run):
        assert_same_bits(full_state(own_at_once[0], step), full_state(run, step))


def test_weights_that_are_exchanged_while_they_are_copied_cost_that_save_and_the_hiding(
    tmp_path, fault, gate, *, monkeypatch, own_at_once, capfd
):
    fault(f"delay:arena.behind,seconds=0; hold:arena.behind,step=2,{gate.until}")
    run = make_run(tmp_path / "run", **EACH, checkpoint__overlap_copy=True)
    _train_own(run, monkeypatch, overlap_by=2, gate=gate)

    (failed,) = _events(run, "save_failed")
    assert failed["step"] == 2
    assert "checkpoint.overlap_copy = false" in failed["why"]
    assert _committed(run) == [1, 3, 4, 5]
    hidden = re.findall(r"delay:arena.behind.*step (\d)", capfd.readouterr().err)
    assert hidden == ["1", "2"]
    for step in _committed(run):
        assert_same_bits(full_state(own_at_once[0], step), full_state(run, step))


# ---- what comes in between


def test_what_training_waits_for_a_copy_counts_as_a_stall_and_not_as_a_step(
    tmp_path, fault, gate, monkeypatch
):
    fault(f"hold:arena.behind,step=2,{gate.until}")
    _open_where_training_waits(monkeypatch, gate, HELD_S)
    run = _run_of_recipe(tmp_path, "ddp", checkpoint__overlap_copy=True)
    train(run, 2)

    stalls = {data["step"]: data["stall_s"] for data in _events(run, "saved")}
    assert stalls[2] >= HELD_S
    steps = {data["last"]: data for data in _events(run, "steps")}
    before, after = steps[2], steps[3]
    assert after["save_s"] - before["save_s"] >= HELD_S


def test_a_rank_that_is_killed_while_it_copies_costs_the_step_and_the_next_start_goes_on(
    tmp_path, fault
):
    reference = _run_of_recipe(tmp_path / "reference", "fsdp2", checkpoint__mode="sync")
    train(reference, 2)
    fault(f"kill:arena.behind,step=3,rank=1,once={tmp_path / 'killed'}")
    run = _run_of_recipe(tmp_path / "run", "fsdp2", checkpoint__overlap_copy=True)
    train(run, 2, kill_at=10**6)
    assert max(_committed(run)) <= 2

    train(run, 2)
    assert STEPS in _committed(run)
    assert_same_bits(full_state(reference, STEPS), full_state(run, STEPS))


def test_a_stop_while_a_copy_is_made_saves_it_and_the_newest_step(
    tmp_path, fault, gate, monkeypatch
):
    fault(f"hold:arena.behind,step=2,{gate.until}")
    _open_where_training_waits(monkeypatch, gate)
    more = {"checkpoint__interval_steps": 2, "train__steps": 50}
    run = _run_of_recipe(tmp_path, "ddp", checkpoint__overlap_copy=True, **more)
    train(run, 2, stop_at=2, victim=1)

    stopped = _events(run, "stopped")[0]["step"]
    assert {2, stopped} <= set(_committed(run))
    assert not _events(run, "save_failed")


def test_a_program_that_leaves_its_loop_keeps_what_is_being_copied(
    tmp_path, fault, gate, monkeypatch
):
    fault(f"hold:arena.behind,{gate.until}")

    def waits(_saves):
        gate.wait()
        gate.open()

    gates.before(monkeypatch, saves.Saves, "settle", waits)
    run = make_run(tmp_path / "run", **EACH, checkpoint__overlap_copy=True)
    monkeypatch.setenv("HPCTRAIN_RUN_DIR", str(run.root))
    launch(_leave_early_and_spoil, 1)

    assert _committed(run) == [1]
    assert full_state(run, 1)["model.weight"].any()


def _leave_early_and_spoil():
    import torch

    import hpctrain

    run = hpctrain.init()
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(total=3):
        if step == 1:
            break
        optimizer.step()
    model.weight.data.zero_()


def test_ctrl_c_while_training_waits_for_a_copy_is_heard(tmp_path, fault, gate, monkeypatch):
    fault(f"hold:arena.behind,step=1,{gate.until}")
    run = make_run(tmp_path / "run", **EACH, checkpoint__overlap_copy=True)
    monkeypatch.setenv("HPCTRAIN_RUN_DIR", str(run.root))

    def interrupt(copies):
        def once_it_waits():
            patience.until(lambda: copies._held_from is not None)
            os.kill(os.getpid(), signal.SIGINT)

        if gate.arrivals():
            threading.Thread(target=once_it_waits).start()

    gates.before(monkeypatch, device_copy.CopyThread, "hold", interrupt)
    assert launch(_interrupted_in_hold, 1, gate=gate) == ["interrupted, and the copy is held"]


def _interrupted_in_hold(gate):
    import torch

    import hpctrain

    run = hpctrain.init()
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for step in run.steps(total=3):
        if step == 1:
            gate.wait()
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            assert not gate.path.exists()
            gate.open()
            return "interrupted, and the copy is held"
        optimizer.step()
    return None

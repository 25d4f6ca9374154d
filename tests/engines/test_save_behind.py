"""Saves behind training, in the shipped recipe on real ranks: what becomes of each.

Of two cases of a test one has ranks that agree by a control plane (`TREE`), as an agent's do.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time

import pytest

from hpctrain.checkpoint.store import find
from hpctrain.checkpoint.tensors import save as saver
from hpctrain.core.testing import faults
from hpctrain.ledger.run import events as ledger
from hpctrain.train.runtime import saves
from tests.support import small_disk as disks
from tests.support.gates import Gate, before
from tests.support.gloo import launch
from tests.support.ledger_runs import all_fields
from tests.support.recipe import assert_same_bits, full_state, make_run, train

small_disk = disks.small_disk
STEPS = 8
HELD_S = 0.2
TREE = {"tree": 2}
EACH = {"train__steps": STEPS, "checkpoint__interval_steps": 1, "checkpoint__keep_last": STEPS}


@pytest.fixture
def fault():
    """`fault(text)`: put a fault into all that this test starts."""
    with contextlib.ExitStack() as stack:
        yield lambda text: stack.enter_context(faults.armed(text))


@pytest.fixture
def gate(tmp_path):
    with Gate(tmp_path / "gate") as gate:
        yield gate


def _opens(gate):
    """What opens the gate where training waits for a save, once both writers stand there."""

    def opens(saves, *_):
        if saves.saver.in_flight:
            gate.wait(2)
            gate.open()

    return opens


def _events(run, kind):
    return [all_fields(event) for event in ledger.read(run) if event.kind == kind]


def _committed(run):
    return [found.step for found in find.candidates(run) if found.problem is None]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("undisturbed") / "run", **EACH, checkpoint__mode="sync")
    train(run, 2)
    return run


@pytest.mark.parametrize("ranks", [{}, TREE], ids=["gloo", "agents"])
def test_every_step_saved_behind_training_is_what_it_is_when_training_waits(
    tmp_path, undisturbed, ranks
):
    run = make_run(tmp_path / "run", **EACH)
    train(run, 2, **ranks)

    saved = _events(run, "saved")
    assert [data["step"] for data in saved] == list(range(1, STEPS + 1))
    assert [data["mode"] for data in saved] == ["async"] * (STEPS - 1) + ["sync"]
    assert all(data["stall_s"] <= data["seconds"] for data in saved)
    assert {data["mode"] for data in _events(undisturbed, "saved")} == {"sync"}
    for step in range(1, STEPS + 1):
        assert_same_bits(full_state(undisturbed, step), full_state(run, step))


def test_a_save_that_is_due_while_one_is_written_waits_and_says_how_long(
    tmp_path, fault, gate, monkeypatch
):
    """The bounds are what a clock beside it has measured."""
    fault(f"hold:shard.flush,step=2,{gate.until}")
    due, landed, begun = {}, {}, {}
    real = saves.Saves._land

    def land(self):
        before = time.monotonic()
        if max(due) == 3:
            gate.wait(2)
            threading.Timer(HELD_S, gate.open).start()
        ended = real(self)
        landed.setdefault(max(due), time.monotonic() - before)
        return ended

    def begin(_self, _state, manifest, **_):
        begun[manifest.step] = time.monotonic() - due[manifest.step]
        (tmp_path / os.environ["RANK"]).write_text(json.dumps([landed, begun]))

    def is_due(_self, _saver, step, _snapshot):
        due[step] = time.monotonic()

    monkeypatch.setattr(saves.Saves, "_land", land)
    before(monkeypatch, saves.Saves, "_behind", is_due)
    before(monkeypatch, saver.Saver, "begin", begin)
    run = make_run(tmp_path / "run", **EACH)
    train(run, 2)

    assert _committed(run) == list(range(STEPS, 0, -1))
    waited = {data["step"]: data["waited_s"] for data in _events(run, "saved")}
    landed, begun = json.loads((tmp_path / "0").read_text())
    assert waited[3] >= HELD_S
    for step in range(2, STEPS):
        assert round(landed[f"{step}"], 3) <= waited[step] <= round(begun[f"{step}"], 3)


def test_a_save_that_is_written_as_the_first_step_ends_keeps_its_memory_and_its_process(
    tmp_path, fault, gate, monkeypatch, undisturbed
):
    """An attempt from copies in memory begins with a save of their step, if that one was due."""
    fault(f"hold:shard.flush,step=1,{gate.until}")
    real = saves.Saves.warm_up

    def warm_up(self, snapshot):
        self.periodic(1, snapshot)
        gate.wait(2)
        real(self, snapshot)
        gate.open()

    monkeypatch.setattr(saves.Saves, "warm_up", warm_up)
    run = make_run(tmp_path / "run", **EACH)
    train(run, 2)

    assert _committed(run) == list(range(STEPS, 0, -1))
    assert_same_bits(full_state(undisturbed, 1), full_state(run, 1))


def test_a_writer_that_dies_costs_its_save_only(tmp_path, fault, undisturbed):
    fault(
        f"kill:shard.write,step=3,rank=0,once={tmp_path / 'of_0'};"
        f"kill:shard.write,step=6,rank=1,once={tmp_path / 'of_1'}"
    )
    run = make_run(tmp_path / "run", **EACH)
    train(run, 2)

    failed = _events(run, "save_failed")
    assert [data["step"] for data in failed] == [3, 6]
    assert all("SIGKILL" in data["why"] for data in failed)
    assert _committed(run) == [step for step in range(STEPS, 0, -1) if step not in {3, 6}]
    assert not find.staged(run)
    assert_same_bits(full_state(undisturbed, STEPS), full_state(run, STEPS))


def test_without_memory_for_the_copy_on_one_rank_all_ranks_save_while_training_waits(
    tmp_path, monkeypatch
):
    from hpctrain.checkpoint.tensors import arena

    real = arena.Arena.ensure

    def ensure(self, nbytes):
        if os.environ.get("RANK") == "1" and nbytes > 0:
            raise arena.CheckpointError("there is no memory")
        real(self, nbytes)

    monkeypatch.setattr(arena.Arena, "ensure", ensure)
    run = make_run(tmp_path / "run", **EACH)
    train(run, 2, stop_at=4, victim=0)
    train(run, 2)  # a resume reads into the same memory, and must do without as well

    assert set(_committed(run)) == set(range(1, STEPS + 1))
    assert {data["mode"] for data in _events(run, "saved")} == {"sync"}
    assert [data["why"] for data in _events(run, "save_mode")] == ["there is no memory"] * 2


def test_a_rank_that_cannot_copy_fails_the_save_on_all_ranks(tmp_path, fault):
    fault("fail:arena.copy,step=3,rank=1,error=ENOMEM")
    run = make_run(tmp_path / "run", **EACH)
    train(run, 2)

    (failed,) = _events(run, "save_failed")
    assert failed["step"] == 3
    assert "rank 1" in failed["why"]
    assert _committed(run) == [step for step in range(STEPS, 0, -1) if step != 3]


ERRORS = {2: "ENOSPC", 4: "EDQUOT", 6: "EIO"}
"""What goes wrong with the saves of these steps."""


@pytest.mark.parametrize(("mode", "ranks"), [("async", TREE), ("sync", {})])
def test_an_error_of_one_ranks_disk_fails_the_save_on_all_and_frees_what_was_staged(
    tmp_path, fault, mode, ranks
):
    errors = ERRORS.items()
    fault(";".join(f"fail:shard.write,step={step},rank=1,error={e}" for step, e in errors))
    run = make_run(tmp_path / "run", **EACH, checkpoint__mode=mode)
    train(run, 2, **ranks)

    failed = _events(run, "save_failed")
    assert [data["step"] for data in failed] == list(ERRORS)
    for data in failed:
        assert "rank 1" in data["why"]
    assert _committed(run) == [step for step in range(STEPS, 0, -1) if step not in ERRORS]
    assert not find.staged(run)


@pytest.mark.parametrize(("mode", "ranks"), [("async", {}), ("sync", TREE)])
def test_a_full_disk_costs_saves_and_not_the_training(small_disk, mode, ranks):
    disk = small_disk(800 << 10)
    run = make_run(disk / "run", **EACH, checkpoint__mode=mode, checkpoint__patience_s=0)
    with pytest.raises(AssertionError, match=r"step 8 was not saved: .* free"):
        train(run, 2, **ranks)  # the last save is no periodic one: the run needs it to be done

    kept = _committed(run)
    failed = [data["step"] for data in _events(run, "save_failed")]
    assert kept
    assert failed
    assert sorted(kept + failed) == list(range(1, STEPS))
    assert not find.staged(run)
    for step in kept[1:]:
        shutil.rmtree(find.step_path(run, step))
    with contextlib.suppress(AssertionError):
        train(run, 2)
    assert _events(run, "restored")[-1]["step"] == kept[0]


@pytest.mark.parametrize(("stop_at", "ranks"), [(None, {}), (4, TREE)])
def test_the_last_save_before_leaving_is_tried_again(tmp_path, fault, stop_at, ranks):
    """After it there is no other, and a file system that is away for a moment comes back."""
    fault("fail:shard.write,rank=1,error=ESTALE,hit=1")
    steps = STEPS if stop_at is None else 100  # by leases a stop comes some short steps later
    run = make_run(tmp_path / "run", train__steps=steps, checkpoint__interval_steps=100)
    train(run, 2, stop_at=stop_at, victim=1, **ranks)

    end = _events(run, "done" if stop_at is None else "stopped")[-1]["step"]
    (failed,) = _events(run, "save_failed")
    assert failed["step"] == end
    assert "Stale file handle" in failed["why"]
    assert failed["why"].endswith("; tried again")
    assert _committed(run) == [end]


def test_the_last_save_is_tried_again_only_while_there_is_time(tmp_path, fault, monkeypatch):
    fault("fail:shard.write,rank=1,error=EIO")
    monkeypatch.setenv("HPCTRAIN_KILL_WAIT_S", "7")
    seldom = {"train__steps": 60, "checkpoint__interval_steps": 100}
    run = make_run(tmp_path / "run", **seldom, checkpoint__patience_s=300)
    train(run, 2, stop_at=4, victim=1)

    assert _events(run, "stopped")
    assert not _committed(run)
    assert not _events(run, "save_failed")[-1]["why"].endswith("; tried again")


def test_a_stop_while_a_save_is_written_finishes_it_and_saves_the_newest_step(
    tmp_path, fault, gate, monkeypatch
):
    fault(f"hold:shard.flush,step=2,{gate.until}")
    for waits in ("_behind", "final"):  # a save at 4 may be due before the ranks have agreed
        before(monkeypatch, saves.Saves, waits, _opens(gate))
    sets = {
        **EACH,
        "train__steps": 100,
        "checkpoint__interval_steps": 2,
        "checkpoint__keep_last": 60,
    }
    run = make_run(tmp_path / "run", **sets)
    train(run, 2, stop_at=2, victim=1, **TREE)

    stopped = _events(run, "stopped")[0]["step"]
    assert {2, stopped} <= set(_committed(run))


def test_a_stop_with_no_time_for_a_new_save_leaves_with_the_one_in_flight(
    tmp_path, fault, monkeypatch
):
    fault("delay:shard.flush,seconds=2")
    monkeypatch.setenv("HPCTRAIN_KILL_WAIT_S", "4")
    run = make_run(tmp_path / "run", **{**EACH, "checkpoint__interval_steps": 2})
    train(run, 2, stop_at=4, victim=1)

    stopped = _events(run, "stopped")[0]["step"]
    assert stopped > 4
    assert _committed(run)[0] == 4
    (skipped,) = _events(run, "save_skipped")
    assert skipped["step"] == stopped


def test_a_model_that_is_not_the_one_that_is_trained_is_noticed(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", **EACH)
    monkeypatch.setenv("HPCTRAIN_RUN_DIR", str(run.root))
    launch(_track_a_model_that_nobody_trains, 1)

    same = {data["step"]: bool(data.get("same_as_before")) for data in _events(run, "saved")}
    assert same == {1: False, 2: True, 3: True}


def test_a_background_save_that_hangs_does_not_cost_the_save_at_the_stop(
    tmp_path, fault, monkeypatch
):
    fault("stop:shard.flush,rank=1,step=4")  # the writer process stands still
    monkeypatch.setenv("HPCTRAIN_KILL_WAIT_S", "12")
    run = make_run(tmp_path / "run", train__steps=200, checkpoint__interval_steps=2)
    train(run, 2, stop_at=4, victim=1, **TREE)

    stopped = _events(run, "stopped")[0]["step"]
    assert 4 < stopped < 200
    assert _committed(run)[0] == stopped
    assert [data["step"] for data in _events(run, "save_failed")] == [4]


@pytest.mark.parametrize("ranks", [TREE, {}], ids=["leases", "gloo"])
def test_a_stop_is_heard_while_the_next_save_waits_for_one_that_hangs(
    tmp_path, fault, monkeypatch, ranks
):
    """A save that is due before the stop's step would wait until the processes are killed."""
    fault("stop:shard.flush,rank=1,step=2")
    monkeypatch.setenv("HPCTRAIN_KILL_WAIT_S", "8")
    monkeypatch.setattr(saves.Saves, "_behind", _told_to_stop_where_it_waits(saves.Saves._behind))
    run = make_run(tmp_path / "run", train__steps=200, checkpoint__interval_steps=2)
    train(run, 2, **ranks)

    stopped = _events(run, "stopped")[0]["step"]
    assert 4 < stopped < 200
    assert _committed(run) == [stopped]
    assert [data["step"] for data in _events(run, "save_failed")] == [2]
    (skipped,) = _events(run, "save_skipped")
    assert (skipped["step"], skipped["why"]) == (4, "a stop is near, and step 2 could not be saved")


def _told_to_stop_where_it_waits(real):
    def behind(self, saver, step, snapshot):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        real(self, saver, step, snapshot)

    return behind


def test_a_program_that_leaves_its_loop_early_keeps_the_save_in_flight(
    tmp_path, fault, gate, monkeypatch
):
    fault(f"hold:shard.flush,{gate.until}")
    before(monkeypatch, saves.Saves, "settle", _opens(gate))
    run = make_run(tmp_path / "run", **EACH)
    monkeypatch.setenv("HPCTRAIN_RUN_DIR", str(run.root))
    launch(_leave_early, 2)

    assert _committed(run) == [1]


def _leave_early():
    import torch

    import hpctrain

    run = hpctrain.init()
    run.track(model=torch.nn.Linear(3, 3))
    for step in run.steps(total=3):
        if step == 1:
            break


def _track_a_model_that_nobody_trains():
    import torch

    import hpctrain

    run = hpctrain.init()
    run.track(model=torch.nn.Linear(3, 3))
    list(run.steps(total=3))

"""`hpctrain train --parity`: engines that train as one process does pass, broken ones do not."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile

import pytest

from hpctrain.cli.main import main
from hpctrain.engines.native import Native
from hpctrain.plan.parity import GradientSums, StepRecord, compare, summary
from hpctrain.recipes.lm import parity
from tests.support.gloo import preload

TINY = {
    "train.global_batch": 12,
    "train.seq_len": 16,
    "train.layers": 2,
    "train.dim": 16,
    "train.heads": 2,
    "train.data_limit_mb": 0.2,
    "train.dropout": 0.1,
}
VICTIM = "blocks.1.mlp_norm.weight"


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path, monkeypatch):
    preload()
    (tmp_path / "work").mkdir()
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))


def train(*flags):
    sets = [f"--set={name}={value}" for name, value in TINY.items()]
    return main(["train", *sets, *flags])


def on_every_rank(monkeypatch, broken):
    """Have each rank of the engine call `broken(engine)` instead of its own step."""
    real = Native.step

    def step(engine):
        if engine.world.is_distributed:
            broken(engine)
        return real(engine)

    monkeypatch.setattr(Native, "step", step)


def parameter(engine):
    return next(value for name, value in engine.model.named_parameters() if name.endswith(VICTIM))


# ---- what holds


def test_an_engine_that_trains_as_one_process_does_passes_and_leaves_nothing(tmp_path, capfd):
    code = train("--parity", "2", "--engine", "fsdp2", "--mesh", "tp=2", "--ranks", "4")

    out, err = capfd.readouterr()
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "engine fsdp2 on 4 ranks (dp_shard 2, tp 2) against one process"
    assert [line.split()[0] for line in lines[1:4]] == ["step", "1", "2"]
    assert lines[-1].startswith("parity holds: largest difference of a loss ")
    assert "train.dropout has no effect on --parity" in err
    assert list((tmp_path / "work").iterdir()) == []
    assert list((tmp_path / "scratch").iterdir()) == []


def test_what_programs_read_is_one_json_object(capfd):
    assert train("--parity", "2", "--json", "--set=train.micro_batch=2") == 0

    told = json.loads(capfd.readouterr().out)
    assert (told["engine"], told["ranks"], told["holds"]) == ("ddp", 2, True)
    assert [step["step"] for step in told["steps"]] == [1, 2]
    assert told["largest_difference"] < told["tolerance"] == 1e-4


# ---- what does not


def test_a_parameter_without_a_gradient_is_named(monkeypatch, capfd):
    def drop(engine):
        parameter(engine).grad = None

    on_every_rank(monkeypatch, drop)

    code = train("--parity", "2", "--engine", "fsdp2")

    assert code == 3
    said = capfd.readouterr().err
    assert f"parity does not hold: without a gradient: {VICTIM}; " in said


def test_a_gradient_that_only_one_rank_has_wrong_is_named(monkeypatch, capfd):
    def bend(engine):
        if engine.world.rank == 1:
            parameter(engine).grad *= 1.05

    on_every_rank(monkeypatch, bend)

    code = train("--parity", "1", "--json", "--engine", "fsdp2")

    assert code == 3
    told = json.loads(capfd.readouterr().out)
    assert list(told["different_gradients"]) == [VICTIM]
    assert 1e-2 < told["different_gradients"][VICTIM] < 5e-2


def test_an_engine_that_sees_other_samples_leaves_the_tolerance(monkeypatch, capfd):
    real = parity.make_batches

    def other(tokens, train, engine):
        batches = real(tokens, train, engine)
        if engine.world.is_distributed:
            batches.consumed = train.global_batch
        return batches

    monkeypatch.setattr(parity, "make_batches", other)

    assert train("--parity", "1") == 3

    assert "out of tolerance from step 1 on" in capfd.readouterr().err


def test_a_failing_ranks_error_is_one_line_and_the_others_are_ended(monkeypatch, capfd):
    def fail(engine):
        if engine.world.rank == 1:
            raise RuntimeError("out of luck\nand more")

    on_every_rank(monkeypatch, fail)  # rank 0 goes on into a collective, and would wait

    assert train("--parity", "1") == 1

    assert capfd.readouterr().err.splitlines()[-1] == (
        "hpctrain: error: rank 1 failed: RuntimeError: out of luck"
    )


def test_a_rank_that_is_killed_is_told(monkeypatch, capfd):
    def die(engine):
        if engine.world.rank == 0:
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    on_every_rank(monkeypatch, die)

    assert train("--parity", "1") == 1

    assert "rank 0 ended with SIGKILL; it printed last: last words" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "2"], "--ranks goes with --parity only"),
        (["--parity", "1", "--name", "none"], "there is no run none"),
        (["--parity", "1", "--engine", "fsdp2", "--mesh", "tp=4"], "does not divide train.heads 2"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(flags, message, capfd):
    assert train(*flags) in {2, 4}

    assert message in capfd.readouterr().err


# ---- ranks end with the command

WAITING = """
import os, signal, sys
from hpctrain.recipes.local_ranks import run_ranks

signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist's workers ignore it

def wait():
    os.write({fd}, b"x")
    signal.pause()

run_ranks(wait, 2)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_no_rank_outlives_the_command(signum):
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", WAITING.format(fd=writing)],
        pass_fds=[writing],
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    ) as command:
        os.close(writing)
        assert os.read(reading, 1) + os.read(reading, 1) == b"xx"

        if signum == signal.SIGINT:
            os.killpg(command.pid, signum)
        else:
            command.kill()

        assert os.read(reading, 1) == b""  # the end of file: nobody holds the other end any more
    os.close(reading)


# ---- the result by itself

ONE = [StepRecord(4.0, 1.0), StepRecord(3.0, 1.0)]
SAME = {"a": GradientSums(1.0, 1.0, 0.0)}


@pytest.mark.parametrize(
    ("engine", "gradients", "said"),
    [
        ([StepRecord(4.0, 1.0), StepRecord(3.00029, 1.0)], SAME, "loss 9.7e-05, within 0.0001"),
        ([StepRecord(4.0, 1.0), StepRecord(3.0004, 1.0)], SAME, "out of tolerance from step 2 on"),
        ([StepRecord(4.0, 1.002), StepRecord(3.0, 1.0)], SAME, "out of tolerance from step 1 on"),
        ([StepRecord(math.nan, 1.0), StepRecord(3.0, 1.0)], SAME, "difference of a loss nan"),
        (ONE, {"a": GradientSums(0.0, 1.0, 1.0)}, "without a gradient: a;"),
        (ONE, {"a": GradientSums(1.0, 1.0, 4e-6)}, "another gradient: a (2.0e-03);"),
        (ONE, {"a": GradientSums(1.0, 0.0, 1.0)}, "another gradient: a (inf);"),
        (ONE, {"a": GradientSums(0.0, 0.0, 0.0)}, "parity holds"),
        (ONE, {f"w{i}": GradientSums(0.0, 1.0, 1.0) for i in range(7)}, "w4 and 2 more;"),
    ],
    ids=["near", "a loss", "a norm", "no number", "no gradient", "other", "from nothing", "none",
         "many"],
)  # fmt: skip
def test_the_verdict_says_what_is_off(engine, gradients, said):
    result = compare(ONE, engine, gradients, 1e-4)

    assert said in summary(result)
    assert result.holds is summary(result).startswith("parity holds: ")
    json.dumps(result.as_dict(), allow_nan=False)


def test_a_step_that_both_leave_out_for_an_overflow_is_none():
    overflow = [StepRecord(4.0, math.inf), StepRecord(3.0, 1.0)]
    assert compare(overflow, overflow, SAME, 2e-2).holds
    assert not compare(ONE, overflow, SAME, 2e-2).holds

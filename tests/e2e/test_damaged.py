"""The newest checkpoint torn in six ways: never loaded; the next one is, and the reason told."""

from __future__ import annotations

import shutil

import pytest

from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, STAGED, aside_name
from hpctrain.checkpoint.store import find
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from tests.support.checkpoints import flip_bit
from tests.support.ledger_runs import all_fields
from tests.support.recipe import assert_same_bits, full_state, make_run, train
from tests.support.scenario import cli

STEPS = 16
EVERY = 4


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Two ranks, with checkpoints of steps 4 and 8 and of the step at which they were stopped."""
    root = tmp_path_factory.mktemp("stopped") / "run"
    slow_enough_to_stop_at_once = {"train__step_delay_s": 0.12}
    run = make_run(
        root,
        train__steps=STEPS,
        checkpoint__interval_steps=EVERY,
        **slow_enough_to_stop_at_once,
    )
    train(run, 2, stop_at=9)
    assert find.steps(run)[1:] == [8, 4]
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("undisturbed") / "run", train__steps=STEPS)
    train(run, 2)
    return run


@pytest.fixture
def run(stopped, tmp_path):
    """A copy of it, to be damaged."""
    shutil.copytree(stopped.root, tmp_path / "runs" / "run")
    return RunDir(tmp_path / "runs" / "run")


def newest_of(run):
    return find.step_path(run, find.steps(run)[0])


def shard(newest):
    return newest / "shard-00001.safetensors"


def truncate_shard(newest):
    shard(newest).write_bytes(shard(newest).read_bytes()[:-100])


def remove_shard(newest):
    shard(newest).unlink()


def flip_one_bit(newest):
    flip_bit(shard(newest), 8 * (shard(newest).stat().st_size // 2))


def remove_manifest(newest):
    (newest / MANIFEST_NAME).unlink()


def cut_manifest(newest):
    text = (newest / MANIFEST_NAME).read_text()
    (newest / MANIFEST_NAME).write_text(text[: len(text) // 2])


def leave_it_staged(newest):
    step = int(newest.name.removeprefix("step-"))
    newest.rename(newest.with_name(aside_name(step, STAGED, 1)))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate_shard, "shard shard-00001.safetensors is "),
        (remove_shard, "shard shard-00001.safetensors is missing"),
        (flip_one_bit, "shard-00001.safetensors: "),
        (remove_manifest, "manifest is missing"),
        (cut_manifest, "manifest is cut"),
        (leave_it_staged, "staged by attempt 1, never committed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_torn_checkpoint_is_passed_over_and_the_reason_is_shown(
    run, tmp_path, undisturbed, damage, reason
):
    name = newest_of(run).name
    damage(newest_of(run))

    plan = cli(None, tmp_path, "resume", "run", "--dry-run")
    train(run, 2)
    status = cli(None, tmp_path, "status", "run")

    assert plan.returncode == status.returncode == 0, plan.stderr + status.stderr
    if damage is not flip_one_bit:  # bits are read at the restore, not on the login node
        line = next(line for line in plan.stdout.splitlines() if "skips" in line)
        assert name in line
        assert reason in line
        assert "takes step-0000000008" in plan.stdout
    restored = [all_fields(e) for e in ledger.read(run) if e.kind == "restored"][-1]
    assert (restored["step"], restored["checkpoint"]) == (8, "step-0000000008")
    (skipped,) = restored["skipped"]
    assert skipped["name"].startswith(name)
    assert reason in skipped["reason"]
    assert reason in " ".join(status.stdout.split())
    assert_same_bits(full_state(undisturbed, STEPS), full_state(run, STEPS))

"""The documented example of an own loop: stopped and started again, it ends with the same bits."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import runpy
import signal
from pathlib import Path

from hpctrain.checkpoint.store import find
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.results import read_results
from tests.support.gloo import launch, preload
from tests.support.ledger_runs import all_fields
from tests.support.recipe import assert_same_bits, full_state

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
EVALUATION = EXAMPLE.with_name("evaluate.py")
STEPS = 200
STOP_AT = 50


def start(run, stop_at=None):
    """The example as a program of its own, forked as ranks are."""
    preload()
    fork = multiprocessing.get_context("fork")
    program = fork.Process(target=_program, args=(run, stop_at))
    program.start()
    program.join(120)
    code = program.exitcode
    program.kill()
    assert code == 0


def _program(run, stop_at):
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = itertools.count(1)

    def stop(*_):
        if next(steps) == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    os.environ["HPCTRAIN_RUN_DIR"] = str(run.root)
    register_optimizer_step_post_hook(stop)
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_the_example_stopped_on_its_way_ends_bit_equal_to_one_left_in_peace(tmp_path):
    peace, stopped = RunDir(tmp_path / "peace"), RunDir(tmp_path / "stopped")
    for run in (peace, stopped):
        run.root.mkdir()

    start(peace)
    start(stopped, stop_at=STOP_AT)
    start(stopped)

    steps = [all_fields(e)["step"] for e in ledger.read(stopped) if e.kind in {"stopped", "done"}]
    assert STOP_AT <= steps[0] < STEPS == steps[1]
    assert_same_bits(full_state(peace, STEPS), full_state(stopped, STEPS))
    assert 0 < evaluated(stopped, stopped.root / "results.json")["mean"] < 0.1


def evaluated(run, results):
    """What the example of an evaluation reports of the last checkpoint, on two ranks."""
    launch(_evaluation, 2, checkpoint=find.step_path(run, STEPS), results=results)
    return read_results(results).metrics


def _evaluation(checkpoint, results):
    os.environ |= {"HPCTRAIN_CHECKPOINT": str(checkpoint), "HPCTRAIN_RESULTS": str(results)}
    runpy.run_path(str(EVALUATION), run_name="__main__")

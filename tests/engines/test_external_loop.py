"""A program with a loop of its own says where it is: it stops, goes on and is done like others."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest
import torch

from hpctrain.errors import UsageError
from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.progress import progress
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.attempt_files import read_heartbeat
from hpctrain.ledger.run.event_types import StepsDone
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.ledger.run.layout import RunDir
from hpctrain.train.runtime.own_loop import earlier_save_s
from tests.support import local_runs
from tests.support.gloo import launch

SCRIPT = str(local_runs.SCRIPTS / "own_steps.py")
STEPS, PREEMPTED_AT = 200, 5
SAVE_S = 0.3


@pytest.mark.parametrize("words", [[], ["--returns", "--tells-after"]], ids=["leave", "returns"])
def test_a_preempted_program_with_its_own_loop_loses_no_step(tmp_path, words):
    words = [str(STEPS), "--preempted-at", str(PREEMPTED_AT), *words]
    folder = local_runs.start(tmp_path, "r", 1, 2, "--", SCRIPT, *words)
    last = local_runs.await_end(folder, 2)

    run = RunDir(folder)
    history = RunHistory.read(run)
    first, second = attempts(history)
    stopped = first.last_step
    assert PREEMPTED_AT <= stopped < STEPS
    assert [int(line) for line in (tmp_path / "steps.txt").read_text().split()] == list(
        range(1, STEPS + 1)
    )
    assert (first.reason, second.reason, last["next"]) == ("preempted", "completed", "stop")
    assert first.stop_cause == "sigterm"
    assert (first.first_step, second.first_step, second.last_step) == (0, stopped, STEPS)
    assert (first.steps_lost, second.steps_lost) == (0, 0)
    assert progress(history).loss == pytest.approx(1 / STEPS)
    marks = [event.fact for event in ledger.read(run) if isinstance(event.fact, StepsDone)]
    assert sum(mark.tokens for mark in marks) == 100 * STEPS
    assert not list(run.checkpoints.glob("*"))
    status = local_runs.hpctrain(tmp_path, "status", "r")
    assert f"{STEPS}" in status


def _program(tell, root, *, log_every_s=0.0):
    """A single rank of a run in a folder, without an agent that looks after it."""
    import hpctrain
    from hpctrain.core.settings.schema import RunSettings, Settings

    run_dir = RunDir(root)
    run_dir.root.mkdir(parents=True, exist_ok=True)
    attempt = take_attempt(run_dir, job_id="test", restarts=0)
    run_dir.attempt(attempt.number).mkdir(parents=True)
    os.environ["HPCTRAIN_RUN_DIR"] = str(root)
    os.environ["HPCTRAIN_ATTEMPT"] = json.dumps(asdict(attempt))
    return tell(hpctrain.init(Settings(run=RunSettings(log_every_s=log_every_s))))


def told(tell, tmp_path, **more):
    """What a program said in one start, and what the ledger has of it."""
    root = tmp_path / "run"
    [answer] = launch(_program, 1, tell=tell, root=root, **more)
    return answer, [event.fact for event in ledger.read(RunDir(root))]


def marks_of(facts):
    return [(fact.first, fact.last) for fact in facts if isinstance(fact, StepsDone)]


def begun_at(facts):
    return [fact.step for fact in facts if fact.kind == "restored"]


def _every_ten(run):
    run.at(30)
    run.at(40, loss=2.0, tokens=10)
    run.at(50, loss=1.0, tokens=10)
    run.leave()


def test_a_program_may_tell_of_several_steps_at_once(tmp_path):
    answer, facts = told(_every_ten, tmp_path)

    assert answer == ("exit", 0)
    assert (begun_at(facts), marks_of(facts)) == ([30], [(31, 40), (41, 50)])
    assert read_heartbeat(RunDir(tmp_path / "run"), 1).step == 40 + 10
    outcome = json.loads(RunDir(tmp_path / "run").outcome(1).read_text())
    assert outcome == {"outcome": "done", "step": 50, "cause": None}


def _says_first_with_values(run):
    run.at(31, loss=2.0)
    run.at(32, loss=1.0)


def test_a_first_word_with_values_comes_after_the_first_update(tmp_path):
    _, facts = told(_says_first_with_values, tmp_path)

    assert (begun_at(facts), marks_of(facts)[0]) == ([30], (31, 31))
    first = next(fact for fact in facts if isinstance(fact, StepsDone))
    assert first.p50_s is None, "nobody knows when that step began"


def _goes_back(run):
    for step in (0, 1, 2, 3, 1, 2):
        run.at(step)
    run.leave()


def test_a_program_that_goes_back_is_believed(tmp_path):
    _, facts = told(_goes_back, tmp_path)

    assert begun_at(facts) == [0, 1]
    assert marks_of(facts) == [(1, 1), (2, 2), (3, 3), (2, 2)]
    history = RunHistory.read(RunDir(tmp_path / "run"))
    assert progress(history).step == 2


def _adds_to_a_step(run):
    run.at(0)
    run.at(1)
    run.at(1, loss=3.0)
    run.leave()


def test_values_may_come_after_their_step(tmp_path):
    _, facts = told(_adds_to_a_step, tmp_path, log_every_s=60.0)

    [mark] = [fact for fact in facts if isinstance(fact, StepsDone)]
    assert (mark.first, mark.last, mark.loss) == (1, 1, 3.0)


def _refusals(run):
    def refused(act):
        try:
            act()
        except UsageError as error:
            return str(error)
        return ""

    told = [refused(partial(run.at, step)) for step in (-1, 1.5, "3", None)]
    run.at(torch.tensor(3))
    told += [refused(partial(run.at, 3, total=1.5))]
    told += [refused(lambda: next(run.steps(5))), refused(run.save)]
    return told


def test_two_loops_and_strange_steps_are_refused_in_a_line(tmp_path):
    answer, facts = told(_refusals, tmp_path)

    whole = "the step is how many updates are applied, a whole number from 0 on"
    assert answer[:4] == [f"run.at({step}): {whole}" for step in ("-1", "1.5", "'3'", "None")]
    total = "total is how many updates there are in all, a whole number from 0 on"
    assert answer[4] == f"run.at(total=1.5): {total}"
    assert answer[5].startswith("run.at() is for a loop of the program's own")
    assert answer[6] == "run.save() goes with run.steps(); with run.at() the program saves"
    assert begun_at(facts) == [3]


def _steps_then_at(run):
    answers = []
    for _ in run.steps(1):
        for act in (lambda: run.at(1), run.leave):
            try:
                act()
            except UsageError as error:
                answers.append(str(error))
    return answers


def test_a_program_of_our_loop_neither_tells_nor_leaves(tmp_path):
    answer, _ = told(_steps_then_at, tmp_path)

    assert [text.split("(")[0] for text in answer] == ["run.at", "run.leave"]


def _near_the_end(run):
    run._clock.end_time = 0.0  # long past
    before = run.should_stop()
    run.at(0)
    run.at(1)
    after = run.should_stop()
    return before, after, run._clock.expected_save_s() > 1.0


def test_the_jobs_end_is_a_stop_once_a_step_was_done_with_time_for_a_save(tmp_path):
    answer, facts = told(_near_the_end, tmp_path)

    assert answer == (False, True, True)
    assert [fact.cause for fact in facts if fact.kind == "stop_requested"] == ["clock"]
    outcome = json.loads(RunDir(tmp_path / "run").outcome(1).read_text())
    assert outcome == {"outcome": "left", "step": 1, "cause": "clock"}, "it need not call leave"


def _seals(run):
    run.at(1)
    time.sleep(SAVE_S)
    path = run.dir.root.parent / "state.bin"
    path.write_bytes(b"weights")
    run.sealed(np.int64(1), path)
    run.at(2)
    return run._clock.save_s


def test_what_a_programs_own_save_takes_is_kept_for_the_next_stop(tmp_path):
    answer, facts = told(_seals, tmp_path)

    [fact] = [fact for fact in facts if fact.kind == "sealed"]
    assert fact.own_s >= SAVE_S
    assert answer >= fact.own_s
    assert earlier_save_s(RunDir(tmp_path / "run"), 1) >= SAVE_S
    marks = [fact for fact in facts if isinstance(fact, StepsDone)]
    assert marks[-1].save_s >= SAVE_S, "it is no time of a step"
    assert marks[-1].p50_s < SAVE_S


def _says_its_total(run):
    run.at(0)
    run.at(1)
    run.at(2, total=8)
    run.at(3)


def _loops(run):
    model = torch.nn.Linear(1, 1)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(np.int64(8)):
        if step == 3:
            break


@pytest.mark.parametrize("program", [_says_its_total, _loops])
def test_a_total_is_in_the_marks_from_when_the_program_has_said_it(tmp_path, program):
    _, facts = told(program, tmp_path)
    marks = [fact for fact in facts if isinstance(fact, StepsDone)]
    assert [mark.total for mark in marks][-1] == 8
    assert progress(RunHistory.read(RunDir(tmp_path / "run"), marks="few")).total == 8

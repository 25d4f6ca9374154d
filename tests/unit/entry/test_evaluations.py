"""Who looks after evaluations beside training never harms it, and passes nothing of its job on."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

import pytest

from hpctrain.cluster.scheduler.slurm.command import script_environment
from hpctrain.core.settings.spec import Entry, Evaluates, load_spec
from hpctrain.entry import evaluations
from hpctrain.entry.evaluations import LOOK_AGAIN_S, LOOK_S, at_the_end_of, watch
from hpctrain.errors import ClusterError
from hpctrain.launch.evaluations import Advanced
from hpctrain.ledger.run.event_types import Evaluated
from hpctrain.ledger.run.layout import RunDir
from tests.support.ledger_runs import Story
from tests.support.patience import PATIENCE_S


@pytest.fixture
def story(tmp_path):
    """A run that trains, and of which every checkpoint is evaluated."""
    story = Story(tmp_path / "gpt").submitted().started(1)
    beside(story.run)
    return story


def beside(run, **changes):
    spec = load_spec(run.spec)
    spec.beside = {"evaluate": Entry("script", "/x.py")}
    for name, value in changes.items():
        setattr(spec, name, value)
    spec.dump(run.spec)


class Watcher:
    """A watch on this thread, in time that jumps, and the moments of its looks."""

    def __init__(self, run, hands, monkeypatch, *, fails=()):
        self.run, self.hands, self.fails = run, hands, list(fails)
        self.looks, self.stop = [], threading.Event()
        monkeypatch.setattr(evaluations, "look", self.look)

    def look(self, _run):
        self.looks.append(self.hands.passed_s)
        if self.fails:
            raise self.fails.pop(0)

    def watch(self, ends_s):
        self.hands.after(ends_s, self.stop.set)
        watch(self.run, self.stop)
        return self.looks


@pytest.fixture
def watcher(story, hands, monkeypatch):
    return Watcher(story.run, hands, monkeypatch)


def test_it_looks_at_its_start_and_whenever_something_else_is_due(story, hands, watcher):
    hands.after(2.5 * LOOK_S, lambda: story.saved(1, 10))
    hands.after(4.5 * LOOK_S, lambda: story.steps(1, 11, 20))
    hands.after(6.5 * LOOK_S, lambda: story.saved(1, 20))

    assert watcher.watch(10.5 * LOOK_S) == [LOOK_S, 3 * LOOK_S, 7 * LOOK_S]


def test_it_looks_again_after_a_while_though_nothing_new_was_said(watcher):
    assert watcher.watch(3 * LOOK_AGAIN_S) == [LOOK_S, LOOK_S + LOOK_AGAIN_S, LOOK_S + 120.0]


def test_its_last_look_sees_what_was_saved_at_the_very_end(story, hands, watcher):
    hands.after(1.5 * LOOK_S, lambda: story.saved(1, 10))

    assert watcher.watch(1.6 * LOOK_S) == [LOOK_S, 1.6 * LOOK_S]


def test_it_goes_on_after_every_failure_and_says_the_same_once(watcher, caplog):
    silent = ClusterError("no answer")
    watcher.fails = [silent, silent, OSError(28, "no space"), ZeroDivisionError("x")]
    with caplog.at_level(logging.WARNING):
        assert len(watcher.watch(5.5 * LOOK_AGAIN_S)) == 6

    told = [record.getMessage() for record in caplog.records]
    assert [text.rpartition("now: ")[2] for text in told] == [
        "no answer",
        "[Errno 28] no space",
        "ZeroDivisionError: x",
    ]


def test_it_ends_when_the_script_that_started_it_has_ended(hands, watcher, monkeypatch):
    hands.after(3.5 * LOOK_S, lambda: monkeypatch.setattr(evaluations.os, "getppid", lambda: 1))
    watch(watcher.run, watcher.stop)

    assert hands.passed_s == 4 * LOOK_S


def test_a_run_whose_ledger_is_not_there_yet_is_waited_for(story, hands, watcher):
    story.run.events.unlink()
    hands.after(2.5 * LOOK_S, lambda: story.saved(1, 10))

    assert watcher.watch(4.5 * LOOK_S) == [LOOK_S, 3 * LOOK_S]


def test_it_hears_at_once_that_it_is_to_stop(story, monkeypatch):
    """By the real clock, on a thread of its own."""
    monkeypatch.setattr(evaluations, "LOOK_S", 600.0)
    stop = threading.Event()
    thread = threading.Thread(target=watch, args=(story.run, stop), daemon=True)
    monkeypatch.setattr(evaluations, "look", lambda _run: None)
    thread.start()
    stop.set()
    thread.join(PATIENCE_S)

    assert not thread.is_alive()


# ---- the end of a job


@pytest.fixture
def started(monkeypatch):
    """The commands that were started, with their environments."""
    commands = []

    def run(command, *, env, **_more):
        commands.append((command[command.index("-m") + 1 :], env))

    monkeypatch.setattr(evaluations.subprocess, "run", run)
    return commands


def test_at_the_end_of_a_run_its_evaluations_are_looked_after(story, started):
    story.ended(1, "completed", "stop")
    at_the_end_of(story.run, {"A": "b"})

    assert started == [(["hpctrain.entry.evaluations", str(story.run.root), "look"], {"A": "b"})]


def test_at_the_end_of_an_evaluation_its_run_is_looked_after(story, started):
    beside(story.run, beside={}, evaluates=Evaluates("/runs/r", 300, "/runs/r/c"))
    story.ended(1, "crashed", "stop")
    at_the_end_of(story.run, {})

    assert started[0][0][1:] == ["/runs/r", "look", "300"]


def test_where_the_job_comes_back_nobody_has_to_wait_for_it(story, started):
    story.ended(1, "preempted", "requeue")
    at_the_end_of(story.run, {})

    assert started == []


def test_at_the_end_of_any_other_run_nothing_is_done(story, started):
    beside(story.run, beside={})
    story.ended(1, "completed", "stop")
    at_the_end_of(story.run, {})

    assert started == []


@pytest.mark.parametrize("error", [OSError(11, "no process"), subprocess.TimeoutExpired("x", 90)])
def test_what_goes_wrong_then_is_a_line(story, monkeypatch, caplog, error):
    def run(*_words, **_more):
        raise error

    monkeypatch.setattr(evaluations.subprocess, "run", run)
    story.ended(1, "completed", "stop")
    at_the_end_of(story.run, {})

    assert "are not looked after" in caplog.text


def test_a_run_without_a_spec_is_no_evaluation(tmp_path, started):
    at_the_end_of(RunDir(tmp_path), {})

    assert started == []


def test_what_was_done_is_said(story, caplog):
    done = Advanced(
        alive={30: "17"},
        submitted=[30],
        said=[Evaluated(step=10, run="x", metrics={"loss": 2.5}), Evaluated(step=20, why="failed")],
        refused={40: "denied"},
    )
    with caplog.at_level(logging.INFO):
        evaluations.say(story.run, done)

    *said, helpless = [record.getMessage() for record in caplog.records]
    assert said == [
        "step 10 is evaluated: loss 2.5",
        "step 20 is evaluated: failed",
        "step 30 is evaluated by job 17",
    ]
    assert helpless.startswith("the evaluation of step 40 could not be submitted from here")
    assert helpless.endswith(f"`hpctrain evaluate {story.run.root}` on a login node submits it")


def test_the_program_ends_by_sigint_and_by_nothing_else_that_slurm_sends(story):
    text = (
        "import os, signal, sys; from hpctrain.entry import evaluations as e\n"
        "def looks(run): print('looks', flush=True)\n"
        "e.look = looks; e.LOOK_S = 0.05; sys.exit(e.main([sys.argv[1], 'watch']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", text, str(story.run.root)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "looks\n"
        for number in evaluations.IGNORED:
            process.send_signal(number)
        story.saved(1, 10)
        assert process.stdout.readline() == "looks\n"
        process.send_signal(evaluations.signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0


def test_what_it_submits_gets_the_environment_of_the_script_and_nothing_of_its_job():
    given = {
        "PATH": os.environ["PATH"],
        "MINE": "a=b",
        "TMPDIR": "/scratch/job-4711",
        "SLURM_JOB_ID": "4711",
        "SLURM_CONF": "/etc/slurm.conf",
        "HPCTRAIN_RUN_DIR": "/runs/r",
        "HPCTRAIN_LOG_LEVEL": "INFO",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["/bin/cat"], env=given, **pipes) as script:
        script.stdin.write(b"started\n")
        script.stdin.flush()
        assert script.stdout.readline() == b"started\n"
        found = script_environment(script.pid, {"MODULE": "loaded since"})
        script.stdin.close()

    assert found == {
        "PATH": os.environ["PATH"],
        "MINE": "a=b",
        "SLURM_CONF": "/etc/slurm.conf",
        "HPCTRAIN_LOG_LEVEL": "INFO",
    }


def test_a_users_own_temporary_folder_is_passed_on():
    environ = {"TMPDIR": "/scratch/me", "SLURM_JOB_ID": "4711"}
    assert script_environment(-1, environ) == {"TMPDIR": "/scratch/me"}

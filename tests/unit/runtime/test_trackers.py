"""Trackers get every step and cannot disturb training."""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpctrain.core.settings.check import check_hooks
from hpctrain.core.settings.schema import (
    NotifySettings,
    Settings,
    SlurmSettings,
    TrackSettings,
    TrainSettings,
    replaced,
)
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.errors import UsageError
from hpctrain.launch.checks import check_hooks_here
from hpctrain.train.runtime import trackers as run_trackers
from hpctrain.train.runtime.trackers import (
    BEFORE_SAVE_S,
    ONCE_SLOW_S,
    TrackedRun,
    Trackers,
    TrackerThread,
    public_settings,
)
from tests.support.ledger_runs import Story

LONG_S = 60.0


class Notebook:
    """A tracker that remembers."""

    def __init__(self, run=None):
        self.run = run
        self.steps = []
        self.flushed = 0
        self.closed = threading.Event()

    def log(self, step, values, t):
        self.steps.append((step, dict(values)))

    def flush(self):
        self.flushed += 1

    def close(self):
        self.closed.set()


class Stuck(Notebook):
    """Hangs in its first call until it is let go."""

    def __init__(self):
        super().__init__()
        self.reached, self.go = threading.Event(), threading.Event()

    def log(self, step, values, t):
        self.reached.set()
        self.go.wait(LONG_S)
        super().log(step, values, t)


@pytest.fixture
def own_module(monkeypatch):
    """A module of the user's with a tracker; gives what it made."""
    made = []
    module = types.ModuleType("users_trackers")
    module.make = lambda run: made.append(Notebook(run)) or made[-1]
    module.broken = lambda run: 1 / 0
    monkeypatch.setitem(sys.modules, "users_trackers", module)
    return made


def spec_of(run, **track):
    settings = Settings(
        track=TrackSettings(**track),
        notify=NotifySettings(command="tell --token SECRET"),
        slurm=SlurmSettings(setup=["export KEY=SECRET"]),
        train=TrainSettings(steps=40),
    )
    origins = {"train.steps": "hpctrain.toml:3"}
    spec = Spec(
        run.name, "run-id", 1.0, "local", "", Entry("recipe"), settings=settings, origins=origins
    )
    spec.dump(run.spec)
    return spec


def start(run, spec, *, attempt=1, resumed_step=0):
    return Trackers(run, spec, attempt=attempt, resumed_step=resumed_step)


def test_a_save_waits_for_the_curves_and_little_where_the_disk_was_slow_the_last_time(
    tmp_path, monkeypatch
):
    limits, in_time = [], iter([True, False, True, True])
    monkeypatch.setattr(
        TrackerThread, "flush", lambda _, limit_s: limits.append(limit_s) or next(in_time)
    )
    trackers = start(Story(tmp_path / "lm").run, None)

    for _ in range(4):
        trackers.flush()
    trackers.close()

    assert limits == [BEFORE_SAVE_S, BEFORE_SAVE_S, ONCE_SLOW_S, BEFORE_SAVE_S]


# ---- one tracker behind a queue


def test_a_tracker_gets_every_step_in_order_and_is_closed():
    book = Notebook()
    thread = TrackerThread("book", lambda: book, every_s=LONG_S)
    for step in range(1, 6):
        thread.put(step, {"loss": 1.0}, 0.0)

    assert thread.flush(LONG_S)
    assert [step for step, _ in book.steps] == [1, 2, 3, 4, 5]
    assert book.flushed == 1
    thread.begin_close()
    assert thread.wait_closed(LONG_S)
    assert book.closed.is_set()


@pytest.mark.parametrize("where", ["start", "log", "flush", "close"])
def test_a_tracker_that_raises_is_told_once_and_left_out(where, capfd):
    book = Notebook()

    def raising(*_):
        raise RuntimeError("no\nnetwork")

    if where != "start":
        setattr(book, where, raising)
    thread = TrackerThread("book", raising if where == "start" else lambda: book)
    thread.put(1, {"loss": 1.0}, 0.0)
    thread.begin_close()

    assert thread.wait_closed(LONG_S)
    thread.put(2, {"loss": 1.0}, 0.0)
    assert thread.flush(LONG_S)
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1
    assert "tracker book: RuntimeError: no network; the run continues without it" in told[0]


def test_a_tracker_that_hangs_keeps_nobody_and_its_losses_are_counted(capfd):
    book = Stuck()
    thread = TrackerThread("book", lambda: book, most=3, every_s=0.001)
    thread.put(1, {"loss": 1.0}, 0.0)
    assert book.reached.wait(LONG_S)

    for step in range(2, 8):  # three wait, three find no place
        thread.put(step, {"loss": 1.0}, 0.0)
    assert not thread.flush(0.01)
    thread.begin_close()
    assert not thread.wait_closed(0.01)

    told = capfd.readouterr().err
    assert told.count("it is too slow or hangs") == 1
    assert "too slow for 3 steps" in told
    assert "it was given up: 3 steps" in told
    book.go.set()
    assert book.closed.wait(LONG_S)
    assert [step for step, _ in book.steps] == [1, 2, 3, 4]


# ---- all trackers of a run


def test_an_own_tracker_is_told_of_the_run_and_each_step_once(tmp_path, own_module):
    run = Story(tmp_path / "gpt").started(2).run
    spec = spec_of(run, loggers=["users_trackers:make"], project="p")
    trackers = start(run, spec, attempt=2, resumed_step=10)
    trackers.log(11, {"loss": 2.0})
    trackers.log(11, {"loss": 1.0, "lr": 0.1})
    trackers.log(12, {"loss": 3.0})
    trackers.close()

    (book,) = own_module
    assert book.steps == [(11, {"loss": 1.0, "lr": 0.1}), (12, {"loss": 3.0})]
    told = book.run
    assert (told.run_id, told.name, told.dir) == ("run-id", "gpt", run.root)
    assert (told.attempt, told.resumed_step, told.project) == (2, 10, "p")
    assert told.config["train.steps"] == 40
    assert "SECRET" not in json.dumps(told.config)


def test_a_logger_that_cannot_be_imported_costs_a_line(tmp_path, own_module, capfd):
    run = Story(tmp_path / "gpt").started(1).run
    loggers = ["users_trackers:nothing", "no_such_module:make", "users_trackers:make"]
    trackers = start(run, spec_of(run, loggers=loggers))
    trackers.log(1, {"loss": 2.0})
    trackers.close()

    told = capfd.readouterr().err.splitlines()
    assert len(told) == 2
    assert "users_trackers:nothing cannot be imported (AttributeError" in told[0]
    assert "no_such_module:make cannot be imported (ModuleNotFoundError" in told[1]
    assert own_module[0].steps == [(1, {"loss": 2.0})]


def test_a_folder_that_cannot_be_written_does_not_end_training(tmp_path, capfd):
    run = Story(tmp_path / "gpt").started(1).run
    run.tensorboard.write_text("in the way")
    trackers = start(run, spec_of(run))
    trackers.log(1, {"loss": 2.0})
    trackers.close()

    assert "tracker tensorboard: FileExistsError" in capfd.readouterr().err


def test_what_was_logged_before_a_save_outlives_a_kill(tmp_path):
    run = Story(tmp_path / "gpt").started(1).run
    trackers = start(run, spec_of(run))
    trackers._board.flush(LONG_S)  # it is up
    trackers.log(7, {"loss": 2.0})
    trackers.flush()

    scalars = EventAccumulator(str(run.tensorboard)).Reload().Scalars("loss")  # before any close
    assert [scalar.step for scalar in scalars] == [7]
    trackers.close()


# ---- the settings that trackers are told


def test_settings_for_trackers_hold_no_secret(tmp_path):
    config = public_settings(spec_of(Story(tmp_path / "gpt").run).settings)

    assert config["train.steps"] == 40
    assert "SECRET" not in str(config)


# ---- wandb


def history(path):
    """Steps with their losses in a wandb transaction log: LevelDB's log format, protobuf inside."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    position, whole, found = 7, b"", []
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", content[position : position + 7])
        if position + 7 + size > len(content):  # it is being written
            break
        whole += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in {1, 4}:
            record, whole = Record.FromString(whole), b""
            if record.WhichOneof("record_type") == "history":
                items = {"".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
                found.append((record.history.step.num, json.loads(items["loss"])))
            if record.WhichOneof("record_type") == "run":
                assert record.run.run_id == "run-id"
                assert record.run.project == "p"
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb_has_one_run_over_all_attempts_with_each_step_once(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens: offline
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    monkeypatch.setattr(run_trackers, "FINISH_S", 60.0)  # its service writes on a busy machine too
    for attempt, first, last in ((1, 1, 20), (2, 11, 30)):  # 10 steps are done again
        run = TrackedRun("run-id", "gpt", tmp_path, attempt, first - 1, "p", {"train.steps": 30})
        tracker = run_trackers.start(run)
        for step in range(first, last + 1):
            tracker.log(step, {"loss": float(attempt)}, time.time())
        tracker.flush()
        tracker.close()

    logs, steps = [], []
    deadline = time.monotonic() + LONG_S  # its service, a process of its own, may write on
    while len(steps) < 30 and time.monotonic() < deadline:
        logs = sorted((tmp_path / "wandb").glob("offline-run-*/run-run-id.wandb"))
        steps = sorted(pair for log in logs for pair in history(log))
    assert len(logs) == 2
    assert steps == [(n, 1.0) for n in range(1, 21)] + [(n, 2.0) for n in range(21, 31)]


# ---- settings


@pytest.mark.parametrize(
    ("section", "name", "value", "said"),
    [
        ("track", "loggers", ["wandbb"], "did you mean wandb?"),
        ("track", "loggers", ["tensorboard"], "TensorBoard's files are always written"),
        ("track", "loggers", ["mine.py"], "e.g. mypackage.mymodule:make"),
        ("notify", "on", ["don"], "did you mean done?"),
        ("notify", "command", "echo 'x", "no closing quotation"),
        ("notify", "webhook_file", "https://hooks.example/s3cret", "put it into a file"),
    ],
)
def test_hooks_that_cannot_be_are_refused(section, name, value, said):
    settings = replaced(Settings(), {f"{section}.{name}": value})

    with pytest.raises(UsageError, match=f"^hpctrain.toml:7: {section}.{name} ") as refused:
        check_hooks(settings, {f"{section}.{name}": "hpctrain.toml:7"})

    assert said in str(refused.value)
    assert "s3cret" not in str(refused.value)


def test_a_tracker_that_the_runs_python_lacks_is_refused_at_submit(tmp_path, monkeypatch):
    settings = replaced(Settings(), {"track.loggers": ["wandb"]})
    assert check_hooks_here(settings, {}, tmp_path) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(UsageError, match=r"wandb, which .* cannot import; pip install wandb"):
        check_hooks_here(settings, {}, tmp_path)

    assert check_hooks_here(settings, {}, tmp_path, python="/another/python") == []


def test_a_webhook_is_looked_at_before_it_is_needed(tmp_path):
    settings = replaced(Settings(), {"notify.webhook_file": "hook"})
    settings = replaced(settings, {"notify.command": "no-such-program-here --x"})
    with pytest.raises(UsageError, match=r"webhook_file .*hook cannot be read: No such file"):
        check_hooks_here(settings, {}, tmp_path)
    path = tmp_path / "hook"
    path.write_text("s3cret\n")
    with pytest.raises(UsageError, match="holds no URL") as refused:
        check_hooks_here(settings, {}, tmp_path)
    path.write_text("https://hooks.example/s3cret\n")
    path.chmod(0o644)

    notes = check_hooks_here(settings, {}, tmp_path)

    assert "chmod 600" in notes[0]
    assert "no-such-program-here, which is not here" in notes[1]
    assert "s3cret" not in str(refused.value) + str(notes)

"""Curves of evaluations follow from the ledger, in whatever order and however torn they came."""

from __future__ import annotations

import itertools
import random
import struct

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpctrain.ledger.run import results
from hpctrain.ledger.run.results import write_curves
from tests.support.ledger_runs import Story


@pytest.fixture
def story(tmp_path):
    return Story(tmp_path / "gpt")


def evaluated(story, step, **metrics):
    story.add("evaluated", step=step, run="x", metrics=metrics)
    write_curves(story.run)


def shown(board, tag="eval/loss"):
    board.Reload()
    return [(point.step, point.value) for point in board.Scalars(tag)]


def test_a_tensorboard_that_is_open_shows_each_as_it_comes_in_any_order(story):
    steps = [30, 10, 40, 20, 50, 60, 10]
    evaluated(story, 70, loss=0.5)
    board = EventAccumulator(str(story.run.evaluation_curves))
    seen = {70: 0.5}

    for n, step in enumerate(steps):
        evaluated(story, step, loss=float(n), top=1.0)
        seen[step] = float(n)
        assert shown(board) == sorted(seen.items())


def test_points_that_rise_are_added_to_the_file_that_is_there(story):
    evaluated(story, 10, loss=1.0)
    (path,) = story.run.evaluation_curves.iterdir()
    before = path.read_bytes()

    evaluated(story, 20, loss=2.0)

    assert list(story.run.evaluation_curves.iterdir()) == [path]
    assert path.read_bytes().startswith(before)
    after = path.stat()
    write_curves(story.run)
    assert path.stat() == after, "nothing to do"


@pytest.mark.parametrize("number", range(20))
def test_what_a_crash_or_another_user_has_left_is_made_good(story, number):
    dice = random.Random(number)
    for step in (10, 20, 30):
        evaluated(story, step, loss=step / 2)
    (path,) = story.run.evaluation_curves.iterdir()
    content = bytearray(path.read_bytes())
    at = dice.randrange(len(content))
    if dice.random() < 0.5:
        del content[at:]
    else:
        content[at] ^= 1 << dice.randrange(8)
    path.write_bytes(content)
    (path.parent / "staged").write_bytes(b"half")

    evaluated(story, 40, loss=20.0)

    board = EventAccumulator(str(path.parent))
    assert shown(board) == [(step, step / 2) for step in (10, 20, 30, 40)]


def test_no_more_files_are_kept_than_an_open_tensorboard_needs(story):
    for step in range(200, 0, -10):
        evaluated(story, step, loss=step / 2)

    names = sorted(file.name for file in story.run.evaluation_curves.iterdir())
    assert len(names) == results.KEPT
    assert names[-1].endswith("evaluations-0000000020")
    assert len(shown(EventAccumulator(str(story.run.evaluation_curves)))) == 20


def test_numbers_and_names_of_any_size_are_points(story):
    evaluated(story, 2**40, **{"ä" * 100: -1e-9, "loss": 1e300})

    board = EventAccumulator(str(story.run.evaluation_curves))
    assert shown(board) == [(2**40, float("inf"))]
    assert shown(board, f"eval/{'ä' * 100}") == [
        (2**40, struct.unpack("<f", struct.pack("<f", -1e-9))[0])
    ]


def test_what_a_program_writes_beside_them_and_odd_names_disturb_nothing(story):
    folder = story.run.evaluation_curves
    folder.mkdir(parents=True)
    other = folder / "events.out.tfevents.99.n1"
    other.write_bytes(b"")
    for step in (20, 10):
        evaluated(story, step, **{"loss": 1.0, "\ud800\x1b[2J": 2.0})

    assert shown(EventAccumulator(str(folder))) == [(10, 1.0), (20, 1.0)]
    assert other.read_bytes() == b""


def test_a_step_without_metrics_is_no_point_and_the_last_word_counts(story):
    story.add("evaluated", step=10, run="x", metrics={}, why="exit code 1")
    write_curves(story.run)
    assert not story.run.tensorboard.exists()
    evaluated(story, 10, loss=1.0)
    evaluated(story, 20, loss=1.0)
    story.add("evaluated", step=20, run="x", metrics={}, why="exit code 1")
    write_curves(story.run)

    assert shown(EventAccumulator(str(story.run.evaluation_curves))) == [(10, 1.0)]


def test_a_disk_that_is_full_leaves_what_the_next_call_makes_good(story, monkeypatch):
    real = results._append
    calls = itertools.count()

    def full(path, content):
        real(path, content[: len(content) // 2])
        if next(calls) % 2 == 0:
            raise OSError(28, "No space left on device", str(path))
        real(path, content[len(content) // 2 :])

    monkeypatch.setattr(results, "_append", full)
    for step in (10, 20, 15):
        with pytest.raises(OSError, match="No space"):
            evaluated(story, step, loss=step / 2)
        write_curves(story.run)
        assert (step, step / 2) in shown(EventAccumulator(str(story.run.evaluation_curves)))

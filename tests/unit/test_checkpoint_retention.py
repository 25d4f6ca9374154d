from __future__ import annotations

import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint import find, retention
from hpctrain.checkpoint.manifest import MANIFEST_NAME
from hpctrain.errors import CheckpointError, Fenced
from tests.support import checkpoints as support

FOUND = st.dictionaries(st.integers(0, 60), st.booleans(), max_size=15)
RULES = {
    "keep_last": st.integers(1, 5),
    "keep_every": st.integers(0, 10),
    "protect": st.sets(st.integers(0, 60), max_size=3),
}


@pytest.fixture
def run(tmp_path):
    return support.new_run(tmp_path)


@pytest.fixture
def attempt(run):
    return support.next_attempt(run)


def test_the_last_ones_and_every_so_many_stay():
    found = [(step, True) for step in range(1000, 8000, 1000)]

    gone = retention.to_delete(found, keep_last=2, keep_every=3000, protect={1000})

    assert gone == [2000, 4000, 5000]


def test_torn_ones_never_count():
    found = [(1000, True), (2000, True), (3000, False), (4000, False)]

    assert retention.to_delete(found, keep_last=2) == []
    assert retention.to_delete(found, keep_last=1) == [1000]


@given(found=FOUND, **RULES)
def test_nothing_goes_that_must_stay(found, keep_last, keep_every, protect):
    rules = {"keep_last": keep_last, "keep_every": keep_every, "protect": protect}
    gone = retention.to_delete(found.items(), **rules)

    valid = sorted((step for step, ok in found.items() if ok), reverse=True)
    kept_valid = [step for step in valid if step not in gone]
    assert set(valid[:keep_last]).isdisjoint(gone)
    assert len(kept_valid) >= min(keep_last, len(valid))
    assert protect.isdisjoint(gone)
    assert not any(keep_every and step % keep_every == 0 for step in gone)
    assert set(gone) <= set(found)
    assert gone == sorted(gone)


@given(found=FOUND, **RULES)
def test_everything_else_goes_once_there_are_enough(found, keep_last, keep_every, protect):
    rules = {"keep_last": keep_last, "keep_every": keep_every, "protect": protect}
    gone = retention.to_delete(found.items(), **rules)

    valid = sorted((step for step, ok in found.items() if ok), reverse=True)
    for step in valid[keep_last:]:
        needed = step in protect or (keep_every and step % keep_every == 0)
        assert needed or step in gone


@given(found=FOUND, **RULES)
def test_whether_an_older_one_is_valid_makes_no_difference(found, keep_last, keep_every, protect):
    rules = {"keep_last": keep_last, "keep_every": keep_every, "protect": protect}
    valid = sorted((step for step, ok in found.items() if ok), reverse=True)
    counted = set(valid[:keep_last])
    not_looked_at = {
        step: ok and (step in counted or len(counted) < keep_last) for step, ok in found.items()
    }

    assert retention.to_delete(found.items(), **rules) == retention.to_delete(
        not_looked_at.items(), **rules
    )


@pytest.mark.parametrize(("last", "every"), [(0, 0), (-1, 0), (1, -1)])
def test_a_rule_that_could_take_the_last_valid_one_is_refused(last, every):
    with pytest.raises(ValueError, match="is below"):
        retention.to_delete([(1000, True)], keep_last=last, keep_every=every)


def test_pruning_deletes_what_need_not_be_kept(run, attempt):
    paths = support.save(run, attempt, 1000, 2000, 3000, 4000)

    gone = retention.prune(run, keep_last=2, protect={1000}, attempt=attempt)

    assert gone == [2000]
    assert find.steps(run) == [4000, 3000, 1000]
    assert support.names_in(run) == [paths[i].name for i in (0, 2, 3)]


def test_pruning_counts_only_checkpoints_that_could_be_loaded(run, attempt):
    paths = support.save(run, attempt, 1000, 2000, 3000, 4000)
    (paths[3] / MANIFEST_NAME).unlink()
    os.truncate(paths[2] / "__0_0.distcp", 1)

    assert retention.prune(run, keep_last=2) == []
    assert retention.prune(run, keep_last=1) == [1000]
    assert support.chosen(run) == 2000


def test_an_old_attempt_prunes_and_sweeps_nothing(run, attempt):
    support.save(run, attempt, 1000, 2000)
    staged, _ = support.stage(run, attempt, 3000)
    support.next_attempt(run)

    with pytest.raises(Fenced):
        retention.prune(run, keep_last=1, attempt=attempt)
    with pytest.raises(Fenced):
        retention.sweep(run, attempt)
    assert find.steps(run) == [2000, 1000]
    assert staged.is_dir()


def test_dying_while_bytes_are_deleted_leaves_nothing_to_choose_and_the_rest_is_swept(
    run, attempt, monkeypatch
):
    support.save(run, attempt, 1000, 2000)

    def half(path):
        (path / "__0_0.distcp").unlink()
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", half)
        with pytest.raises(CheckpointError, match="gpt-a cannot be pruned"):
            retention.prune(run, keep_last=1, attempt=attempt)

    assert find.steps(run) == [2000]
    assert find.choose(run).skipped == []
    assert retention.sweep(run, attempt) == ["step-0000001000.deleting-1"]
    assert support.names_in(run) == ["step-0000002000"]


def test_a_file_that_somebody_still_holds_open_waits_for_the_next_sweep(run, attempt, monkeypatch):
    support.save(run, attempt, 1000, 2000)

    def busy(path):
        raise OSError(39, "Directory not empty", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        assert retention.prune(run, keep_last=1, attempt=attempt) == [1000]

    assert find.steps(run) == [2000]
    assert retention.sweep(run, attempt) == ["step-0000001000.deleting-1"]


def test_a_sweep_takes_what_older_attempts_left_and_nothing_else(run, attempt):
    (damaged,) = support.save(run, attempt, 500)
    (damaged / MANIFEST_NAME).unlink()
    support.save(run, attempt, 1000)
    support.stage(run, attempt, 2000)
    newer = support.next_attempt(run)
    mine, _ = support.stage(run, newer, 2000)
    foreign = run.checkpoints / "step-0000002000.staged-0001.bak"
    foreign.mkdir()

    swept = retention.sweep(run, newer)

    assert swept == ["step-0000002000.staged-0001"]
    assert support.names_in(run) == sorted(
        ["step-0000000500", "step-0000001000", mine.name, foreign.name]
    )


def test_a_sweep_of_a_run_without_checkpoints_finds_nothing(run, attempt):
    assert retention.sweep(run, attempt) == []


def test_pruning_a_linked_checkpoint_removes_the_link_only(run, attempt, tmp_path):
    path, _ = support.save(run, attempt, 1000, 2000)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)

    assert retention.prune(run, keep_last=1) == [1000]
    assert find.steps(run) == [2000]
    assert (elsewhere / MANIFEST_NAME).exists()

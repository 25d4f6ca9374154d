"""How often one process looks at the files of all ranks, and what it finds all the same."""

from __future__ import annotations

import os
import threading

import pytest

from hpctrain.checkpoint.format import manifest as manifests
from hpctrain.checkpoint.format.manifest import FileEntry
from hpctrain.checkpoint.format.shard import file_name
from hpctrain.checkpoint.store import commit, find, retention
from hpctrain.errors import CheckpointError
from tests.support import checkpoints as support
from tests.support.patience import PATIENCE_S

RANKS = 400
LAST, ODD = file_name(RANKS - 1), file_name(RANKS // 2 + 1)
"""The last shard, and one whose size no sample looks at."""


def stage(run, attempt, step):
    """A staged checkpoint of many ranks with a byte each."""
    staged = commit.stage(run, step, attempt)
    names = [file_name(rank) for rank in range(RANKS)]
    for name in names:
        (staged / name).write_bytes(b"x")
    files = [FileEntry(name, 1, "xxh3_64-blocks:" + "0" * 16) for name in names]
    return staged, support.manifest(step, files)


def save(run, attempt, step):
    return commit.publish(run, *stage(run, attempt, step), attempt)


@pytest.fixture
def asked(monkeypatch):
    """Which shards' sizes were asked, and which folders were listed."""
    asked, stat, scandir = {"sizes": [], "lists": []}, os.stat, os.scandir

    def count_stat(path, *args, **kwargs):
        if os.fspath(path).endswith(".safetensors"):
            asked["sizes"].append(os.path.basename(path))  # noqa: PTH119
        return stat(path, *args, **kwargs)

    def count_scandir(path):
        if not isinstance(path, int):
            asked["lists"].append(os.path.basename(path))  # noqa: PTH119
        return scandir(path)

    monkeypatch.setattr(os, "stat", count_stat)
    monkeypatch.setattr(os, "scandir", count_scandir)
    return asked


def test_a_commit_lists_the_folder_once_and_looks_at_a_sample(run, attempt, asked):
    staged, listed = stage(run, attempt, 1)
    asked["lists"].clear()

    commit.publish(run, staged, listed, attempt)

    assert asked["lists"] == [staged.name]
    assert 32 <= len(asked["sizes"]) <= 64  # of 400, as docs/development/performance.md says


@pytest.mark.parametrize("name", [file_name(0), ODD, LAST])
def test_a_shard_that_vanished_before_the_commit_is_missed(run, attempt, name):
    staged, listed = stage(run, attempt, 1)
    (staged / name).unlink()

    with pytest.raises(CheckpointError, match=f"shard {name} is missing"):
        commit.publish(run, staged, listed, attempt)
    assert find.steps(run) == []


def test_a_shard_too_many_is_seen_among_many(run, attempt):
    staged, listed = stage(run, attempt, 1)
    (staged / file_name(RANKS)).touch()

    with pytest.raises(CheckpointError, match=f"{file_name(RANKS)} is not in the manifest"):
        commit.publish(run, staged, listed, attempt)


@pytest.mark.parametrize("name", [file_name(0), ODD, LAST])
def test_what_is_loaded_had_the_size_of_each_file_looked_at(run, attempt, asked, name):
    save(run, attempt, 1)
    path = save(run, attempt, 2)
    os.truncate(path / name, 0)
    asked["sizes"].clear()

    choice = find.choose(run)

    assert choice.checkpoint.step == 1
    assert [one.reason for one in choice.skipped] == [f"shard {name} is 0 bytes, manifest says 1"]
    assert sorted(set(asked["sizes"])) == [file_name(rank) for rank in range(RANKS)]
    assert len(asked["sizes"]) <= 2 * (RANKS + find.SAMPLE)


def test_many_sizes_are_asked_at_once(run, attempt, monkeypatch):
    path = save(run, attempt, 1)
    real, together = find._size, threading.Barrier(find.LOOKERS)
    first = threading.local()

    def size(path):
        if not hasattr(first, "done"):
            first.done = True
            together.wait(timeout=PATIENCE_S)  # broken unless all of them look at the same time
        return real(path)

    monkeypatch.setattr(find, "_size", size)
    manifest = manifests.load(path / manifests.MANIFEST_NAME)
    assert find.size_problems(path, manifest.files) == []


def test_what_is_shown_misses_no_file_and_looks_at_a_sample(run, attempt, asked):
    save(run, attempt, 1)
    path = save(run, attempt, 2)
    asked["sizes"].clear()
    assert find.choose(run, to_show=True).checkpoint.step == 2
    assert len(asked["sizes"]) <= find.SAMPLE

    (path / ODD).unlink()
    assert find.choose(run, to_show=True).checkpoint.step == 1


def test_a_prune_after_a_commit_looks_at_a_sample_of_that_one_alone(run, attempt, asked):
    known = {}
    save(run, attempt, 1)
    asked["sizes"].clear()
    retention.prune(run, retention.Rules(1), attempt=attempt, rows_by_step=known)
    # All of them: nobody has told that it was committed a moment ago.
    assert len(set(asked["sizes"])) == RANKS
    save(run, attempt, 2)
    asked["sizes"].clear()

    gone = retention.prune(
        run, retention.Rules(1), attempt=attempt, rows_by_step=known, committed=2
    )

    assert gone == [1]
    assert len(asked["sizes"]) <= find.SAMPLE


def test_a_prune_does_not_count_a_commit_that_has_lost_a_file(run, attempt):
    save(run, attempt, 1)
    path = save(run, attempt, 2)
    (path / ODD).unlink()

    assert retention.prune(run, retention.Rules(1), attempt=attempt, committed=2) == []


@pytest.mark.parametrize("how", ["missing", "torn"])
def test_a_choice_does_not_ask_each_file_of_what_a_sample_shows_to_be_damaged(
    run, attempt, asked, how
):
    """Of twenty checkpoints of 16,384 files 19 may be damaged, and a look may take 0.3 ms."""
    for step in (1, 2, 3):
        save(run, attempt, step)
    for step in (2, 3):
        first = find.step_path(run, step) / file_name(0)
        first.unlink() if how == "missing" else first.write_bytes(b"xx")
    asked["sizes"].clear()

    choice = find.choose(run)
    assert choice.checkpoint is not None
    assert choice.checkpoint.step == 1
    assert [skipped.step for skipped in choice.skipped] == [3, 2]
    assert len(asked["sizes"]) <= RANKS + len(find.steps(run)) * find.SAMPLE

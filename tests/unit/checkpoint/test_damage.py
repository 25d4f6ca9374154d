"""Every way of damaging a checkpoint is found, and a damaged one is never loaded.

Bits flipped in every file, files cut, swapped, taken from elsewhere; names and clocks that mislead.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter

import pytest

from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, TABLE_NAME
from hpctrain.checkpoint.format.reader import CheckpointSource
from hpctrain.checkpoint.format.shard import ShardPiece
from hpctrain.checkpoint.store import commit, find, retention, verify
from hpctrain.errors import CheckpointError, TornCheckpoint
from tests.support import checkpoints as support
from tests.support.checkpoints import SHARD_0, SHARD_1
from tests.support.loading import loaded

OLD, NEW = 1000, 2000
FILES = (SHARD_0, SHARD_1, TABLE_NAME, MANIFEST_NAME)
ALIKE = [
    [ShardPiece("model.w", "F32", (16, 16), (0, 0), (8, 16))],
    [ShardPiece("model.w", "F32", (16, 16), (8, 0), (8, 16))],
]
"""Two shards of the same size."""


@pytest.fixture
def run(tmp_path):
    run = support.new_run(tmp_path)
    support.save(run, support.next_attempt(run), OLD, NEW)
    return run


def _problems(run, step):
    """What a person's `checkpoints verify` finds."""
    return verify.verify(find.look(run, step))


def _is_refused(run, step):
    """Whether a rank that loads everything is told so, at the latest while it reads."""
    found = find.look(run, step)
    if found.problem is not None:
        return True
    try:
        content = loaded(found)
    except TornCheckpoint:
        return True
    assert content == support.contents(step), f"step {step} was loaded with wrong values"
    return False


def _check_damaged(run, *steps):
    for step in steps:
        assert _problems(run, step), f"verify sees nothing wrong with step {step}"
        assert _is_refused(run, step), f"step {step} was loaded"


def _flips(run, count, seed=3):
    """Flip single bits, each undone before the next; what was missed, and where the others were."""
    path = find.step_path(run, NEW)
    found = find.look(run, NEW)
    chunks = CheckpointSource.open(path, found.manifest).rows
    headers = {
        entry.name: int(chunks.offset[chunks.rows_in(number)[0]])
        for number, entry in enumerate(found.manifest.files)
        if entry.name != TABLE_NAME
    }
    dice = random.Random(seed)
    missed, places = [], Counter()
    for number in range(count):
        file = path / FILES[number % len(FILES)]
        whole = file.read_bytes()
        bit = dice.randrange(len(whole) * 8)
        if number % 8 in {0, 1}:  # a header is a small part of a shard
            bit = dice.randrange(headers[file.name] * 8)
        in_header = bit < headers.get(file.name, 0) * 8
        support.flip_bit(file, bit)
        places[f"{file.name} {'header' if in_header else 'content'}"] += 1
        # No value is read from a shard's header: a flipped one is found, and does no harm.
        if not _problems(run, NEW) or not (_is_refused(run, NEW) or in_header):
            missed.append((file.name, bit))
        file.write_bytes(whole)
    return missed, places


def test_a_bit_flipped_anywhere_in_any_file_is_found_and_never_loaded(run):
    missed, places = _flips(run, 160)

    assert missed == []
    assert len(places) == len(FILES) + 2
    assert _problems(run, NEW) == []  # no false alarm: all flips are undone
    assert not _is_refused(run, NEW)


@pytest.mark.soak
def test_a_thousand_bits_flipped_anywhere_are_all_found_and_never_loaded(run):
    missed, places = _flips(run, 1000, seed=20261121)

    print(dict(places))
    assert missed == []
    assert places.total() == 1000


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_at_any_of_a_hundred_lengths_is_found_without_reading_it(run, name):
    file = find.step_path(run, NEW) / name
    whole = file.read_bytes()
    dice = random.Random(name)
    lengths = {0, 1, len(whole) - 1, *dice.sample(range(2, len(whole) - 1), 97)}

    for length in lengths:
        file.write_bytes(whole[:length])
        assert find.look(run, NEW).problem is not None, f"{name} cut to {length} bytes"
        assert support.chosen(run) == OLD
        assert _problems(run, NEW)

    assert len(lengths) == 100


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_has_grown_is_found_without_reading_it(run, name):
    with (find.step_path(run, NEW) / name).open("ab") as file:
        file.write(b"\0")

    assert support.chosen(run) == OLD


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_is_found_without_reading_anything(run, name):
    (find.step_path(run, NEW) / name).unlink()

    assert support.chosen(run) == OLD
    _check_damaged(run, NEW)


@pytest.mark.parametrize(
    "names",
    # The tables of two checkpoints of the same ranks are the same, byte for byte.
    [*[(name,) for name in FILES if name != TABLE_NAME], (SHARD_0, SHARD_1), FILES[:3]],
)
def test_files_swapped_between_two_checkpoints_are_found_in_both(run, names):
    for name in names:
        _swap(find.step_path(run, OLD) / name, find.step_path(run, NEW) / name)

    _check_damaged(run, OLD, NEW)


def test_two_checkpoints_under_each_others_names_are_both_refused(run):
    _swap(find.step_path(run, OLD), find.step_path(run, NEW))

    assert support.chosen(run) is None
    _check_damaged(run, OLD, NEW)


def test_two_shards_of_the_same_size_swapped_in_one_checkpoint_are_found(tmp_path):
    run = support.new_run(tmp_path)
    path = _save_alike(run, seed=1)
    assert (path / SHARD_0).stat().st_size == (path / SHARD_1).stat().st_size
    assert loaded(find.look(run, NEW)) == support.contents(1, ALIKE)

    _swap(path / SHARD_0, path / SHARD_1)

    assert _problems(run, NEW)
    with pytest.raises(TornCheckpoint, match=r"digests .*damaged bytes"):
        loaded(find.look(run, NEW))


def test_a_file_of_another_run_with_the_same_name_and_size_is_found(tmp_path):
    name = SHARD_0
    ours, theirs = support.new_run(tmp_path, "ours"), support.new_run(tmp_path, "theirs")
    path, other = _save_alike(ours, seed=1), _save_alike(theirs, seed=2)
    assert (path / name).stat().st_size == (other / name).stat().st_size

    shutil.copy2(other / name, path / name)

    assert _problems(ours, NEW)
    with pytest.raises(TornCheckpoint):
        loaded(find.look(ours, NEW))


def test_a_page_of_zeros_is_found(run):
    path = find.step_path(run, NEW) / SHARD_0
    content = bytearray(path.read_bytes())
    content[-512:] = bytes(512)
    path.write_bytes(content)

    _check_damaged(run, NEW)


def test_a_second_checkpoint_of_the_same_step_is_refused_and_the_first_is_as_it_was(run):
    before = {file.name: file.read_bytes() for file in find.step_path(run, NEW).iterdir()}
    attempt = support.next_attempt(run)
    with pytest.raises(CheckpointError, match="already committed"):
        commit.stage(run, NEW, attempt)
    # It was committed between our staging and our publishing:
    aside = find.step_path(run, NEW).rename(run.root / "meanwhile")
    staged, manifest = support.stage(run, attempt, NEW)
    aside.rename(find.step_path(run, NEW))

    with pytest.raises(CheckpointError, match="already committed"):
        commit.publish(run, staged, manifest, attempt)

    assert {f.name: f.read_bytes() for f in find.step_path(run, NEW).iterdir()} == before


@pytest.mark.parametrize(
    "name",
    [
        "step-0000002001",
        "step-0000002000.staged-0001",
        "step-0000002000.bak",
        "step-2000",
        "latest",
    ],
)
def test_a_copy_under_another_name_is_never_chosen(run, name):
    shutil.copytree(find.step_path(run, NEW), run.checkpoints / name)

    assert support.chosen(run) == NEW
    assert [one.step for one in find.candidates(run) if one.problem is None] == [NEW, OLD]


def test_a_clock_that_goes_backwards_changes_nothing(tmp_path, monkeypatch):
    run = support.new_run(tmp_path)
    attempt = support.next_attempt(run)
    now = time.time()
    real = support.manifest
    for number, step in enumerate((500, OLD, NEW)):
        then = now - 1e6 * number
        monkeypatch.setattr(
            support, "manifest", lambda step, files, then=then: _at(real(step, files), then)
        )
        (path,) = support.save(run, attempt, step)
        for place in (*path.iterdir(), path):
            os.utime(place, (then, then))
    created = [one.manifest.created for one in find.candidates(run)]
    assert created == sorted(created)  # the newest step claims to be the oldest

    assert support.chosen(run) == NEW
    assert retention.prune(run, retention.Rules(2), attempt=attempt) == [500]
    assert support.chosen(run) == NEW


def _at(manifest, created):
    manifest.created = created
    return manifest


def _swap(one, other):
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def _save_alike(run, seed):
    attempt = support.next_attempt(run)
    staged = commit.stage(run, NEW, attempt)
    manifest = support.manifest(NEW, [])
    parts = support.write_pieces(staged, ALIKE, support.contents(seed, ALIKE))
    commit.write_table(staged, manifest, parts)
    return commit.publish(run, staged, manifest, attempt)

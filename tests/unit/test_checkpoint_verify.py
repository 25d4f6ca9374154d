from __future__ import annotations

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint import find, verify
from hpctrain.checkpoint.digest import file_digest
from hpctrain.checkpoint.manifest import MANIFEST_NAME
from hpctrain.errors import CheckpointError, Fenced
from tests.support import checkpoints as support


@pytest.fixture
def run(tmp_path):
    return support.new_run(tmp_path)


@pytest.fixture
def attempt(run):
    return support.next_attempt(run)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_whole_checkpoint_has_no_problems(run, attempt, threads):
    support.save(run, attempt, 1000)

    assert verify.verify(find.look(run, 1000), threads=threads) == []


def test_two_hundred_flipped_bits_are_all_caught(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    files = [path / name for name in (*support.SHARDS, MANIFEST_NAME)]
    whole = {file: file.read_bytes() for file in files}
    dice = random.Random(1)

    missed = []
    for _ in range(200):
        file = dice.choice(files)
        bit = dice.randrange(len(whole[file]) * 8)
        support.flip_bit(file, bit)
        found = find.look(run, 1000)
        if found.problem is None and not verify.verify(found):
            missed.append((file.name, bit))
        file.write_bytes(whole[file])

    assert missed == []
    assert verify.verify(find.look(run, 1000)) == []


def test_each_kind_of_damage_is_named_with_its_file(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    found = find.look(run, 1000)
    os.truncate(path / "__0_0.distcp", 1)
    (path / "__1_0.distcp").unlink()
    before = file_digest(path / ".metadata")
    support.flip_bit(path / ".metadata", 0)
    after = file_digest(path / ".metadata")

    assert verify.verify(found) == [
        f".metadata: digest {after}, manifest says {before} (damaged bytes)",
        "shard __0_0.distcp is 1 bytes, manifest says 4,096",
        "shard __1_0.distcp is missing",
    ]


def test_swapped_shards_of_one_size_are_caught(run, attempt):
    paths = support.save(run, attempt, 1000, 2000)
    one, other = (path / ".metadata" for path in paths)
    one.write_bytes(other.read_bytes())

    assert find.look(run, 1000).problem is None
    assert len(verify.verify(find.look(run, 1000))) == 1


def test_a_shard_that_cannot_be_read_is_damage(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    found = find.look(run, 1000)
    (path / ".metadata").unlink()
    (path / ".metadata").symlink_to(".metadata")

    (problem,) = verify.verify(found)

    assert problem.startswith("shard .metadata cannot be read: ")


def test_only_the_asked_for_files_are_read(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    support.flip_bit(path / "__1_0.distcp", 0)
    found = find.look(run, 1000)
    read = []

    assert verify.verify(found, ["__0_0.distcp"], on_bytes=read.append) == []
    assert sum(read) == support.SHARDS["__0_0.distcp"]
    assert len(verify.verify(found, ["__1_0.distcp"])) == 1


def test_a_file_that_the_manifest_does_not_name_is_a_problem(run, attempt):
    support.save(run, attempt, 1000)

    problems = verify.verify(find.look(run, 1000), ["__9_0.distcp"])

    assert problems == ["__9_0.distcp is not in the manifest"]


def test_without_a_manifest_nothing_is_whole(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    (path / MANIFEST_NAME).unlink()

    assert verify.verify(find.look(run, 1000)) == ["manifest is missing"]


@given(st.lists(st.integers(), max_size=40), st.integers(1, 12))
def test_every_file_is_in_exactly_one_ranks_share(files, world_size):
    shares = [verify.share(files, rank, world_size) for rank in range(world_size)]

    assert sorted(file for share in shares for file in share) == sorted(files)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_what_is_set_aside_keeps_its_bytes_and_gets_a_name_of_its_own(run, attempt):
    for _ in range(2):
        support.save(run, attempt, 1000)
        verify.set_aside(run, find.look(run, 1000), "damaged bytes", attempt)

    assert [(one.path.name, one.reason) for one in find.set_aside(run)] == [
        ("step-0000001000.set-aside-2", "damaged bytes"),
        ("step-0000001000.set-aside-1", "damaged bytes"),
    ]
    assert find.candidates(run) == []
    assert all((one.path / MANIFEST_NAME).exists() for one in find.set_aside(run))


def test_an_old_attempt_sets_nothing_aside(run, attempt):
    support.save(run, attempt, 1000)
    support.next_attempt(run)

    with pytest.raises(Fenced):
        verify.set_aside(run, find.look(run, 1000), "why", attempt)
    assert support.chosen(run) == 1000


def test_a_person_sets_aside_without_an_attempt(run, attempt):
    support.save(run, attempt, 1000)

    verify.set_aside(run, find.look(run, 1000), "why", None)

    assert support.chosen(run) is None


def test_setting_aside_what_is_gone_is_an_error(run, attempt):
    support.save(run, attempt, 1000)
    found = find.look(run, 1000)
    verify.set_aside(run, found, "why", attempt)

    with pytest.raises(CheckpointError, match="cannot be set aside"):
        verify.set_aside(run, found, "why", attempt)


def test_dying_before_the_note_leaves_nothing_to_choose(run, attempt, monkeypatch):
    support.save(run, attempt, 1000, 2000)
    monkeypatch.setattr("hpctrain.checkpoint.commit.find.REASON_NAME", "no/such/place")
    with pytest.raises(CheckpointError, match="cannot be set aside"):
        verify.set_aside(run, find.look(run, 2000), "why", attempt)

    assert support.chosen(run) == 1000

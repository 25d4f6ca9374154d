from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace

import pytest

from hpctrain.checkpoint.format import reader
from hpctrain.checkpoint.format import table as tables
from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, TABLE_NAME, TensorEntry, bytes_digest
from hpctrain.checkpoint.format.reader import open_chunks
from hpctrain.checkpoint.store import find, verify
from hpctrain.errors import CheckpointError, Fenced, FileSystemFault
from tests.support import checkpoints as support
from tests.support.checkpoints import SHARD_0, SHARD_1
from tests.support.patience import PATIENCE_S
from tests.support.sampling import LIMITS, sample


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("window", [1, 1 << 20])
def test_a_whole_checkpoint_has_no_problems_and_is_read_to_the_last_byte(
    run, attempt, monkeypatch, threads, window
):
    monkeypatch.setattr(reader, "WINDOW_BYTES", window)
    support.save(run, attempt, 1000)
    read = []

    problems = verify.verify(find.look(run, 1000), threads=threads, on_bytes=read.append)

    assert problems == []
    assert sum(read) == sum(support.SHARDS.values())


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", [*support.SHARDS, MANIFEST_NAME])
def test_any_single_changed_byte_is_found_and_its_file_named(run, attempt, name, limit):
    (path,) = support.save(run, attempt, 1000)
    found = find.look(run, 1000)
    missed = []
    with (path / name).open("r+b", buffering=0) as file:
        for at in sample(range(os.fstat(file.fileno()).st_size), limit):
            whole = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([whole[0] ^ 1 << at % 8]), at)
            problems = verify.verify(find.look(run, 1000) if name == MANIFEST_NAME else found)
            said = "manifest" if name == MANIFEST_NAME else f"{name}: "
            if len(problems) != 1 or not problems[0].startswith(said):
                missed.append((at, problems))
            os.pwrite(file.fileno(), whole, at)

    assert missed == []
    assert verify.verify(find.look(run, 1000)) == []


def flip_from_end(path, distance):
    support.flip_bit(path, 8 * (path.stat().st_size - distance))


def test_damage_is_told_with_file_tensor_and_place(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    flip_from_end(path / SHARD_0, support.PROOF_0 + 8)
    flip_from_end(path / SHARD_0, support.PROOF_0 + 208)
    flip_from_end(path / SHARD_1, support.PROOF_1 + 2000)
    support.flip_bit(path / SHARD_1, 8 * 20)

    told = [line.split(" xxh3_64")[0] for line in verify.verify(find.look(run, 1000))]

    assert told == [
        f"{SHARD_0}: model.b, block 0 of box [0:100]: digest",
        f"{SHARD_0}: optim.step, block 0 of box []: digest",
        f"{SHARD_1}: header [0:440]: digest of the file",
        f"{SHARD_1}: model.w, block 1 of box [56:96, 0:16]: digest",
    ]


def test_a_file_full_of_damage_is_cut_short(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    content = (path / SHARD_0).read_bytes()
    turned, proof = content[: -support.PROOF_0], content[-support.PROOF_0 :]
    (path / SHARD_0).write_bytes(bytes(byte ^ 255 for byte in turned) + proof)

    problems = verify.verify(find.look(run, 1000))

    assert len(problems) == verify.SHOWN + 1
    assert problems[0].startswith(f"{SHARD_0}: header ")
    assert problems[-1] == f"{SHARD_0}: and 7 more damaged places"


def test_each_kind_of_damage_to_files_is_named(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    found = find.look(run, 1000)
    os.truncate(path / SHARD_0, 1)
    (path / SHARD_1).unlink()
    expected = [
        f"shard {SHARD_0} is 1 bytes, manifest says 4,408",
        f"shard {SHARD_1} is missing",
    ]

    assert verify.verify(found) == verify.verify(found, deep=False) == expected


def test_a_damaged_chunk_table_is_named_once_and_no_shard_is_called_damaged(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    before = bytes_digest((path / TABLE_NAME).read_bytes())
    support.flip_bit(path / TABLE_NAME, 8 * 600)
    after = bytes_digest((path / TABLE_NAME).read_bytes())
    line = f"{TABLE_NAME}: digest {after}, manifest says {before} (damaged bytes)"

    assert verify.verify(find.look(run, 1000)) == [f"{line}; no shard was read"]
    assert verify.verify(find.look(run, 1000), deep=False) == [line]
    (path / TABLE_NAME).unlink()
    assert verify.verify(find.look(run, 1000)) == [f"shard {TABLE_NAME} is missing"]


def test_truncation_at_any_length_is_found(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    size = support.SHARDS[SHARD_0]
    for length in range(size - 1, 0, -(size // 100)):
        os.truncate(path / SHARD_0, length)
        assert verify.verify(find.look(run, 1000)) == [
            f"shard {SHARD_0} is {length:,} bytes, manifest says {size:,}"
        ]


def test_a_shard_of_another_step_or_run_under_the_same_name_is_found(run, attempt, tmp_path):
    one, other = support.save(run, attempt, 1000, 2000)
    foreign = support.new_run(tmp_path, "other")
    (abroad,) = support.save(foreign, support.next_attempt(foreign), 3000)
    shutil.copy(other / SHARD_0, one / SHARD_0)
    shutil.copy(abroad / SHARD_1, other / SHARD_1)

    for step, name in ((1000, SHARD_0), (2000, SHARD_1)):
        found = find.look(run, step)
        problems = verify.verify(found)
        assert found.problem is None
        assert problems
        assert all(problem.startswith(f"{name}: ") for problem in problems)


def test_swapped_shards_of_one_size_are_found(tmp_path):
    half = [replace(support.PIECES[0][0], begin=(at, 0), extent=(48, 16)) for at in (0, 48)]
    ranks = [[half[0]], [half[1]]]
    manifest, _ = support.bare(tmp_path, ranks, support.contents(1, ranks))
    found = find.FoundCheckpoint(1000, tmp_path, manifest, None)
    assert verify.verify(found) == []
    (tmp_path / SHARD_0).rename(tmp_path / "spare")
    (tmp_path / SHARD_1).rename(tmp_path / SHARD_0)
    (tmp_path / "spare").rename(tmp_path / SHARD_1)

    told = {problem.split(":")[0] for problem in verify.verify(found)}

    assert told == {SHARD_0, SHARD_1}


def test_one_large_file_is_read_by_several_threads(run, attempt, monkeypatch):
    monkeypatch.setattr(reader, "WINDOW_BYTES", 1)
    support.save(run, attempt, 1000)
    together, came, read = threading.Barrier(2), {threading.get_ident()}, set()
    real = reader.ChunkFiles.read

    def noted(self, number, buffers, position):
        read.add((number, threading.get_ident()))
        return real(self, number, buffers, position)

    def meet(_):
        if threading.get_ident() not in came:
            came.add(threading.get_ident())
            together.wait(timeout=PATIENCE_S)

    monkeypatch.setattr(reader.ChunkFiles, "read", noted)
    problems = verify.verify(find.look(run, 1000), threads=2, on_bytes=meet)

    assert problems == []
    assert {thread for number, thread in read if number == 0} == came - {threading.get_ident()}
    assert len(came) == 3


def test_a_disk_that_gives_errors_is_named_and_is_no_damage(run, attempt, monkeypatch):
    support.save(run, attempt, 1000)
    found = find.look(run, 1000)

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    refused = []

    assert verify.verify(found, unreadable=refused) == []
    assert (
        refused
        == [
            f"shard {name} cannot be read: [Errno 5] Input/output error"
            for name in (SHARD_0, SHARD_1, "chunks.table")
        ][: len(refused)]
    )
    assert len(refused) >= 2
    with pytest.raises(FileSystemFault, match=f"^step-0000001000: shard {SHARD_0} cannot be read"):
        verify.verify(found)


def test_a_link_to_itself_is_a_missing_file(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    found = find.look(run, 1000)
    (path / SHARD_0).unlink()
    (path / SHARD_0).symlink_to(SHARD_0)

    (problem,) = verify.verify(found)

    assert problem == f"shard {SHARD_0} is missing"


def test_without_deep_no_shard_is_opened(run, attempt, monkeypatch):
    (path,) = support.save(run, attempt, 1000)
    flip_from_end(path / SHARD_1, 1)
    monkeypatch.setattr(os, "preadv", None)

    assert verify.verify(find.look(run, 1000), deep=False) == []


def test_without_a_manifest_nothing_is_whole(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    (path / MANIFEST_NAME).unlink()

    assert verify.verify(find.look(run, 1000)) == ["manifest is missing"]


def test_a_checkpoint_under_another_steps_name_is_not_whole(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    path.rename(find.step_path(run, 2000))

    assert verify.verify(find.look(run, 2000)) == ["manifest is of step 1000, not 2000"]


def test_a_table_that_lacks_a_part_of_a_tensor_is_damage(run, attempt):
    support.save(run, attempt, 1000)
    found = find.look(run, 1000)
    first, *rest = found.manifest.tensors
    larger = TensorEntry(first.name, first.dtype, (97, 16))
    wrong = replace(found, manifest=replace(found.manifest, tensors=[larger, *rest]))

    (problem,) = verify.verify(wrong, deep=False)

    assert "model.w has 1,552 elements, 1,536 were written" in problem


@pytest.mark.parametrize("shift", [-8, 8])
def test_a_table_that_leaves_bytes_without_a_digest_is_damage(run, attempt, shift):
    (path,) = support.save(run, attempt, 1000)
    found = find.look(run, 1000)
    index = open_chunks(path, found.manifest)
    index.head[1] += shift
    content = index.dump()
    (path / TABLE_NAME).write_bytes(content)
    files = [*found.manifest.files[:-1], tables.entry_of(content)]
    wrong = replace(found, manifest=replace(found.manifest, files=files))

    (problem,) = verify.verify(wrong, deep=False)

    assert problem == f"{TABLE_NAME} has chunks that do not fill their file"


def test_what_is_set_aside_keeps_its_bytes_and_gets_a_name_of_its_own(run, attempt):
    for _ in range(2):
        support.save(run, attempt, 1000)
        verify.set_aside(run, 1000, "damaged bytes", attempt)

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
        verify.set_aside(run, 1000, "why", attempt)
    assert support.chosen(run) == 1000


def test_newer_ones_are_set_aside_and_told_of_and_the_step_itself_stays(run, attempt):
    support.save(run, attempt, 1000, 2000, 3000, 4000)
    facts = []

    verify.set_newer_aside(run, 2000, "newer", attempt, facts.append)

    assert find.steps(run) == [2000, 1000]
    assert [(one.step, one.reason) for one in find.set_aside(run)] == [
        (4000, "newer"),
        (3000, "newer"),
    ]
    assert [(fact.step, fact.name, fact.reason) for fact in facts] == [
        (4000, "step-0000004000", "newer"),
        (3000, "step-0000003000", "newer"),
    ]


def test_setting_aside_what_is_gone_is_an_error(run, attempt):
    support.save(run, attempt, 1000)
    found = find.look(run, 1000)
    verify.set_aside(run, found.step, "why", attempt)

    with pytest.raises(CheckpointError, match="cannot be set aside"):
        verify.set_aside(run, found.step, "why", attempt)


def test_dying_before_the_note_leaves_nothing_to_choose(run, attempt, monkeypatch):
    support.save(run, attempt, 1000, 2000)
    monkeypatch.setattr("hpctrain.checkpoint.store.commit.find.REASON_NAME", "no/such/place")
    with pytest.raises(CheckpointError, match="cannot be set aside"):
        verify.set_aside(run, 2000, "why", attempt)

    assert support.chosen(run) == 1000

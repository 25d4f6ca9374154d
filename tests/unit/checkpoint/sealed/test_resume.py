"""The newest whole sealed checkpoint is what a start goes on from; nothing torn is."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path

import pytest

from hpctrain.checkpoint.sealed import files as unit
from hpctrain.checkpoint.sealed import resume as choosing
from hpctrain.checkpoint.sealed import seals
from hpctrain.errors import CheckpointError, Fenced, FileSystemFault, NoCheckpoint
from tests.support.checkpoints import next_attempt
from tests.support.sealed import archive, choose, seal


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def folder_of(out, step, size=1000):
    path = out / f"checkpoint-{step}"
    (path / "deep").mkdir(parents=True)
    (path / "model.bin").write_bytes(bytes([step % 256]) * size)
    (path / "deep" / "rank_0.pt").write_bytes(b"state of %d" % step)
    return path


def belongs_to_another(monkeypatch, path):
    """Another user's file, as lstat(2) tells it."""
    lstat, other_user = os.lstat, os.geteuid() + 4242

    def told(this, **options):
        status = lstat(this, **options)
        if os.fspath(this) != str(path):
            return status
        return os.stat_result((*status[:4], other_user, *status[5:10]))

    monkeypatch.setattr(os, "lstat", told)
    monkeypatch.setattr(os, "scandir", Entries(told))


class Entries:
    """scandir(3) whose entries ask `lstat`."""

    def __init__(self, lstat):
        self.lstat, self.scandir = lstat, os.scandir

    def __call__(self, folder):
        with self.scandir(folder) as entries:
            names = [entry.path for entry in entries]
        return contextlib.nullcontext([Entry(path, self.lstat) for path in names])


class Entry:
    """One of them."""

    def __init__(self, path, lstat):
        self.path, self.name, self.lstat = path, Path(path).name, lstat

    def stat(self, *, follow_symlinks):
        assert not follow_symlinks
        return self.lstat(self.path)


def test_without_a_seal_there_is_nothing_to_go_on_from(run, attempt):
    assert choose(run, attempt).path is None


def test_the_newest_seal_is_taken_and_files_beside_the_sealed_ones_do_not_matter(run, attempt, out):
    for step in (50, 100):
        seal(run, attempt, folder_of(out, step), step)
    (out / "checkpoint-100" / "README.md").write_text("added later")

    taken = choose(run, attempt)

    assert (taken.path, taken.step, taken.name) == (out / "checkpoint-100", 100, "seal-000002")
    assert taken.read_bytes == seals.listing(run)[0].seal.size > 1000
    assert not taken.skipped


@pytest.mark.parametrize("damage", ["a byte", "cut", "a file is gone", "a link", "a fifo"])
def test_a_torn_one_is_set_aside_and_the_one_before_it_is_taken(run, attempt, out, damage):
    for step in (50, 100):
        seal(run, attempt, folder_of(out, step), step)
    hit = out / "checkpoint-100" / "deep" / "rank_0.pt"
    whole = hit.read_bytes()
    hit.unlink()
    if damage == "a byte":
        hit.write_bytes(b"X" + whole[1:])
    elif damage == "cut":
        hit.write_bytes(whole[:-1])
    elif damage == "a link":
        elsewhere = out / "elsewhere"
        elsewhere.write_bytes(whole)
        hit.symlink_to(elsewhere)
    elif damage == "a fifo":
        os.mkfifo(hit)

    taken = choose(run, attempt)

    assert (taken.path, taken.step) == (out / "checkpoint-50", 50)
    assert [row.step for row in taken.skipped] == [100]
    assert "deep/rank_0.pt" in taken.skipped[0].reason
    assert not (out / "checkpoint-100").exists()
    assert (out / "checkpoint-100.torn-1" / "model.bin").exists(), "renamed, never deleted"


def test_one_that_the_program_has_removed_is_passed_over_without_a_word_of_damage(
    run, attempt, out
):
    for step in (50, 100):
        seal(run, attempt, folder_of(out, step), step)
    (out / "checkpoint-100").rename(out.parent / "away")

    taken = choose(run, attempt)

    assert taken.step == 50
    assert "was removed" in taken.skipped[0].reason
    assert not taken.set_aside


def test_a_path_that_is_written_over_is_put_back_from_its_copy(run, attempt, out):
    path = out / "ckpt.pt"
    for step in (50, 100):
        path.write_bytes(b"step %d " % step * 500)
        assert seal(run, attempt, path, step).seal.is_copy
    whole = path.read_bytes()
    path.write_bytes(whole[:100])

    taken = choose(run, attempt)

    assert (taken.path, taken.step, taken.put_back) == (path, 100, True)
    assert path.read_bytes() == whole
    assert (out / "ckpt.pt.torn-1").read_bytes() == whole[:100]
    assert sorted(p.name for p in out.iterdir()) == ["ckpt.pt", "ckpt.pt.torn-1"]


def test_a_folder_that_is_written_over_is_put_back_too(run, attempt, out):
    path = folder_of(out, 7).rename(out / "last")
    seal(run, attempt, path, 100)
    (path / "deep" / "rank_0.pt").unlink()

    assert choose(run, attempt).put_back
    assert (path / "deep" / "rank_0.pt").read_bytes() == b"state of 7"


def test_where_the_newest_copy_is_damaged_the_one_before_it_is_put_back(run, attempt, out):
    path = out / "ckpt.pt"
    for step in (50, 100):
        path.write_bytes(b"step %d" % step)
        stored = seal(run, attempt, path, step)
    stored.copy.write_bytes(b"step 1__")
    path.unlink()

    taken = choose(run, attempt)

    assert (taken.step, taken.put_back) == (50, True)
    assert path.read_bytes() == b"step 50"
    assert "its copy is damaged" in taken.skipped[0].reason


def test_a_newer_file_that_its_own_checksums_prove_is_sealed_and_taken(run, attempt, out):
    path = out / "ckpt.pt"
    archive(path, b"step 50")
    first = seal(run, attempt, path, 50)
    archive(path, b"step 73, saved and not sealed", later_than=first.copy)
    saved = path.read_bytes()

    taken = choose(run, attempt)

    assert (taken.path, taken.name, taken.step) == (path, "seal-000002", None)
    assert path.read_bytes() == saved
    assert seals.listing(run)[0].seal.by == "agent"


def test_an_older_archive_in_the_place_of_the_newest_is_not_taken_for_newer(run, attempt, out):
    path = out / "ckpt.pt"
    archive(path, b"step 50")
    first = seal(run, attempt, path, 50)
    older = path.stat().st_mtime_ns - 10**9
    archive(path, b"from a backup")
    os.utime(path, ns=(older, older))

    taken = choose(run, attempt)

    assert (taken.step, taken.put_back) == (50, True)
    assert path.read_bytes() == first.copy.read_bytes()


def test_what_is_gone_is_not_waited_for(run, attempt, out, hands):
    for step in (50, 100):
        seal(run, attempt, folder_of(out, step), step)
    (out / "checkpoint-100").rename(out / "away")

    def waits(_):
        raise AssertionError("it waits")

    hands.on_sleep = waits
    assert choosing.Choice(run, attempt, patience_s=60).choose().step == 50


@pytest.mark.parametrize("range_works", [True, False])
def test_a_copy_ends_where_whoever_listens_wants_it(run, attempt, out, monkeypatch, range_works):
    path = out / "ckpt.pt"
    path.write_bytes(b"weights" * 1000)
    plan = seals.begin(run, attempt, path, step=None, copy=True)

    def no_range(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    class Ended(Exception):
        pass

    def end(count):
        assert count == 0, "while it is copied"
        raise Ended

    if not range_works:
        monkeypatch.setattr(os, "copy_file_range", no_range)
    with pytest.raises(Ended):
        plan.seal_file(plan.files[0], end)
    seals.discard(plan)
    assert seal(run, attempt, path, None).copy.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("keep", [0.2, 0.9, 0.999])
def test_a_newer_archive_that_a_kill_has_cut_is_not_taken(run, attempt, out, keep):
    path = out / "ckpt.pt"
    archive(path, b"step 50" * 100)
    first = seal(run, attempt, path, 50)
    archive(path, b"step 73" * 100, later_than=first.copy)
    newer, whole = path.stat().st_mtime_ns, path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    os.utime(path, ns=(newer, newer))

    taken = choose(run, attempt)

    assert (taken.step, taken.put_back) == (50, True)
    assert path.read_bytes() == first.copy.read_bytes()


def test_the_first_of_a_path_without_a_number_is_copied_and_those_with_their_step_are_not(
    run, attempt, out
):
    plain, stepped = out / "model.pt", out / "model-epoch=1-step=50.pt"
    plain.write_bytes(b"1")
    stepped.write_bytes(b"2")

    assert not seal(run, attempt, stepped, 50).seal.is_copy
    assert not seal(run, attempt, plain, 60).seal.is_copy, "each save of this run has a new name"
    assert seal(run, attempt, plain, 70).seal.is_copy, "this one has not"


def test_a_run_that_has_sealed_does_not_begin_anew_unasked(run, attempt, out):
    path = folder_of(out, 50)
    seal(run, attempt, path, 50)
    (path / "model.bin").write_bytes(b"")

    with pytest.raises(NoCheckpoint, match=r"none is complete.*--from 0") as caught:
        choose(run, attempt)
    assert "\n" not in str(caught.value)
    assert choose(run, attempt, at_step=0).path is None
    assert choose(run, next_attempt(run)).path is None, "and stays so at the next start"


def test_going_back_takes_that_step_and_forgets_newer_ones(run, attempt, out):
    for step in (50, 100, 150):
        seal(run, attempt, folder_of(out, step), step)

    assert choose(run, attempt, at_step=100).step == 100
    assert choose(run, attempt).step == 100
    assert (out / "checkpoint-150" / "model.bin").exists(), "the program's files are its own"
    with pytest.raises(NoCheckpoint, match="no complete registered checkpoint of step 70"):
        choose(run, attempt, at_step=70)
    assert seal(run, attempt, folder_of(out, 200), 200).number == 4, "no number is given twice"


def test_going_back_puts_the_older_copy_back_and_keeps_the_newer_file_beside_it(run, attempt, out):
    path = out / "ckpt.pt"
    archive(path, b"step 50")
    older = seal(run, attempt, path, 50)
    archive(path, b"step 100", later_than=older.copy)
    newer = path.read_bytes()
    seal(run, attempt, path, 100)

    taken = choose(run, attempt, at_step=50)

    assert (taken.step, taken.put_back) == (50, True)
    assert path.read_bytes() == older.copy.read_bytes()
    assert (out / "ckpt.pt.torn-1").read_bytes() == newer
    assert choose(run, attempt).step == 50


def test_an_error_of_the_file_system_is_no_damage(run, attempt, out, monkeypatch):
    for step in (50, 100):
        seal(run, attempt, folder_of(out, step), step)

    def stale(path, on_bytes=None):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(unit, "digest_of", stale)
    with pytest.raises(FileSystemFault, match="Stale file handle"):
        choose(run, attempt)
    assert (out / "checkpoint-100").exists()


def test_a_seal_that_the_disk_does_not_give_is_no_damage(run, attempt, out, monkeypatch):
    for step in (50, 100):
        seal(run, attempt, folder_of(out, step), step)

    def stale(path, most_bytes=0):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr("hpctrain.checkpoint.sealed.files.read_plain", stale)
    with pytest.raises(FileSystemFault, match="Stale file handle"):
        choose(run, attempt)


def test_it_is_tried_again_for_a_while(run, attempt, out, monkeypatch):
    seal(run, attempt, folder_of(out, 50), 50)
    tries, digest_of = [], unit.digest_of

    def stale_once(path, on_bytes=None):
        tries.append(path)
        if len(tries) == 1:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return digest_of(path, on_bytes)

    monkeypatch.setattr(unit, "digest_of", stale_once)
    monkeypatch.setattr("hpctrain.core.base.files.FIRST_WAIT_S", 0.01)
    taken = choosing.Choice(run, attempt, patience_s=60).choose()

    assert (taken.step, len(tries)) == (50, 3)


def test_an_older_attempt_seals_nothing_any_more(run, attempt, out):
    path = folder_of(out, 50)
    plan = seals.begin(run, attempt, path, step=50)
    files = [plan.seal_file(file) for file in plan.files]
    next_attempt(run)

    with pytest.raises(Fenced):
        seals.commit(run, attempt, plan, files, step=50, by="program")
    assert not seals.listing(run)


def test_what_was_staged_and_never_committed_is_swept_at_a_start(run, attempt, out):
    seals.begin(run, attempt, folder_of(out, 50), step=50)

    assert choose(run, attempt).path is None
    assert not list(run.sealed.iterdir())


@pytest.mark.parametrize("kind", ["link", "fifo", "empty", "missing", "stranger's", "own", "holds"])
def test_what_is_no_ordinary_file_of_ours_is_not_sealed(run, attempt, out, kind, monkeypatch):
    path = folder_of(out, 50)
    if kind == "link":
        (path / "link").symlink_to(path / "model.bin")
    elif kind == "fifo":
        os.mkfifo(path / "fifo")
    elif kind == "empty":
        path = out / "nothing"
        path.mkdir()
    elif kind == "missing":
        path = out / "nowhere"
    elif kind == "stranger's":
        belongs_to_another(monkeypatch, path / "model.bin")
    elif kind == "own":
        path = run.checkpoints
        (path / "file").write_bytes(b"ours")
    else:
        path = run.root.parent

    with pytest.raises(CheckpointError) as caught:
        seal(run, attempt, path, 50)
    assert "\n" not in str(caught.value)
    assert not seals.listing(run)


def test_the_runs_own_output_folder_is_the_programs(run, attempt):
    run.output.mkdir()
    assert seal(run, attempt, folder_of(run.output, 50), 50).seal.step == 50


def test_a_file_that_changes_while_it_is_sealed_is_not_sealed(run, attempt, out):
    path = folder_of(out, 50)
    plan = seals.begin(run, attempt, path, step=50)
    with (path / "model.bin").open("ab") as file:
        file.write(b"more")

    with pytest.raises(CheckpointError, match=r"model\.bin was changed while it was registered"):
        [plan.seal_file(file) for file in plan.files]


def test_older_copies_go_and_of_what_is_gone_ten_are_remembered(run, attempt, out):
    path = out / "ckpt.pt"
    for step in range(5):
        path.write_bytes(b"%d" % step)
        seal(run, attempt, path, step)
    seals.prune(run, attempt, keep=2)
    assert [stored.seal.step for stored in seals.listing(run)] == [4, 3]

    for step in range(100, 113):
        gone = folder_of(out, step)
        seal(run, attempt, gone, step, copy=False)
        gone.rename(out / f"away-{step}")
    seals.prune(run, attempt, keep=2)
    left = [stored.seal.step for stored in seals.listing(run)]
    assert left == [*range(112, 102, -1), 4, 3]
    assert not re.findall("deleting", " ".join(p.name for p in run.sealed.iterdir()))


def test_a_seal_that_another_user_has_put_there_is_not_believed(run, attempt, out, monkeypatch):
    seal(run, attempt, folder_of(out, 50), 50)
    stored = seal(run, attempt, folder_of(out, 100), 100)
    belongs_to_another(monkeypatch, stored.folder / "SEAL.json")

    taken = choose(run, attempt)

    assert taken.step == 50
    assert "belongs to another user" in taken.skipped[0].reason

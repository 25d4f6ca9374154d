from __future__ import annotations

import errno
import os

import pytest

from hpctrain.checkpoint.store import commit
from tests.support import small_disk as disks

small_disk = disks.small_disk

MIB = 1024**2


def stat(**changes):
    """A disk of 400 MiB with half of it and half of its inodes free, but for the changes."""
    values = {
        "bsize": 4096,
        "frsize": 4096,
        "blocks": 102_400,
        "bfree": 51_200,
        "bavail": 51_200,
        "files": 1000,
        "ffree": 500,
        "favail": 500,
        "flag": 0,
        "namemax": 255,
    }
    return os.statvfs_result(list((values | changes).values()))


@pytest.fixture
def disk(monkeypatch):
    """Sets what the file system says of itself."""
    return lambda **changes: monkeypatch.setattr(os, "statvfs", lambda _: stat(**changes))


def test_a_save_that_does_not_fit_is_told_with_both_numbers_place_and_advice(small_disk):
    path = small_disk(4 * MIB)
    (path / "other").write_bytes(bytes(MIB))

    said = commit.forecast(path / "runs" / "gpt-a", 3 * MIB + 1)

    assert said == (
        f"{path}/runs/gpt-a has 3.0 MiB (3,145,728 bytes) free and the next checkpoint needs "
        "3.0 MiB (3,145,729 bytes); free some with `hpctrain checkpoints prune`, or keep fewer "
        "(checkpoint.keep_last)"
    )


def test_a_save_that_just_fits_is_not_spoken_against(small_disk):
    assert commit.forecast(small_disk(4 * MIB), 4 * MIB) is None


def test_a_disk_without_inodes_is_told_although_it_has_room(small_disk):
    path = small_disk(4 * MIB, files=3)
    (path / "other").touch()

    assert commit.forecast(path, 1000, need_files=1) is None
    said = commit.forecast(path, 1000, need_files=2)

    assert said is not None
    assert "room for 1 more files (inodes) and the next checkpoint needs 2" in said


def test_the_reserve_of_roots_does_not_count(disk, tmp_path):
    disk(bfree=51_200, bavail=10)

    assert "40.0 KiB (40,960 bytes) free" in (commit.forecast(tmp_path, MIB) or "")


def test_blocks_are_counted_in_the_file_systems_own_size(disk, tmp_path):
    disk(bsize=MIB, frsize=512, bavail=100)

    assert "50.0 KiB (51,200 bytes) free" in (commit.forecast(tmp_path, MIB) or "")


def test_a_file_system_that_reports_nothing_is_not_full(disk, tmp_path):
    disk(blocks=0, bfree=0, bavail=0, files=0, ffree=0, favail=0)

    assert commit.forecast(tmp_path, 10**15, need_files=10**6) is None


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EACCES, errno.ESTALE])
def test_a_file_system_that_does_not_answer_fails_no_save(monkeypatch, tmp_path, number):
    def refuse(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "statvfs", refuse)

    assert commit.forecast(tmp_path, 10**15) is None
    assert commit.describe(OSError(errno.ENOSPC, "x"), tmp_path).startswith("disk full at ")


def test_a_full_disk_is_named_and_no_quota_is_suspected(small_disk):
    path = small_disk(MIB)
    disks.fill(path)

    with pytest.raises(OSError, match="No space left") as caught:
        (path / "more").write_bytes(b"x")

    assert commit.describe(caught.value, path) == f"disk full at {path}; {commit.ADVICE}"


def test_running_out_of_inodes_is_told_from_a_full_disk(small_disk):
    path = small_disk(MIB, files=2)
    (path / "first").touch()

    with pytest.raises(OSError, match="No space left") as caught:
        (path / "second").touch()

    said = commit.describe(caught.value, path)
    assert said == (
        f"no file can be added at {path}: the file system is out of inodes; {commit.ADVICE}"
    )


def test_a_full_disk_of_xfs_is_not_called_out_of_inodes(disk, tmp_path):
    disk(bfree=0, bavail=0, ffree=0, favail=0)

    said = commit.describe(OSError(errno.ENOSPC, "No space left on device"), tmp_path)

    assert said.startswith(f"disk full at {tmp_path}; ")


def test_room_on_a_full_disk_points_to_a_quota(disk, tmp_path):
    disk()

    said = commit.describe(OSError(errno.ENOSPC, "No space left on device"), tmp_path)

    assert said == (
        f"disk full at {tmp_path} (200.0 MiB of the file system are free by now); if that is "
        f"plenty, it was a quota; {commit.ADVICE}"
    )


def test_a_quota_is_told_from_a_full_disk_with_the_commands_that_show_it(tmp_path):
    said = commit.describe(OSError(errno.EDQUOT, "Disk quota exceeded"), tmp_path)

    assert said.startswith(f"quota exceeded at {tmp_path}: a limit of your user, group or project")
    assert "`quota -s`, `lfs quota`" in said


def test_any_other_error_keeps_its_own_words(tmp_path):
    said = commit.describe(OSError(errno.EIO, "Input/output error"), tmp_path)

    assert said == f"{tmp_path}: Input/output error"


def test_every_answer_is_one_line(disk, tmp_path):
    disk(bavail=5, favail=0)
    said = [commit.forecast(tmp_path, MIB), commit.forecast(tmp_path, 1)]
    said += [
        commit.describe(OSError(n, "x"), tmp_path) for n in (errno.EDQUOT, errno.ENOSPC, errno.EIO)
    ]

    assert all(text and "\n" not in text for text in said)

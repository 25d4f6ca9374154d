"""The disk of tests/support/client_disk.py is what it says: other tests stand on it."""

from __future__ import annotations

import errno
import os
import subprocess
import time

import pytest

from tests.support import client_disk

pytestmark = pytest.mark.fuse
FOREVER_S = 600


@pytest.fixture
def here(tmp_path):
    with client_disk.mounted(tmp_path / "behind", tmp_path / "here", cache_s=FOREVER_S):
        yield tmp_path / "here"


@pytest.fixture
def there(tmp_path):
    with client_disk.mounted(tmp_path / "behind", tmp_path / "there", cache_s=FOREVER_S):
        yield tmp_path / "there"


@pytest.fixture
def faulty(tmp_path):
    with client_disk.mounted(tmp_path / "behind", tmp_path / "here") as rules:
        yield tmp_path / "here", rules


def listed(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_another_node_has_made_is_not_seen_for_a_while(here, there):
    (there / "known").write_text("1")
    assert listed(here) == ["known"]
    assert not (here / "new").exists()

    (there / "new").write_text("2")

    assert not (here / "new").exists()
    assert listed(here) == ["known"]
    assert (there / "new").read_text() == "2"


def test_a_size_that_is_known_stays_until_the_file_is_opened(here, there):
    (there / "file").write_text("1")
    assert (here / "file").stat().st_size == 1

    (there / "file").write_text("123")

    assert (here / "file").stat().st_size == 1
    assert (here / "file").read_text() == "123"


def test_ones_own_changes_are_seen_at_once(here):
    assert listed(here) == []
    (here / "folder").mkdir()
    (here / "folder" / "file").write_text("1")
    (here / "folder").rename(here / "other")

    assert listed(here) == ["other"]
    assert listed(here / "other") == ["file"]
    assert not (here / "folder").exists()


def test_appends_of_two_nodes_lose_nothing(here, there):
    (here / "file").write_text("")
    first = os.open(here / "file", os.O_WRONLY | os.O_APPEND)
    second = os.open(there / "file", os.O_WRONLY | os.O_APPEND)
    for number in range(10):
        os.write(first, b"a%d\n" % number)
        os.write(second, b"b%d\n" % number)
    os.close(first)
    os.close(second)

    assert len((here / "file").read_text().split()) == 20


def test_a_lock_holds_between_nodes(here, there):
    (here / "file").write_text("")
    tried = ["flock", "--nonblock", there / "file", "true"]

    code = subprocess.run(["flock", here / "file", *tried], check=False).returncode

    assert code == 1
    assert subprocess.run(tried, check=False).returncode == 0


def test_faults_come_by_rule_and_are_counted(faulty):
    disk, rules = faulty
    with rules.during(
        {"op": "create", "path": "*.b", "do": "EDQUOT", "count": 1},
        {"op": "write", "path": "*.c", "do": "ENOSPC", "after": 1},
    ):
        (disk / "a").write_text("1")
        with pytest.raises(OSError, match="quota"):
            (disk / "x.b").write_text("1")
        (disk / "x.b").write_text("1")
        with (disk / "x.c").open("wb", buffering=0) as file:
            file.write(b"1")
            with pytest.raises(OSError, match="No space"):
                file.write(b"2")
    (disk / "x.c").write_text("12")

    assert rules.hits() == ["EDQUOT create x.b", "ENOSPC write x.c"]


def test_a_disk_without_locks_and_one_that_loses_them(faulty):
    disk, rules = faulty
    (disk / "file").write_text("")
    again = ["flock", disk / "file", "flock", "--nonblock", disk / "file", "true"]

    assert subprocess.run(again, check=False).returncode == 1
    with rules.during({"op": "flock", "path": "*", "do": "lost"}):
        assert subprocess.run(again, check=False).returncode == 0
    with rules.during({"op": "flock", "path": "*", "do": "ENOSYS"}):
        done = subprocess.run(again, check=False, capture_output=True, text=True)
        assert os.strerror(errno.ENOSYS) in done.stderr


def test_a_lock_may_hold_on_its_own_node_alone(faulty, there):
    disk, rules = faulty
    (disk / "file").write_text("")
    tried = [["flock", "--nonblock", folder / "file", "true"] for folder in (disk, there)]

    with rules.during({"op": "flock", "path": "*", "do": "local"}):
        codes = [
            subprocess.run(["flock", disk / "file", *other], check=False).returncode
            for other in tried
        ]
        assert subprocess.run(tried[0], check=False).returncode == 0

    assert codes == [1, 0]


def test_a_rename_that_is_torn_and_a_disk_that_is_slow(faulty):
    disk, rules = faulty
    (disk / "file").write_text("1")
    (disk / "new").write_text("2")
    with (
        rules.during({"op": "rename", "path": "new", "do": "torn 1"}),
        subprocess.Popen(["mv", disk / "new", disk / "file"]) as mover,
    ):
        while (disk.with_name("behind") / "file").exists():
            assert mover.poll() is None
    assert (disk / "file").read_text() == "2"

    began = time.monotonic()
    with rules.during({"op": "mkdir", "path": "*", "do": "delay 0.3"}):
        (disk / "folder").mkdir()
    assert time.monotonic() - began >= 0.3

"""A disk on which a run's promises do not hold is refused at submit; a good one is taken fast."""

from __future__ import annotations

import errno
import fcntl
import os
import time

import pytest

from hpctrain.core.settings.schema import Settings
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.errors import ChecksFailed
from hpctrain.launch import checks
from hpctrain.launch.checks import check_disk, file_system
from hpctrain.launch.launch import launch
from hpctrain.ledger.run.layout import RunDir
from tests.support import client_disk


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faulty")
    with client_disk.mounted(folder / "behind", folder / "here", cache_s=60) as rules:
        yield folder / "here", rules


@pytest.fixture
def listed(tmp_path):
    """Checks that nothing is left."""
    yield
    assert list(tmp_path.iterdir()) == []


def test_a_good_disk_is_taken_at_once_and_left_as_it_was(tmp_path, listed):
    took = []
    for _ in range(5):
        began = time.process_time()
        check_disk(tmp_path)
        took.append(time.process_time() - began)

    assert min(took) < 0.05


@pytest.mark.fuse
def test_a_disk_of_a_cluster_that_caches_is_taken(faulty):
    check_disk(faulty[0])
    assert list(faulty[0].iterdir()) == []


REFUSED = [
    ("flock", "lost", "flock does not keep a second process out"),
    ("flock", "EOPNOTSUPP", "flock .*not supported"),
    ("flock", "ENOLCK", "flock .*No locks"),
    ("fsync", "EINVAL", "fsync does not work"),
    ("fsyncdir", "EINVAL", "fsync does not work"),
    ("rename", "EXDEV", "a rename is not one change"),
    ("create", "ENAMETOOLONG", "flock"),
    ("mkdir", "EIO", "no folder can be made"),
]


@pytest.mark.fuse
@pytest.mark.parametrize(("op", "do", "said"), REFUSED)
def test_what_a_disk_lacks_is_one_line_with_its_name_and_what_to_do(faulty, op, do, said):
    folder, rules = faulty
    with (
        rules.during({"op": op, "path": "*", "do": do}),
        pytest.raises(ChecksFailed, match=said) as told,
    ):
        check_disk(folder)

    text = str(told.value)
    assert "\n" not in text
    assert f"{folder} (fuse.client) cannot hold a run" in text
    assert "--runs" in text
    assert list(folder.iterdir()) == []


@pytest.mark.fuse
def test_names_that_are_too_long_are_refused(faulty):
    folder, rules = faulty
    rule = {"op": "create", "path": "*/nnnnnn*", "do": "ENAMETOOLONG"}
    with rules.during(rule), pytest.raises(ChecksFailed, match="names of 128 bytes are too long"):
        check_disk(folder)


@pytest.mark.fuse
@pytest.mark.parametrize("do", ["ENOSPC", "EDQUOT"])
@pytest.mark.parametrize("op", ["mkdir", "create", "write"])
def test_a_full_disk_is_no_unfit_one(faulty, op, do):
    folder, rules = faulty
    with rules.during({"op": op, "path": "*", "do": do}):
        check_disk(folder)

    assert rules.hits()
    assert list(folder.iterdir()) == []


def test_locks_of_processes_are_tried_by_another_process(tmp_path, monkeypatch, listed):
    """Some clients make flock of locks that belong to a process: two of ours do not conflict."""
    held = []

    def flock(file, operation):
        if not held:
            real(file, operation)
            held.append(file)

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)

    check_disk(tmp_path)


def test_a_disk_that_overwrites_appends_is_refused(tmp_path, monkeypatch):
    real = os.open

    def opened(path, flags, *mode, **more):
        return real(path, flags & ~os.O_APPEND, *mode, **more)

    monkeypatch.setattr(os, "open", opened)

    with pytest.raises(ChecksFailed, match="appends of two writers overwrite each other"):
        check_disk(tmp_path)


def test_an_object_store_is_refused_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "file_system", lambda folder: "fuse.s3fs")

    with pytest.raises(ChecksFailed, match=r"\(fuse\.s3fs\) .*renaming a folder"):
        check_disk(tmp_path)


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path):
    (tmp_path / "a b").mkdir()
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 8:1 / / rw shared:1 - ext4 /dev/root rw\n"
        f"22 21 0:2 / {tmp_path} rw - lustre mgs:/x rw,localflock\n"
        f"23 22 0:3 / {tmp_path}/a\\040b rw master:2 - nfs4 server:/x rw\n"
        f"24 22 0:4 / {tmp_path}/a rw - tmpfs x rw\n"
    )

    assert file_system(tmp_path / "a b", mounts) == "nfs4"
    assert file_system(tmp_path, mounts) == "lustre"
    assert file_system(tmp_path.parent, mounts) == "ext4"
    assert file_system(tmp_path, tmp_path / "none") == ""


def test_strangeness_is_never_a_traceback(tmp_path, monkeypatch):
    def refuse(*_args, **_named):
        raise OSError(errno.EREMOTEIO, "Remote I/O error")

    monkeypatch.setattr(checks.mmap, "mmap", refuse)

    with pytest.raises(ChecksFailed, match=r"cannot be mapped into memory \(Remote I/O error\)"):
        check_disk(tmp_path)


def test_a_resume_looks_too(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "file_system", lambda folder: "fuse.gcsfuse")
    run = RunDir(tmp_path)

    with pytest.raises(ChecksFailed, match=r"\(fuse\.gcsfuse\) cannot hold a run"):
        launch(run, Spec("run", "id", 0.0, "local", "", Entry("recipe"), Settings()), by="resume")

    assert list(tmp_path.iterdir()) == []

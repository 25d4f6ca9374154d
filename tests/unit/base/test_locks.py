"""A lock is the kernel's, only the run's own people can take it, and no fact is lost to one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import tempfile

import pytest

from hpctrain.core.base import locks
from hpctrain.errors import CheckpointError
from hpctrain.ledger.run import fence
from hpctrain.ledger.run.events import read
from hpctrain.ledger.run.fence import run_lock, take_attempt
from hpctrain.ledger.run.layout import RunDir
from tests.support.ledger_runs import write_event
from tests.support.users import COLLEAGUE, OWNER, STRANGER, run_as, start_as

HOLD = """
import fcntl, sys
with open({path!r}, "rb") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""
TAKE = """
import sys
import tempfile
from pathlib import Path
from hpctrain.ledger.run.event_types import TrainingDone
from hpctrain.ledger.run.events import append
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.ledger.run.layout import RunDir
run = RunDir(Path(sys.argv[1]))
print(take_attempt(run, job_id="7", restarts=0).number)
append(run, TrainingDone())
"""


@pytest.fixture
def shared_run(common_path):
    """A run of OWNER's that everybody may read, with one attempt and one fact."""
    root = common_path / "first"
    root.mkdir()
    os.chown(root, OWNER.uid, OWNER.gid)
    take(OWNER, root)
    return RunDir(root)


def take(user, root, *, check=True):
    return run_as(user, [sys.executable, "-c", TAKE, str(root)], check=check)


@contextlib.contextmanager
def holding(path, user=None):
    """Another process that has the file's lock; yields whether it got it."""
    script = [sys.executable, "-c", HOLD.format(path=str(path))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = start_as(user, script) if user else subprocess.Popen(script, **pipes)
    with process:
        try:
            yield process.stdout.readline() == "held\n"
        finally:
            process.kill()


def permissions(path):
    return stat.S_IMODE(path.stat().st_mode)


def failing(monkeypatch, code, times=10**6):
    """flock(2) fails with this errno so many times; returns how often it was asked."""
    real, asked = fcntl.flock, []

    def flock(descriptor, operation):
        if operation & fcntl.LOCK_EX:
            asked.append(operation)
            if len(asked) <= times:
                raise OSError(code, os.strerror(code))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    return asked


# ---- who may lock -------------------------------------------------------------------------------


@pytest.mark.two_users
@pytest.mark.parametrize("name", ["lock", "events_lock", "events", "spec"])
def test_who_may_only_read_a_run_cannot_keep_it_from_going_on(shared_run, name):
    """flock(2) asks for no right to write: what a stranger can open, he can lock."""
    shared_run.spec.write_text("{}")

    with holding(getattr(shared_run, name), STRANGER) as held:
        assert take(OWNER, shared_run.root).stdout == "2\n"

    assert held == (name in {"events", "spec"})


def test_the_files_of_locks_are_open_to_nobody_else(run):
    take_attempt(run, job_id="7", restarts=0)
    write_event(run, "x")

    assert [permissions(run.lock), permissions(run.events_lock)] == [0o600, 0o600]


def test_locks_that_an_earlier_version_made_are_shut(run):
    run.lock.touch(0o644)
    run.events_lock.touch(0o666)

    take_attempt(run, job_id="7", restarts=0)
    write_event(run, "x")

    assert [permissions(run.lock), permissions(run.events_lock)] == [0o600, 0o600]


@pytest.mark.two_users
def test_a_run_that_a_group_shares_on_purpose_is_locked_by_each_of_them(common_path):
    root = common_path / "ours"
    root.mkdir()
    os.chown(root, OWNER.uid, OWNER.gid)
    root.chmod(0o2775)
    with_group = ["sh", "-c", 'umask 002; exec "$@"', "sh", sys.executable, "-c", TAKE, str(root)]

    assert run_as(OWNER, with_group).stdout == "1\n"
    assert run_as(COLLEAGUE, with_group).stdout == "2\n"
    assert run_as(OWNER, with_group).stdout == "3\n"

    run = RunDir(root)
    assert [permissions(run.lock), permissions(run.events_lock)] == [0o660, 0o660]


@pytest.mark.two_users
def test_another_user_who_would_change_a_run_is_told_whose_it_is(shared_run):
    done = take(STRANGER, shared_run.root, check=False)

    last = done.stderr.strip().splitlines()[-1]
    assert "run.lock cannot be locked: permission denied" in last.lower()
    assert f"it belongs to user {OWNER.uid}" in last


# ---- a lock that does not come ------------------------------------------------------------------


def test_a_lock_that_another_process_keeps_is_one_line_with_what_to_do(run):
    take_attempt(run, job_id="7", restarts=0)
    with (
        holding(run.lock),
        pytest.raises(CheckpointError, match=r"run\.lock .* held .*lslocks.*fuser") as told,
        run_lock(run, timeout_s=0.1),
    ):
        pass

    assert "\n" not in str(told.value)
    assert told.value.exit_code == 75


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_is_refused_and_never_locked_softly(run, monkeypatch, code):
    """A file whose being there is the lock stays behind a killed holder for ever."""
    asked = failing(monkeypatch, code)

    with pytest.raises(CheckpointError, match=r"no flock.*-o flock") as told, run_lock(run):
        pass

    assert len(asked) == 1
    assert "\n" not in str(told.value)
    monkeypatch.undo()
    with run_lock(run, timeout_s=0.1):  # nothing was left that would keep others out
        pass


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EIO, errno.ESTALE, errno.EINTR])
def test_a_moment_without_an_answer_of_the_lock_server_is_waited_out(run, monkeypatch, code):
    asked = failing(monkeypatch, code, times=2)

    with run_lock(run):
        pass

    assert len(asked) == 3


def test_a_lock_server_that_stays_away_is_one_line(run, monkeypatch):
    failing(monkeypatch, errno.ENOLCK)

    with pytest.raises(CheckpointError, match="No locks available"), run_lock(run, timeout_s=0.2):
        pass


def test_a_start_waits_on_for_a_lock_and_says_so(run, monkeypatch, capfd):
    take_attempt(run, job_id="7", restarts=0)
    monkeypatch.setattr(fence, "LOCK_TIMEOUT_S", 0.05)
    real, waits = locks.held, []

    def held(path, timeout_s, **more):
        waits.append(timeout_s)
        if len(waits) == 3:
            other.terminate()
            other.wait()
        return real(path, timeout_s, **more)

    monkeypatch.setattr(locks, "held", held)
    script = HOLD.format(path=str(run.lock))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as other:
        other.stdout.readline()

        assert take_attempt(run, job_id="7", restarts=1).number == 2

    told = capfd.readouterr().err.splitlines()
    assert len(told) == 2
    assert all("lslocks" in line and line.endswith("waiting on") for line in told)


def test_a_holder_that_is_killed_leaves_nothing_behind(run):
    take_attempt(run, job_id="7", restarts=0)
    with holding(run.lock):
        pass

    with run_lock(run, timeout_s=0.1):
        pass


def test_who_removes_the_lock_file_does_not_let_in_two(run, monkeypatch):
    """`rm run.lock` just as it is opened: the lock of a file that is gone keeps nobody out."""
    real, asked = fcntl.flock, []

    def flock(descriptor, operation):
        if not asked:
            run.lock.unlink()
        asked.append(operation)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)

    with run_lock(run), pytest.raises(CheckpointError, match="held"), run_lock(run, timeout_s=0.1):
        pass


# ---- the ledger ---------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EIO, errno.ESTALE])
def test_no_fact_is_lost_where_there_are_no_locks(run, monkeypatch, code):
    asked = failing(monkeypatch, code)

    for _ in range(20):
        write_event(run, "x")

    assert len(read(run)) == 20
    assert len(asked) == 20, "a fact waited for a lock that does not come"


def test_no_fact_is_lost_where_the_lock_cannot_be_opened(run):
    run.events_lock.mkdir()

    write_event(run, "x")

    assert [event.kind for event in read(run)] == ["x"]


def test_a_fact_waits_no_longer_than_a_moment_for_a_lock_that_is_kept(run):
    write_event(run, "first")
    with holding(run.events_lock):
        write_event(run, "second")

    assert [event.kind for event in read(run)] == ["first", "second"]


# ---- folders of a process on its node


def killed_with(folder):
    """What a process that was killed leaves: one that it has made there."""
    pid = os.fork()
    if pid == 0:
        made = locks.NodeFolder("stop", folder)
        (made.path / "stop").write_text("here")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def test_what_a_killed_process_has_left_is_removed_with_the_next_folder(tmp_path):
    killed_with(tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(f"hpctrain-stop-{locks._here()}")

    own = locks.NodeFolder("control", tmp_path)

    assert list(tmp_path.iterdir()) == [own.path]
    own.remove()
    own.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_in_use_stays_also_by_a_child_alone(tmp_path):
    own = locks.NodeFolder("stop", tmp_path)
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    os.close(own._descriptor)  # as its maker was killed

    locks.remove_left_over(tmp_path)
    assert own.path.exists()
    child.kill()
    child.join()
    locks.remove_left_over(tmp_path)
    assert not own.path.exists()


def test_nothing_else_is_removed(tmp_path, monkeypatch):
    others = ["hpctrain-compiled", "hpct-1"]
    for name, value in ((locks.os, "getuid"), (locks.socket, "gethostname")):  # and of others
        with monkeypatch.context() as patch:
            patch.setattr(name, value, {"getuid": lambda: 77, "gethostname": lambda: "n2"}[value])
            others.append(f"hpctrain-stop-{locks._here()}x")
    for name in others:
        (tmp_path / name).mkdir()
    target = tmp_path / "else"
    target.mkdir()
    (target / "kept").touch()
    (tmp_path / f"hpctrain-stop-{locks._here()}link").symlink_to(target)

    locks.remove_left_over(tmp_path)

    assert {path.name for path in tmp_path.iterdir()} >= {*others, "else"}
    assert (target / "kept").exists()


def test_what_another_user_has_given_such_a_name_is_not_touched(tmp_path, monkeypatch):
    theirs = tmp_path / f"hpctrain-stop-{locks._here()}theirs"
    theirs.mkdir()
    linked = tmp_path / f"hpctrain-stop-{locks._here()}link"
    linked.symlink_to(theirs)
    opened = []
    really = os.open
    monkeypatch.setattr(locks.os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(locks.fcntl, "flock", lambda *_: opened.append("locked"))
    monkeypatch.setattr(
        locks.os, "open", lambda path, flags: opened.append(path) or really(path, flags)
    )

    locks.remove_left_over(tmp_path)

    assert theirs.exists()
    assert set(opened) == {theirs, linked}, "neither was locked"


def test_a_folder_that_was_taken_for_left_over_before_its_lock_is_made_again(tmp_path, monkeypatch):
    flock, first = locks.fcntl.flock, []

    def lock(descriptor, how):
        if not first:
            first.extend(tmp_path.iterdir())
            first[0].rmdir()
        flock(descriptor, how)

    monkeypatch.setattr(locks.fcntl, "flock", lock)
    own = locks.NodeFolder("stop", tmp_path)

    assert own.path.exists()
    assert own.path != first[0]
    own.remove()


def test_a_folder_that_another_start_removes_before_it_is_opened_is_made_anew(
    tmp_path, monkeypatch
):
    """Four nodes of a local job started at once, and two had no folder: the attempt died."""
    make, first = tempfile.mkdtemp, []

    def removed_at_once(**words):
        made = make(**words)
        if not first:
            first.append(made)
            locks.remove_left_over(tmp_path)
        return made

    monkeypatch.setattr(locks.tempfile, "mkdtemp", removed_at_once)

    own = locks.NodeFolder("control", tmp_path)

    assert own.path.exists()
    assert str(own.path) != first[0]
    own.remove()


def test_by_itself_it_looks_in_the_nodes_memory_and_its_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "MEMORY", tmp_path / "shm")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for name in ("shm", "tmp"):
        (tmp_path / name).mkdir()
        killed_with(tmp_path / name)

    locks.remove_left_over()

    assert [list((tmp_path / name).iterdir()) for name in ("shm", "tmp")] == [[], []]

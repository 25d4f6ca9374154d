from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

import pytest

from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, FileEntry
from hpctrain.checkpoint.store import commit, find, retention, verify
from hpctrain.errors import CheckpointError, Fenced
from hpctrain.ledger.run.fence import run_lock
from tests.support import checkpoints as support

KILLED = 9
TRACED = ("checkpoint/store/commit.py", "run/fence.py")
"""Where the disk is changed; besides `dump` of the manifest."""


def in_child(work):
    """Start `work` in a forked process; its result becomes the exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work()
        except BaseException:  # noqa: BLE001 - nothing of pytest may run on in the child
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def exit_code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at_line(number):
    """Leave this process at once when that many lines of our own code have been run."""
    left = number

    def trace(frame, event, _):
        nonlocal left
        code = frame.f_code
        if not code.co_filename.endswith(TRACED) and code.co_name != "dump":
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os._exit(KILLED)
        return trace

    sys.settrace(trace)


def killed_at_every_line(prepare, work, check):
    """Run `work` in processes that die one line later each time; returns how many died."""
    line = 0
    while True:
        line += 1
        prepared = prepare(line)

        def die_in_it(line=line, prepared=prepared):
            die_at_line(line)
            work(*prepared)
            sys.settrace(None)
            return 0

        code = exit_code(in_child(die_in_it))
        assert code in {0, KILLED}
        check(line)
        if code == 0:
            return line - 1


def outcome(publish):
    """The exit code for how a publication ended."""
    try:
        publish()
    except Fenced:
        return 3
    except CheckpointError:
        return 2
    return 0


def test_what_is_published_is_whole_and_carries_its_attempt(run, attempt):
    staged, listed = support.stage(run, attempt, 1000)

    path = commit.publish(run, staged, listed, attempt)

    found = find.choose(run).checkpoint
    assert path == found.path == find.step_path(run, 1000)
    assert not staged.exists()
    assert (found.manifest.attempt, found.manifest.attempt_token) == (1, attempt.token)
    assert found.manifest.files == listed.files
    assert verify.verify(found) == []


def test_a_process_killed_at_any_line_of_publish_leaves_all_or_nothing(run):
    attempts = []

    def prepare(step):
        attempts.append(support.next_attempt(run))
        return (run, *support.stage(run, attempts[-1], step), attempts[-1])

    def check(step):
        found = find.choose(run).checkpoint
        committed = found is not None and found.step == step
        assert committed or (found is None and step == 1) or found.step == step - 1
        assert found is None or verify.verify(found) == []
        newest = support.next_attempt(run)
        retention.sweep(run, newest)
        if not committed:
            support.save(run, newest, step)
        assert support.chosen(run) == step
        assert find.staged(run) == []

    died = killed_at_every_line(prepare, commit.publish, check)

    assert died > 50
    assert find.steps(run) == list(range(died + 1, 0, -1))


def test_a_process_killed_at_any_line_of_stage_leaves_the_older_one(run):
    support.save(run, support.next_attempt(run), 1000)

    def prepare(_):
        for aside in find.set_aside(run):
            commit.remove_tree(aside.path)
        attempt = support.next_attempt(run)
        torn = find.step_path(run, 2000)
        torn.mkdir()
        (torn / "shard-00000.safetensors").write_bytes(b"torn")
        return run, 2000, attempt

    def check(_):
        assert support.chosen(run) == 1000
        newest = support.next_attempt(run)
        retention.sweep(run, newest)
        commit.discard(commit.stage(run, 2000, newest))
        assert find.steps(run) == [1000]

    assert killed_at_every_line(prepare, commit.stage, check) > 20


@pytest.mark.parametrize("failing", ["fsync", "rename", "open", "scandir"])
def test_a_failing_disk_leaves_all_or_nothing_whichever_call_it_is(
    run, attempt, failing, monkeypatch
):
    support.save(run, attempt, 1)
    real, failures, step = getattr(os, failing), 0, 1
    while True:
        step += 1
        staged, listed = support.stage(run, attempt, step)
        calls = 0

        def fail(*args, at=failures + 1, **kwargs):
            nonlocal calls
            calls += 1
            if calls == at:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, failing, fail)
            code = outcome(lambda s=staged, m=listed: commit.publish(run, s, m, attempt))
        assert code in {0, 2}
        if code == 0:
            break
        failures += 1
        found = find.choose(run).checkpoint
        assert verify.verify(found) == []
        if found.step != step:
            assert found.step == step - 1
            commit.discard(staged)
            support.save(run, attempt, step)

    assert failures == {"fsync": 3, "rename": 1, "open": failures, "scandir": failures}[failing]
    assert failures >= 1


def test_an_error_of_the_disk_is_told_with_the_step_and_the_run(run, attempt, monkeypatch):
    staged, listed = support.stage(run, attempt, 1000)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError) as caught:
        commit.publish(run, staged, listed, attempt)

    assert str(caught.value) == (
        "step 1000 of gpt-a cannot be published: [Errno 28] No space left on device"
    )


def test_an_old_attempt_publishes_nothing_once_a_newer_one_has_begun(run, attempt):
    staged, listed = support.stage(run, attempt, 1000)
    support.next_attempt(run)

    with pytest.raises(Fenced, match=r"attempt 1 .* attempt 2 has taken gpt-a over"):
        commit.publish(run, staged, listed, attempt)
    with pytest.raises(Fenced):
        commit.stage(run, 2000, attempt)

    assert find.steps(run) == []


def test_of_two_processes_that_publish_the_same_step_one_wins(run, attempt):
    for step in range(1, 16):
        staged, listed = support.stage(run, attempt, step)
        start = time.monotonic() + 0.02

        def publish(staged=staged, listed=listed, start=start):
            while time.monotonic() < start:
                pass
            return outcome(lambda: commit.publish(run, staged, listed, attempt))

        codes = [exit_code(child) for child in [in_child(publish), in_child(publish)]]

        assert sorted(codes) == [0, 2]
        assert support.chosen(run) == step
        assert verify.verify(find.look(run, step)) == []


def test_of_two_attempts_at_the_same_step_only_the_newest_can_publish(run, attempt):
    old = support.stage(run, attempt, 1000)
    newer = support.next_attempt(run)
    new = support.stage(run, newer, 1000)

    children = [
        in_child(lambda: outcome(lambda: commit.publish(run, *old, attempt))),
        in_child(lambda: outcome(lambda: commit.publish(run, *new, newer))),
    ]

    assert [exit_code(child) for child in children] == [3, 0]
    assert find.look(run, 1000).manifest.attempt == 2


def test_a_publication_and_a_new_attempt_never_both_win_late(run, attempt):
    staged, listed = support.stage(run, attempt, 1000)
    with run_lock(run):
        child = in_child(lambda: outcome(lambda: commit.publish(run, staged, listed, attempt)))
        while not (staged / MANIFEST_NAME).exists():
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
        assert find.steps(run) == []
        run.fence.write_text(run.fence.read_text().replace(attempt.token, "somebody else"))

    assert exit_code(child) == 3
    assert find.steps(run) == []


def test_a_committed_step_is_neither_staged_nor_published_again(run, attempt):
    staged, listed = support.stage(run, attempt, 1000)
    kept = staged.with_name("kept")
    staged.rename(kept)
    (path,) = support.save(run, attempt, 1000)
    before = (path / MANIFEST_NAME).read_bytes()

    with pytest.raises(CheckpointError, match="step 1000 is already committed"):
        commit.stage(run, 1000, attempt)
    kept.rename(staged)
    with pytest.raises(CheckpointError, match="step 1000 is already committed"):
        commit.publish(run, staged, listed, attempt)

    assert (path / MANIFEST_NAME).read_bytes() == before


@pytest.mark.parametrize("content", [None, "x"])
def test_publish_never_renames_onto_a_directory_even_an_empty_one(run, attempt, content):
    staged, listed = support.stage(run, attempt, 1000)
    target = find.step_path(run, 1000)
    target.mkdir()
    if content:
        (target / "file").write_text(content)

    with pytest.raises(CheckpointError, match="step 1000 is already committed"):
        commit.publish(run, staged, listed, attempt)
    assert [path.name for path in target.iterdir()] == (["file"] if content else [])


def test_a_torn_directory_in_the_way_is_set_aside_with_its_reason(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    (path / "chunks.table").unlink()

    support.save(run, attempt, 1000)

    assert support.chosen(run) == 1000
    (aside,) = find.set_aside(run)
    assert aside.reason == "shard chunks.table is missing"


def test_staging_again_starts_from_an_empty_directory(run, attempt):
    first, _ = support.stage(run, attempt, 1000)
    (first / "shard-00007.safetensors").write_bytes(b"of the first try")

    second = commit.stage(run, 1000, attempt)

    assert second == first
    assert list(second.iterdir()) == []
    assert support.names_in(run) == [second.name]


def cut(staged, _):
    os.truncate(staged / "shard-00000.safetensors", 7)


def lose(staged, _):
    (staged / "shard-00001.safetensors").unlink()


def add(staged, _):
    (staged / "shard-00002.safetensors").write_bytes(b"of a rank that nobody heard of")


def forget(_, listed):
    listed.files.pop()


def name_outside(_, listed):
    listed.files.append(FileEntry("../../attempt.json", 1, "xxh3_64:0"))


def name_nothing(_, listed):
    listed.files.clear()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut, "shard shard-00000.safetensors is 7 bytes, manifest says 4,408"),
        (lose, "shard shard-00001.safetensors is missing"),
        (add, "shard-00002.safetensors is not in the manifest"),
        (forget, "chunks.table is not in the manifest"),
        (name_outside, "manifest names '../../attempt.json', which is no shard's name"),
        (name_nothing, "manifest names no files"),
    ],
)
def test_what_is_not_complete_is_not_published(run, attempt, spoil, said):
    staged, listed = support.stage(run, attempt, 1000)
    spoil(staged, listed)

    with pytest.raises(CheckpointError) as caught:
        commit.publish(run, staged, listed, attempt)

    assert str(caught.value) == (f"{staged.name} is not complete, nothing was published: {said}")
    assert find.steps(run) == []
    assert not (staged / MANIFEST_NAME).exists()


def test_a_directory_staged_for_something_else_is_not_published(run, attempt):
    staged, _ = support.stage(run, attempt, 1000)
    wrong = support.manifest(2000, support.entries(staged))

    with pytest.raises(CheckpointError, match="is not what attempt 1 staged for step 2000"):
        commit.publish(run, staged, wrong, attempt)
    assert find.steps(run) == []


def test_discarding_is_for_staged_directories_only_and_may_be_repeated(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    staged, _ = support.stage(run, attempt, 2000)

    commit.discard(staged)
    commit.discard(staged)
    with pytest.raises(ValueError, match="is not a staged checkpoint"):
        commit.discard(path)

    assert support.names_in(run) == [path.name]


def test_files_are_flushed_before_the_rename_and_the_parent_after_it(run, attempt, monkeypatch):
    staged, listed = support.stage(run, attempt, 1000)
    order = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(handle):
        order.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        real_fsync(handle)

    def rename(one, other):
        order.append("rename")
        real_rename(one, other)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    commit.publish(run, staged, listed, attempt)

    assert order == [
        str(staged / MANIFEST_NAME),
        str(staged),
        "rename",
        str(run.checkpoints),
    ]

from __future__ import annotations

import os
import threading

import pytest

from hpctrain.checkpoint.format.manifest import MANIFEST_NAME
from hpctrain.checkpoint.store import find, retention
from hpctrain.errors import CheckpointError, NotFound
from hpctrain.ledger.run.fence import run_lock
from tests.support import checkpoints as support
from tests.support import small_disk as disks
from tests.support.patience import PATIENCE_S

small_disk = disks.small_disk


def test_a_pin_is_a_file_with_the_reason_and_the_checkpoint_stays_whole(run, attempt):
    path, _ = support.save(run, attempt, 1000, 2000)

    assert retention.pin(run, 1000, "table 2 of the paper")

    assert (path / "PINNED").read_text() == "table 2 of the paper\n"
    assert retention.pinned(run) == {1000: "table 2 of the paper"}
    assert find.look(run, 1000).problem is None


def test_pinning_twice_changes_nothing_and_another_reason_replaces_the_first(run, attempt):
    support.save(run, attempt, 1000)
    retention.pin(run, 1000, "first")

    assert not retention.pin(run, 1000, "first")
    assert retention.pin(run, 1000, "second")

    assert retention.pinned(run) == {1000: "second"}


def test_unpinning_takes_the_file_away_and_twice_changes_nothing(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    retention.pin(run, 1000)

    assert retention.unpin(run, 1000)
    assert not retention.unpin(run, 1000)

    assert retention.pinned(run) == {}
    assert not (path / "PINNED").exists()


def test_a_torn_checkpoint_cannot_be_pinned_but_its_pin_can_be_taken_away(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    retention.pin(run, 1000)
    (path / MANIFEST_NAME).unlink()

    with pytest.raises(CheckpointError) as caught:
        retention.pin(run, 1000, "again")

    assert str(caught.value) == (
        "step 1000 of gpt-a is torn and was not pinned: manifest is missing"
    )
    assert retention.unpin(run, 1000)


@pytest.mark.parametrize("act", [retention.pin, retention.unpin])
def test_an_unknown_step_is_refused_with_those_that_are_there(run, attempt, act):
    support.save(run, attempt, 1000, 2000)
    support.stage(run, attempt, 1500)

    with pytest.raises(NotFound) as caught:
        act(run, 1500)

    assert str(caught.value) == "gpt-a has no checkpoint of step 1500; there are: 2000, 1000"


def test_a_file_made_by_hand_is_a_pin(run, attempt):
    path, other = support.save(run, attempt, 1000, 2000)
    (path / "PINNED").touch()
    (other / "PINNED").mkdir()

    assert retention.pinned(run) == {2000: "the reason cannot be read: Is a directory", 1000: ""}


def test_a_reason_is_one_line_that_no_terminal_obeys(run, attempt):
    (path,) = support.save(run, attempt, 1000)

    retention.pin(run, 1000, "two\nlines \x1b[31mred")
    assert retention.pinned(run) == {1000: "two lines [31mred"}

    (path / "PINNED").write_bytes(b"\xff\x1b[2J\n")
    assert retention.pinned(run) == {1000: "\ufffd [2J"}


def test_a_full_disk_leaves_no_half_pin_and_the_old_reason(small_disk):
    run = support.new_run(small_disk(1024**2))
    attempt = support.next_attempt(run)
    paths = support.save(run, attempt, 1000, 2000)
    retention.pin(run, 2000, "old")
    disks.fill(run.root)

    for step in (1000, 2000):
        with pytest.raises(CheckpointError, match=rf"step {step} of gpt-a cannot be pinned: .*No"):
            retention.pin(run, step, "new")

    assert retention.pinned(run) == {2000: "old"}
    assert sorted(path.name for path in paths[0].iterdir()) == sorted(
        [*support.SHARDS, MANIFEST_NAME]
    )


def test_whether_it_is_pinned_is_not_guessed_where_nobody_can_say(run, attempt, monkeypatch):
    support.save(run, attempt, 1000, 2000)

    def refuse(path):
        raise OSError(116, "Stale file handle", str(path))

    monkeypatch.setattr(os, "lstat", refuse)

    with pytest.raises(CheckpointError, match=r"cannot be pruned: .*Stale"):
        retention.prune(run, retention.Rules(1), attempt=attempt)
    assert find.steps(run) == [2000, 1000]


def test_pinning_waits_for_who_chooses_what_may_go(run, attempt):
    support.save(run, attempt, 1000)
    made = threading.Event()

    def pin():
        retention.pin(run, 1000)
        made.set()

    with run_lock(run):
        other = threading.Thread(target=pin)
        other.start()
        assert not made.wait(0.2)
    other.join(timeout=PATIENCE_S)

    assert made.is_set()

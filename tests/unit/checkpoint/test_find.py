from __future__ import annotations

import os
import pickle
import shutil

import pytest

from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, SET_ASIDE
from hpctrain.checkpoint.store import commit, find, retention, verify
from hpctrain.core.testing import faults
from hpctrain.errors import FileSystemFault, NoCheckpoint, OtherFormat
from tests.support import checkpoints as support


def cut_shard(path):
    os.truncate(path / "shard-00000.safetensors", 1048)


def remove_shard(path):
    (path / "shard-00001.safetensors").unlink()


def remove_manifest(path):
    (path / MANIFEST_NAME).unlink()


def cut_manifest(path):
    os.truncate(path / MANIFEST_NAME, 300)


def flip_in_manifest(path):
    support.flip_bit(path / MANIFEST_NAME, 8 * 30)


def put_directory_in_shards_place(path):
    (path / "chunks.table").unlink()
    (path / "chunks.table").mkdir()


@pytest.mark.parametrize(
    ("tear", "said"),
    [
        (cut_shard, "shard shard-00000.safetensors is 1,048 bytes, manifest says 4,408"),
        (remove_shard, "shard shard-00001.safetensors is missing"),
        (remove_manifest, "manifest is missing"),
        (cut_manifest, "manifest is cut: it ends after 300 bytes, in line"),
        (flip_in_manifest, "manifest"),
        (put_directory_in_shards_place, "shard chunks.table is missing"),
    ],
)
def test_a_torn_checkpoint_is_never_chosen_and_the_reason_is_told(run, attempt, tear, said):
    _, newest = support.save(run, attempt, 1000, 2000)
    tear(newest)

    choice = find.choose(run)

    assert choice.checkpoint.step == 1000
    assert choice.checkpoint.problem is None
    (skipped,) = choice.skipped
    assert (skipped.step, skipped.name) == (2000, "step-0000002000")
    assert skipped.reason.startswith(said)
    assert "\n" not in skipped.reason


def test_one_flipped_bit_is_found_by_reading_and_then_the_older_one_is_taken(run, attempt):
    _, newest = support.save(run, attempt, 1000, 2000)
    support.flip_bit(newest / "shard-00001.safetensors", 8 * 2000)

    found = find.choose(run).checkpoint
    (problem,) = verify.verify(found)
    verify.set_aside(run, found.step, problem, attempt)

    assert problem.startswith("shard-00001.safetensors: model.w, block 3 of box [56:96, 0:16]: ")
    assert problem.endswith("(damaged bytes)")
    assert support.chosen(run) == 1000
    (aside,) = find.set_aside(run)
    assert (aside.step, aside.reason) == (2000, problem)


def test_what_was_staged_and_never_committed_is_reported_and_left_alone(run, attempt):
    support.save(run, attempt, 1000)
    staged, _ = support.stage(run, attempt, 2000)

    choice = find.choose(run)

    assert choice.checkpoint.step == 1000
    assert [(s.step, s.name, s.reason) for s in choice.skipped] == [
        (2000, "step-0000002000.staged-0001", "staged by attempt 1, never committed")
    ]
    assert staged.is_dir()


def test_a_staged_directory_with_a_whole_manifest_is_still_not_a_checkpoint(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    path.rename(path.with_name("step-0000001000.staged-0001"))

    assert find.choose(run).checkpoint is None


def test_what_is_older_than_the_one_taken_was_not_skipped(run, attempt):
    oldest, _ = support.save(run, attempt, 1000, 3000)
    remove_manifest(oldest)
    support.stage(run, attempt, 2000)

    choice = find.choose(run)

    assert choice.checkpoint.step == 3000
    assert choice.skipped == []


def test_several_damaged_files_are_one_line(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    cut_shard(path)
    remove_shard(path)

    (found,) = find.candidates(run)

    assert found.problem == (
        "shard shard-00000.safetensors is 1,048 bytes, manifest says 4,408 (and 1 more)"
    )


def test_a_checkpoint_under_another_steps_name_is_not_loaded_as_that_step(run, attempt):
    older, newer = support.save(run, attempt, 1000, 2000)
    shutil.rmtree(newer)
    shutil.copytree(older, newer)

    choice = find.choose(run)

    assert choice.checkpoint.step == 1000
    assert choice.skipped[0].reason == "manifest is of step 1000, not 2000"


def test_neither_age_nor_a_latest_file_nor_a_foreign_name_decides(run, attempt):
    older, newer = support.save(run, attempt, 1000, 2000)
    os.utime(newer, (1, 1))
    os.utime(newer / MANIFEST_NAME, (1, 1))
    (run.checkpoints / "latest").write_text("step-0000001000\n")
    shutil.copytree(newer, run.checkpoints / "step-0000009000.bak")
    shutil.copytree(newer, run.checkpoints / "step-9000")
    (run.checkpoints / "step-0000009999").write_text("a file")

    choice = find.choose(run)

    assert choice.checkpoint.step == 2000
    assert [(s.step, s.reason) for s in choice.skipped] == [(9999, "manifest is missing")]
    assert older.is_dir()


def test_a_run_without_checkpoints_has_none_and_that_is_no_error(run):
    assert find.candidates(run) == []
    assert find.choose(run) == find.CheckpointChoice(None, [])


def test_when_all_are_torn_none_is_taken_and_all_are_told(run, attempt):
    for path in support.save(run, attempt, 1000, 2000):
        remove_manifest(path)

    choice = find.choose(run)

    assert choice.checkpoint is None
    assert [s.step for s in choice.skipped] == [2000, 1000]


def test_candidates_are_newest_first_by_step_not_by_order_of_saving(run, attempt):
    support.save(run, attempt, 2000, 10_000, 1000)

    assert [found.step for found in find.candidates(run)] == [10_000, 2000, 1000]


def test_an_asked_for_step_is_taken_although_newer_ones_are_there(run, attempt):
    support.save(run, attempt, 1000, 2000)

    assert find.choose(run, at_step=1000).checkpoint.step == 1000


def test_an_asked_for_step_that_is_not_there_names_what_is(run, attempt):
    _, torn, _ = support.save(run, attempt, 1000, 2000, 3000)
    remove_shard(torn)

    with pytest.raises(NoCheckpoint) as missing:
        find.choose(run, at_step=1500)
    with pytest.raises(NoCheckpoint) as damaged:
        find.choose(run, at_step=2000)

    assert str(missing.value) == (
        "checkpoint of step 1500 of gpt-a is not there; whole ones: 3000, 1000"
    )
    assert str(damaged.value) == (
        "checkpoint of step 2000 of gpt-a is torn: shard shard-00001.safetensors is missing; "
        "whole ones: 3000, 1000"
    )


def test_an_asked_for_step_of_a_run_without_any_says_so(run):
    with pytest.raises(NoCheckpoint, match="there is no whole one"):
        find.choose(run, at_step=1000)


def test_a_set_aside_one_without_its_note_is_listed_all_the_same(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    commit.rename_away(path, 1000, SET_ASIDE)

    (aside,) = find.set_aside(run)

    assert (aside.step, aside.reason) == (1000, "no reason was left")


def test_what_is_found_can_be_sent_to_other_ranks(run, attempt):
    support.save(run, attempt, 1000)
    choice = find.choose(run)

    assert pickle.loads(pickle.dumps(choice)) == choice  # noqa: S301 - our own bytes


def test_a_link_to_another_disk_is_followed(run, attempt, tmp_path):
    (path,) = support.save(run, attempt, 1000)
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")

    assert support.chosen(run) == 1000


ERRORS = ["ESTALE", "EIO", "ETIMEDOUT", "EACCES", "EMFILE"]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("point", ["choose.list", "read.manifest,step=2000"])
def test_what_the_file_system_refuses_is_neither_chosen_nor_passed_over(run, attempt, point, error):
    support.save(run, attempt, 1000, 2000)

    with faults.armed(f"fail:{point},error={error}"), pytest.raises(FileSystemFault):
        find.choose(run)
    assert support.chosen(run) == 2000


def _stage_again(run, attempt):
    commit.stage(run, 2000, attempt)


def _prune(run, attempt):
    retention.prune(run, retention.Rules(1), attempt=attempt)


def _prune_best(run, attempt):
    retention.prune(run, retention.Rules(1, keep_best=1, best_metric="loss"), attempt=attempt)


def _remove(run, _):
    retention.remove(run, [1000])


def _pin(run, _):
    retention.pin(run, 2000)


@pytest.mark.parametrize("act", [_stage_again, _prune, _prune_best, _remove, _pin])
@pytest.mark.parametrize(
    "trouble", [f"fail:read.manifest,error={error}" for error in ERRORS] + ["other format"]
)
def test_what_nobody_can_judge_is_not_moved_or_deleted_by_anyone(run, attempt, act, trouble):
    support.save(run, attempt, 1000, 2000, 3000)
    if trouble == "other format":
        (find.step_path(run, 2000) / MANIFEST_NAME).write_text('{"format": 5}\n')
        (find.step_path(run, 3000) / MANIFEST_NAME).write_text('{"format": 5}\n')
    before = support.names_in(run)

    doubts = (FileSystemFault, OtherFormat)
    with faults.armed("" if trouble == "other format" else trouble), pytest.raises(doubts):
        act(run, attempt)

    assert support.names_in(run) == before


@pytest.mark.parametrize("number", [2, 5])
def test_going_back_does_not_set_another_format_aside(run, attempt, number):
    support.save(run, attempt, 1000, 2000)
    (find.step_path(run, 2000) / MANIFEST_NAME).write_text(f'{{"format": {number}}}\n')

    with pytest.raises(OtherFormat, match=f"checkpoints rm {run.typed} 2000 --force"):
        find.choose(run, at_step=1000)
    assert retention.remove(run, [2000], force=True) == [2000]
    assert find.choose(run, at_step=1000).checkpoint.step == 1000


@pytest.mark.parametrize("name", [MANIFEST_NAME, "PINNED", "SET-ASIDE.txt"])
def test_a_fifo_in_a_files_place_is_waited_for_by_nobody(run, attempt, name):
    (path,) = support.save(run, attempt, 1000)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)

    if name == MANIFEST_NAME:
        with pytest.raises(FileSystemFault, match="not an ordinary file"):
            find.look(run, 1000)
        assert find.glance(run, 1000).state == "unreadable"
        return
    assert "not an ordinary file" in retention.reason_of(path) or name != "PINNED"
    path.rename(path.with_name("step-0000001000.set-aside-1"))
    (aside,) = find.set_aside(run)
    assert aside.reason in {"no reason was left", "the reason cannot be read: not an ordinary file"}

"""The files of a job: whole or not there, whoever was killed, whatever had the number before."""

from __future__ import annotations

import os
import stat

import pytest
from submitit.core.utils import DelayedSubmission

from hpctrain.ledger.run.layout import RunDir
from hpctrain.submitit.job import JobFiles, SavedState, dump
from tests.unit.submitit.conftest import make_call


@pytest.fixture
def files(tmp_path):
    files = JobFiles(tmp_path / "submitit")
    files.folder.mkdir()
    dump(DelayedSubmission(abs, -1), files.pickle())
    return files


def test_a_start_goes_on_from_what_was_committed_last(files):
    dump(DelayedSubmission(abs, -2), files.pickle(attempt=2))
    assert files.load(rank=1).result() == 1

    files.commit(SavedState(attempt=2))

    assert files.load(rank=0).result() == 2
    assert files.load(rank=1).result() == 2


def test_each_rank_has_its_own_where_each_has_saved_and_rank_0s_where_there_are_more(files):
    for rank in (0, 1):
        dump(DelayedSubmission(abs, -10 - rank), files.pickle(attempt=3, rank=rank))
    files.commit(SavedState(attempt=3, ranks=2, timeouts=1))

    assert [files.load(rank).result() for rank in range(3)] == [10, 11, 10]
    assert files.saved_state().timeouts == 1


def test_older_states_go_and_the_submitted_call_stays(files):
    for attempt in (1, 2):
        dump(DelayedSubmission(abs, attempt), files.pickle(attempt))
        files.commit(SavedState(attempt))

    assert sorted(path.name[:9] for path in files.folder.glob("*.pkl")) == [
        "call-0000",
        "call-0002",
    ]


def test_what_a_killed_process_left_hinders_nobody(files):
    """submitit asserts that its temporary file is not there, and the job fails for ever."""
    target = files.result(0)
    target.with_name(f".{target.name}.{os.getpid()}").write_text("torn")

    dump(("success", 1), target)

    assert [path.name for path in files.folder.iterdir() if path.name.startswith(".")] == []


def test_a_value_that_cannot_be_pickled_leaves_what_was_there(files):
    dump("before", files.result(0))
    with pytest.raises(TypeError):
        dump((x for x in ()), files.result(0))

    assert b"before" in files.result(0).read_bytes()
    assert [path.name for path in files.folder.iterdir() if path.name.startswith(".")] == []


def test_a_job_with_the_number_of_an_older_one_has_files_of_its_own(executor, cluster):
    before = executor.submit(abs, -1)
    make_call(before)
    assert before.result() == 1
    cluster.asked.clear()  # a database that was emptied, or another cluster

    again = executor.submit(abs, -5)

    assert again.job_id == before.job_id
    assert not again.paths.result_pickle.exists()
    assert again.submission().args == (-5,)


def test_nobody_else_can_put_a_pickle_there(executor):
    job = executor.submit(abs, -1)

    run = RunDir(job.run)
    assert stat.S_IMODE(JobFiles.of(run).folder.stat().st_mode) == 0o700
    assert not run.root.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)

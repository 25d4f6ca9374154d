"""submitit's own tests of executors and their jobs, on our executors, without starting a job.

Adapted from submitit 1.5.4, core/test_core.py, auto/test_auto.py and slurm/test_slurm.py:
Copyright (c) Facebook, Inc. and its affiliates, under the MIT licence
(https://github.com/facebookincubator/submitit/blob/main/LICENSE). Adapted are the imports, and how
a job is pretended (`cluster` in the place of a mocked subprocess).

Left out, since they test what a run does not use: sacct's output and its watcher, the text of
submitit's batch file, its signal handler with its count of time-outs, plugins, node lists.
"""

from __future__ import annotations

import pickle
import sys

import pytest
from submitit.core import core, utils
from submitit.local import debug

from hpctrain import submitit
from hpctrain.submitit import AutoExecutor, Job, SlurmExecutor, helpers
from hpctrain.submitit.job import JobFiles, dump
from tests.unit.submitit.conftest import RunDir, make_call


def _three_time(x):
    return 3 * x


def do_nothing(*args, **kwargs):
    if kwargs.get("error", False):
        raise ValueError("Too bad")
    return 12


# ---- core/test_core.py


def test_executor(executor):
    job = executor.submit(_three_time, 8)
    assert job.job_id == "12"
    assert job.paths.submission_file.exists()
    make_call(job)
    assert job.result() == 24


def test_executor_batch(executor):
    with executor.batch():
        job = executor.submit(_three_time, 8)
        assert isinstance(job, core.DelayedJob)
    assert isinstance(job, Job)
    with executor.batch():  # make sure we can send a new batch
        job = executor.submit(_three_time, 8)
        assert isinstance(job, core.DelayedJob)
    assert isinstance(job, Job)
    # bad update
    with pytest.raises(RuntimeError), executor.batch():
        executor.update_parameters(blublu=12)
    # bad access
    with pytest.raises(AttributeError):  # noqa: PT012 - as submitit has it
        with executor.batch():
            job = executor.submit(_three_time, 8)
            assert isinstance(job, core.DelayedJob)
            _ = job.job_id
        assert isinstance(job, core.DelayedJob)

    with executor.batch(allow_implicit_submissions=True):
        job = executor.submit(_three_time, 8)
        assert isinstance(job, core.DelayedJob)
        _ = job.job_id
        assert isinstance(job, Job)
        assert not executor._delayed_batch

    # empty context
    with pytest.warns(RuntimeWarning), executor.batch():
        pass
    # multi context
    with pytest.raises(RuntimeError), executor.batch(), executor.batch():  # noqa: PT012 - as above
        job = executor.submit(_three_time, 8)
        assert isinstance(job, core.DelayedJob)


def test_unpickling_watcher_registration(executor):
    job = executor.submit(_three_time, 4)
    original_job_id = job._job_id
    job._job_id = "007"
    assert job.watcher._registered == {original_job_id}  # still holds the old job id
    newjob = pickle.loads(pickle.dumps(job))  # noqa: S301 - our own
    assert newjob.job_id == "007"
    assert newjob.watcher._registered == {original_job_id, "007"}


def test_max_pickle_size_gb(cluster, tmp_path):
    executor = SlurmExecutor(folder=tmp_path, max_pickle_size_gb=0)
    with pytest.raises(RuntimeError):
        executor.submit(_three_time, 4)


# ---- auto/test_auto.py


def test_slurm_executor(executor, monkeypatch):
    monkeypatch.setattr(debug.DebugExecutor, "_valid_parameters", lambda: {"blabla"})
    assert executor.cluster == "slurm"

    # debug_xxx parameter is ignored
    executor.update_parameters(mem_gb=2, name="machin", debug_blabla="blublu")
    assert executor._executor.parameters == {"mem": "2GB", "job_name": "machin"}

    # shared parameter with wrong type
    with pytest.raises(AssertionError):
        executor.update_parameters(mem_gb="2.0GB")  # should be int
    # unknown shared parameter
    with pytest.raises(NameError):
        executor.update_parameters(blublu=2.0)
    # unknown slurm parameter
    with pytest.raises(NameError):
        executor.update_parameters(slurm_host_filter="blublu")
    # check that error message contains all
    with pytest.raises(NameError, match=r"debug_blublu.*\n.*local_num_threads"):
        executor.update_parameters(debug_blublu=2.0, local_num_threads=4)


def test_local_executor(tmp_path):
    assert AutoExecutor(folder=tmp_path, cluster="local").cluster == "local"


def test_max_pickle_size_gb_in_auto(tmp_path):
    ex = AutoExecutor(folder=tmp_path, cluster="local", local_max_pickle_size_gb=0.12)
    assert ex._executor.max_pickle_size_gb == 0.12


def test_executor_argument(tmp_path):
    executor = AutoExecutor(folder=tmp_path, cluster="slurm", slurm_max_num_timeout=22)
    assert getattr(executor._executor, "max_num_timeout", None) == 22

    executor = AutoExecutor(folder=tmp_path, cluster="local", slurm_max_num_timeout=22)
    assert getattr(executor._executor, "max_num_timeout", None) != 22


def test_executor_unknown_argument(tmp_path):
    with pytest.raises(TypeError):
        AutoExecutor(folder=tmp_path, cluster="slurm", slurm_foobar=22)


def test_executor_deprecated_arguments(tmp_path):
    with pytest.warns(UserWarning, match="slurm_max_num_timeout"):
        AutoExecutor(folder=tmp_path, cluster="slurm", max_num_timeout=22)


def test_deprecated_argument(executor, monkeypatch):
    # debug 'blabla' parameter is ignored
    monkeypatch.setattr(debug.DebugExecutor, "_valid_parameters", lambda: {"blabla"})
    executor = AutoExecutor(folder=executor.folder, cluster="slurm")
    with pytest.warns(UserWarning, match=r"blabla.*debug_blabla"):
        executor.update_parameters(mem_gb=2, blabla="blublu")


def test_overriden_arguments(executor, tmp_path):
    executor.update_parameters(
        timeout_min=60, slurm_timeout_min=120, tasks_per_node=2, slurm_ntasks_per_node=3
    )
    # slurm use time
    assert executor._executor.parameters == {"time": 120, "ntasks_per_node": 3}

    # others use timeout_min
    local_ex = AutoExecutor(folder=tmp_path, cluster="local")
    local_ex.update_parameters(timeout_min=60, slurm_time=120)


def test_auto_batch_watcher(cluster, tmp_path):
    executor = AutoExecutor(folder=tmp_path, cluster="local")
    with executor.batch():
        job = executor.submit(print, "hi")
    assert not job.done()


# ---- slurm/test_slurm.py


def test_slurm_job(executor):
    job = executor.submit(do_nothing, 1, 2, blublu=3)
    assert job.job_id == "12"
    assert job.stdout() is None
    job.paths.stdout.write_text("hop")
    job.paths.stderr.write_text("This is the error log\n")
    job._results_timeout_s = 0
    with pytest.raises(utils.UncompletedJobError):
        job._get_outcome_and_result()
    make_call(job)
    assert job.result() == 12
    # logs
    assert job.stdout() == "hop"
    assert job.stderr() == "This is the error log\n"


@pytest.mark.parametrize("use_batch_api", [False, True])
def test_slurm_job_array(executor, use_batch_api):
    """Each job of an array is a run with a job of its own, so its number is no `12_0`."""
    executor.update_parameters(slurm_array_parallelism=3)
    n = 5
    data1, data2 = range(n), range(10, 10 + n)

    def add(x, y):
        assert x in data1
        assert y in data2
        return x + y

    jobs = []
    if use_batch_api:
        with executor.batch():
            for d1, d2 in zip(data1, data2, strict=True):
                jobs.append(executor.submit(add, d1, d2))
    else:
        jobs = executor.map_array(add, data1, data2)
    assert [str(12 + a) for a in range(n)] == [j.job_id for j in jobs]
    for job in jobs:
        make_call(job)
    assert list(map(add, data1, data2)) == [j.result() for j in jobs]


def test_slurm_error(executor):
    executor.update_parameters(slurm_time=24, gpus_per_node=0)
    job = executor.submit(do_nothing, 1, 2, error=12)
    dump(("error", "Traceback\nValueError: Too bad"), JobFiles.of(RunDir(job.run)).result(0))
    with pytest.raises(utils.FailedJobError):
        job.result()
    assert isinstance(job.exception(), utils.FailedJobError)


def test_update_parameters(executor):
    executor.update_parameters(mem_gb=3.5)
    assert executor._executor.parameters["mem"] == "3584MB"


def test_update_parameters_error(tmp_path):
    executor = SlurmExecutor(folder=tmp_path)
    with pytest.raises(ValueError, match="Unavailable"):
        executor.update_parameters(blublu=12)


def test_name():
    assert SlurmExecutor.name() == "slurm"


@pytest.mark.parametrize("name", ["a_0", "a 0", 'a"=0"', "a'; echo foo", r"a\=0", "a\n0"])
def test_weird_dir(cluster, tmp_path, name):
    executor = AutoExecutor(tmp_path / name / "%j", cluster="local")
    job = executor.submit(do_nothing, 1, 2, blublu=3)
    make_call(job)
    assert job.result() == 12
    assert job.paths.folder == tmp_path / name / "12"


def test_slurm_job_no_stderr(executor):
    job = executor.submit(do_nothing)
    job.paths.stdout.write_text("job is running ...\n")
    job._results_timeout_s = 0
    with pytest.raises(utils.UncompletedJobError, match=r"job is running \.\.\."):
        job._get_outcome_and_result()

    job = executor.submit(do_nothing)
    job._results_timeout_s = 0
    with pytest.raises(utils.UncompletedJobError, match="No output/error stream produced !"):
        job._get_outcome_and_result()


# ---- the package itself


def test_what_programs_import_from_submitit_is_there():
    assert helpers.Checkpointable is submitit.helpers.Checkpointable
    assert submitit.JobEnvironment is sys.modules["submitit"].JobEnvironment
    assert type(AutoExecutor("unused", cluster="debug")._executor) is debug.DebugExecutor

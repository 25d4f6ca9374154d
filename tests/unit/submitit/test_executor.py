"""What submitit's parameters become, what is refused, and that an array starts whole or not."""

from __future__ import annotations

import sys

import pytest

import hpctrain
from hpctrain.core.settings.spec import load_spec
from hpctrain.submitit import AutoExecutor, LocalExecutor, SlurmExecutor
from hpctrain.submitit.executor import RUNS


def spec_of(job):
    return load_spec(job.run / "spec.json")


def test_parameters_of_submitit_become_settings_of_the_run(executor):
    executor.update_parameters(
        name="my job",
        timeout_min=90,
        nodes=2,
        tasks_per_node=4,
        cpus_per_task=3,
        gpus_per_node=4,
        mem_gb=3.5,
        slurm_partition="gpu",
        slurm_account="a1",
        slurm_setup=["module load x"],
        slurm_signal_delay_s=120,
        slurm_comment="a b",
        slurm_exclusive=True,
        slurm_additional_parameters={"mail-user": "a@b.c", "contiguous": True, "qos": "high"},
    )
    job = executor.submit(print)

    slurm = spec_of(job).settings.slurm
    assert spec_of(job).name == "my-job-1"
    assert (slurm.nodes, slurm.ranks_per_node, slurm.cpus_per_rank) == ("2", 4, 3)
    assert (slurm.gpus_per_node, slurm.mem, slurm.time) == (4, "3584MB", "1:30:00")
    assert (slurm.partition, slurm.account, slurm.qos) == ("gpu", "a1", "high")
    assert (slurm.setup, slurm.signal_lead_s, slurm.exclusive) == (["module load x"], 120, "yes")
    assert slurm.extra == ["--comment=a b", "--mail-user=a@b.c", "--contiguous"]
    assert job.num_tasks == 8
    assert spec_of(job).settings.run.snapshot == "no"


def test_a_job_of_one_cpu_takes_no_whole_node_and_a_short_one_is_warned_late(executor):
    executor.update_parameters(timeout_min=1)

    slurm = spec_of(executor.submit(print)).settings.slurm

    assert (slurm.exclusive, slurm.time, slurm.signal_lead_s) == ("no", "0:01:00", 20)


@pytest.mark.parametrize(
    ("given", "time"), [("02:00:00", "2:00:00"), ("1-00:00", "24:00:00"), ("90", "1:30:00")]
)
def test_a_time_limit_may_be_in_slurms_words_as_submitit_hands_it_on(executor, given, time):
    executor.update_parameters(slurm_time=given, slurm_signal_delay_s="120")

    slurm = spec_of(executor.submit(print)).settings.slurm
    assert (slurm.time, slurm.signal_lead_s) == (time, 120)


def test_a_job_has_the_tasks_of_its_run_wherever_their_number_was_set(cluster, tmp_path):
    executor = AutoExecutor(tmp_path, cluster="slurm", settings={"slurm.nodes": "2"})
    executor.update_parameters(slurm_additional_parameters={"ntasks-per-node": 3})

    assert executor.submit(print).num_tasks == 6


@pytest.mark.parametrize("cluster_name", ["slurm", "local"])
def test_a_run_has_the_name_of_the_job(cluster, tmp_path, cluster_name):
    executor = AutoExecutor(tmp_path, cluster=cluster_name)
    executor.update_parameters(name="sweep")

    assert executor.submit(print).run.name == "sweep-1"


def test_settings_of_hpctrain_can_be_given_beside(cluster, tmp_path):
    executor = AutoExecutor(tmp_path, cluster="slurm", settings={"budget.preemptions": 7})

    assert spec_of(executor.submit(print)).settings.budget.preemptions == 7


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"slurm_use_srun": False}, "use_srun=False"),
        ({"slurm_teardown": ["rm x"]}, "teardown"),
        ({"slurm_additional_parameters": {"nodes": "1-2"}}, "nodes is '1-2'"),
        ({"slurm_gpus_per_node": "a100:4"}, "gpus_per_node is 'a100:4'; it takes a number"),
        ({"slurm_array_parallelism": 0}, "array_parallelism is 0; it takes how many jobs"),
        ({"slurm_array_parallelism": "two"}, "array_parallelism is 'two'"),
        ({"slurm_gpus_per_task": "a100:1"}, "gpus_per_task is 'a100:1'"),
    ],
)
def test_what_no_run_can_do_is_refused_in_a_line_as_it_is_asked(executor, parameters, words):
    with pytest.raises(hpctrain.UsageError, match=words) as caught:
        executor.update_parameters(**parameters)

    assert "\n" not in str(caught.value)


def test_an_option_that_hpctrain_refuses_leaves_nothing_behind(executor, tmp_path):
    executor.update_parameters(slurm_additional_parameters={"array": "0-3"})

    with pytest.raises(hpctrain.UsageError, match="one run per submit"):
        executor.submit(print)
    assert [left.name for left in (tmp_path / "log" / RUNS).iterdir()] == [".gitignore"]


def test_another_interpreter_is_refused(tmp_path):
    with pytest.raises(hpctrain.UsageError, match="python is '/bin/other'"):
        LocalExecutor(tmp_path, python="/bin/other")
    LocalExecutor(tmp_path, python=sys.executable)


def test_setup_lines_of_a_local_job_are_refused(tmp_path):
    with pytest.raises(hpctrain.UsageError, match="a local job has none"):
        AutoExecutor(tmp_path, cluster="local").update_parameters(local_setup=["touch x"])


def test_no_more_jobs_of_an_array_run_at_once_than_were_asked_for(executor):
    executor.update_parameters(slurm_array_parallelism=2, slurm_dependency="afterok:3")

    jobs = executor.map_array(abs, range(4))

    assert [job.job_id for job in jobs] == ["12", "13", "14", "15"]
    assert [spec_of(job).settings.slurm.extra for job in jobs] == [
        ["--dependency=afterok:3"],
        ["--dependency=afterok:3"],
        ["--dependency=afterok:3,afterany:12"],
        ["--dependency=afterok:3,afterany:13"],
    ]


def test_of_an_array_that_is_refused_in_the_midst_nothing_runs_on(executor, cluster, monkeypatch):
    ended = []
    monkeypatch.setattr(
        "hpctrain.submitit.job.Job.cancel", lambda job, check: ended.append(job.job_id)
    )
    cluster.refuse_after = 2

    with pytest.raises(hpctrain.UsageError, match="refused"):
        executor.map_array(abs, range(4))

    assert ended == ["12", "13"]
    assert list(executor.runs.glob(".*.pkl")) == []


def test_time_limits_are_not_counted_unless_that_is_asked_for(cluster, tmp_path):
    assert SlurmExecutor.job_class is LocalExecutor.job_class
    for given, expected in ((None, "null"), (2, "2")):
        more = {} if given is None else {"slurm_max_num_timeout": given}
        job = AutoExecutor(tmp_path, cluster="slurm", **more).submit(print)
        assert f'"max_num_timeout": {expected}' in spec_of(job).entry.args[-1]


def test_jobs_of_one_folder_have_runs_with_names_of_their_own(executor):
    first, second = executor.submit(print), executor.submit(print)

    assert (first.run.name, second.run.name) == ("submitit-1", "submitit-2")
    assert first.run.parent == executor.runs

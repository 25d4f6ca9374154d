"""SLURM's own words, recorded on 22.05.8, read into our records."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm.jobs import (
    accounted_job,
    is_alive,
    job_facts,
    job_id_of,
    job_info,
    job_starts,
)
from hpctrain.cluster.scheduler.slurm.parse import (
    parse_bulk,
    parse_config,
    parse_config_seconds,
    parse_count,
    parse_records,
    parse_sacct,
    parse_state,
    parse_time,
)
from hpctrain.core.base.records import JobStart, JobState

DATA = Path(__file__).parents[2] / "data" / "slurm-answers"


def recorded(name):
    return parse_records((DATA / f"{name}.txt").read_text())


def test_job_name_cannot_pass_itself_off_as_the_state():
    (record,) = recorded("show_job_odd_name")

    info = job_info(record)

    assert record["JobName"] == "a b'c\"d$(rm) JobState=DONE\\e;f #g"
    assert (info.state, info.restarts, info.nodes) == ("COMPLETED", 0, "n[1-2]")
    assert info.alive is False


def test_comment_cannot_pass_itself_off_as_the_restart_count():
    (record,) = recorded("show_job_odd_name")

    assert record["Comment"] == "hello Restarts=9"
    assert record["StdOut"] == "/tmp/sh/x y%23'q.out"  # noqa: S108 # as recorded
    assert job_facts(record).restarts == 0


def test_preemption_with_grace_is_running_with_a_preempt_time():
    (record,) = recorded("show_job_preempted_with_grace")

    facts = job_facts(record)

    assert (facts.state, facts.restarts, facts.reason) == ("RUNNING", 0, None)
    assert facts.preempt_time == 1795241509
    assert facts.end_time is None


def test_time_limit_gives_its_reason():
    (record,) = recorded("show_job_time_limit")

    facts = job_facts(record)

    assert (facts.state, facts.restarts, facts.reason) == ("COMPLETING", 0, "TimeLimit")
    assert facts.preempt_time is None


def test_node_failure_counts_as_requeued_and_alive():
    (record,) = recorded("show_job_node_failed")

    assert job_facts(record).restarts == 1
    assert job_facts(record).end_time is None
    assert job_info(record).alive is True


def test_array_tasks_are_meant_one_by_one():
    ids = [job_id_of(record) for record in recorded("show_job_array")]

    assert ids == ["24_1", "24_0"]


@pytest.mark.parametrize(
    ("text", "state", "alive"),
    [
        ("RUNNING", "RUNNING", True),
        ("CANCELLED by 1000", "CANCELLED", False),
        ("CANCELLED+", "CANCELLED", False),
        ("OUT_OF_MEMORY", "OUT_OF_MEMORY", False),
        ("REQUEUE_HOLD", "REQUEUE_HOLD", True),
        ("INVENTED_NEXT_YEAR", "INVENTED_NEXT_YEAR", True),
        ("", "UNKNOWN", True),
    ],
)
def test_only_states_that_are_surely_over_count_as_finished(text, state, alive):
    assert parse_state(text) == state
    assert is_alive(state) is alive


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("BOOT_FAIL", JobState.NODE_FAILED),
        ("NODE_FAIL", JobState.NODE_FAILED),
        ("DEADLINE", JobState.TIMED_OUT),
        ("TIMEOUT", JobState.TIMED_OUT),
        ("REQUEUE_HOLD", JobState.REQUEUED),
        ("SPECIAL_EXIT", JobState.REQUEUED),
        ("SIGNALING", JobState.RUNNING),
        ("SUSPENDED", JobState.SUSPENDED),
        ("STOPPED", JobState.SUSPENDED),
        ("RESV_DEL_HOLD", JobState.PENDING),
        ("STAGE_OUT", JobState.COMPLETING),
        ("INVENTED_NEXT_YEAR", JobState.RUNNING),
        ("REVOKED", JobState.OVER),
    ],
)
def test_its_words_become_ours_and_people_see_its_own(said, state):
    info = job_info({"JobId": "17", "JobState": said})

    assert (info.state, info.shown) == (state, said)


def test_times_in_both_forms_are_the_same_instant():
    local = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(1795240996))

    assert parse_time("1795240996") == parse_time(local) == 1795240996


@pytest.mark.parametrize("text", ["Unknown", "None", "N/A", "", "(null)", "12:30:00"])
def test_no_time_is_none(text):
    assert parse_time(text) is None


def test_queue_rows_keep_a_command_with_bars_and_spaces():
    rows = parse_bulk("7|RUNNING|n1|1|2|3|None|/a b/c|d.sh\n8_[1-3]|PENDING||N/A\n\n")

    assert rows == [["7", "RUNNING", "n1", "1", "2", "3", "None", "/a b/c|d.sh"]]


def test_sacct_duplicates_are_incarnations_oldest_first():
    text = (
        "16|NODE_FAIL|1795241194|1795241197|n[1-3]\n"
        "16|CANCELLED by 0|1795241211|1795241236|n[1,3-4]\n"
    )

    rows = parse_sacct(text)
    info = accounted_job(rows)

    assert [row.state for row in rows] == ["NODE_FAIL", "CANCELLED"]
    assert (info.state, info.restarts, info.nodes) == ("CANCELLED", 1, "n[1,3-4]")


def test_starts_are_counted_in_each_job_and_their_nodes_are_named():
    text = (
        "16|NODE_FAIL|1795241194|1795241197|n[1-3]\n"
        "16|REQUEUED|1795241211|1795241236|n[1,3-4]\n"
        "16|PENDING|Unknown|Unknown|None assigned\n"
        "17|CANCELLED by 1000|None|1795241300|None assigned\n"
        "18_2|RUNNING|1795241400|Unknown|n[1\n"
    )

    assert job_starts(parse_sacct(text)) == [
        JobStart("16", 0, "NODE_FAIL", 1795241194, 1795241197, "n1,n2,n3"),
        JobStart("16", 1, "REQUEUED", 1795241211, 1795241236, "n1,n3,n4"),
        JobStart("16", 2, "PENDING"),
        JobStart("17", 0, "CANCELLED", None, 1795241300),
        JobStart("18_2", 0, "RUNNING", 1795241400, None, "n[1"),
    ]


def test_running_job_that_only_accounting_knows_is_not_alive():
    info = accounted_job(parse_sacct("9|RUNNING|1795241194|Unknown|n1\n"))

    assert info.state == "RUNNING"
    assert info.alive is False


def test_job_without_rows_is_forgotten():
    assert accounted_job(parse_sacct("")) is None


def test_kill_wait_is_read_from_the_config():
    text = "KillOnBadExit           = 0\nKillWait                = 8 sec\nLaunch = x\n"

    assert parse_config_seconds(text, "KillWait") == 8
    assert parse_config_seconds(text, "Wait") is None


def test_a_setting_without_a_value_does_not_take_the_next_line_for_it():
    """A blank of any length could stand for the line's end, too, where one expression read all."""
    text = "Epilog                  =\nJobDefaults = DefCpuPerGPU=8\nTwo words = x\nEqual = a = b\n"

    assert parse_config(text) == {
        "Epilog": "",
        "JobDefaults": "DefCpuPerGPU=8",
        "Equal": "a = b",
    }


@pytest.mark.parametrize(
    "text", ["", "-1", "1.5", "x", "\N{SUPERSCRIPT TWO}", "9" * 12, "9" * 5000]
)
def test_a_count_that_is_none_is_none(text):
    assert parse_count(text) is None
    assert parse_count("17") == 17

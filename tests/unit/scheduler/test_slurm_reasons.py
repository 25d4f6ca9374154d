"""Every word of SLURM's for a reason or a state, of three versions, has a meaning here."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm.jobs import (
    FINISHED,
    STATES,
    job_facts,
    job_info,
    job_state,
    queued_job,
    wait_reason,
    wait_reasons,
)
from hpctrain.cluster.scheduler.slurm.parse import parse_bulk
from hpctrain.core.base.records import JobState

WORDS = Path(__file__).parents[2] / "data" / "slurm-words"
VERSIONS = {
    path.stem: tomllib.loads(path.read_text()) for path in sorted(WORDS.glob("[0-9]*.toml"))
}
LATER = 4e9


def record(**fields):
    known = {"JobId": "17", "JobState": "PENDING", "StartTime": str(int(LATER)), "Priority": "4021"}
    return known | fields


@pytest.mark.parametrize("version", VERSIONS)
def test_every_reason_of_a_version_is_in_the_table(version):
    words, _ = wait_reasons()

    assert set(VERSIONS[version]["reasons"]) - set(words) == set()


def test_the_table_has_no_reason_that_no_version_has():
    words, _ = wait_reasons()

    assert set(words) == {word for told in VERSIONS.values() for word in told["reasons"]}


def test_every_row_says_what_it_means_and_what_a_held_job_needs():
    words, texts = wait_reasons()
    for name, row in (words | texts).items():
        assert row.means.strip(), name
        assert not row.means.endswith("."), name
        assert not (row.held and row.starts), name
        assert not row.held or "scontrol release JOBID" in row.helps, name
        assert "never starts" not in row.means or not row.starts, name
        assert len(f"{row.means}; {row.helps}") < 220, name


@pytest.mark.parametrize("version", VERSIONS)
def test_every_state_of_a_version_is_one_of_ours_by_name(version):
    """A word that nobody has thought of would count as a job that runs."""
    ours = set(JobState) | set(STATES) | FINISHED

    assert set(VERSIONS[version]["states"]) - ours == set()
    assert all(job_state(word) in JobState for word in VERSIONS[version]["states"])


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "it is next"),
        ("QOSMaxJobsPerUserLimit", "you run as many jobs as the QOS gives one user"),
        ("QOSMaxGRESPerUser", "than the QOS gives one user"),
        ("AssocGrpGRESMinutes", "budget of GPU (GRES) minutes; ask the site for more"),
        ("DependencyNeverSatisfied", "it never starts; cancel it"),
        ("JobHeldAdmin", "an administrator holds it"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-3]", "down, drained or reserved"),
        ("ReqNodeNotAvail(Unavailable:n[1-3])", ""),  # of versions before those of the table
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs", "down, drained or res"),
        ("RaisedSignal:9(Killed)", "a signal ended its batch script"),
        ("(Priority)", "other jobs come first"),
        ("SomethingNew", ""),
        ("", ""),
    ],
)
def test_a_reason_is_put_into_words_where_it_is_known(reason, words):
    explained = job_info(record(Reason=reason)).explained

    assert words in explained
    assert bool(explained) == bool(words)


@pytest.mark.parametrize(
    ("reason", "counts"),
    [
        ("Resources", True),
        ("Priority", True),
        ("BeginTime", True),
        ("Dependency", False),
        ("QOSGrpCpuLimit", False),
        ("PartitionTimeLimit", False),
        ("JobHeldUser", False),
        ("job_requeued_in_held_state", False),
        ("SomethingNew", True),  # then SLURM's own word counts
        ("None", True),
    ],
)
def test_a_start_is_told_only_where_it_means_something(reason, counts):
    assert job_info(record(Reason=reason)).start_time == (LATER if counts else None)


@pytest.mark.parametrize(
    "fields",
    [
        {"Reason": "JobHeldUser"},
        {"Reason": "job requeued in held state"},
        {"Reason": "launch_failed_requeued_held"},
        {"Reason": "JobHoldMaxRequeue"},
        {"Reason": "BeginTime", "Priority": "0"},
        {"Reason": "SomethingNew", "Priority": "0"},
        {"Reason": "None", "JobState": "REQUEUE_HOLD"},
        {"Reason": "Reservation x was deleted", "JobState": "RESV_DEL_HOLD"},
        {"Reason": "None", "JobState": "SPECIAL_EXIT"},
    ],
)
def test_a_held_job_has_no_start_and_names_its_release(fields):
    info = job_info(record(**fields))

    assert info.held
    assert info.start_time is None
    assert info.alive
    assert "`scontrol release 17`" in info.explained
    assert job_facts(record(**fields)).held
    assert job_facts(record(**fields) | {"JobState": "COMPLETING", "Priority": "0"}).held
    assert not job_facts(record(JobState="COMPLETING")).held


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING", "CANCELLED", "COMPLETED"])
def test_a_job_that_does_not_wait_is_not_explained(state):
    info = job_info(record(JobState=state, Reason="JobHeldUser", Priority="0"))

    assert (info.held, info.explained, info.start_time) == (False, "", LATER)


def test_the_row_of_a_look_at_all_jobs_says_the_same():
    line = f"17|PENDING||{LATER:.0f}|N/A|{{}}|{{}}|/a b|c.sh"
    rows = parse_bulk(
        "\n".join(line.format(*fields) for fields in (("9", "Priority"), ("0", "BeginTime")))
    )

    free, held = (queued_job(row) for row in rows)

    assert (free.held, free.start_time, free.script) == (False, LATER, "/a b|c.sh")
    assert free.explained == job_info(record(Reason="Priority")).explained
    assert (held.held, held.start_time) == (True, None)
    assert "`scontrol release 17`" in held.explained


def test_the_time_of_a_suspension_is_that_of_the_job():
    info = job_info(record(JobState="SUSPENDED", SuspendTime="1795241507"))

    assert (info.state, info.shown) == (JobState.SUSPENDED, "SUSPENDED")
    assert info.suspended_at == 1795241507
    assert info.alive
    assert job_info(record(JobState="RUNNING", SuspendTime="1795241507")).suspended_at is None
    # SLURM notes the end of a suspension in the same field.
    resumed = [
        job_facts(record(JobState=state, SuspendTime="1795241507")).resumed_at
        for state in ("RUNNING", "SUSPENDED")
    ]
    assert resumed == [1795241507, None]


def test_a_word_of_both_tables_is_found_by_its_whole_name_first():
    assert wait_reason("Reservation") is wait_reasons()[0]["Reservation"]
    assert wait_reason("Reservation x was deleted") is wait_reasons()[1]["Reservation_"]

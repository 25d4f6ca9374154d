"""A bad night on the real cluster, and the account of it: held against SLURM's own."""

from __future__ import annotations

import json
import os
import signal

import pytest

from hpctrain.cluster.scheduler.slurm.parse import SACCT_COMMAND, parse_sacct
from hpctrain.ledger.history.goodput import TimeClass, goodput
from hpctrain.ledger.history.run_history import RunHistory
from tests.support import processes
from tests.support.ledger_runs import all_fields
from tests.support.scenario import submit

pytestmark = pytest.mark.slurm

EVERY = 5
STEPS = 100
SETTINGS = {
    "train.steps": STEPS,
    "train.step_delay_s": 0.25,
    "checkpoint.interval_steps": EVERY,
    "run.stop_margin_s": 20,
}
NEWS = "news.json"
CLOSE_S = 2.0
"""So near must our times of a start be to SLURM's."""
LEAVING_S = 10.0
"""KillWait of the test cluster."""


@pytest.fixture
def night(slurm, tmp_path):
    """Two preemptions, a time limit, a dead node and a dead rank; then the run ends."""
    told = {"notify.command": f"tee -a {tmp_path / NEWS}", "notify.on": ["attempt", "done"]}
    run = submit(
        slurm, tmp_path, "--nodes=2", "--ranks-per-node=2", "--time=10", sets=SETTINGS | told
    )
    for attempt in (1, 2):
        _wait_steps(run, attempt)
        urgent = slurm.submit_urgent(4)
        slurm.wait_job(run.job_id, "PENDING")
        waiting = run.status()
        assert waiting["state"] == "requeued"
        assert f"job {run.job_id} waits in the queue after attempt {attempt}" in waiting["words"]
        assert waiting["job"]["reason"], waiting["words"]
        slurm.start_now(run.job_id)
        slurm.cancel(urgent)
    _wait_steps(run, 3)
    slurm.end_in(run.job_id, 25)
    slurm.run("scancel", "-s", "USR2", run.job_id, check=True)
    slurm.wait_job(run.job_id, "PENDING")
    limit = ("scontrol", "update", f"jobid={run.job_id}", "TimeLimit=10")
    slurm.run(*limit, check=True)  # the nearer end was a shorter limit, which stays
    slurm.start_now(run.job_id)
    _wait_steps(run, 4)
    victim = all_fields(run.events("attempt_started", attempt=4)[0])["nodes"][-1]
    slurm.kill_node(victim)
    slurm.start_now(run.job_id)
    _wait_steps(run, 5)
    os.kill(run.wait("rank 3", lambda: _rank_pid(slurm, run, 3)), signal.SIGKILL)
    run.wait_done()
    return run


def _wait_steps(run, attempt):
    """Until the attempt has saved, and has done more steps since."""
    run.wait_event("restored", attempt=attempt)
    first = all_fields(run.events("restored", attempt=attempt)[0])["step"]
    run.wait_step(first + EVERY + 2, attempt=attempt)


def _rank_pid(slurm, run, rank):
    log = f"/attempts/0005/rank-{rank:05d}.log"
    for pid in slurm.pids_of_job(run.job_id):
        if any(path.endswith(log) for path in processes.open_files(pid)):
            return pid
    return None


def _stretches(account):
    """The times in which nodes were held, as the account has them: (start, end) of each."""
    found = []
    for one in account.slices:
        if one.kind is TimeClass.QUEUE or one.end <= one.start:
            continue
        if found and one.start - found[-1][1] < 1e-6:
            found[-1][1] = one.end
        else:
            found.append([one.start, one.end])
    return found


@pytest.mark.story(
    proved_by=("tests/unit/history/test_goodput.py", "tests/unit/history/test_attempts.py")
)
def test_the_account_of_a_bad_night_adds_up_and_agrees_with_slurms_own(night, slurm):
    run = night
    rows = run.wait("SLURM's account of the end", lambda: _account(slurm, run.job_id))
    last = run.events()[-1].t

    alone = goodput(RunHistory.of(run.events()), now=last)
    told = run.status()

    _assert_right_story(run, told)
    _assert_sums(told["goodput"])
    assert len(rows) == 5
    for source, starts in (("events alone", _stretches(alone)), ("status", _told(told))):
        assert len(starts) == len(rows), (source, starts, rows)
        # SLURM's account ends with the order to leave; those who left know when they did.
        leaving_s = LEAVING_S if source == "events alone" else 0.0
        for (start, end), row in zip(starts, rows, strict=True):
            where = (source, row, start, end)
            assert start == pytest.approx(row.start, abs=CLOSE_S), where
            assert row.end - CLOSE_S <= end <= row.end + CLOSE_S + leaving_s, where
    held = sum(2 * (row.end - row.start) for row in rows)
    assert told["goodput"]["allocated_s"] == pytest.approx(held, abs=2 * CLOSE_S * len(rows))
    _assert_report_agrees(run, told)
    _assert_each_end_was_told_once(run)


def _account(slurm, job_id):
    """sacct's rows, once the last has its end: slurmdbd hears of it after slurmctld has told us."""
    rows = parse_sacct(slurm.run(*SACCT_COMMAND, f"--jobs={job_id}", check=True).stdout)
    return rows if rows and all(row.end is not None for row in rows) else None


def _told(told):
    """The starts that `status --json` tells of: attempts of one allocation together."""
    found = {}
    for one in told["attempts"]:
        start = found.setdefault(one["allocated"], [one["allocated"], one["ended"]])
        start[1] = one["released"] if one.get("released") else one["ended"]
    return list(found.values())


def _assert_right_story(run, told):
    attempts = told["attempts"]
    assert [one["cause"] for one in attempts] == [
        "preempted",
        "preempted",
        "walltime",
        "node_fail",
        "crashed",
        "completed",
    ]
    said = [run.doctor(attempt) for attempt in (1, 3, 4, 5, 6)]
    assert said == ["preempted", "walltime", "node_fail", "killed", "completed"]
    lost = [one["steps_lost"] for one in attempts]
    assert lost[:3] == [0, 0, 0]
    restored = {e.attempt: all_fields(e)["step"] for e in run.events("restored")}
    for attempt in (4, 5):
        least, most = (step - restored[attempt + 1] for step in _last_steps(run, attempt))
        assert most <= 2 * EVERY  # one save may have been under way
        assert least - 1 <= lost[attempt - 1] <= most  # killed within its last step, perhaps
    waited = [one["queued_s"] for one in attempts]
    assert waited[0] >= 0  # SLURM's times are whole seconds
    assert all(one is not None and one > 0 for one in waited[1:5]), waited
    assert waited[5] is None  # started again inside its allocation


def _last_steps(run, attempt):
    """The least and the most that a rank did in an attempt, by the ranks' own records.

    These know nothing of the ledger. A rank that was killed at the end of a step has not recorded
    it, though the others have done it.
    """
    records = run.dir.attempt(attempt).glob("samples-*.txt")
    steps = [int(path.read_text().splitlines()[-1].split()[0]) for path in records]
    return min(steps), max(steps)


def _assert_sums(account):
    classes = account["classes"]
    inside = {name: one for name, one in classes.items() if name != "queue"}
    total = sum(one["node_seconds"] for one in inside.values())
    assert total == pytest.approx(account["allocated_s"], abs=0.01)
    assert sum(one["share"] for one in inside.values()) == pytest.approx(1.0, abs=1e-3)
    assert classes["other"]["share"] <= 0.01, classes
    for name in ("queue", "startup", "restore", "warm_up", "step", "save", "redone", "teardown"):
        assert classes[name]["seconds"] > 0, (name, classes)


def _assert_report_agrees(run, told):
    page = json.loads(run.cli("report", run.dir.name, "--json"))
    said = page["runs"][0] if "runs" in page else page
    for name in ("allocated_s", "submitted_s", "useful_of_allocated", "useful_since_submit"):
        assert said["goodput"][name] == pytest.approx(told["goodput"][name], rel=1e-3), name
    assert [one["cause"] for one in said["attempts"]] == [one["cause"] for one in told["attempts"]]


def _assert_each_end_was_told_once(run):
    """Also the end of the attempt whose node died, by its successor."""
    run.wait_event("notified", count=6)
    text, decoder, heard = (run.cwd / NEWS).read_text(), json.JSONDecoder(), []
    while text:
        news, end = decoder.raw_decode(text)
        heard.append((news["what"], news["attempt"], news["reason"]))
        text = text[end:].lstrip()
    assert sorted(heard, key=lambda one: one[1]) == [
        ("attempt", 1, "preempted"),
        ("attempt", 2, "preempted"),
        ("attempt", 3, "timed_out"),
        ("attempt", 4, "node_failed"),
        ("attempt", 5, "crashed"),
        ("done", 6, "completed"),
    ]
    assert all(all_fields(event)["ok"] for event in run.events("notified"))

"""Rank 0's side thread hears requests and warnings while the job runs, whatever a look meets."""

from __future__ import annotations

import errno
import json
import os
import threading
import time

import pytest

from hpctrain.core.base.records import JobFacts
from hpctrain.errors import ClusterUnreachable
from hpctrain.ledger.run import fence
from hpctrain.ledger.run.fence import left_text
from hpctrain.observe.profile import trace as files
from hpctrain.observe.profile.trace import ProfileRequest
from hpctrain.train.runtime import stops as module
from hpctrain.train.runtime.agreement import STOP_TERM, STOP_USER, STOP_WARNED
from hpctrain.train.runtime.stops import JobClock, Rank0Requests
from tests.support import patience
from tests.support.patience import PATIENCE_S

RUNNING = JobFacts("RUNNING", restarts=0)
PREEMPTED = JobFacts("RUNNING", restarts=0, preempt_time=1.0, end_time=2e9)
JOB = "17"


class Disk:
    """A path on a file system that answers each look with the next of these, then with the last."""

    def __init__(self, path, *answers):
        self._path = path
        self._answers = list(answers)
        self.looks = 0

    def read_text(self):
        self.looks += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer), str(self._path))
        return answer

    def unlink(self, *, missing_ok=False):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def __str__(self):
        return str(self._path)


class Scheduler:
    """Answers with what the test has set; an exception is raised."""

    def __init__(self, answer):
        self.answer = answer

    def facts(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.005)
    for reader in (fence, files):
        monkeypatch.setattr(reader, "left_text", _left_text)


def _left_text(path):
    return path.read_text() if isinstance(path, Disk) else left_text(path)


def watching(tmp_path, *, request=None, profile=None, control=None, end_time=2e9):
    requests = Rank0Requests(
        request=request or tmp_path / "stop-request.json",
        profile_request=profile or tmp_path / "profile-request.json",
        job_id=JOB,
        clock=JobClock(end_time, 10.0),
        control=control,
    )
    requests.start()
    return requests


def until(condition):
    patience.until(condition, "it did not come")


def asked(job_id=JOB):
    return json.dumps({"job_id": job_id})


@pytest.mark.parametrize(
    "bad",
    [errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOTCONN, "[]", "3", "null", '"17"', "{", "\0"],
)
def test_a_request_to_stop_is_heard_after_a_look_that_failed(tmp_path, bad):
    disk = Disk(tmp_path / "stop-request.json", bad, bad, asked())

    requests = watching(tmp_path, request=disk)

    until(lambda: requests.stop)
    assert (requests.stop, disk.looks) == (STOP_USER, 3)


def test_a_stop_is_told_on_once_it_is_known(tmp_path):
    control = Scheduler(RUNNING)
    requests, told = watching(tmp_path, control=control), threading.Event()
    requests.on_stop = told.set
    control.answer = PREEMPTED

    requests.warn()

    assert told.wait(PATIENCE_S)
    assert requests.stop == STOP_WARNED


@pytest.mark.parametrize("bad", [errno.ESTALE, errno.EIO, errno.EACCES, "[]", '{"job_id": 1}'])
def test_a_preemption_is_heard_beside_files_that_cannot_be_read(tmp_path, bad):
    stop, profile = Disk(tmp_path / "s", bad), Disk(tmp_path / "p", bad)
    control = Scheduler(RUNNING)
    requests = watching(tmp_path, request=stop, profile=profile, control=control)
    until(lambda: profile.looks > 2)
    control.answer = PREEMPTED

    requests.warn()

    until(lambda: requests.stop)
    assert requests.stop == STOP_WARNED


def test_trouble_with_one_request_does_not_hide_the_other(tmp_path):
    request = ProfileRequest(JOB, "token", 3, None, memory=False, t=time.time())
    request.write(tmp_path / "profile-request.json")
    broken = Disk(tmp_path / "stop-request.json", errno.EIO)

    requests = watching(tmp_path, request=broken)

    until(lambda: requests.profile)
    assert requests.take_profile() == request
    assert not (tmp_path / "profile-request.json").exists(), "that it is answered"


def test_trouble_is_told_once_for_each_file(tmp_path, capfd):
    stop, profile = Disk(tmp_path / "s", errno.EIO), Disk(tmp_path / "p", errno.ESTALE)

    watching(tmp_path, request=stop, profile=profile)

    until(lambda: stop.looks > 5 and profile.looks > 5)
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 2
    assert all(line.startswith("hpctrain: ") and "looks again" in line for line in told)


@pytest.mark.parametrize(
    ("answer", "end_time", "expected"),
    [
        (PREEMPTED, 2e9, STOP_WARNED),
        (JobFacts("COMPLETING", restarts=0), 2e9, STOP_WARNED),
        (RUNNING, None, STOP_WARNED),
        (ClusterUnreachable("silent"), 2e9, STOP_WARNED),
        (OSError(errno.EMFILE, "too many"), 2e9, STOP_WARNED),
        (ValueError("no record"), 2e9, STOP_WARNED),
        (RUNNING, 2e9, STOP_USER),
    ],
)
def test_what_a_warning_means(tmp_path, answer, end_time, expected):
    control = Scheduler(RUNNING)
    requests = watching(tmp_path, control=control, end_time=end_time)
    profile = tmp_path / "profile-request.json"
    ProfileRequest(JOB, "up", 1, None, memory=False, t=time.time()).write(profile)
    until(lambda: requests.profile)  # it has asked what it may have missed
    control.answer = answer

    requests.warn()

    if expected == STOP_USER:  # near the time limit the clock says when: only a request stops
        until(lambda: not requests._warned.is_set())
        (tmp_path / "stop-request.json").write_text(asked())
    until(lambda: requests.stop)
    assert requests.stop == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (PREEMPTED, STOP_TERM),
        (JobFacts("COMPLETING", restarts=0), STOP_TERM),
        (RUNNING, STOP_USER),
        (ClusterUnreachable("silent"), STOP_USER),
        (OSError(errno.EMFILE, "too many"), STOP_USER),
    ],
)
def test_a_preemption_that_came_before_the_watch_is_not_missed(tmp_path, answer, expected):
    (tmp_path / "stop-request.json").write_text(asked())

    requests = watching(tmp_path, control=Scheduler(answer))

    until(lambda: requests.stop)
    assert requests.stop == expected


def test_another_jobs_request_stops_nobody(tmp_path):
    disk = Disk(tmp_path / "stop-request.json", asked("18"), asked("18"), asked())

    requests = watching(tmp_path, request=disk)

    until(lambda: requests.stop)
    assert disk.looks == 3


def test_the_schedulers_end_of_the_job_is_the_clocks(tmp_path):
    requests = watching(tmp_path, control=Scheduler(JobFacts("RUNNING", end_time=1234.0)))
    (tmp_path / "stop-request.json").write_text(asked())

    until(lambda: requests.stop)
    assert requests._clock.end_time == 1234.0


def test_after_a_suspension_the_end_of_the_job_is_asked_anew(tmp_path, monkeypatch):
    """SLURM gives back the time in which a job was suspended."""
    monkeypatch.setattr(module, "STOOD_S", -1.0)  # each look comes later than that
    scheduler = Scheduler(JobFacts("RUNNING", end_time=1234.0))
    requests = watching(tmp_path, control=scheduler)
    until(lambda: requests._clock.end_time == 1234.0)

    scheduler.answer = JobFacts("RUNNING", end_time=5678.0)

    until(lambda: requests._clock.end_time == 5678.0)
    assert requests.stop == 0
    (tmp_path / "stop-request.json").write_text(asked())
    until(lambda: requests.stop)


def test_a_profile_request_is_taken_once(tmp_path):
    path = tmp_path / "profile-request.json"
    text = json.dumps(vars(ProfileRequest(JOB, "token", 3, (0, 1), memory=True, t=time.time())))
    disk = Disk(path, text)  # which cannot be removed either

    requests = watching(tmp_path, profile=disk)

    until(lambda: requests.profile)
    taken = requests.take_profile()
    looks = disk.looks
    until(lambda: disk.looks > looks + 2)
    assert (taken.token, taken.ranks, requests.profile) == ("token", (0, 1), 0)
    assert requests.take_profile() is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (PREEMPTED, 2e9),
        (RUNNING, None),
        (JobFacts("RUNNING", end_time=5.0), None),
        (JobFacts("COMPLETING", preempt_time=1.0, end_time=5.0), None),
        (JobFacts("RUNNING", preempt_time=1.0), None),
        (ClusterUnreachable("silent"), None),
    ],
)
def test_the_end_of_a_grace_time_is_the_schedulers_to_say(tmp_path, answer, expected):
    requests = watching(tmp_path, control=Scheduler(answer))

    assert requests.grace_end(PATIENCE_S) == expected


def test_a_silent_scheduler_holds_up_no_save(tmp_path):
    asked_for_ever = threading.Event()

    class Silent:
        def facts(self):
            asked_for_ever.wait(PATIENCE_S)
            return PREEMPTED

    requests = watching(tmp_path, control=Silent())

    assert requests.grace_end(0.01) is None
    asked_for_ever.set()

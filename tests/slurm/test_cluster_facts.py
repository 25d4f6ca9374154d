"""What SLURM does, as hpctrain relies on it: each fact is a real run, so that a new version tells.

A fact that is not the same in all versions says since which each holds (`by_version`): the oldest
that it was seen with, or the one whose source has it. docs/development/slurm-versions.md is the
table of them.

All jobs of a module start together and are then preempted, requeued, cancelled and timed out side
by side (SLURM looks at time limits and grace times only every 30 s). The tests read their diaries.
`support.slurm_diaries` keeps what each version does as data; the embedded cluster is held against
it (tests/unit/entry/test_local_contract.py).
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import signal_watch
from tests.support.slurm_cluster import Record, SlurmCluster, parse_record
from tests.support.slurm_config import GRACE_S, KILL_WAIT_S
from tests.support.slurm_diaries import Recording, attempt_facts, next_facts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from subprocess import CompletedProcess

pytestmark = [pytest.mark.slurm, pytest.mark.every_slurm, pytest.mark.timeout(200)]

ELASTIC = ("--nodes=2-3", "--exclusive")
OLDEST = (22, 5)
LIVE = {"RUNNING", "SIGNALING"}
"""The second is seen for a moment while slurmctld sends a signal."""
LOOP_S = 30
"""slurmctld looks at time limits and grace times once in so many seconds."""
SLACK_S = 15
"""A loaded machine may be this late."""


@dataclass(frozen=True)
class Watched:
    """A job whose batch script and tasks write a diary of their signals."""

    cluster: SlurmCluster
    name: str
    job_id: str

    @classmethod
    def submit(
        cls, cluster: SlurmCluster, name: str, *sbatch: str, on: str = "", srun: str = ""
    ) -> Watched:
        watch = shlex.join([sys.executable, signal_watch.__file__, str(cluster.at.work)])
        reaction = " ".join(f"--on {one}" for one in on.split())
        job_id = cluster.sbatch(
            *(f"--job-name={name}", f"--output={name}.out", "--open-mode=append"),
            *("--signal=USR2@30", "--time=60", *sbatch),
            f"--wrap=exec {watch} {name}-batch -- srun {srun} {watch} {name} {reaction}",
        )
        return cls(cluster, name, job_id)

    def diaries(self, who: str = "", attempt: str = "unset") -> dict[str, list[dict[str, Any]]]:
        """Events by node: of the tasks, or of the batch script with `who="-batch"`."""
        found = {}
        for path in self.cluster.at.work.glob(f"{self.name}{who}.*.{attempt}.jsonl"):
            lines = path.read_text().split("\n")[:-1]
            found[path.name.split(".")[1]] = [json.loads(line) for line in lines]
        return found

    def signals(self, node: str, who: str = "", within: float = GRACE_S / 2) -> list[str]:
        """Signals of a node's first attempt, from the first one on for so many seconds."""
        events = [e for e in self.diaries(who)[node] if e["event"].startswith("SIG")]
        return [e["event"] for e in events if e["t"] - events[0]["t"] < within]

    def event(self, name: str, attempt: str = "unset") -> dict[str, Any]:
        """The first event of that name in a task's diary."""

        def happened() -> dict[str, Any] | None:
            every = [e for events in self.diaries("", attempt).values() for e in events]
            return next((event for event in every if event["event"] == name), None)

        def told() -> str:
            out = self.cluster.at.work / f"{self.name}.out"
            said = out.read_text() if out.exists() else "nothing"
            return f"{name} in {self.name}: {self.cluster.job(self.job_id)}\nsaid {said}"

        found = self.cluster.wait_for(happened, told)
        assert found is not None
        return found

    def started(self, nodes: int = 1, attempt: str = "unset") -> None:
        def all_there() -> bool:
            return len(self.diaries("", attempt)) == nodes

        self.cluster.wait_for(all_there, f"{self.name} on {nodes} nodes")

    def started_again(self, node: str = "") -> None:
        """Its first restart has begun, on this node; SLURM may have begun it unasked."""
        at_once = {"RUNNING", "PENDING"}

        def requeued() -> bool:
            found = self.cluster.job(self.job_id)
            return found["Restarts"] == "1" and found["JobState"] in at_once

        self.cluster.wait_for(requeued, f"the requeue of {self.name}")
        words = [f"ReqNodeList={node}"] if node else []
        # Refused, harmlessly, where it runs by now.
        self.cluster.run("scontrol", "update", f"jobid={self.job_id}", *words, "StartTime=now+2")
        self.started(attempt="1")

    def record(self) -> Record:
        """What SLURM said of the job at its first signal."""
        return parse_record(self.event("record")["record"])

    def seconds_left_after(self, signal: str) -> float:
        """From a signal to the task's last sign of life."""
        events = next(iter(self.diaries().values()))
        return float(events[-1]["t"] - self.event(signal)["t"])

    def wait(self, *states: str) -> Record:
        return self.cluster.wait_job(self.job_id, states)

    def facts(self, ends_after: float = 0) -> dict[str, Any]:
        """What is recorded of a job: its first attempt, and what followed.

        Args:
            ends_after: So long after the signal a task that stays must live at least.
        """

        def next_is_known(record: Record) -> bool:
            return bool(next_facts(record, before=0))

        following = self.cluster.wait_job(self.job_id, next_is_known)
        facts = {
            "tasks": attempt_facts(min(self.diaries().items())[1], ends_after),
            "next": next_facts(following, before=0),
        }
        if ends_after:  # or its signals may come as it leaves
            events = attempt_facts(min(self.diaries("-batch").items())[1])
            facts["batch"] = {"signals": events["signals"]}
        return facts


@pytest.fixture(scope="module")
def limited(slurm_cluster: SlurmCluster) -> Iterator[Watched]:
    """A job that nears its time limit from the beginning, on n4; the rest happens beside it."""
    slurm_cluster.reset()
    # Warned a loop and SLACK_S before: a loop that is late would find only that the limit is over.
    warned_s = LOOP_S + SLACK_S
    signal = f"--signal=USR2@{warned_s}"
    job = Watched.submit(slurm_cluster, "limited", "--nodelist=n4", "--time=10", signal)
    job.started()
    # `jobs` starts slurmctld twice anew, and with it a loop.
    slurm_cluster.end_in(job.job_id, LOOP_S + warned_s + 2)
    yield job
    slurm_cluster.reset()


@pytest.fixture(scope="module")
def recording(slurm_cluster: SlurmCluster) -> Iterator[Recording]:
    """What is recorded of this version; `support.slurm_diaries` writes it anew."""
    with Recording.of(slurm_cluster.version) as found:
        yield found


@pytest.fixture(scope="module")
def answers() -> dict[str, CompletedProcess[str]]:
    """What SLURM said to requests that `jobs` had to make at a certain moment."""
    return {}


@pytest.fixture(scope="module")
def jobs(limited: Watched, answers: dict[str, CompletedProcess[str]]) -> dict[str, Watched]:
    """Start the jobs of the stories below and do to each what its name says."""
    c = limited.cluster
    on_n1 = ("--partition=grace", "--nodelist=n1")
    on_n3 = ("--nodelist=n3",)
    plan: dict[str, tuple[tuple[str, ...], str]] = {
        "preempted": (("--nodelist=n1,n2", "--nodes=2"), ""),
        "graced": (on_n1, ""),
        "graced_exits": (on_n1, "SIGTERM=exit"),
        "graced_requeues": (on_n1, "SIGTERM=requeue"),
        "graced_requeues_then_exits": (on_n1, "SIGTERM=requeue SIGUSR1=exit"),
        "requeued": (("--nodelist=n2",), ""),
        "cancelled": (("--nodelist=n2",), ""),
        "cancelled_requeues": (("--nodelist=n2",), "SIGTERM=requeue"),
        "warned_preempted": (on_n3, ""),
        "warned_graced": (("--partition=grace", *on_n3), ""),
    }
    found = {name: Watched.submit(c, name, *argv, on=on) for name, (argv, on) in plan.items()}
    for name, job in found.items():
        job.started(2 if name == "preempted" else 1)
    c.submit_urgent(["n1"])
    c.run("scontrol", "requeue", found["requeued"].job_id, check=True)
    found["requeued"].event("SIGTERM")
    answers["second requeue"] = c.run("scontrol", "requeue", found["requeued"].job_id)
    c.cancel(found["cancelled"].job_id)
    c.cancel(found["cancelled_requeues"].job_id)
    for name in ("preempted", *(name for name in found if name.startswith("graced"))):
        found[name].event("SIGTERM")
    with c.user_signal():
        c.submit_urgent(["n3"])
        found["warned_preempted"].event("SIGTERM")
        found["warned_graced"].event("SIGUSR2")
    return found


@pytest.fixture
def three_nodes(limited: Watched) -> Iterator[SlurmCluster]:
    """The cluster for one job on n1 to n3 (with --exclude=n4), and free of it afterwards."""
    c = limited.cluster
    yield c
    for job_id in c.run("squeue", "-h", "-o", "%A", check=True).stdout.split():
        if job_id != limited.job_id:
            c.end_job(job_id)
    for node in c.nodes:
        c.revive_node(node)


def test_a_job_without_task_count_comes_back_on_the_nodes_that_a_failure_left(
    three_nodes: SlurmCluster, recording: Recording
) -> None:
    c = three_nodes
    job = Watched.submit(
        c, "elastic", "--exclude=n4", *ELASTIC, srun="--ntasks-per-node=1", on="SIGTERM=exit"
    )
    job.started(3)

    c.kill_node("n2", leave_ranks=True)
    assert job.wait("PENDING")["Restarts"] == "1"
    c.start_now(job.job_id)
    job.started(2, attempt="1")

    assert c.job(job.job_id)["NodeList"] == "n[1,3]"
    assert c.pids_of_job(job.job_id, "n2"), "ranks of the lost node outlive their attempt"
    recording.hold("node failed", job.facts() | {"nodes": [3, 2]})


def test_a_task_count_in_the_header_may_take_the_least_number_of_nodes(
    three_nodes: SlurmCluster,
) -> None:
    c = three_nodes
    job = Watched.submit(c, "rigid", "--exclude=n4", *ELASTIC, "--ntasks-per-node=1")
    job.started(c.by_version({OLDEST: 2, (24, 11): 3}))

    assert c.job(job.job_id)["NumNodes"] == c.by_version({OLDEST: "2", (24, 11): "3"})


def test_a_doubled_percent_sign_in_sruns_output_is_read_once_or_twice(
    three_nodes: SlurmCluster,
) -> None:
    c = three_nodes
    job = c.sbatch("--output=percent.out", "--wrap", "srun --output=percent-%%j-%t.out true")

    c.wait_job(job, "COMPLETED")

    (path,) = c.at.work.glob("percent-*.out")
    once, twice = "percent-%j-0.out", f"percent-{job}-0.out"
    assert path.name == c.by_version({OLDEST: once, (25, 11): twice})


def test_preemption_without_grace_sends_term_and_no_user_signal(jobs: dict[str, Watched]) -> None:
    job = jobs["preempted"]
    job.wait("PENDING")

    for node in ("n1", "n2"):
        assert set(job.signals(node)) == {"SIGTERM", "SIGCONT"}
    assert set(job.signals("n1", "-batch")) == {"SIGTERM", "SIGCONT"}


def test_preemption_without_grace_is_seen_as_a_requeue_under_way(jobs: dict[str, Watched]) -> None:
    job = jobs["preempted"]

    seen = job.record()

    assert seen["JobState"] == "COMPLETING"
    assert seen["Restarts"] == "1"
    assert "PreemptTime" not in seen
    assert seen["Reason"] == "None"
    after = job.wait("PENDING")
    assert after["Restarts"] == "1"
    assert KILL_WAIT_S - 2 < job.seconds_left_after("SIGTERM") < KILL_WAIT_S + SLACK_S


def test_preemption_with_grace_sends_term_and_leaves_the_job_running(
    jobs: dict[str, Watched],
) -> None:
    job = jobs["graced"]

    seen = job.record()

    assert seen["JobState"] in LIVE
    assert seen["Restarts"] == "0"
    assert seen["Reason"] == "None"
    end, decision = (datetime.fromisoformat(seen[key]) for key in ("EndTime", "PreemptTime"))
    assert (end - decision).total_seconds() == pytest.approx(GRACE_S, abs=1)
    assert set(job.signals("n1")) == {"SIGTERM", "SIGCONT"}


def test_a_job_that_exits_0_in_its_grace_is_completed_or_comes_back_by_itself(
    jobs: dict[str, Watched],
) -> None:
    job = jobs["graced_exits"]

    after = job.wait("COMPLETED", "PENDING")

    assert job.record()["JobState"] in LIVE
    expected = {OLDEST: ("COMPLETED", "0", "1"), (24, 5): ("PENDING", "1", "2")}
    seen = (after["JobState"], after["Restarts"], after["BatchFlag"])
    assert seen == job.cluster.by_version(expected)


def test_a_job_that_was_requeued_in_its_grace_may_come_back_after_its_next_end_as_well(
    jobs: dict[str, Watched], recording: Recording
) -> None:
    job = jobs["graced_requeues_then_exits"]
    job.started_again("n4")
    first = job.facts()

    job.cluster.run("scancel", "--signal=USR1", job.job_id, check=True)

    after = job.wait("COMPLETED", "PENDING")
    assert (after["JobState"], after["Restarts"]) == job.cluster.by_version(
        {OLDEST: ("COMPLETED", "1"), (24, 5): ("PENDING", "2"), (26, 5): ("COMPLETED", "1")}
    )
    recording.hold("graced_requeues_then_exits", first | {"then": next_facts(after, before=1)})


def test_a_job_that_requeues_itself_in_its_grace_comes_back(jobs: dict[str, Watched]) -> None:
    job = jobs["graced_requeues"]

    asked = job.event("requeue")

    assert asked["status"] == 0
    after = job.wait("PENDING")
    assert after["Restarts"] == "1"


def test_user_signal_at_preemption_comes_with_term_when_there_is_no_grace(
    jobs: dict[str, Watched],
) -> None:
    job = jobs["warned_preempted"]

    signals = job.signals("n3")

    assert {"SIGUSR2", "SIGTERM"} <= set(signals)
    assert parse_record(job.event("record")["record"])["JobState"] == "COMPLETING"


def test_user_signal_at_preemption_replaces_term_when_there_is_grace(
    jobs: dict[str, Watched],
) -> None:
    job = jobs["warned_graced"]

    seen = job.record()

    assert job.event("record")["at"] == "SIGUSR2"
    assert seen["JobState"] in LIVE
    assert seen["PreemptTime"] not in {"None", "Unknown"}
    assert "SIGTERM" not in job.signals("n3")


def test_a_requeue_from_outside_looks_like_preemption_without_grace(
    jobs: dict[str, Watched],
) -> None:
    job = jobs["requeued"]

    seen = job.record()

    assert seen["JobState"] == "COMPLETING"
    assert seen["Restarts"] == "1"
    assert seen["Reason"] == "None"


def test_a_second_requeue_is_refused_and_changes_nothing(
    jobs: dict[str, Watched], answers: dict[str, CompletedProcess[str]], recording: Recording
) -> None:
    job, again = jobs["requeued"], answers["second requeue"]

    assert again.returncode == 1
    assert "pending execution" in again.stderr
    job.started_again()
    assert job.cluster.job(job.job_id)["Restarts"] == "1"
    recording.hold("second requeue", {"status": again.returncode, "restarts": 1})


def test_a_requeued_job_keeps_its_id_and_counts_restarts_in_its_environment(
    jobs: dict[str, Watched],
) -> None:
    job = jobs["graced_requeues"]
    assert job.diaries(attempt="unset")

    job.started_again("n4")

    assert job.cluster.job(job.job_id)["JobState"] == "RUNNING"


def test_a_cancelled_job_sees_itself_completing_with_its_own_restart_count(
    jobs: dict[str, Watched],
) -> None:
    job = jobs["cancelled"]

    seen = job.record()

    assert seen["JobState"] == "COMPLETING"
    assert seen["Restarts"] == "0"
    assert seen["Reason"] == "None"
    after = job.wait("CANCELLED")
    assert after["Restarts"] == "0"
    assert set(job.signals("n2")) == {"SIGTERM", "SIGCONT"}


def test_the_warning_before_the_time_limit_reaches_tasks_only(limited: Watched) -> None:
    seen = limited.record()

    assert limited.event("record")["at"] == "SIGUSR2"
    assert seen["JobState"] in LIVE
    assert seen["Restarts"] == "0"
    assert seen["PreemptTime"] == "None"
    assert "SIGUSR2" not in limited.signals("n4", "-batch")


def test_the_time_limit_is_told_as_the_reason(limited: Watched) -> None:
    limited.event("SIGTERM")
    after = limited.wait("TIMEOUT")

    records = [e for e in limited.diaries()["n4"] if e["event"] == "record"]
    seen = parse_record(records[-1]["record"])
    assert records[-1]["at"] == "SIGTERM"
    assert (seen["JobState"], seen["Reason"]) == ("COMPLETING", "TimeLimit")
    assert after["Restarts"] == "0"


def test_a_cancelled_job_that_asks_for_a_requeue_runs_again(jobs: dict[str, Watched]) -> None:
    job = jobs["cancelled_requeues"]

    assert job.event("requeue")["status"] == 0
    assert job.facts()["next"] == {"state": "runs again", "restarts": 1}


def test_the_end_of_a_grace_time_is_a_requeue(jobs: dict[str, Watched]) -> None:
    job = jobs["graced"]

    after = job.wait("PENDING")

    assert after["Restarts"] == "1"
    assert job.seconds_left_after("SIGTERM") >= GRACE_S


def test_after_a_user_signal_the_term_comes_at_the_end_of_the_grace_time(
    jobs: dict[str, Watched],
) -> None:
    job = jobs["warned_graced"]

    after = job.wait("PENDING")

    assert after["Restarts"] == "1"
    assert job.event("SIGTERM")["t"] - job.event("SIGUSR2")["t"] >= GRACE_S - 1


STAY_S = {
    "limited": KILL_WAIT_S - 2,
    "preempted": KILL_WAIT_S - 2,
    "graced": GRACE_S,
    "requeued": KILL_WAIT_S - 2,
    "cancelled": KILL_WAIT_S - 2,
    "warned_preempted": KILL_WAIT_S - 2,
    "warned_graced": GRACE_S - 1,
}
"""Of jobs whose tasks do not leave: so long after the first signal they live at least."""


@pytest.mark.parametrize(
    "name",
    ["graced_exits", "graced_requeues", "cancelled_requeues", *STAY_S],
)
def test_each_job_does_what_is_recorded(
    limited: Watched, jobs: dict[str, Watched], recording: Recording, name: str
) -> None:
    job = {"limited": limited, **jobs}[name]

    facts = job.facts(STAY_S.get(name, 0))

    recording.hold(name, facts)

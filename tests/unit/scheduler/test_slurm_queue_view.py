"""What the queue shows of starts, read from output as SLURM 22.05 printed it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm.control import SlurmControl
from hpctrain.cluster.scheduler.slurm.facts import ask_starts, read_queue, read_start
from hpctrain.errors import ClusterError, ClusterUnreachable
from hpctrain.ledger.shapes.queue import JobShape

NOW = 1_795_860_000.0
SINFO = """\
work*|n1|alloc|infinite
work*|n2|mix|infinite
work*|n3|plnd|infinite
work*|n4|idle|infinite
work*|n5|down*|infinite
work*|n6|drain|infinite
short|n1|alloc|2:00:00
short|n4|idle|2:00:00
broken line
"""
SQUEUE = """\
11|RUNNING|work|n[1-2]|(null)|1795859000|1795861800|30:00
12|PENDING|work||n[1-4]|1795861800|1795865400|1:00:00
13|PENDING|work||(null)|N/A|N/A|1-00:00:00
14|PENDING|short||(null)|N/A|N/A|10:00
15|COMPLETED|work|n1|(null)|1795850000|1795851000|30:00
16|RUNNING|other|m1|(null)|1795859000|N/A|UNLIMITED
broken|line
"""


def view(partition="", sinfo=SINFO, squeue=SQUEUE):
    seen = read_queue(sinfo, squeue, partition, now=NOW)
    assert seen is not None
    return seen


def test_the_partitions_nodes_that_take_jobs_and_who_has_them():
    seen = view()

    assert seen.nodes == {"n1", "n2", "n3", "n4"}
    assert [(c.job_id, sorted(c.nodes), c.start - NOW, c.end - NOW) for c in seen.claims] == [
        ("11", ["n1", "n2"], 0, 1800),
        ("12", ["n1", "n2", "n3", "n4"], 1800, 5400),
    ]
    assert seen.max_time_s is None
    assert seen.start_of(JobShape(1, 1800)) == NOW
    assert seen.start_of(JobShape(1, 1801)) == NOW + 5400


def test_a_node_whose_job_completes_beside_others_is_one():
    seen = view(sinfo=SINFO.replace("n1|alloc", "n1|alloc+"))

    assert seen.nodes == {"n1", "n2", "n3", "n4"}


def test_another_partition_has_its_own_limit_and_shares_its_nodes_jobs():
    seen = view("short")

    assert (seen.nodes, seen.max_time_s) == ({"n1", "n4"}, 7200)
    assert seen.start_of(JobShape(2, 600)) == NOW + 5400


def test_a_node_with_jobs_that_nobody_shows_is_free_at_no_time_that_is_known():
    seen = view(squeue="")

    assert seen.start_of(JobShape(1, 60)) == NOW  # n4
    assert seen.start_of(JobShape(2, 60)) is None


def test_a_running_job_past_its_end_is_still_there():
    late = "11|RUNNING|work|n[1-4]|(null)|1795850000|1795859000|30:00\n"

    assert view(squeue=late).start_of(JobShape(4, 60)) == NOW + 1


def test_a_partition_that_is_not_there_is_not_known():
    assert read_queue(SINFO, SQUEUE, "nope", now=NOW) is None
    assert read_queue("", "", "", now=NOW) is None


def test_a_start_is_read_in_both_of_slurms_forms():
    told = "sbatch: Job 7 to start at {} using 8 processors on nodes n4 in partition work\n"

    assert read_start(told.format(f"{NOW + 90:.0f}"), now=NOW).wait_s == 90
    assert read_start(told.format(f"{NOW - 90:.0f}"), now=NOW).wait_s == 0
    assert read_start(told.format("2000-01-01T00:00:00"), now=NOW).wait_s == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "sbatch --test-only named no start: ''"),
        ("sbatch: Job 7 to start at N/A using", "named no start"),
        (f"sbatch: Job 7 to start at {NOW + 400 * 86400:.0f} using 8", "that never comes"),
    ],
)
def test_an_answer_without_a_start_is_not_known(text, why):
    estimate = read_start(text, now=NOW)

    assert (estimate.wait_s, estimate.refused) == (None, "")
    assert why in estimate.unknown


def test_every_shape_has_its_own_answer_whatever_the_others_get():
    shapes = [JobShape(nodes, 600) for nodes in (1, 2, 3)]

    def ask(command, *, timeout_s, errors):
        assert command[:2] == ["sbatch", "--test-only"]
        assert errors
        said = Path(command[2]).read_text()
        if said == "1":
            return "sbatch: Job 7 to start at 1 using 8 processors"
        raise ClusterUnreachable("silent") if said == "2" else ClusterError("no such QOS")

    answers = ask_starts({shape: str(shape.nodes) for shape in shapes}, timeout_s=3.0, ask=ask)

    assert [answers[shape].wait_s for shape in shapes] == [0.0, None, None]
    assert answers[shapes[1]].unknown == "silent"
    assert answers[shapes[2]].refused == "no such QOS"
    assert ask_starts({}, ask=ask) == {}
    assert math.isfinite(answers[shapes[0]].wait_s or 0.0)


# ---- a requeued job in another shape


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A scontrol that notes what it is asked, except `show`, and says one line of `says` a call."""
    (tmp_path / "scontrol").write_text(
        '#!/bin/sh\n[ "$1" != show ] || { echo "JobId=17 JobState=COMPLETING Restarts=0"; exit; }\n'
        f'echo "$*" >> {tmp_path}/asked\n'
        f"said=$(sed -n 1p {tmp_path}/says); sed -i 1d {tmp_path}/says\n"
        '[ -z "$said" ] || { echo "$said" >&2; exit 1; }\n'
    )
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "scancel").symlink_to("scontrol")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def reshaped(scontrol, *says):
    (scontrol / "says").write_text("".join(f"{line}\n" for line in says))
    SlurmControl("17").reshape(JobShape(3, 5401))
    return (scontrol / "asked").read_text().splitlines()


def test_a_job_gets_exactly_so_many_nodes_their_cpus_and_a_limit_in_whole_minutes(scontrol):
    assert reshaped(scontrol) == ["update JobId=17 NumNodes=3-3 NumCPUs=3 TimeLimit=91"]


def test_a_job_that_is_still_taken_off_its_nodes_is_asked_again(scontrol, hands):
    says = ["Job has already finished for job 17", "Job is already completing"]

    assert len(reshaped(scontrol, *says)) == 3


def test_a_refusal_that_stays_is_told(scontrol, hands):
    with pytest.raises(ClusterError, match="Access/permission denied"):
        reshaped(scontrol, "Access/permission denied for job 17")
    assert len((scontrol / "asked").read_text().splitlines()) == 1

    with pytest.raises(ClusterError, match="already finished"):
        reshaped(scontrol, *["Job has already finished"] * 50)


@pytest.mark.parametrize("doing", ["forbid_requeue", "end"])
@pytest.mark.parametrize(
    "says", ["Job has already finished for job 17", "Job/step already completing"]
)
def test_of_a_job_that_is_over_nothing_more_is_asked(scontrol, doing, says):
    """After a takeover another agent cancels the job, and its batch script ends afterwards."""
    (scontrol / "says").write_text(f"{says}\n")

    getattr(SlurmControl("17", restarts=0), doing)()

    assert len((scontrol / "asked").read_text().splitlines()) == 1


@pytest.mark.parametrize("doing", ["forbid_requeue", "end"])
def test_another_refusal_of_a_jobs_end_is_told(scontrol, doing):
    (scontrol / "says").write_text("Access/permission denied for job 17\n")

    with pytest.raises(ClusterError, match="denied"):
        getattr(SlurmControl("17", restarts=0), doing)()

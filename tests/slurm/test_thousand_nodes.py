"""A run's story on many nodes: nothing of ours grows with their square, nor asks SLURM for each.

    HPCTRAIN_SLURM_NODES=100 pytest -m soak -s tests/slurm/test_thousand_nodes.py

A short version has 16 nodes; `make soak` takes 1,000. Agents are stand-ins without torch (see
tests/support/agent_stand_in.py); the preflight is real, with longer time-outs.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hpctrain.ledger.run.layout import RunDir, rank_log_path
from tests.support.agent_stand_in import FINISH
from tests.support.scenario import RunHandle
from tests.support.slurm_config import FEW
from tests.support.slurm_thousand import Diary, ManyNodes, stand_in_python

pytestmark = pytest.mark.slurm

MANY = int(os.environ.get("HPCTRAIN_SLURM_NODES", "1000"))
MIB_OF_PREFLIGHT = 24
"""For each node. It takes half of the memory that is free at most, and fewer nodes where needed."""
MOST_ASKED = {
    "submit": 4,
    "start": 10,
    "status": 4,
    "preempted, on all nodes again": 25,
    "a dead node, on the others again": 30,  # srun asks for partitions as often as it likes
    "cancel": 14,
    "resume": 20,
    "done": 1,
}
"""Whatever the number of nodes. A preflight asks for its job every second or two besides."""
MOST_ASKED_BY_PREFLIGHT = 18


def run_of(cluster, cwd, *args):
    told = json.loads(cluster.cli(cwd, args[0], "--json", *args[1:]).stdout)
    return RunHandle(cluster, cwd, RunDir(cwd / "runs" / "run"), str(told["job_id"]))


def wait_attempt(run, number, nodes):
    """Until all its nodes have begun."""
    begun = run.wait_event("attempt_started", number)
    folder = run.dir.attempt(number)
    run.wait(
        f"logs of {nodes} ranks",
        lambda: all(rank_log_path(folder, rank).exists() for rank in range(nodes)),
    )
    assert len(begun.fact.nodes) == nodes


def wait_ends(run, *reasons):
    """Until attempts have ended so; where slurmctld is slow, one end is written more than once.

    While a thousand nodes start on two cores, neither slurmctld nor accounting answers in the time
    that hpctrain gives them: then the loss of a node is taken for a preemption.
    """
    busy = {"node_failed": {"node_failed", "preempted"}} if len(run.slurm.nodes) > FEW else {}

    def there():
        ends = {event.attempt: event.fact.reason for event in run.events("attempt_ended")}
        pairs = zip(ends.values(), reasons, strict=False)
        is_so = all(end in busy.get(reason, {reason}) for end, reason in pairs)
        return is_so and len(ends) == len(reasons)

    run.wait(f"ends {reasons}", there)


def free_mib():
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvail")) / 1024


@pytest.mark.story(proved_by="tests/unit/scheduler/test_many_nodes.py")
@pytest.mark.parametrize(
    "count", [16, pytest.param(MANY, marks=[pytest.mark.soak, pytest.mark.timeout(0)])]
)
def test_a_run_on_many_nodes_asks_slurm_as_often_as_on_few(count, tmp_path, capsys):
    def say(line):
        with capsys.disabled():  # at once, into whatever log there is
            print(line, flush=True)

    began = time.monotonic()
    with ManyNodes(count) as cluster:
        up_s, diary = time.monotonic() - began, Diary(cluster, say)
        say(f"\n{count} nodes: idle after {up_s:.1f} s; MiB: {cluster.memory_mib()}")
        setup = f'slurm.setup=["export HPCTRAIN_PYTHON={stand_in_python(tmp_path)}"]'
        own = ["--set", setup, "--cluster=slurm"]
        run = start(cluster, diary, tmp_path, own, count)
        say(f"  MiB while it runs: {cluster.memory_mib()}")
        with diary.part("status"):
            status = run.status()
        assert (status["state"], len(status["attempts"][-1]["nodes"])) == ("running", count)
        disturb(cluster, diary, run, count)
        resume_and_end(cluster, diary, run, count)
        preflight(cluster, diary, tmp_path, own, count)

    for part, most in MOST_ASKED.items():
        assert diary.asked(part) <= most, (part, diary.rows[part])
    most = MOST_ASKED_BY_PREFLIGHT + 2 * diary.rows["preflight"][0]
    assert diary.asked("preflight") <= most, diary.rows["preflight"]


def start(cluster, diary, cwd, own, count):
    """A run on all nodes."""
    budgets = [f"--set=budget.{name}=0" for name in ("nodes", "crashes", "no_progress")]
    size = ["--nodes", f"{count - 1}-{count}", "--ranks-per-node=1"]
    words = ["submit", "--name=run", *size, *own, *budgets, "--set=preflight.enabled=no"]
    with diary.part("submit"):
        run = run_of(cluster, cwd, *words, "--", "/bin/true")
    with diary.part("start"):
        wait_attempt(run, 1, count)
    return run


def disturb(cluster, diary, run, count):
    """Preempt it, and then let one of its nodes die."""
    with diary.part("preempted, on all nodes again"):
        cluster.submit_urgent(1, seconds=1)
        wait_ends(run, "preempted")
        cluster.start_now(run.job_id)
        wait_attempt(run, 2, count)
    with diary.part("a dead node, on the others again"):
        cluster.kill_node(cluster.nodes[count // 2])
        cluster.start_now(run.job_id)
        wait_attempt(run, 3, count - 1)
    wait_ends(run, "preempted", "node_failed")


def resume_and_end(cluster, diary, run, count):
    """Cancel it, resume it, and let it come to its end."""
    with diary.part("cancel"):
        run.cli("cancel", "run")
        wait_ends(run, "preempted", "node_failed", "cancelled")
    cluster.wait_job(run.job_id, "CANCELLED")
    with diary.part("resume"):
        run = run_of(cluster, run.cwd, "resume", "run")
        wait_attempt(run, 4, count - 1)
    with diary.part("done"):
        (run.dir.root / FINISH).touch()
        run.wait_event("done")
    cluster.wait_job(run.job_id, "COMPLETED")


def preflight(cluster, diary, cwd, own, count):
    """A real one, of all nodes that live, or of as many as there is memory for."""
    nodes = min(count - 1, int(free_mib() / 2 / MIB_OF_PREFLIGHT))
    look = ["preflight", f"--nodes={nodes}", "--no-bandwidth", "--timeout=1200"]
    with diary.part("preflight"):
        said = cluster.cli(cwd, *look, *own, "--json")
    report = json.loads(said.stdout)
    assert report["status"] != "fail", report["results"]
    assert (len(report["nodes"]), report["bad_nodes"]) == (nodes, {})
    diary.say(f"  preflight of {nodes} nodes: {report['measured']['seconds']} s of its own")

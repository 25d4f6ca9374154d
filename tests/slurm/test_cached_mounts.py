"""Each node sees the folder of runs through a client of its own, which caches for a minute.

The mounts are those of tests/support/client_disk.py: attributes, names that are not there and
listings are up to a minute old; opening a file asks the server. So NFS does it, and others are
kinder. A lock holds on its own node and on no other, as with Lustre's `localflock`.
"""

from __future__ import annotations

import contextlib

import pytest

from hpctrain.cluster.preflight.node import REPORT
from hpctrain.cluster.preflight.report import PreflightReport
from tests.support import client_disk
from tests.support.ledger_runs import all_fields
from tests.support.scenario import submit

pytestmark = [pytest.mark.slurm, pytest.mark.fuse]

CACHE_S = 60.0
SETTINGS = {"train.steps": 100_000, "train.step_delay_s": 0.1}
TWO_BY_ONE = ("--nodes=2", "--ranks-per-node=1", "--time=10")
"""Well below `CACHE_S`, and what a loaded machine may need."""


@pytest.fixture
def rules(slurm, tmp_path):
    """Node's name to the faults of its mount; "login" is this process's."""
    behind, runs = tmp_path / "behind", tmp_path / "runs"
    behind.mkdir()
    runs.mkdir()
    found = {name: client_disk.Rules(tmp_path / f"rules-{name}") for name in slurm.nodes}

    def mount(name):
        return client_disk.command(behind, runs, cache_s=CACHE_S, rules=found[name].path)

    with contextlib.ExitStack() as stack:
        stack.enter_context(slurm.own_mounts(mount))
        found["login"] = stack.enter_context(client_disk.mounted(behind, runs, cache_s=CACHE_S))
        for faults in found.values():
            faults.set({"op": "flock", "path": "*", "do": "local"})
        yield found


def more_steps(run, attempt):
    """Wait until an attempt has done some."""
    begun = all_fields(run.wait_event("restored", attempt))["step"]
    return run.wait_step(begun + 5, attempt)


def move(run, nodes):
    """Take these nodes away, and let the run begin again elsewhere; the job that took them."""
    urgent = run.slurm.submit_urgent(nodes)
    run.slurm.start_now(run.job_id)
    return urgent


@pytest.mark.story(
    proved_by=("tests/e2e/test_faulty_disk.py", "tests/engines/test_unkind_disks.py")
)
def test_a_run_that_moves_between_nodes_with_stale_caches_loses_nothing(slurm, rules, tmp_path):
    run = submit(slurm, tmp_path, *TWO_BY_ONE, sets=SETTINGS)
    more_steps(run, 1)
    first = move(run, ("n1", "n2"))
    more_steps(run, 2)
    second = move(run, ("n3", "n4"))
    slurm.cancel(first)
    newest = more_steps(run, 3)
    slurm.cancel(second)

    run.cli("cancel", "run", "--save")
    slurm.wait_job(run.job_id, "COMPLETED")
    last = run.wait_step(newest)
    words = run.cli("resume", "run", f"--set=train.steps={last + 10}")
    run.job_id = words.split("job ")[1].split()[0]
    run.wait_done()

    nodes = [all_fields(event)["nodes"] for event in run.events("attempt_started")]
    assert nodes[:3] == [["n1", "n2"], ["n3", "n4"], ["n1", "n2"]]
    assert [why for why, _ in run.ends()] == ["preempted", "preempted", "stopped", "completed"]
    assert run.steps_lost() == [0, 0, 0], run.story()
    reports = [PreflightReport.load(path) for path in run.dir.root.glob(f"preflight/*/{REPORT}")]
    told = [{one.check: one.message for one in report.results} for report in reports]
    assert len(told) == 4
    assert all("every node sees all files" in one["shared directory"] for one in told), told
    assert all(one["locks"].startswith("local: ") for one in told), told


@pytest.mark.story(proved_by="tests/unit/run/test_shared_folder.py")
def test_nodes_that_do_not_see_each_others_renames_end_the_run_in_one_line(slurm, rules, tmp_path):
    rules["n2"].set({"op": "open", "path": "run/preflight/*/n1", "do": "ENOENT"})
    run = submit(slurm, tmp_path, *TWO_BY_ONE, sets=SETTINGS)

    slurm.wait_job(run.job_id, "FAILED")

    stopped = all_fields(run.wait_event("run_stopped"))
    assert stopped["exit_code"] == 93
    assert "is not one directory for all nodes (n2 does not see n1): have it" in stopped["detail"]
    assert run.ends() == [("storage_failed", "stop")]
    assert slurm.job(run.job_id)["Restarts"] == "0", run.story()
    assert "is not one directory for all nodes" in run.cli("status", "run")

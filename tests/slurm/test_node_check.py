"""A job that gets a sick node starts again without it; one that is known gets into no job."""

from __future__ import annotations

import pytest

from hpctrain.cluster.preflight import report as node_lists
from hpctrain.cluster.preflight.report import bad_nodes_of_user, record_bad
from hpctrain.core.base.env import HPCTRAIN_NODE_FAULTS
from tests.support.ledger_runs import all_fields
from tests.support.scenario import cli, submit
from tests.support.slurm_config import CLUSTER

pytestmark = pytest.mark.slurm


def test_a_job_with_a_sick_node_starts_again_without_it(slurm, tmp_path):
    env = {HPCTRAIN_NODE_FAULTS: "version:n2,of=torch,is=1.0", "XDG_STATE_HOME": str(tmp_path)}
    record_bad(bad_nodes_of_user(env, CLUSTER), {"n4": "slow in a preflight of this morning"})
    run = submit(slurm, tmp_path, "--nodes=2-3", "--ranks-per-node=1", env=env)

    end = run.wait_event("attempt_ended")
    assert (all_fields(end)["reason"], all_fields(end)["next"]) == ("node_failed", "requeue")
    assert "n2: version of torch" in all_fields(end)["detail"]
    assert all_fields(run.wait_event("excluded"))["nodes"] == ["n2"]
    slurm.start_now(run.job_id)
    run.wait_done()

    started = run.events("attempt_started")[-1]
    assert all_fields(started)["nodes"] == ["n1", "n3"]
    assert [all_fields(e)["leave"] for e in run.events("preflight")] == [True, False]
    assert [one["cause"] for one in run.status()["attempts"]] == ["unfit_node", "completed"]
    assert run.doctor(1) == "unfit_node"


@pytest.mark.story(
    proved_by=("tests/unit/preflight/test_known_good.py", "tests/unit/preflight/test_slow_nodes.py")
)
def test_a_node_that_slows_the_collective_is_left_behind_where_the_preset_has_a_baseline(
    slurm, tmp_path
):
    (tmp_path / "site.toml").write_text("[baseline.allreduce_busbw_gbs]\n2 = 0.08\n4 = 0.08\n")
    run = submit(slurm, tmp_path, "--nodes=3-4", "--ranks-per-node=1", "--site=site.toml",
                 sets={"train.steps": 2},
                 env={HPCTRAIN_NODE_FAULTS: "slow:n3,seconds=0.3"})  # fmt: skip

    end = run.wait_event("attempt_ended")
    assert (all_fields(end)["reason"], all_fields(end)["next"]) == ("node_failed", "requeue")
    assert "n3: bandwidth" in all_fields(end)["detail"]
    slurm.start_now(run.job_id)
    run.wait_done()

    assert all_fields(run.events("attempt_started")[-1])["nodes"] == ["n1", "n2", "n4"]
    assert [all_fields(e)["collective"] for e in run.events("preflight")] == ["fail", "ok"]
    assert node_lists.are_known_good(node_lists.known_good_path(run.dir), ["n1", "n2", "n4"])


@pytest.mark.story(proved_by="tests/unit/submit/test_kept_out_nodes.py")
def test_where_no_node_is_left_the_refusal_says_who_was_kept_out(slurm, tmp_path):
    record_bad(bad_nodes_of_user(slurm.env, CLUSTER), dict.fromkeys(slurm.nodes, "slow"))

    done = cli(slurm, tmp_path, "submit", "--cluster=slurm", "--name=run", "--set=train.steps=1")

    assert done.returncode == 6
    assert "kept off n1, n2, n3, n4, which a preflight found bad" in done.stderr
    assert not (tmp_path / "runs").exists()

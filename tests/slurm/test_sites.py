"""From nothing to a preset that runs: init, validate, detect and submit on a real SLURM."""

from __future__ import annotations

import json

import pytest

from hpctrain.core.settings.spec import load_spec
from tests.support.scenario import cli, submit
from tests.support.slurm_config import CLUSTER, GRACE_S, KILL_WAIT_S

pytestmark = pytest.mark.slurm


def test_a_drafted_preset_validates_is_detected_and_serves_a_submit_unchanged(slurm, tmp_path):
    sites = tmp_path / "sites"
    sites.mkdir()
    env = {"HPCTRAIN_SITE_PATH": str(sites)}

    def ask(*args):
        done = cli(slurm, tmp_path, *args, env=env)
        assert done.returncode == 0, f"{args}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    ask("sites", "init", "--from-slurm", "-o", f"sites/{CLUSTER}.toml")
    (checked,) = json.loads(ask("sites", "validate", CLUSTER, "--json"))
    values = json.loads(ask("sites", "show", CLUSTER, "--json"))["values"]
    run = submit(slurm, tmp_path, "--nodes=2", sets={"train.steps": 2}, env=env)
    run.wait_done()

    assert [one["path"] for one in checked["findings"]] == ["contact"]  # only its admin knows
    preemption = {
        name: [values.get(f"partitions.{name}.preemption.{key}", {}).get("value")
               for key in ("mode", "grace_s", "signal")]
        for name in ("work", "grace", "urgent")
    }  # fmt: skip
    assert preemption == {
        "work": ["requeue", 0, "SIGTERM"],
        "grace": ["requeue", GRACE_S, "SIGTERM"],
        "urgent": ["none", None, None],
    }
    assert values["slurm.kill_wait_s"]["value"] == KILL_WAIT_S
    assert load_spec(run.dir.spec).site == CLUSTER
    assert slurm.job(run.job_id)["Partition"] == "work"


PRESET = """\
[slurm]
export = "none"
required = ["--switches=1"]
srun_args = ["--distribution=block"]

[network]
socket_ifnames = ["lo"]

[env.multi_node]
NCCL_CROSS_NIC = "1"
NCCL_DEBUG = "WARN"

[env.single_node]
NCCL_CROSS_NIC = "0"
"""


def test_ranks_get_the_environment_of_their_site_whatever_the_job_was_given(slurm, tmp_path):
    """SLURM_EXPORT_ENV=NONE, which SLURM sets here, would keep even our own exports from srun."""
    (tmp_path / "small.toml").write_text(PRESET)
    run = submit(slurm, tmp_path, "--nodes=2", "--site=small.toml", "--env=NCCL_DEBUG=INFO",
                 sets={"train.steps": 2})  # fmt: skip

    run.wait_done()

    told = json.loads((run.dir.attempt(1) / "environment.json").read_text())
    values = {name: one["value"] for name, one in told["values"].items()}
    assert values["GLOO_SOCKET_IFNAME"] == "lo"
    assert values["NCCL_SOCKET_IFNAME"] == "=lo"
    assert values["NCCL_CROSS_NIC"] == "1"
    assert values["NCCL_DEBUG"] == "INFO"
    assert any("NCCL_DEBUG" in note for note in told["notes"])

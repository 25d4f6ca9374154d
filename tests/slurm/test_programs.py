"""Programs that know SLURM, or a shell, and nothing of hpctrain, on the real cluster."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.scenario import submit

pytestmark = pytest.mark.slurm

PROGRAM = """#!/bin/bash
# Rank 3 shows what Lightning makes of SLURM's variables. All save at SIGTERM, and go on from there.
echo "$SLURM_PROCID=$RANK $SLURM_LOCALID=$LOCAL_RANK $SLURM_NTASKS=$WORLD_SIZE" >> "rank-$RANK"
[ -e "saved-$RANK" ] && exit 0
save() { sleep 1; touch "saved-$RANK"; exit 0; }
trap save TERM
[ "$RANK" = 3 ] && "$1" lightning_says.py
touch "ready-$RANK"
while :; do sleep 0.1; done
"""
LIGHTNING = """
import json, pathlib, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from lightning.fabric.plugins.environments import SLURMEnvironment

assert SLURMEnvironment.detect()
found = SLURMEnvironment(auto_requeue=False)
found.validate_settings(num_devices=2, num_nodes=2)
told = [found.global_rank(), found.local_rank(), found.node_rank(), found.world_size()]
pathlib.Path("lightning.json").write_text(json.dumps(told))
"""


@pytest.mark.story(
    proved_by="tests/engines/test_foreign.py::test_a_preempted_shell_script_saves_while_the_other_ranks_die_and_comes_back"
)
def test_a_shell_script_is_preempted_saves_and_comes_back_and_slurm_tells_each_rank_its_own(
    slurm, tmp_path
):
    script = tmp_path / "any.sh"
    script.write_text(PROGRAM)
    script.chmod(0o755)
    (tmp_path / "lightning_says.py").write_text(LIGHTNING)
    size = ("--nodes=2", "--ranks-per-node=2", "--partition=grace", "--time=10")
    run = submit(slurm, tmp_path, *size, script=["./any.sh", sys.executable])
    ready = [tmp_path / f"ready-{rank}" for rank in range(4)]
    run.wait("all ranks", lambda: all(path.exists() for path in ready))
    urgent = slurm.submit_urgent(4)
    slurm.wait_job(run.job_id, "PENDING")
    slurm.cancel(urgent)
    run.wait_done()

    assert [reason for reason, _ in run.ends()] == ["preempted", "completed"]
    assert not run.events("failure")
    assert json.loads((tmp_path / "lightning.json").read_text()) == [3, 1, 1, 4]
    for rank in range(4):
        assert (tmp_path / f"saved-{rank}").exists()
        line = f"{rank}={rank} {rank % 2}={rank % 2} 4=4"
        assert (tmp_path / f"rank-{rank}").read_text().splitlines() == [line, line]

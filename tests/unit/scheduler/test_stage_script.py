"""sbatch/stage.sh below body.sh of a hand-written script: what it asks of srun and sbcast."""

from __future__ import annotations

import hashlib
import io
import os
import shlex
import subprocess
import tarfile
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm.script import shell_variables
from hpctrain.ledger.run.staging import EnvironmentArchive, Staging
from tests.support.patience import PATIENCE_S

BODY = Path(__file__).parents[3] / "sbatch" / "body.sh"
SRUN = """#!/bin/bash
echo srun >>calls
while [[ $1 == --* ]]; do shift; done
for node in $NODES; do SLURMD_NODENAME=$node "$@" || exit; done
"""
PYTHON = """#!/bin/bash
case "$*" in
  *" before "*) cat before ;;
  *" staged "*) printf '%s\\n' "${@:7}" >staged; cat >>staged ;;
  *" after "*) ;;
  *) echo "$0 $SLURMD_NODENAME" >>agents ;;
esac
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job's folder with commands of SLURM's; `job(...)` runs the script, gives what was noted."""
    monkeypatch.chdir(tmp_path)
    for name in ("n1", "n2", "bin", "run"):
        Path(name).mkdir()
    put("srun", SRUN)
    put("python", PYTHON)
    archive = tmp_path / "key.tar"
    python = b"#!/bin/sh\ncase $1 in -I) echo ${0%/bin/python};; *) echo $0 >>agents;; esac\n"
    with tarfile.open(archive, "w") as tar:
        info = tarfile.TarInfo("env/bin/python")
        info.size, info.mode = len(python), 0o755
        tar.addfile(info, io.BytesIO(python))
    content = archive.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    facts = EnvironmentArchive(
        "key", str(archive), sha256, len(content), 9999, 1, "none", "/shared", "bin/python"
    )

    def run(place, *, why="", term=False):
        lines = shell_variables(Staging(None if why else facts, why, [place], 20.0))
        Path("before").write_text("\n".join(lines))
        lines = [
            f"HPCTRAIN_RUN_DIR={tmp_path}/run HPCTRAIN_PYTHON={tmp_path}/bin/python",
            "hpctrain_srun_args=()",
            "hpctrain_setup() { kill -TERM $$; }" if term else "",
            f"source {shlex.quote(str(BODY))}",
        ]
        env = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "NODES": "n1 n2"}
        env |= {"SLURM_NNODES": "2", "SLURM_JOB_ID": "55"}
        script = ["bash", "-c", "\n".join(lines)]
        subprocess.run(script, env=env, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)
        return [noted(name) for name in ("staged", "agents", "calls")]

    return run


def put(name, text):
    path = Path("bin", name)
    path.write_text(text)
    path.chmod(0o755)


def noted(name):
    return Path(name).read_text().splitlines() if Path(name).exists() else []


def test_where_all_nodes_lack_it_in_one_folder_it_is_sent(job, tmp_path):
    put("sbcast", '#!/bin/bash\necho sbcast "${@:3}" >>calls\ncp "$2" "$3"\n')

    staged, agents, calls = job(f"{tmp_path}/n1")

    root = f"{tmp_path}/n1/hpctrain-environments-{os.geteuid()}"
    assert calls == ["srun", f"sbcast {root}/key.sent-55", "srun", "srun"]
    assert staged[:1] == ["sbcast"]
    assert [line.split()[1:3] for line in staged[-2:]] == [["n1", "staged"], ["n2", "reused"]]
    assert agents == [f"{root}/key/env/bin/python"] * 2
    assert not list(Path(root).glob("*.sent*"))


def test_where_nodes_have_it_nothing_is_sent(job, tmp_path):
    job(f"{tmp_path}/n1")
    put("sbcast", "#!/bin/bash\necho sbcast >>calls\n")
    Path("calls").unlink()

    staged, _, calls = job(f"{tmp_path}/n1")

    assert calls == ["srun"] * 3
    assert [line.split()[2] for line in staged[-2:]] == ["reused"] * 2


@pytest.mark.parametrize("is_broken", [True, False])
def test_where_it_cannot_be_sent_each_node_reads_it(job, tmp_path, is_broken):
    put("sbcast", "#!/bin/bash\necho sbcast >>calls\nexit 1\n")

    staged, agents, calls = job(f"{tmp_path}/{'n1' if is_broken else '$SLURMD_NODENAME'}")

    assert calls == ["srun", *(["sbcast"] if is_broken else []), "srun", "srun"]
    assert staged[:1] == ["read"]
    assert len(agents) == 2
    assert all(f"/hpctrain-environments-{os.geteuid()}/key/env" in agent for agent in agents)


def test_where_nothing_was_packed_no_node_is_asked(job, tmp_path):
    staged, agents, calls = job(f"{tmp_path}/n1", why="it was not packed: the disk is full")

    assert calls == ["srun"]
    assert "it was not packed: the disk is full" in staged
    assert agents == [f"{tmp_path}/bin/python n1", f"{tmp_path}/bin/python n2"]


def test_where_the_archive_has_gone_no_node_is_asked(job, tmp_path):
    (tmp_path / "key.tar").unlink()

    staged, _, calls = job(f"{tmp_path}/n1")

    assert calls == ["srun"]
    assert f"{tmp_path}/key.tar cannot be read any more" in staged


def test_a_job_that_is_told_to_end_stages_nothing(job, tmp_path):
    assert job(f"{tmp_path}/n1", term=True) == [[], [], []]

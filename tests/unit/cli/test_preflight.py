from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from hpctrain.cli.main import cli, main
from hpctrain.cluster.preflight.checks_between import ALL_UP_TO
from hpctrain.cluster.scheduler.slurm import client
from hpctrain.errors import ClusterError, ClusterUnreachable
from hpctrain.launch.preflight import check_mount, check_room

MOUNTS = """\
21 1 8:1 / / rw - ext4 /dev/sda1 rw
22 21 0:5 / /scratch rw shared:1 - lustre 10.0.0.1@o2ib:/scratch rw
23 22 0:6 / /scratch/my\\040disk rw - nfs4 server:/x rw
24 21 0:7 / /odd rw - strangefs none rw
"""


@pytest.mark.parametrize(
    ("folder", "status"),
    [
        ("/scratch/me/runs", "ok"),
        ("/scratchy/runs", "warn"),
        ("/home/me/runs", "warn"),
        ("/odd/runs", "unknown"),
        ("/scratch/my disk/runs", "ok"),
    ],
)
def test_a_folder_that_other_nodes_may_not_see_is_told(tmp_path, folder, status):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)

    (found,) = check_mount(type(tmp_path)(folder), mounts)

    assert found.status == status


def test_unreadable_mounts_are_unknown(tmp_path):
    (found,) = check_mount(tmp_path, tmp_path / "none")

    assert found.status == "unknown"


def test_room_is_that_of_the_nearest_folder_that_is_there(tmp_path):
    (found,) = check_room(tmp_path / "not" / "yet")

    assert str(tmp_path) in found.message
    assert "not/yet" not in found.message


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "ok"),
        (ClusterError("SLURM refused: invalid account"), "fail"),
        (ClusterUnreachable("silent"), "unknown"),
    ],
)
def test_what_sbatch_says_is_told(tmp_path, monkeypatch, error, status):
    def ask(words, *, query):
        assert words == ["sbatch", "--test-only", str(tmp_path / "x.sh")]
        if error:
            raise error
        return ""

    monkeypatch.setattr(client, "run", ask)
    (found,) = client.SlurmCluster().check_script(tmp_path / "x.sh")

    assert found.status == status


def test_login_only_tells_what_it_saw_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    done = CliRunner().invoke(
        cli, ["preflight", "--login-only", "--cluster=local", "--json"], standalone_mode=False
    )

    report = json.loads(done.stdout)
    assert done.return_value == 0
    assert {r["check"] for r in report["results"]} >= {"preset", "space", "login node"}
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_failed_check(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")

    assert main(["preflight", "--login-only", "--cluster=local"]) == 3
    assert "is not a folder" in capsys.readouterr().out


def test_nodes_on_this_machine_are_looked_at_and_the_sick_one_is_named(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    args = ["preflight", "--cluster=local", "--nodes=3", "--no-bandwidth", "--json"]
    monkeypatch.setenv("HPCTRAIN_NODE_FAULTS", "version:local1,of=torch,is=1.0")

    assert main(args) == 3

    report = json.loads(capsys.readouterr().out)
    assert list(report["bad_nodes"]) == ["local1"]
    assert report["nodes"] == ["local0", "local1", "local2"]


def test_of_more_nodes_than_all_look_for_each_other_the_sick_one_is_named(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    args = ["preflight", "--cluster=local", f"--nodes={ALL_UP_TO + 4}", "--no-bandwidth", "--json"]
    monkeypatch.setenv("HPCTRAIN_NODE_FAULTS", "no-shared:local7; skew:local9,seconds=5")

    assert main(args) == 3

    report = json.loads(capsys.readouterr().out)
    assert set(report["bad_nodes"]) == {"local7", "local9"}
    failed = {one["check"]: one["nodes"] for one in report["results"] if one["status"] == "fail"}
    assert failed == {"shared directory": ["local7"], "clock": ["local9"]}


def test_a_misspelt_fault_ends_in_a_report_that_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCTRAIN_NODE_FAULTS", "skw:local0")

    assert main(["preflight", "--cluster=local", "--no-bandwidth"]) == 3
    assert "'skw' is no fault of a node" in capsys.readouterr().out


def test_probe_prints_facts_or_a_draft(capsys):
    assert main(["sites", "probe", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"]["python"]
    assert main(["sites", "probe", "--toml"]) == 0
    assert "[network]" in capsys.readouterr().out
    assert main(["sites", "probe"]) == 0
    assert "memlock" in capsys.readouterr().out
    assert main(["sites", "probe", "--toml", "--json"]) == 2

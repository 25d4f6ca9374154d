"""A job of thousands of nodes: no variable and no argument grows with their names.

Linux takes 128 KiB as one word of a command or of the environment, and starts nothing beyond.
"""

from __future__ import annotations

import os
import subprocess
import threading

import pytest

from hpctrain.cluster.preflight.node import main as preflight_node
from hpctrain.cluster.preflight.node import place_of
from hpctrain.cluster.scheduler.slurm import command
from hpctrain.cluster.scheduler.slurm.command import job_context
from hpctrain.cluster.scheduler.slurm.control import SlurmControl
from hpctrain.core.base.host_list import expand_nodes
from hpctrain.core.base.records import NODE_DOWN
from hpctrain.entry.slurm_batch import exports
from hpctrain.errors import ClusterError

NODES = 16_384
NODELIST = f"accelerated-node[{1:06d}-{NODES:06d}]"
ONE_WORD = 128 * 1024
JOB = {"SLURM_JOB_ID": "4711", "SLURM_NODEID": "5", "SLURM_JOB_NODELIST": NODELIST}


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """SLURM's commands, which say what a test wants; returns the words of each question."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def answer(**says):
        for name, shell in says.items():
            path = folder / name
            path.write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/asked\n{shell}\n')
            path.chmod(0o755)
        return lambda: (folder / "asked").read_text().splitlines()

    return answer


def test_what_the_batch_script_exports_can_be_handed_on(scontrol, tmp_path):
    scontrol(scontrol="exit 1")
    assert len(",".join(expand_nodes(NODELIST))) > ONE_WORD

    found = exports(JOB)
    assert all(len(f"{name}={value}") < 1024 for name, value in found.items())
    started = subprocess.run(["true"], env=os.environ | found, check=False)
    place = place_of(tmp_path, NODES - 1, found | {"HPCTRAIN_PREFLIGHT_KEY": "key"})

    assert started.returncode == 0
    assert place.nodes == list(job_context(JOB).nodes)
    assert (len(place.nodes), place.node) == (NODES, f"accelerated-node{NODES:06d}")


@pytest.mark.parametrize(
    ("listed_and_rank", "why"),
    [
        (("n[1-", 0), "brackets that do not match: nobody can say which nodes the job has"),
        (("n[1-2]", 2), "names 2 nodes, and this is number 2"),
        (("", 0), "names 0 nodes"),
    ],
)
def test_a_list_that_does_not_name_this_node_is_one_clear_line(
    tmp_path, monkeypatch, capsys, listed_and_rank, why
):
    listed, rank = listed_and_rank
    monkeypatch.setenv("HPCTRAIN_NODES", listed)
    monkeypatch.setenv("HPCTRAIN_PORT", "20000")
    monkeypatch.setenv("HPCTRAIN_PREFLIGHT_KEY", "key")
    (tmp_path / "order.json").write_text("{}")
    tmp_path.chmod(0o700)

    assert preflight_node([str(tmp_path), str(rank)]) == ClusterError.exit_code

    [line] = capsys.readouterr().err.splitlines()
    assert why in line


def test_a_dead_node_among_all_is_found_by_one_short_question(scontrol):
    asked = scontrol(
        scontrol="echo 'JobId=4711 JobState=PENDING Restarts=1'", sinfo="printf 'idle\\ndown*\\n'"
    )
    nodes = expand_nodes(NODELIST)

    facts = SlurmControl("4711", restarts=0, nodes=nodes, timeout_s=10.0).facts()

    assert facts.reason == NODE_DOWN
    [question] = [line for line in asked() if line.startswith("sinfo")]
    assert f"--nodes={NODELIST} " in question


def test_nodes_that_are_to_be_left_out_are_named_in_short(scontrol):
    asked = scontrol(scontrol=f"echo 'JobId=4711 ExcNodeList={NODELIST}'")

    SlurmControl("4711", timeout_s=10.0).exclude(["b2", "b1", "login"])

    assert asked()[-1] == f"scontrol update JobId=4711 ExcNodeList=login,{NODELIST},b[1-2]"


def test_threads_that_ask_for_the_clusters_name_at_once_ask_slurm_once(scontrol):
    asked = scontrol(scontrol="sleep 0.3; echo 'ClusterName = juniper'")
    names: list[str] = []
    threads = [threading.Thread(target=lambda: names.append(command.name_here())) for _ in range(4)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert names == ["juniper"] * 4
    assert asked() == ["scontrol show config"]


def test_a_silence_is_waited_for_once_and_not_believed_for_long(scontrol, monkeypatch):
    asked = scontrol(scontrol="sleep 60")
    monkeypatch.setattr(command, "CLUSTER_NAME_TIMEOUT_S", 0.2)

    assert [command.name_here() for _ in range(3)] == [""] * 3
    assert asked() == ["scontrol show config"]

    scontrol(scontrol="echo 'ClusterName = juniper'")
    monkeypatch.setattr(command, "SILENCE_S", 0.0)
    assert command.name_here() == "juniper"

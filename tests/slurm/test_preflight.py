"""Preflight on a real SLURM: whoever is sick is named, and nobody who is well.

The nodes of the test cluster are one machine, so what is wrong with one of them is put in where the
preflight looks (HPCTRAIN_NODE_FAULTS).
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cluster.preflight.checks import Expected, check_interfaces
from hpctrain.cluster.preflight.facts import FactSources, NodeFacts, read_interfaces
from hpctrain.cluster.preflight.report import FAIL
from hpctrain.core.base.env import HPCTRAIN_NODE_FAULTS
from tests.support.processes import AT_A_TERMINAL
from tests.support.scenario import cli

pytestmark = pytest.mark.slurm

IFNAME = next(one.name for one in read_interfaces(FactSources()) if one.up and one.addresses)
FAULTS = {
    "interfaces": f"no-interface:n2,name={IFNAME}",
    "shared directory": "no-shared:n3",
    "clock": "skew:n1,seconds=5",
    "version of torch": "version:n4,of=torch,is=1.0",
}
SLOW = "slow:n3,seconds=1.5"


def preflight(slurm, cwd, *args, faults="", code):
    """What `hpctrain preflight --json` says."""
    env = {HPCTRAIN_NODE_FAULTS: faults, "XDG_STATE_HOME": str(cwd / "state")}
    done = cli(slurm, cwd, "preflight", "--cluster=slurm", "--json", *args, env=env)
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    return json.loads(done.stdout)


def failed(report):
    return {r["check"]: r["nodes"] for r in report["results"] if r["status"] == "fail"}


def bad_list(cwd):
    found = list((cwd / "state" / "hpctrain").glob("*bad-nodes.json"))
    return list(json.loads(found[0].read_text())["nodes"]) if found else []


def test_all_that_is_wrong_is_named_with_its_node_and_nothing_else(slurm, tmp_path):
    args = ("--nodes=4", "--no-bandwidth")
    sick = preflight(slurm, tmp_path, *args, faults="; ".join(FAULTS.values()), code=3)

    assert failed(sick) == {
        "interfaces": ["n2"],
        "shared directory": ["n3"],
        "clock": ["n1"],
        "version of torch": ["n4"],
    }
    assert bad_list(tmp_path) == ["n1", "n2", "n3", "n4"]

    well = preflight(slurm, tmp_path, *args, code=0)

    assert failed(well) == {}
    assert well["bad_nodes"] == {}
    assert bad_list(tmp_path) == []


PROBE = """
import json, sys
from hpctrain.cluster.preflight.facts import probe
json.dump(probe(sys.argv[1]).plain(), sys.stdout)
"""
WITHOUT_NETWORK = ["unshare", "--map-root-user", "--net", "--mount", "sh", "-c"]
"""A network of its own, in which there is nothing but a loopback; /sys has to be told."""


def really_read(node, *, network):
    """What a node's probe reads from the kernel."""
    command = [sys.executable, "-c", PROBE, node]
    if not network:
        within = f"mount -t sysfs sysfs /sys && exec {shlex.join(command)}"
        command = [*WITHOUT_NETWORK, within]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return NodeFacts.from_plain(json.loads(done.stdout))


def test_an_interface_that_the_kernel_has_not_got_is_missed():
    facts = [really_read("n1", network=True), really_read("n2", network=False)]
    facts.append(replace(facts[0], node="n3"))  # most nodes have it

    for named in ((), (IFNAME,)):
        (found,) = check_interfaces(facts, Expected(socket_ifnames=named))
        assert (found.status, found.nodes) == (FAIL, ["n2"])
        assert IFNAME in found.message


@pytest.mark.story(proved_by="tests/unit/preflight/test_slow_nodes.py")
def test_a_throttled_node_is_found_by_bisection(slurm, tmp_path):
    report = preflight(slurm, tmp_path, "--nodes=4", faults=SLOW, code=3)

    assert failed(report) == {"bandwidth": ["n3"]}
    assert list(report["bad_nodes"]) == ["n3"]


def test_ctrl_c_cancels_the_job(slurm, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", AT_A_TERMINAL, "preflight", "--cluster=slurm", "--nodes=4"],
        cwd=tmp_path,
        env={
            **slurm.env,
            HPCTRAIN_NODE_FAULTS: "silent:n2",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as command:
        job_id = ""
        for line in command.stderr:
            if " started" in line:
                job_id = line.split("job ")[1].split()[0]
            if "waiting for 4 nodes" in line:
                break
        command.send_signal(signal.SIGINT)
        command.stderr.read()

    assert command.returncode == 130
    slurm.wait_job(job_id, "CANCELLED")
    assert not (tmp_path / "runs" / ".preflight").exists()


@pytest.mark.soak
@pytest.mark.parametrize("repeat", range(20))
def test_no_healthy_node_is_ever_named(slurm, tmp_path, repeat):
    """Every fault on every node in turn, twenty times round; slow ones as well."""
    node = slurm.nodes[repeat % 4]
    for check, fault in {**FAULTS, "bandwidth": SLOW}.items():
        text = fault.split(":")[0] + f":{node}" + fault[fault.index(":") + 3 :]
        args = ("--nodes=4", *([] if check == "bandwidth" else ["--no-bandwidth"]))
        report = preflight(slurm, tmp_path, *args, faults=text, code=3)
        assert failed(report) == {check: [node]}, report["results"]
    assert os.environ.get(HPCTRAIN_NODE_FAULTS) is None

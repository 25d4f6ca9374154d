"""Where an agent stands in its job, from the environment alone."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest

from hpctrain.cluster.scheduler.slurm.command import job_context, master_addr, own_switch
from hpctrain.cluster.scheduler.slurm.control import SlurmControl
from hpctrain.core.base.process import PORTS, _is_free, first_port, free_port
from hpctrain.core.base.records import EndReason
from hpctrain.entry import slurm_batch
from hpctrain.entry.slurm_batch import exports
from hpctrain.errors import ClusterError

KNOWN = ["HPCTRAIN_BATCH_VERSION", "HPCTRAIN_NODES", "HPCTRAIN_PORT", "HPCTRAIN_RESTARTS"]
JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "localhost,n[2-3]",
}


def test_context_is_read_from_slurm_and_our_exports():
    context = job_context(
        JOB
        | {
            "SLURM_RESTART_COUNT": "2",
            "HPCTRAIN_PORT": "20016",
            "HPCTRAIN_JOB_END": "1795240996",
            "HPCTRAIN_KILL_WAIT_S": "8",
            "HPCTRAIN_MASTER_ADDR": "10.0.0.1",
            "HPCTRAIN_TOKEN": "run-12",
        }
    )

    assert (context.job_id, context.restarts, context.node_rank) == ("4711", 2, 1)
    assert list(context.nodes) == ["localhost", "n2", "n3"]
    assert (context.master_addr, context.port, context.token) == ("10.0.0.1", 20016, "run-12")
    assert (context.end_time, context.kill_wait_s) == (1795240996, 8)


def test_context_without_exports_is_the_same_on_every_node():
    one = job_context(JOB | {"SLURM_NODEID": "0"})
    two = job_context(JOB | {"SLURM_NODEID": "2"})

    assert (one.restarts, one.token, one.end_time, one.kill_wait_s) == (0, "", None, 30)
    assert one.port == two.port == first_port("4711", 0)
    assert one.master_addr == two.master_addr == "localhost"


def test_end_time_comes_from_slurm_where_it_tells():
    assert job_context(JOB | {"SLURM_JOB_END_TIME": "1795240996"}).end_time == 1795240996


def test_start_time_is_what_slurmctld_said_else_slurms_variable():
    variable = {"SLURM_JOB_START_TIME": "1795240000"}

    assert job_context(JOB).start_time is None
    assert job_context(JOB | variable).start_time == 1795240000
    asked = variable | {"HPCTRAIN_JOB_START": "1795240007"}
    assert job_context(JOB | asked).start_time == 1795240007


def command(folder, monkeypatch, name, output):
    """A command of SLURM's that prints this."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_the_jobs_times_are_exported_as_slurmctld_knows_them(tmp_path, monkeypatch):
    shown = "JobId=4711\n   StartTime=1795240007 EndTime=1795243607\n"
    command(tmp_path, monkeypatch, "scontrol", shown)

    found = exports(JOB)

    assert (found["HPCTRAIN_JOB_START"], found["HPCTRAIN_JOB_END"]) == ("1795240007", "1795243607")


def test_accounting_tells_when_the_previous_start_ended(tmp_path, monkeypatch):
    rows = "7|REQUEUED|100|200|n1\n7|NODE_FAIL|300|400|n1\n7|RUNNING|500|Unknown|n2"
    command(tmp_path, monkeypatch, "sacct", rows)

    control = SlurmControl("7")

    assert control.previous_end() is EndReason.NODE_FAILED
    assert control.previous_stop() == 400


def test_without_accounting_the_previous_start_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")

    assert SlurmControl("7").previous_stop() is None


def test_the_steps_nodes_come_before_the_jobs():
    context = job_context(JOB | {"SLURM_STEP_NODELIST": "n[2-3]"})

    assert list(context.nodes) == ["n2", "n3"]


def test_array_task_has_an_id_of_its_own():
    array = {"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"}

    assert job_context(JOB | array).job_id == "4711_3"


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_NODEID"])
def test_agent_outside_of_a_job_is_refused(name):
    with pytest.raises(ClusterError, match=f"^{name} is not set"):
        job_context({key: value for key, value in JOB.items() if key != name})


def test_node_name_that_does_not_resolve_gives_the_launch_address():
    env = {"SLURM_LAUNCH_NODE_IPADDR": "10.1.2.3"}

    assert master_addr(env, ["no-such-host.invalid"]) == "10.1.2.3"


def test_port_differs_after_a_requeue():
    assert first_port("7", 0) != first_port("7", 1)


def of_nobody():
    """A job whose first ports nobody on this machine has, or has claimed."""
    jobs = iter(lambda: str(uuid4()), "")
    return next(
        job for job in jobs if all(_is_free(first_port(job, 0) + n) for n in range(PORTS + 1))
    )


def test_port_block_in_use_is_passed_over():
    job = of_nobody()
    port = first_port(job, 0)
    with socket.socket() as taken:
        taken.bind(("", port + PORTS - 1))
        taken.listen()

        assert free_port(job, 0) != port


def test_two_jobs_that_look_at_the_same_time_get_different_ports():
    """Neither listens yet: that takes the seconds in which its agents start."""
    job = str(uuid4())
    with ThreadPoolExecutor(8) as threads:
        ports = list(threads.map(lambda _: free_port(job, 0), range(24)))

    assert len(set(ports)) == len(ports)
    # Those that look at the very same port pass its block over, all of them.
    assert set(ports) <= {first_port(job, 0, turn) for turn in range(24 * 8)}
    assert all(20000 <= port < 32000 - PORTS for port in ports)


def test_a_claim_keeps_no_port_of_the_block():
    port = free_port("9", 0)

    for n in range(PORTS):
        with socket.socket() as own:
            own.bind(("", port + n))


def test_batch_side_does_without_scontrol(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")

    found = exports(JOB)

    assert sorted(found) == KNOWN
    assert found["HPCTRAIN_NODES"] == "localhost,n[2-3]"
    assert "scontrol is not on PATH" in capsys.readouterr().err


def scontrol(folder, monkeypatch, cases):
    """A scontrol that answers by its words, a line of shell for each."""
    path = folder / "scontrol"
    arms = "".join(f"'{words}') {shell};;\n" for words, shell in cases.items())
    path.write_text(f'#!/bin/sh\necho "$*" >> {folder}/asked\ncase "$*" in\n{arms}esac\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_site_that_shows_no_nodes_keeps_no_job_from_starting(tmp_path, monkeypatch, capsys):
    denied = "echo 'slurm_load_node error: Access/permission denied' >&2; exit 1"
    cases = {
        "show job 4711": "echo 'JobId=4711 EndTime=1795243607'",
        "show config": "echo 'KillWait = 8 sec'",
        "show node localhost": denied,
    }
    scontrol(tmp_path, monkeypatch, cases)

    found = exports(JOB)

    assert (found["HPCTRAIN_JOB_END"], found["HPCTRAIN_KILL_WAIT_S"]) == ("1795243607", "8")
    assert "HPCTRAIN_MASTER_ADDR" not in found
    [told] = capsys.readouterr().err.splitlines()
    assert "Access/permission denied" in told
    assert master_addr(JOB | found, ["localhost", "n2", "n3"]) == "localhost"


def test_what_is_refused_before_does_not_hide_what_comes_after(tmp_path, monkeypatch):
    cases = {
        "show job 4711": "echo 'error: of a kind unheard of' >&2; exit 1",
        "show config": "echo 'KillWait = 8 sec'",
        "show node localhost": "echo 'NodeName=localhost NodeAddr=10.0.0.9 NodeHostName=elsewhere'",
    }
    scontrol(tmp_path, monkeypatch, cases)

    found = exports(JOB)

    assert (found["HPCTRAIN_KILL_WAIT_S"], found["HPCTRAIN_MASTER_ADDR"]) == ("8", "10.0.0.9")


def test_a_silent_slurmctld_is_asked_once_before_the_start(tmp_path, monkeypatch):
    silent = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"
    scontrol(tmp_path, monkeypatch, {"show job 4711": silent})

    assert sorted(exports(JOB)) == KNOWN

    assert (tmp_path / "asked").read_text() == "show job 4711\n"


@pytest.mark.parametrize(
    ("env", "what"),
    [
        ({"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "0"}, "a task of the array 4711"),
        ({"SLURM_HET_SIZE": "2"}, "a part of a heterogeneous job"),
    ],
)
def test_one_of_several_jobs_starts_no_run_and_is_not_requeued(monkeypatch, capsys, env, what):
    for name, value in (JOB | env).items():
        monkeypatch.setenv(name, value)

    before = slurm_batch.main(["before", "/runs/lm", "tok"])
    [line] = capsys.readouterr().err.splitlines()
    after = slurm_batch.main(["after", "/runs/lm", "tok", "--rc", "2", "--term", "0"])

    assert (before, after) == (2, 2)
    assert f"job 4711 is {what}, and a run is one plain job" in line
    assert capsys.readouterr() == ("", "")


def test_exports_are_safe_to_evaluate(tmp_path):
    hostile = "n1$(touch pwned)`touch pwned`;touch pwned"
    printed = subprocess.run(
        [sys.executable, "-m", "hpctrain.entry.slurm_batch", "before", str(tmp_path), "token"],
        env={"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": hostile, "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    show = "import json, os; print(json.dumps(os.environ['HPCTRAIN_NODES']))"
    evaluated = subprocess.run(
        ["bash", "-c", f"{printed}\n{shlex.join([sys.executable, '-c', show])}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert json.loads(evaluated) == hostile
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_another_has_over_ipv6_alone_is_not_free():
    """The first node's name may have both addresses, and clients try this one first."""
    job = of_nobody()
    port = first_port(job, 0)
    with socket.socket(socket.AF_INET6) as theirs:
        theirs.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        theirs.bind(("::", port))
        theirs.listen()

        assert free_port(job, 0) != port


def _on(address, pattern, node="n3"):
    return {
        "SLURM_TOPOLOGY_ADDR": address,
        "SLURM_TOPOLOGY_ADDR_PATTERN": pattern,
        "SLURMD_NODENAME": node,
    }


@pytest.mark.parametrize(
    ("variables", "switch"),
    [
        (_on("top.s2.n3", "switch.switch.node"), "top.s2"),
        (_on("top..n3", "switch.switch.node"), "top."),
        (_on("top.s[1-2].n3", "switch.switch.node"), "top.s[1-2]"),
        (_on("top.s2.n3.site.org", "switch.switch.node", "n3.site.org"), "top.s2"),
        (_on("b8.n3", "block.node"), "b8"),
    ],
)
def test_the_switch_of_a_node_is_what_slurmd_says_above_it(variables, switch):
    assert own_switch(variables) == switch
    assert job_context(JOB | variables).switch == switch


@pytest.mark.parametrize(
    "variables",
    [
        {},
        _on("n3", "node"),  # no topology
        _on("s2.n3", "node"),
        _on("r8:2.n3", "ring:position.node"),  # each place of a ring has one node
        _on("top.s2.n4", "switch.switch.node"),  # of another node
        _on("top.s2.n3", "switch.switch"),
        _on("top.s2.n3", ""),
        _on("", "switch.node"),
        _on("top.s2.n3", "switch.switch.node", ""),
        _on("s\x1b[2J.n3", "switch.node"),
        _on("s\n2.n3", "switch.node"),
        _on(f"{'s' * 1001}.n3", "switch.node"),
    ],
)
def test_a_switch_that_nobody_tells_in_plain_words_is_not_known(variables):
    assert own_switch(variables) == ""
    assert job_context(JOB | variables).switch == ""

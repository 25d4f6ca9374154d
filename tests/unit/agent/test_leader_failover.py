"""Agents that are left agree on who leads them, and each finds its place behind that one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

from hpctrain.core.base.env import HPCTRAIN_GENERATION
from hpctrain.core.base.records import JobContext
from hpctrain.node.agent.loss_ending import LeaderFailover, generation_of
from tests.support.patience import PATIENCE_S

SECRET = "of this start"  # noqa: S105 - of a test


def context(node):
    nodes = ["n1", "n2", "n3", "n4"]
    return JobContext("7", 0, nodes.index(node), nodes, "127.0.0.1", 20000, "tok")


def failover(run, node, secret=SECRET):
    return LeaderFailover(run, secret, context(node))


def test_who_claims_first_leads_and_the_others_find_it(run):
    assert failover(run, "n3").claimed() is None
    begun = failover(run, "n3").claim(follows=4)
    assert (begun.number, begun.leader, begun.follows, begun.lost) == (1, "n3", 4, ("n1",))
    assert failover(run, "n2").claimed() == begun
    assert failover(run, "n2").claim(follows=4) == begun


def test_a_claim_of_another_start_of_the_job_or_of_another_user_is_none(run):
    begun = failover(run, "n3", secret="of the start before").claim(follows=4)
    assert failover(run, "n2").claimed() is None
    run.successor.write_text(json.dumps(asdict(begun)))
    assert failover(run, "n2").claimed() is None
    assert failover(run, "n2").claim(follows=5).leader == "n2"


def test_nobody_else_can_read_where_the_agents_meet(run):
    failover(run, "n3").claim(follows=4)
    assert run.successor.stat().st_mode & 0o777 == 0o600


def test_nodes_that_were_lost_before_have_no_place(run):
    begun = failover(run, "n3").claim(follows=4, lost=["n1", "n2", "another job's"])

    assert begun.lost == ("n1", "n2")
    assert begun.context(context("n4")).nodes == ["n3", "n4"]


def test_nodes_that_were_added_have_a_place_and_those_that_never_came_have_none(run):
    claimer = context("n3")
    claimer.nodes.extend(["", "n9", "n2"])  # n2 was lost, and was added again
    begun = LeaderFailover(run, SECRET, claimer).claim(follows=4)

    assert begun.nodes == ("n3", "n2", "n4", "n9")
    added = JobContext("7", 0, 0, ["n9"], "127.0.0.1", 20000, "tok")
    assert begun.context(added).node_rank == 3


def test_each_finds_its_place_behind_the_leader(run):
    begun = failover(run, "n3").claim(follows=4)
    for node, place in {"n3": 0, "n2": 1, "n4": 2}.items():
        later = begun.context(context(node))
        assert (later.nodes, later.node_rank) == (["n3", "n2", "n4"], place)
        assert (later.master_addr, later.port) == (begun.address, begun.port)
        assert (later.job_id, later.token) == ("7", "tok")


def test_a_generation_goes_on_after_a_generation(run, monkeypatch):
    first = failover(run, "n3").claim(follows=4)
    monkeypatch.setenv(HPCTRAIN_GENERATION, json.dumps(asdict(first)))
    assert generation_of(os.environ) == first
    later = LeaderFailover(run, SECRET, first.context(context("n4")))
    assert later.claimed() is None, "that is this one"
    second = later.claim(follows=6)
    monkeypatch.delenv(HPCTRAIN_GENERATION)
    assert (second.number, second.leader, second.lost) == (2, "n4", ("n1", "n3"))
    assert second.context(context("n2")).nodes == ["n4", "n2"]
    assert failover(run, "n2").claimed() == second, "who is late finds the newest"
    assert len({SECRET, first.secret(SECRET), second.secret(SECRET)}) == 3


def test_srun_has_started_an_agent_that_is_told_of_no_generation():
    assert generation_of({}) is None


PROGRAM = """
import os, signal, sys
from pathlib import Path
from hpctrain.node.agent.loss_ending import Generation, generation_of, take_over
from hpctrain.ledger.run.layout import RunDir

if (now := generation_of(os.environ)) is not None:
    print(now.number, sys.argv[1:], os.getpid(), "LATER" in os.environ, flush=True)
    sys.exit(7)
environ = dict(os.environ)
os.environ["LATER"] = "1"
now = Generation(1, "n2", "127.0.0.1", 1, 1, ("n1",), ("n2",))
take_over(now, RunDir(Path(sys.argv[1])), environ)
"""


def test_a_process_takes_itself_over_with_the_environment_that_it_had(run):
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(run.root)], env=os.environ, stdout=subprocess.PIPE
    )
    assert child.communicate(timeout=PATIENCE_S)[0] == b""
    assert child.returncode == 7
    said = (run.jobs / "generation-1.out").read_text()
    assert f"1 ['{run.root}'] {child.pid} False" in said

"""A rank below nsys is that rank in every way: seen to end, its failure told, dead with its agent.

nsys itself is a script here that records its words and starts the program as a child, as nsys does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal

import pytest

from hpctrain.core.base.records import JobContext, RankTask
from hpctrain.ledger.run.fence import Attempt
from hpctrain.node.agent.node import NodeAgent
from hpctrain.node.agent.ranks import run_rank
from hpctrain.node.agent.rounds import RoundHooks
from hpctrain.node.agent.stop_deadline import StopDeadline
from tests.support import patience
from tests.support.agent_parts import NO_LOOKS, NoControl, notice_of
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port
from tests.support.processes import alive, kill_all

NSYS = """#!/bin/sh
echo "$@" > "$(dirname "$0")/words"
shift
while case "$1" in --*) true;; *) false;; esac; do shift; done
"$@"
"""
PROGRAM = """
import os, pathlib, sys, time
here = pathlib.Path(os.environ["HPCTRAIN_ATTEMPT_DIR"])
rank = os.environ["RANK"]
(here / "new").mkdir(exist_ok=True)
staged = here / "new" / rank
staged.write_text(f"{os.getpid()} {'HPCTRAIN_NSYS' in os.environ}")
staged.rename(here / f"told-{rank}")
if sys.argv[1] == "sleep":
    time.sleep(600)
if sys.argv[1] == "fail" and rank == "1":
    raise RuntimeError("of the program's own")
"""


def agent_of(folder, port, what):
    """The agent of one node with two ranks, the second of them under nsys."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from hpctrain.node.agent.rendezvous import Rendezvous

    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    os.setpgid(0, 0)
    context = JobContext("1", 0, 0, ["n0"], "127.0.0.1", port, "")
    deadline = StopDeadline(context, arrivals=list, ask=None)
    hooks = RoundHooks(
        lambda _size: Attempt(1, "token", "1", 0, 0.0),
        deadline,
        lambda _failure: False,
        notice_of(folder, context, deadline),
    )
    rendezvous = Rendezvous("127.0.0.1", port, 0, ["n0"], run_id="test", timeout_s=60)
    spec = WorkerSpec(
        role="rank",
        local_world_size=2,
        entrypoint=run_rank,
        args=(RankTask("", str(folder / "program.py"), [what], nsys_rank=1),),
        rdzv_handler=rendezvous,
        max_restarts=1_000_000,
        master_addr="127.0.0.1",
        master_port=port,
    )
    agent = NodeAgent(
        spec,
        node="n0",
        attempt_dir=lambda number: folder / "attempts" / f"{number:04d}",
        hooks=hooks,
        start_method="fork",
        before_ranks=lambda _number: None,
        secret="",
        control=NoControl(),
        hang_limits=NO_LOOKS,
    )
    agent.run()
    rendezvous.close()
    failure = agent.end.failure
    told = {"ending": agent.end.ending, "summary": failure.summary if failure else ""}
    (folder / "end.json").write_text(json.dumps(told))


@pytest.fixture
def start(tmp_path):
    (tmp_path / "nsys").write_text(NSYS)
    (tmp_path / "nsys").chmod(0o755)
    (tmp_path / "program.py").write_text(PROGRAM)
    begun = []

    def begin(what):
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=agent_of, args=(tmp_path, free_port(), what))
        process.start()
        begun.append(process)
        return process

    yield begin
    for path in tmp_path.glob("attempts/*/told-*"):
        kill_all([int(path.read_text().split()[0])])
    for process in begun:
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def told(folder):
    """Process id of each rank's program, and whether it runs below nsys."""
    at = folder / "attempts" / "0001"
    until(lambda: (at / "told-0").exists() and (at / "told-1").exists(), "both ranks")
    words = [(at / f"told-{rank}").read_text().split() for rank in (0, 1)]
    return [(int(pid), below == "True") for pid, below in words]


def until(reached, what):
    patience.until(reached, what)


def end(folder, process):
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    return json.loads((folder / "end.json").read_text())


def test_both_ranks_end_and_one_ran_below_nsys(start, tmp_path):
    process = start("end")

    assert end(tmp_path, process)["ending"] == "left"
    assert [below for _, below in told(tmp_path)] == [False, True]
    words = (tmp_path / "words").read_text()
    assert words.startswith(f"profile --output={tmp_path}/profile/attempt-0001/rank-00001 ")
    log = (tmp_path / "attempts" / "0001" / "rank-00001.log").read_text()
    assert f"rank 1 runs under {tmp_path}/nsys" in log


def test_the_failure_of_the_program_below_nsys_is_the_one_that_is_told(start, tmp_path):
    process = start("fail")

    assert end(tmp_path, process) == {
        "ending": "failed",
        "summary": "RuntimeError: of the program's own",
    }


def test_the_program_below_nsys_dies_with_the_agent(start, tmp_path):
    process = start("sleep")
    [(_, _), (pid, below)] = told(tmp_path)
    assert below
    assert alive(pid)

    process.kill()

    until(lambda: not alive(pid), "the end of the rank below nsys")

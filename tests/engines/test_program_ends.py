"""A program that destroys its process group while its DDP model lives comes to its end."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
import weakref

import pytest

from hpctrain.core.base.records import JobContext, RankTask
from hpctrain.ledger.run.fence import Attempt
from hpctrain.node.agent.node import NodeAgent
from hpctrain.node.agent.ranks import run_rank
from hpctrain.node.agent.rounds import RoundHooks
from hpctrain.node.agent.stop_deadline import StopDeadline
from tests.support import local_runs
from tests.support.agent_parts import NO_LOOKS, NoControl, notice_of
from tests.support.gloo import launch, preload
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port
from tests.support.processes import descendants, kill_all

SCRIPT = local_runs.SCRIPTS / "ddp_to_the_end.py"
RANKS = 4


@pytest.fixture(scope="module")
def preloaded():
    """What the program imports is there, as in an agent: an import would give the GIL away."""
    preload()


def _agent(folder, port):
    """The agent of one node."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from hpctrain.node.agent.rendezvous import Rendezvous

    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    context = JobContext("1", 0, 0, ["n0"], "127.0.0.1", port, "")
    deadline = StopDeadline(context, arrivals=list, ask=None)
    hooks = RoundHooks(
        lambda _size: Attempt(1, "token", "1", 0, time.time()),
        deadline,
        lambda _failure: False,
        notice_of(folder, context, deadline),
    )
    rendezvous = Rendezvous("127.0.0.1", port, 0, ["n0"], run_id="test", timeout_s=60)
    spec = WorkerSpec(
        role="rank",
        local_world_size=RANKS,
        entrypoint=run_rank,
        args=(RankTask("", str(SCRIPT), ["--epochs", "1", "--keep-gil"]),),
        rdzv_handler=rendezvous,
        max_restarts=1_000_000,
        master_addr="127.0.0.1",
        master_port=port,
    )
    agent = NodeAgent(
        spec,
        node="n0",
        attempt_dir=lambda number: folder / str(number),
        hooks=hooks,
        start_method="fork",
        before_ranks=lambda _number: None,
        secret="of a test",
        control=NoControl(),
        hang_limits=NO_LOOKS,
    )
    agent.run()
    rendezvous.close()
    os._exit(0 if agent.end.ending == "left" else 1)


@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize("turn", range(4))
def test_a_program_whose_last_thread_waits_for_the_gil_ends(tmp_path, turn):
    del turn  # the last backward pass leaves something behind in one rank of three
    agent = multiprocessing.get_context("fork").Process(target=_agent, args=(tmp_path, free_port()))
    agent.start()
    agent.join(PATIENCE_S)

    logs = sorted((tmp_path / "1").glob("rank-*.log"))
    ends = [log.read_text().splitlines()[-1] for log in logs]
    kill_all([*descendants(agent.pid), agent.pid])
    agent.join()
    assert (agent.exitcode, ends) == (0, ["returned"] * RANKS)


def _order_of_ends():
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from hpctrain.core.torch_private import let_groups_go_last

    let_groups_go_last()
    let_groups_go_last()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    group = weakref.ref(model.process_group)
    lived = []
    ends = [
        weakref.ref(part, lambda _: lived.append(group() is not None))
        for part in (model.reducer, model.logger)
    ]
    dist.destroy_process_group()
    del model
    return lived, [end() for end in ends], group()


def test_the_group_of_a_model_goes_after_all_that_hold_it_without_python():
    assert launch(_order_of_ends, 1) == [([True, True], [None, None], None)]


FAILS = """
import logging, os, time
if os.environ["RANK"] == "1":
    logging.getLogger("hpctrain.runtime").info("is heard")
    raise ValueError("mine")
time.sleep(60)
"""


def test_what_ranks_and_agents_log_says_who_and_torchs_elastic_agent_is_heard(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    run = local_runs.start(tmp_path, "a", 1, 2, "--", str(tmp_path / "fails.py"))
    assert local_runs.await_end(run)["reason"] == "user_error"

    when = r"(?m)^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d local0"
    text = (run / "attempts" / "0001" / "rank-00001.log").read_text()
    assert re.search(f"{when} rank 1 attempt 1 hpctrain: is heard$", text)
    (batch,) = (run / "jobs").glob("*.out")
    elastic = r"agent attempt 1 torch.distributed.elastic\S+: failed \(exitcode: 1\) local_rank: 1"
    assert len(re.findall(f"{when} {elastic}", batch.read_text())) == 1


@pytest.mark.soak
def test_64_runs_one_after_another_end(tmp_path):
    for number in range(64):
        run = local_runs.start(tmp_path, f"r{number}", 2, 2, "--", str(SCRIPT))
        assert local_runs.await_end(run)["reason"] == "completed"


@pytest.mark.soak
def test_200_restarts_of_sixteen_ranks_all_come_up(tmp_path):
    budget = [
        "run.restart_pause_s=0",
        "budget.crashes=1000",
        "budget.no_progress=1000",
        "run.restarts_in_job=1000",
    ]
    words = [word for setting in budget for word in ("--set", setting)]
    script = str(local_runs.SCRIPTS / "restarts.py")
    run = local_runs.start(tmp_path, "r", 2, 8, *words, "--", script, "200")

    assert local_runs.await_end(run, 201)["reason"] == "completed"

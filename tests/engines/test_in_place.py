"""Agents of several nodes on one machine: a lost one ends its round, and the next has another."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

from hpctrain.core.base.process import PORTS
from hpctrain.core.base.records import JobContext, RankTask
from hpctrain.errors import ClusterError
from hpctrain.ledger.run.fence import Attempt
from hpctrain.node.agent import in_place, liveness, signals
from hpctrain.node.agent.control import NodeControl
from hpctrain.node.agent.coordinator import LeadSide
from hpctrain.node.agent.in_place import CONNECT_S, InPlaceRendezvous, RoundSize
from hpctrain.node.agent.liveness import LivenessChannel, LivenessPlace
from hpctrain.node.agent.node import InPlaceAgent, NodeAgent
from hpctrain.node.agent.ranks import run_rank
from hpctrain.node.agent.rendezvous import LeftOut
from hpctrain.node.agent.rounds import RoundHooks
from hpctrain.node.agent.stop_deadline import StopDeadline
from tests.support import node_processes, patience
from tests.support.agent_parts import NO_LOOKS, notice_of
from tests.support.processes import alive
from tests.support.slurm_config import free_range

pytestmark = [
    pytest.mark.usefixtures("preloaded"),
    pytest.mark.realtime(
        proved_by=(
            "tests/unit/agent/test_simulated_rounds.py",
            "tests/unit/agent/test_simulated_stories.py",
        )
    ),
]

SECRET = "the same on all nodes"  # noqa: S105 - of a test
LEASE_S = 2.0
LONG_LEASE_S = 1000.0
"""Where no lease is to run out: on a busy machine a process may stand still for longer than one."""
SCRIPT = """
import os, pathlib, time
folder = pathlib.Path(os.environ["HPCTRAIN_ATTEMPT_DIR"])
said = folder / f"new-{os.environ['RANK']}"
said.write_text(f"{os.getpid()} {os.environ['HPCTRAIN_CONTROL']} {os.environ['WORLD_SIZE']}")
said.rename(folder / f"rank-{os.environ['RANK']}")
while not (folder / "leave").exists():
    time.sleep(0.01)
"""


def _bad(folder):
    """Nodes that guards have named, by a file each."""
    return {path.name.removeprefix("bad-"): "guards named it" for path in folder.glob("bad-*")}


def _agent(node, nodes, size, port, folder, *, lease_s):
    """The agent of one node, with one rank; writes how it ended."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    os.setpgid(0, 0)
    signals.install()
    names = [f"n{number}" for number in range(nodes)]
    begun, told = [], []

    def begin(world_size):
        begun.append(rendezvous.names())
        told.append([list(rendezvous.names()), list(rendezvous.spares), world_size])
        staged = folder / "switches.new"
        staged.write_text(json.dumps(rendezvous.switches()))
        staged.rename(folder / f"switches-{len(begun)}")
        return Attempt(len(begun), "token", "1", 0, time.time())

    def resume(_attempt, on_bytes):
        while (folder / f"reads-{len(begun)}").exists():
            on_bytes(1)
            (folder / f"reading-{len(begun)}").touch()
            time.sleep(0.01)

    context = JobContext("1", 0, node, names, "127.0.0.1", port, "")
    deadline = StopDeadline(context, arrivals=list, ask=None)
    lost = []
    hooks = RoundHooks(
        begin,
        deadline,
        may_restart=lambda _failure: agent.leave_out(_bad(folder)),
        notice=notice_of(folder, context, deadline),
        resume=resume,
        may_go_on=lambda _why: not (folder / "may-not").exists(),
        lost=lambda loss, members: lost.append([loss.name, loss.was_member, members]),
    )
    place = LivenessPlace(node, nodes, "127.0.0.1", port + PORTS - 3, lease_s)
    liveness = LivenessChannel(place, SECRET)
    control = NodeControl("127.0.0.1", SECRET)
    rendezvous = InPlaceRendezvous(
        liveness,
        names,
        port=port,
        run_id="test",
        timeout_s=60,
        size=size,
        fits=bool,
        switch=f"s{node // 2}",
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=1,
        entrypoint=run_rank,
        args=(RankTask("", str(folder / "script.py")),),
        rdzv_handler=rendezvous,
        max_restarts=1_000_000,
        master_addr="127.0.0.1",
    )
    agent = InPlaceAgent(
        spec,
        node=names[node],
        attempt_dir=lambda number: folder / str(number),
        hooks=hooks if node == 0 else None,
        start_method="fork",
        before_ranks=lambda _number: None,
        secret=SECRET,
        control=control,
        hang_limits=NO_LOOKS,
    )
    agent.run()
    left = agent.left_out
    why = "" if left is None else "over" if left.is_over else "gone"
    why = "dropped" if left is not None and not (left.is_over or left.first_is_gone) else why
    staged = folder / f"end-{node}.new"
    staged.write_text(json.dumps([agent.end.ending, agent.end.silent_nodes, why, told, lost]))
    staged.rename(folder / f"end-{node}")
    if node == 0:
        liveness.end("done", 10)
    for part in (liveness, control, rendezvous):
        (part.close if part is rendezvous else part.stop)()
    os._exit(0)


class Job:
    """Agents of a job, each a process group of its own."""

    def __init__(self, folder, nodes, size, lease_s):
        (folder / "script.py").write_text(SCRIPT)
        self.folder = folder
        port = free_range(PORTS)  # an outgoing connection may take one of the kernel's own
        fork = multiprocessing.get_context("fork")
        self.agents = [
            fork.Process(
                target=_agent, args=(node, nodes, size, port, folder), kwargs={"lease_s": lease_s}
            )
            for node in range(nodes)
        ]
        for agent in self.agents:
            agent.start()

    def wait(self, name):
        """What a file holds, once it is there."""
        patience.until((self.folder / name).exists, name)
        return (self.folder / name).read_text()

    def ranks(self, attempt, count):
        """The processes of an attempt's ranks."""
        said = [self.wait(f"{attempt}/rank-{rank}").split() for rank in range(count)]
        assert {world for _, _, world in said} == {str(count)}
        return [int(pid) for pid, _, _ in said]

    def signal(self, node, signum, *, ranks=()):
        """To a whole node: the agent's processes share its group, each rank has its own."""
        for pid in ranks:
            os.kill(pid, signum)
        os.killpg(self.agents[node].pid, signum)

    def end(self, attempt):
        """Let the attempt's ranks leave; how node 0's agent ended."""
        (self.folder / str(attempt) / "leave").touch()
        return json.loads(self.wait("end-0"))


@pytest.fixture
def job(tmp_path, monkeypatch):
    # On a busy machine an agent may need more than a lease to leave and to say how; that one which
    # stays is killed has a test of its own (tests/unit/agent/test_liveness.py).
    kill = liveness._Other._kill_agent_after

    def kill_late(side, _seconds):
        kill(side, patience.PATIENCE_S)

    monkeypatch.setattr(liveness._Other, "_kill_agent_after", kill_late)
    jobs = []

    def begin(nodes, size, lease_s=LONG_LEASE_S):
        jobs.append(Job(tmp_path, nodes, size, lease_s))
        return jobs[0]

    yield begin
    for agent in jobs[0].agents:
        agent.kill()
        agent.join()


def _await_end(pids):
    patience.until(lambda: not any(alive(pid) for pid in pids))


def test_a_spare_takes_the_place_of_a_node_that_died(job):
    job = job(3, RoundSize(2, 2))
    ranks = job.ranks(1, 2)

    job.signal(1, signal.SIGKILL, ranks=ranks[1:])
    job.ranks(2, 2)
    ending, _, _, told, lost = job.end(2)

    assert ending == "left"
    assert told == [[["n0", "n1"], ["n2"], 2], [["n0", "n2"], [], 2]]
    assert lost == [["n1", True, [0, 2]]]
    assert not alive(ranks[0])
    assert json.loads(job.wait("end-2"))[0] == "left"


def test_the_first_node_knows_the_switch_of_each_node_that_takes_part(job):
    job = job(3, RoundSize(2, 2))
    ranks = job.ranks(1, 2)

    job.signal(1, signal.SIGKILL, ranks=ranks[1:])
    job.ranks(2, 2)
    job.end(2)

    told = [json.loads(job.wait(f"switches-{number}")) for number in (1, 2)]
    assert told == [["s0", "s0"], ["s0", "s1"]]


def test_where_no_spare_is_left_fewer_nodes_go_on_and_at_last_none(job):
    job = job(3, RoundSize(3, 2))
    first = job.ranks(1, 3)

    job.signal(1, signal.SIGKILL, ranks=[first[1]])
    second = job.ranks(2, 2)
    job.signal(2, signal.SIGKILL, ranks=[second[1]])
    ending, silent, _, told, lost = json.loads(job.wait("end-0"))

    assert (ending, silent) == ("failed", [2])
    assert [names for names, *_ in told] == [["n0", "n1", "n2"], ["n0", "n2"]]
    assert lost[-1] == ["n2", True, None]


def test_a_spare_that_dies_ends_no_round(job):
    job = job(3, RoundSize(2, 2), LEASE_S)
    ranks = job.ranks(1, 2)

    job.signal(2, signal.SIGKILL)
    job.agents[2].join(10)
    time.sleep(LEASE_S)
    assert all(alive(pid) for pid in ranks)
    ending, _, _, told, lost = job.end(1)

    assert (ending, len(told), lost) == ("left", 1, [["n2", False, [0, 1]]])


def test_a_frozen_nodes_ranks_end_as_it_thaws(job):
    job = job(3, RoundSize(2, 2), LEASE_S)
    ranks = job.ranks(1, 2)

    job.signal(1, signal.SIGSTOP, ranks=ranks[1:])
    job.ranks(2, 2)
    assert alive(ranks[1])
    job.signal(1, signal.SIGCONT, ranks=ranks[1:])
    _await_end(ranks[1:])

    assert job.end(2)[0] == "left"
    assert json.loads(job.wait("end-1"))[2] in {"dropped", "gone"}


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_whose_liveness_process_ends_or_stops_is_lost_and_leaves(job, signum):
    job = job(3, RoundSize(2, 2), LEASE_S)
    ranks = job.ranks(1, 2)

    os.kill(node_processes.child(job.agents[1].pid, "liveness"), signum)
    job.ranks(2, 2)
    _await_end(ranks)
    assert json.loads(job.wait("end-1"))[2] == "dropped"
    ending, _, _, told, _ = job.end(2)

    assert ending == "left"
    assert told == [[["n0", "n1"], ["n2"], 2], [["n0", "n2"], [], 2]]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_where_the_first_nodes_liveness_process_ends_or_stops_all_end_their_ranks(job, signum):
    job = job(3, RoundSize(2, 2), LEASE_S)
    ranks = job.ranks(1, 2)

    os.kill(node_processes.child(job.agents[0].pid, "liveness"), signum)
    _await_end(ranks)

    assert [json.loads(job.wait(f"end-{node}"))[2] for node in (1, 2)] == ["gone", "gone"]
    assert json.loads(job.wait("end-0"))[0] == "failed"


def test_a_node_that_dies_while_a_round_begins_is_replaced_before_any_rank_runs(job):
    job = job(3, RoundSize(2, 2))
    (job.folder / "reads-2").touch()
    os.kill(job.ranks(1, 2)[1], signal.SIGKILL)
    job.wait("reading-2")
    job.signal(1, signal.SIGKILL)
    (job.folder / "reads-2").unlink()

    job.ranks(3, 2)
    ending, _, _, told, _ = job.end(3)

    assert ending == "left"
    assert told[-1][0] == ["n0", "n2"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stands still"])
def test_where_the_first_node_is_gone_the_others_end_their_ranks_and_leave(job, how):
    """One that stands still answers nobody: as one without power its store closes no connection."""
    job = job(3, RoundSize(2, 2), LEASE_S)
    ranks = job.ranks(1, 2)

    job.signal(0, how, ranks=ranks[:1])
    _await_end(ranks if how == signal.SIGKILL else ranks[1:])

    for node in (1, 2):
        assert json.loads(job.wait(f"end-{node}"))[2] == "gone"


def test_a_node_whose_ranks_are_killed_twice_is_left_out(job):
    job = job(3, RoundSize(2, 2))
    for attempt in (1, 2):
        os.kill(job.ranks(attempt, 2)[1], signal.SIGKILL)
    job.ranks(3, 2)
    ending, _, _, told, lost = job.end(3)

    assert ending == "left"
    assert [names for names, *_ in told] == [["n0", "n1"], ["n0", "n1"], ["n0", "n2"]]
    assert lost == [["n1", True, [0, 2]]]
    assert json.loads(job.wait("end-1"))[2] == "dropped"


def test_a_node_whose_ranks_are_killed_twice_stays_where_no_round_can_do_without_it(job):
    job = job(2, RoundSize(2, 2))
    for attempt in (1, 2):
        os.kill(job.ranks(attempt, 2)[1], signal.SIGKILL)
    job.ranks(3, 2)
    ending, _, _, told, lost = job.end(3)

    assert (ending, lost) == ("left", [])
    assert [names for names, *_ in told] == [["n0", "n1"]] * 3


@pytest.mark.parametrize(
    ("bad", "size", "second", "lost"),
    [
        (["n1"], RoundSize(2, 2), ["n0", "n2"], [["n1", True, [0, 2]]]),
        (["n1"], RoundSize(3, 2), ["n0", "n2"], [["n1", True, [0, 2]]]),
        (["n2"], RoundSize(2, 2), ["n0", "n1"], [["n2", False, [0, 1]]]),
        (["n9"], RoundSize(2, 2), ["n0", "n1"], []),
    ],
    ids=["a spare waits", "fewer can go on", "it is a spare", "another job's"],
)
def test_a_node_that_guards_have_named_is_left_out_of_the_next_round(job, bad, size, second, lost):
    job = job(3, size)
    ranks = job.ranks(1, size.most)
    for name in bad:
        (job.folder / f"bad-{name}").touch()

    os.kill(ranks[0], signal.SIGKILL)
    job.ranks(2, 2)
    if lost:  # it leaves while the others go on
        (out,) = [node for node in (1, 2) if f"n{node}" in bad]
        assert json.loads(job.wait(f"end-{out}"))[2] == "dropped"
    ending, _, _, told, all_lost = job.end(2)

    assert (ending, [names for names, *_ in told][1], all_lost) == ("left", second, lost)


@pytest.mark.parametrize(
    ("bad", "size"),
    [(["n1"], RoundSize(3, 3)), (["n1", "n2"], RoundSize(3, 2)), (["n0"], RoundSize(3, 2)),
     (["n0", "n1"], RoundSize(3, 1))],
    ids=["all are needed", "too few are left", "the first one", "the first one too"],
)  # fmt: skip
def test_where_no_round_can_do_without_such_nodes_none_is_left_out(job, bad, size):
    job = job(3, size)
    ranks = job.ranks(1, 3)
    for name in bad:
        (job.folder / f"bad-{name}").touch()

    os.kill(ranks[1], signal.SIGKILL)

    assert json.loads(job.wait("end-0"))[0] == "failed"
    *_, told, lost = json.loads(job.wait("end-0"))
    assert (len(told), lost) == (1, [])


def test_a_node_that_is_left_out_for_guards_is_lost_once_though_its_ranks_died_twice(job):
    job = job(3, RoundSize(2, 2))
    for attempt in (1, 2):
        ranks = job.ranks(attempt, 2)
        if attempt == 2:
            (job.folder / "bad-n1").touch()
        os.kill(ranks[1], signal.SIGKILL)
    job.ranks(3, 2)
    *_, lost = job.end(3)

    assert lost == [["n1", True, [0, 2]]]


def test_spares_leave_when_the_run_is_done(job):
    job = job(3, RoundSize(2, 2))
    job.ranks(1, 2)

    assert job.end(1)[0] == "left"
    assert json.loads(job.wait("end-2"))[2] == "over"


def test_no_round_follows_where_the_run_may_not_go_on(job):
    job = job(3, RoundSize(2, 2))
    ranks = job.ranks(1, 2)
    (job.folder / "may-not").touch()

    job.signal(1, signal.SIGKILL, ranks=ranks[1:])

    assert json.loads(job.wait("end-0"))[:2] == ["failed", [1]]


@pytest.mark.parametrize("first_is_gone", [False, True])
def test_who_thaws_and_finds_no_store_knows_whether_it_was_left_out_itself(
    monkeypatch, first_is_gone
):
    """Else it would requeue a job that continues without it."""

    def no_store(_agent, _group):
        raise RuntimeError("Broken pipe")

    out = LeftOut("this node stood still for 9 s", first_is_gone=first_is_gone)
    monkeypatch.setattr(NodeAgent, "_start_and_run", no_store)
    agent = object.__new__(InPlaceAgent)
    agent._stop_workers = lambda _group: None
    agent._meeting_place = SimpleNamespace(left_out=lambda: out)

    end = agent._start_and_run(None)

    assert (agent.left_out, end.left_out) == (out, str(out))


@pytest.mark.parametrize(
    ("kill", "cause", "why"),
    [(False, None, ""), (True, None, "the job is to end"), (False, "term", "the job is to end")],
)
def test_a_stop_that_is_under_way_is_not_held_up_by_copies(kill, cause, why):
    agent = object.__new__(InPlaceAgent)
    deadline = SimpleNamespace(look=lambda: "late" if kill else "", cause=cause)
    place = agent._meeting_place = SimpleNamespace(losses=list)
    agent._side = LeadSide(SimpleNamespace(deadline=deadline), place, NO_LOOKS, 0.0)

    assert agent._why_no_copies() == why


def meeting(nodes, size, *, comes, gather_s):
    """Node 0's side before its first round, where only some of the other nodes come."""
    place = object.__new__(InPlaceRendezvous)
    place.nodes = [f"n{node}" for node in range(nodes)]
    place._size, place._fits, place._gather_s = size, bool, gather_s
    place._living, place._losses, place.timeout = {0}, [], timedelta(seconds=0.5)
    place._out = None
    place._hear = lambda _wait_s: place._living.update(comes)
    said = []
    place._liveness = SimpleNamespace(say=said.append, said=said)
    return place


def test_agents_that_go_on_after_others_wait_a_while_for_nodes_that_may_be_dead(capsys):
    meeting(3, RoundSize(2, 2), comes={1, 2}, gather_s=0.05)._await_all()
    assert capsys.readouterr().err == ""
    (fewer := meeting(3, RoundSize(2, 2), comes={1}, gather_s=0.05))._await_all()
    assert fewer._liveness.said == [{"absent": [2]}]
    assert "continues without n2, which did not come" in capsys.readouterr().err
    with pytest.raises(ClusterError, match=r"the agents of n2 did not come within 0\.5 s"):
        meeting(3, RoundSize(2, 2), comes={1}, gather_s=None)._await_all()


@pytest.mark.parametrize(("node", "turns_s"), [(0, [3600.0]), (1, 3 * [CONNECT_S])])
def test_other_nodes_connect_in_turns_so_that_news_of_a_loss_ends_it(monkeypatch, node, turns_s):
    """A connect to a node without power cannot be broken off; node 0 is slow, not gone."""
    seen = []

    def no_answer(*_, timeout, **__):
        seen.append(timeout.total_seconds())
        if len(seen) == len(turns_s):
            place._out = "node 0 is gone"
        raise RuntimeError("no answer")

    monkeypatch.setattr(in_place, "TCPStore", no_answer)
    place = meeting(2, RoundSize(1, 1), comes=(), gather_s=None)
    place.node, place.round, place._announced = node, 0, {"round": 0}
    place.master_addr, place.master_port = "n0", 1
    place.timeout = timedelta(hours=1)

    with pytest.raises(RuntimeError, match="no answer"):
        place._connect()
    assert seen == turns_s


@pytest.mark.parametrize(
    ("nodes", "size", "can"),
    [
        (3, RoundSize(2, 2), True),
        (2, RoundSize(2, 2), False),
        (2, RoundSize(2, 1), True),
        (1, RoundSize(1, 1), False),
    ],
)
def test_the_first_node_can_be_done_without_where_the_others_are_enough(nodes, size, can):
    assert meeting(nodes, size, comes=(), gather_s=None).can_do_without_first() is can

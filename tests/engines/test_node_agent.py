"""One verdict for all nodes: ranks start again only where every node's agent is there to do it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.core.base.records import JobContext, RankTask, StopCause
from hpctrain.errors import NoCheckpoint
from hpctrain.ledger.run.fence import Attempt
from hpctrain.node.agent import coordinator as module
from hpctrain.node.agent import ranks as ranks_module
from hpctrain.node.agent import signals
from hpctrain.node.agent.control import NodeControl
from hpctrain.node.agent.coordinator import FollowerSide, LeadSide
from hpctrain.node.agent.node import NodeAgent
from hpctrain.node.agent.node_reports import News, NodeReports
from hpctrain.node.agent.ranks import run_rank
from hpctrain.node.agent.rounds import AgentRound, NodeRanks, NothingToResume, RoundHooks
from hpctrain.node.agent.stop_deadline import StopDeadline
from tests.support import patience
from tests.support.agent_parts import NO_LOOKS, notice_of
from tests.support.ports import free_port
from tests.support.processes import listening

pytestmark = [
    pytest.mark.usefixtures("preloaded"),
    pytest.mark.realtime(proved_by="tests/unit/agent/test_simulated_rounds.py"),
]

SECRET = "the same on all nodes"  # noqa: S105 - of a test

SCRIPT = """
import os, pathlib, time
folder = pathlib.Path(os.environ["HPCTRAIN_ATTEMPT_DIR"])
(folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(0 if folder.name == "2" else 60)
"""


CAUSE = """
import os, pathlib, time
folder = pathlib.Path(os.environ["HPCTRAIN_ATTEMPT_DIR"])
pid = folder / "pid"
if folder.name == "1" and os.environ["RANK"] == "0":
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(pid)
    raise ConnectionError("Connection closed by peer")
if folder.name == "1":
    while not pid.exists() or pathlib.Path("/proc", pid.read_text()).exists():
        time.sleep(0.01)
    time.sleep(0.5)  # its agent knows; one that did not wait would conclude by now
    raise ValueError("the cause")
"""
DEAF = """
import os, pathlib, time
if pathlib.Path(os.environ["HPCTRAIN_ATTEMPT_DIR"]).name == "1":
    if os.environ["RANK"] == "0":
        raise ValueError("the cause")
    time.sleep(600)
"""
HEARS = """
import os, pathlib, signal, time
folder = pathlib.Path(os.environ["HPCTRAIN_ATTEMPT_DIR"])
mask = folder / f"new-{os.environ['RANK']}"
mask.write_text(repr(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
mask.rename(folder / f"mask-{os.environ['RANK']}")
while not (folder / "signalled").exists():
    time.sleep(0.01)
"""
HELD = """
import os, pathlib, time
own = f"let-go-{os.environ['RANK']}"
while not pathlib.Path(os.environ["HPCTRAIN_ATTEMPT_DIR"]).with_name(own).exists():
    time.sleep(0.01)
"""
RANKS = 1


def _agent(node, port, folder, changes=None):
    """The agent of one of two nodes, with one rank each; writes how it ended."""
    for name, value in (changes or {}).items():
        setattr(module, name, value)
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from hpctrain.node.agent.rendezvous import Rendezvous

    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    os.setpgid(0, 0)
    signals.install()
    begun = []

    def begin(_world_size):
        begun.append(1)
        return Attempt(len(begun), "token", "1", 0, time.time())

    context = JobContext("1", 0, node, ["n0", "n1"], "127.0.0.1", port, "")
    reads_long = (folder / "reads-long").exists()
    deadline = StopDeadline(context, arrivals=signals.arrivals if reads_long else list, ask=None)
    told = []

    def may_restart(failure):
        told.append(failure.summary)
        return True

    def resume(_attempt, on_bytes):
        while reads_long:
            on_bytes(1)
            (folder / "reading").write_text("begun")
            time.sleep(0.01)
        if not (folder / "nothing-is-whole").exists():
            return "/out/ckpt.pt"
        raise NoCheckpoint("nothing is whole")

    notice = notice_of(folder, context, deadline)
    hooks = RoundHooks(begin, deadline, may_restart, notice, resume) if node == 0 else None
    control = NodeControl("127.0.0.1", SECRET)
    _note_forks(folder / f"forks-{node}")
    rendezvous = Rendezvous("127.0.0.1", port, node, ["n0", "n1"], run_id="test", timeout_s=60)
    spec = WorkerSpec(
        role="rank",
        local_world_size=RANKS,
        entrypoint=run_rank,
        args=(RankTask("", str(folder / "script.py")),),
        rdzv_handler=rendezvous,
        max_restarts=1_000_000,
        master_addr="127.0.0.1",
        master_port=port,
    )
    agent = NodeAgent(
        spec,
        node=f"n{node}",
        attempt_dir=lambda number: folder / str(number),
        hooks=hooks,
        start_method="fork",
        before_ranks=lambda _number: None,
        secret=SECRET,
        control=control,
        hang_limits=NO_LOOKS,
    )
    try:
        agent.run()
    except NothingToResume as error:
        (folder / f"refused-{node}").write_text(f"{type(error.why).__name__}: {error}")
        os._exit(0)
    rendezvous.close()
    control.stop()
    end = agent.end
    staged = folder / f"end-{node}.new"
    staged.write_text(json.dumps([end.ending, end.silent_nodes, len(begun), told]))
    staged.rename(folder / f"end-{node}")
    os._exit(0)


def _note_forks(path):
    """At each fork of this process write down its threads, and the sockets it came to listen on."""
    mine = os.getpid()
    before = listening(mine)

    def note():
        if os.getpid() == mine:
            with path.open("a") as file:
                threads = len(list(Path("/proc/self/task").iterdir()))
                file.write(f"{threads} {len(listening(mine) - before)}\n")

    os.register_at_fork(before=note)


def _wait(path):
    return patience.until(lambda: path.exists() and path.read_text(), f"{path}")


@pytest.fixture
def start(tmp_path):
    """Starts both agents on a script; the second one's constants may differ."""
    agents = []

    def begin(script, **changes):
        (tmp_path / "script.py").write_text(script)
        port = free_port()
        fork = multiprocessing.get_context("fork")
        for node, mine in enumerate(({}, changes)):
            agents.append(fork.Process(target=_agent, args=(node, port, tmp_path, mine)))
            agents[-1].start()
        begin.port = port
        return agents

    yield begin
    for agent in agents:
        agent.kill()
        agent.join()


@pytest.mark.parametrize(
    ("dead", "expected"), [(False, ["left", [], 2]), (True, ["failed", [1], 1])]
)
def test_ranks_start_again_only_where_every_agent_answers(
    start, tmp_path, monkeypatch, dead, expected
):
    monkeypatch.setattr(module, "ROLL_CALL_S", 3.0 if dead else 60.0)
    agents = start(SCRIPT)
    ranks = [int(_wait(tmp_path / "1" / f"pid-{rank}")) for rank in (0, 1)]

    if dead:
        os.kill(agents[1].pid, signal.SIGSTOP)
    os.kill(ranks[0], signal.SIGKILL)
    end = json.loads(_wait(tmp_path / "end-0"))

    assert end[:3] == expected
    # A lock that another thread holds at a fork is held for ever in the rank.
    forks = [(tmp_path / f"forks-{node}").read_text().splitlines() for node in (0, 1)]
    begun = expected[2]
    assert forks == [["1 0"] * (1 + begun), ["1 0"] * begun], "store and ranks; ranks"


def test_the_other_nodes_reports_are_awaited_one_may_be_the_cause(start, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks_module, "SETTLE_S", 60.0)
    start(CAUSE)

    *_, told = json.loads(_wait(tmp_path / "end-0"))

    assert told == ["ValueError: the cause"]


def test_ranks_that_hear_no_sigterm_hold_up_no_restart(start, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "RANKS", 2)
    start(DEAF)

    assert json.loads(_wait(tmp_path / "end-0"))[:3] == ["left", [], 2]
    failed = json.loads((tmp_path / "1" / "failure-00000.json").read_text())["time"]
    assert (tmp_path / "2" / "rank-00000.log").stat().st_mtime - failed < 30, "torch's patience"


def test_torch_does_not_take_the_agents_signals(start, tmp_path):
    agents = start(HEARS)
    masks = [_wait(tmp_path / "1" / f"mask-{rank}") for rank in (0, 1)]

    for agent in agents:
        os.kill(agent.pid, signal.SIGTERM)
        os.kill(agent.pid, signal.SIGHUP)
    (tmp_path / "1" / "signalled").touch()

    assert json.loads(_wait(tmp_path / "end-0"))[:3] == ["left", [], 1]
    assert masks == ["set()", "set()"], "ranks hear what their program wants to hear"


def test_the_first_agent_stays_until_the_others_have_read_the_verdict(start, tmp_path):
    start("import os, time; time.sleep(0.5 * (os.environ['RANK'] == '0'))", POLL_S=1.5)

    ends = [json.loads(_wait(tmp_path / f"end-{node}"))[0] for node in (0, 1)]

    assert ends == ["left", "left"]


def test_a_verdict_that_somebody_writes_over_is_said_again(start, tmp_path):
    """The second agent stands still until it can only see what was written over it."""
    from torch.distributed import TCPStore

    agents = start(HELD)
    store = TCPStore("127.0.0.1", start.port, is_master=False, wait_for_workers=False)

    def until_there(end):
        return patience.until(lambda: [key for key in store.list_keys() if key.endswith(end)])[0]

    (tmp_path / "let-go-1").touch()
    until_there("report/1")
    os.kill(agents[1].pid, signal.SIGSTOP)
    (tmp_path / "let-go-0").touch()
    store.set(until_there("news/0").removeprefix("/"), "a stranger's")
    os.kill(agents[1].pid, signal.SIGCONT)

    ends = [json.loads(_wait(tmp_path / f"end-{node}"))[0] for node in (0, 1)]

    assert ends == ["left", "left"]


@pytest.mark.parametrize("nodes", [4, 1000])
def test_nodes_that_report_one_by_one_are_not_asked_for_all_at_each(hands, nodes):
    asked = []

    class Store:
        said = 0

        def count(self, _):
            return self.said

        def get(self, key):
            asked.append(key)
            return [] if int(key.removeprefix("round/0/report/")) < self.said else None

    store = Store()
    reports = NodeReports(AgentRound(0, "n0", 0, nodes, store, NodeRanks([])), None, 0.0)
    for store.said in range(nodes + 1):
        hands.advance(module.POLL_S)
        reports.gather()

    assert reports.nodes == set(range(nodes))  # also the last one's, at once
    assert len(asked) <= nodes * 60


def news_of(side, nodes, store):
    """What an agent on this side reads of node 0's in a round of so many nodes."""
    round_ = AgentRound(0, "n0", 0, nodes, store, NodeRanks([]))
    return News(round_, [], each_s=side.news_each_s(nodes))


@pytest.mark.parametrize(("nodes", "most_a_second"), [(4, 10), (100, 10), (1000, 1.1), (9000, 0.6)])
def test_the_agents_of_many_nodes_do_not_ask_for_news_ten_times_a_second(
    hands, nodes, most_a_second
):
    """They ask one store, that of node 0's agent: at 4 nodes as quick as ever."""
    asked, told = [], {}

    class Store:
        look = staticmethod(lambda: None)

        def get(self, key):
            asked.append(key)
            return told.get(key)

    news = news_of(FollowerSide(None, 0.0), nodes, Store())
    for _ in range(600):
        hands.advance(module.POLL_S)
        assert news.tick() is None

    assert 0.4 * 60 <= len(asked) <= most_a_second * 60

    told["round/0/news/0"] = {module.STOP: StopCause.TERM}
    told["round/0/news/1"] = asdict(module.RoundEnd("left"))
    began = hands.monotonic()
    while (end := news.tick()) is None:
        hands.advance(module.POLL_S)
    assert end == module.RoundEnd("left")
    # one wait in all: what has come together is read together
    most_s = max(2 * module.POLL_S, min(nodes / 1000, 2.0) + 2 * module.POLL_S)
    assert hands.monotonic() - began <= most_s + 1e-6


def test_the_first_agent_hears_its_own_news_at_once_on_any_number_of_nodes(hands):
    asked = []
    store = SimpleNamespace(look=lambda: None, get=asked.append)
    news = news_of(LeadSide(None, None, NO_LOOKS, 0.0), 9000, store)

    for _ in range(3):
        assert news.tick() is None

    assert asked == ["round/0/news/0"] * 3


def test_the_ranks_of_all_nodes_are_given_what_the_first_agent_has_chosen(start, tmp_path):
    start(
        "import os, pathlib\n"
        "folder = pathlib.Path(os.environ['HPCTRAIN_ATTEMPT_DIR'])\n"
        "said = folder / ('given-' + os.environ['RANK'])\n"
        "said.write_text(os.environ.get('HPCTRAIN_RESUME', ''))\n"
    )

    assert json.loads(_wait(tmp_path / "end-0"))[0] == "left"
    given = [(tmp_path / "1" / f"given-{rank}").read_text() for rank in range(2)]
    assert given == ["/out/ckpt.pt"] * 2


def test_where_nothing_can_be_gone_on_from_no_node_starts_a_rank(start, tmp_path):
    (tmp_path / "nothing-is-whole").touch()
    start("import os, pathlib\npathlib.Path(os.environ['HPCTRAIN_ATTEMPT_DIR'], 'ran').touch()\n")

    assert _wait(tmp_path / "refused-0") == "NoCheckpoint: nothing is whole"
    assert _wait(tmp_path / "refused-1") == "CheckpointError: nothing is whole"
    assert not (tmp_path / "1" / "ran").exists()


def test_a_stop_is_heard_while_it_is_proved_what_the_ranks_go_on_from(start, tmp_path):
    (tmp_path / "reads-long").touch()
    agents = start(
        "import os, pathlib\npathlib.Path(os.environ['HPCTRAIN_ATTEMPT_DIR'], 'ran').touch()\n"
    )
    _wait(tmp_path / "reading")
    os.kill(agents[0].pid, signal.SIGTERM)

    for node in range(2):
        assert json.loads(_wait(tmp_path / f"end-{node}"))[0] == "killed"
    assert not (tmp_path / "1" / "ran").exists()
    (tmp_path / "reading").unlink()
    agents[0].join(20)
    assert not (tmp_path / "reading").exists(), "nobody reads on"

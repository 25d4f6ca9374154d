"""Ranks of several nodes' processes agree and say values to each other; a loss is said once to all.

Each rank is a thread here, each node a process.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from hpctrain.errors import ControlLost, HpctrainError
from hpctrain.node.control import client
from hpctrain.node.control.board import BOARD, SOCKET, Board
from hpctrain.node.control.client import ControlClient, why_none
from hpctrain.node.control.collectives import entry
from hpctrain.node.control.wire import Splitter, framed, packed, unpacked
from tests.support import patience
from tests.support.control_tree import ControlTree

NODES, PER_NODE = 3, 2
RANKS = NODES * PER_NODE


@pytest.fixture
def tree():
    with ControlTree(NODES, PER_NODE) as tree:
        yield tree


def every(act, tree):
    """What each rank's `act(client)` returns or raises, all at once, in rank order."""

    def rank(number):
        try:
            with closing(ControlClient(tree.folder(number), number)) as client:
                return act(client)
        except HpctrainError as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(rank, range(RANKS)))


def test_values_go_between_the_ranks_of_all_nodes(tree):
    def values(client):
        exchange = client.exchange(30)
        first = exchange.broadcast({"of": client.rank})
        gathered = exchange.gather(client.rank**2)
        on_0 = exchange.gather_on_0((client.rank, b"x" * 100_000))
        return first, gathered, [(number, len(text)) for number, text in on_0]

    squares = [rank**2 for rank in range(RANKS)]
    on_0 = [(rank, 100_000) for rank in range(RANKS)]
    assert every(values, tree) == [
        ({"of": 0}, squares, [] if rank else on_0) for rank in range(RANKS)
    ]


def test_rows_travel_while_other_values_are_said(tree):
    def values(client):
        exchange = client.exchange(30)
        rows = exchange.send_to_0([client.rank, 0.5])
        beside = exchange.apart(30).gather(client.rank)
        gathered = exchange.gather(1)
        if client.rank == 0:
            patience.until(rows.is_done)
        return beside, gathered, rows.is_done(), rows.values()

    rows = [[float(rank), 0.5] for rank in range(RANKS)]
    assert every(values, tree) == [
        (list(range(RANKS)), [1] * RANKS, True, [] if rank else rows) for rank in range(RANKS)
    ]


def test_exchanges_made_in_one_order_do_not_meet(tree):
    assert every(_in_threads, tree) == [(["a"] * RANKS, ["b"] * RANKS)] * RANKS


def _in_threads(client):
    """Odd ranks come to the second exchange first."""
    first, second = client.exchange(30), client.exchange(30)
    with ThreadPoolExecutor(2) as pool:
        calls = [(first, "a"), (second, "b")]
        if client.rank % 2:
            calls.reverse()
        found = {value: pool.submit(exchange.gather, value) for exchange, value in calls}
        return found["a"].result(), found["b"].result()


def ticks_until_stop(client, step_s, *, wish_at=None):
    for tick in range(100_000):
        if tick == wish_at:
            client.lease.wish(stop=3)
        if any(decision.kind == "stop" for decision in client.lease.tick()):
            return tick
        time.sleep(step_s)
    return -1


@pytest.mark.parametrize("step_s", [0.0, 0.002, 0.05])
def test_all_ranks_stop_at_one_tick_whoever_wished_it(tree, step_s):
    stopped = every(
        lambda client: ticks_until_stop(client, step_s, wish_at=10 if client.rank == 3 else None),
        tree,
    )

    assert len(set(stopped)) == 1
    assert stopped[0] >= 10


def test_a_wish_in_a_long_step_is_heard_before_that_step_ends(tree):
    """SIGTERM's thread says it while the main thread computes."""
    begun, said = threading.Event(), threading.Event()

    def act(client):
        client.lease.tick()
        if client.rank == 1:
            begun.wait(patience.PATIENCE_S)
            client.lease.wish(stop=3)
            said.set()
        begun.set()
        said.wait(patience.PATIENCE_S)  # all are within their first step
        return [[decision.kind for decision in client.lease.tick()] for _ in range(3)]

    found = every(act, tree)
    assert found == [found[0]] * RANKS
    assert ["stop"] in found[0][:2]


def test_where_a_nodes_process_dies_every_rank_hears_it_soon(tree):
    def act(client):
        exchange = client.exchange(30)
        exchange.gather(0)
        if client.rank == 2:
            os.kill(tree.nodes[2].pid, signal.SIGKILL)
        exchange.gather(1) if client.rank != 2 else ticks_until_stop(client, 0.001)

    found = every(act, tree)
    assert [type(error) for error in found] == [ControlLost] * RANKS
    gone = "the node's control process is gone: (it has closed the connection|.*reset|.*pipe)"
    assert re.match(gone, str(found[4]))
    assert re.match("n0 has lost n2: (it has closed|.*reset)", str(found[0]))
    assert str(found[2]) == str(found[0])


def test_ranks_of_a_node_that_is_stopped_for_a_while_are_waited_for(tree):
    pid = tree.nodes[2].pid

    def act(client):
        client.lease.tick()
        if client.rank == 0:
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(1.5, os.kill, (pid, signal.SIGCONT)).start()
        return ticks_until_stop(client, 0.001, wish_at=1000 if client.rank == 4 else None)

    stopped = every(act, tree)
    assert len(set(stopped)) == 1
    assert stopped[0] >= 1000


def test_what_is_said_to_a_node_that_is_stopped_is_there_when_it_goes_on(tree):
    """More than its connections hold by themselves."""
    pid, size = tree.nodes[1].pid, 4_000_000

    def act(client):
        exchange = client.exchange(60)
        exchange.gather(0)
        if client.rank == 0:
            os.kill(pid, signal.SIGSTOP)
            exchange.broadcast(b"x" * size)
            threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
        else:
            exchange.broadcast(None)
        return [len(value) for value in exchange.gather(b"y" * size)]

    assert every(act, tree) == [[size] * RANKS] * RANKS


def test_a_rank_that_does_not_read_holds_up_nobody_else(tree):
    size, calls = 1_000_000, 8

    def act(client):
        exchange = client.exchange(60)
        if client.rank != 1:
            found = [len(exchange.gather(b"x" * size)) for _ in range(calls)]
            others_are_done.wait(patience.PATIENCE_S)
            return found
        given = [exchange._give("gather", b"x" * size) for _ in range(calls)]
        others_are_done.wait(patience.PATIENCE_S)
        return [len(exchange.values_of(call)) for call in given]

    others_are_done = threading.Barrier(RANKS)
    assert every(act, tree) == [[RANKS] * calls] * RANKS


def test_ranks_do_not_wait_for_ever_for_one_that_does_not_come(tree):
    def act(client):
        return client.exchange(0.5).gather(0) if client.rank != 5 else None

    found = every(act, tree)
    assert {str(error) for error in found[:5]} == {
        "not all ranks came to a gather within 0.5 s: is one of them stuck?"
    }


def test_ranks_that_do_not_do_the_same_are_told_so(tree):
    def act(client):
        exchange = client.exchange(30)
        return exchange.gather(0) if client.rank else exchange.gather_on_0(0)

    found = every(act, tree)
    assert {type(error) for error in found} == {ControlLost}
    assert " where another rank does a gather" in str(found[0])


def test_a_second_process_is_not_the_same_rank(tree):
    with closing(ControlClient(tree.folder(1), 1)) as first:
        with pytest.raises(HpctrainError, match="another process is rank 1 already"):
            ControlClient(tree.folder(1), 1)
        assert first.ranks_in_all == RANKS


def test_a_rank_that_comes_again_goes_on_where_it_was(tree):
    def twice(client):
        client.lease.tick()
        return client.lease.tick()

    every(twice, tree)
    again = every(lambda client: ticks_until_stop(client, 0, wish_at=3), tree)
    assert len(set(again)) == 1
    assert again[0] >= 3


def test_a_process_has_one_client(tree):
    with closing(ControlClient.take(tree.folder(0), 0)) as client:
        assert ControlClient.take(tree.folder(0), 0) is client
        with pytest.raises(HpctrainError, match="this process is rank 0 already, and not rank 1"):
            ControlClient.take(tree.folder(0), 1)


def test_a_rank_of_another_node_is_not_let_in(tree):
    with pytest.raises(ControlLost):
        ControlClient(tree.folder(0), 4)


def test_where_there_is_no_process_a_rank_says_so(tmp_path):
    with pytest.raises(ControlLost, match=r"cannot be reached: .*No such file"):
        ControlClient(tmp_path, 0)


def test_a_new_round_begins_without_the_old_ones_ranks(tree):
    with closing(ControlClient(tree.folder(0), 0)) as old_client:
        old = old_client.exchange(30)
        tree.begin("round 1")

        found = every(lambda client: client.exchange(30).gather(client.rank), tree)
        assert found == [list(range(RANKS))] * RANKS
        with pytest.raises(ControlLost):
            old.gather(0)


def test_a_node_of_another_round_is_not_let_in(tree, monkeypatch):
    monkeypatch.setattr("hpctrain.node.control.node_server.JOIN_S", 0.0)
    with ControlTree(2, 1) as other_users:
        port = other_users.nodes[0].begin(
            other_users.place(0), secret="ours", about="round 0", address="127.0.0.1"
        )
        other_users.nodes[1].begin(
            other_users.place(1), secret="theirs", about="round 0", address="127.0.0.1"
        )
        with pytest.raises(ControlLost, match=f"127.0.0.1:{port} is not the parent of node 1"):
            other_users.nodes[1].join("127.0.0.1", port)


def test_a_failure_that_an_agent_reports_reaches_every_rank(tree):
    def act(client):
        exchange = client.exchange(30)
        exchange.gather(0)
        if client.rank == 5:
            tree.nodes[2].ask({"fail": "n2: rank 5 is gone"})
        return exchange.gather(1)

    assert {str(error) for error in every(act, tree)} == {"n2: rank 5 is gone"}


def test_a_stopped_tree_leaves_nothing_behind():
    with ControlTree(2, 1) as tree:
        folders = [tree.folder(rank) for rank in range(2)]
        assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700] * 2
    assert not any(folder.exists() for folder in folders)


def test_a_silent_node_is_given_up(monkeypatch):
    monkeypatch.setattr("hpctrain.node.control.node_server.PATIENCE_S", 0.5)
    monkeypatch.setattr("hpctrain.node.control.node_server.SAY_S", 0.1)
    with ControlTree(NODES, PER_NODE) as tree:

        def act(client):
            exchange = client.exchange(30)
            exchange.gather(0)
            exchange.gather_on_0(0)
            if client.rank == 0:  # the others of that node have heard all that they wait for
                os.kill(tree.nodes[1].pid, signal.SIGSTOP)
            return None if client.rank in {2, 3} else exchange.gather(1)

        found = every(act, tree)
        assert {str(found[rank]) for rank in (0, 1, 4, 5)} == {
            "n0 has lost n1: it was silent for 0 s"
        }


def test_a_quiet_tree_is_not_taken_for_dead(monkeypatch):
    """No rank says anything for longer than a node may be silent: the nodes speak by themselves."""
    monkeypatch.setattr("hpctrain.node.control.node_server.PATIENCE_S", 0.5)
    monkeypatch.setattr("hpctrain.node.control.node_server.SAY_S", 0.1)
    monkeypatch.setattr(client, "PATIENCE_S", 0.5)
    with ControlTree(NODES, PER_NODE) as tree:

        def act(client):
            exchange = client.exchange(30)
            if client.rank == 0:
                threading.Event().wait(1.5)  # nothing to await: that nothing happens is the point
            return exchange.gather(client.rank)

        assert every(act, tree) == [list(range(RANKS))] * RANKS


def test_ranks_of_the_agents_have_a_place_and_others_are_told_why_not(tree, tmp_path):
    folder = tree.folder(2)

    assert why_none(folder, 2, RANKS) == why_none(folder, 3, RANKS) == ""
    assert why_none(folder, 2, 48) == "the agents have started 6 ranks, and these are 48"
    assert why_none(tmp_path / "none", 0, RANKS).startswith(
        f"{tmp_path}/none is not seen from here"
    )
    for other in (1, 4):
        told = rf"is rank {other}, and .* has started ranks 2 to 3: unset"
        with pytest.raises(ControlLost, match=told):
            why_none(folder, other, RANKS)


def test_the_board_of_another_version_is_none(tmp_path):
    (tmp_path / "board").write_bytes(bytes(1 << 16))

    assert "not a board of version" in why_none(tmp_path, 0, 1)


def test_a_rank_has_the_place_of_one_process(tree):
    child = os.fork()
    if child == 0:
        ControlClient.take(tree.folder(2), 2)
        os._exit(0)
    os.waitpid(child, 0)

    assert why_none(tree.folder(2), 2, RANKS) == "another process was rank 2 before"
    assert why_none(tree.folder(2), 3, RANKS) == ""
    with closing(ControlClient.take(tree.folder(2), 3)):
        assert why_none(tree.folder(2), 3, RANKS) == ""


def test_a_forked_copy_of_a_client_is_none(tree):
    """A data loader's worker: what it would say is the rank's own."""
    with closing(ControlClient.take(tree.folder(0), 0)) as client:
        child = os.fork()
        if child == 0:
            try:
                ControlClient.take(tree.folder(0), 0)
            except HpctrainError as error:
                os._exit(7 if "another process is rank 0 already" in str(error) else 8)
            os._exit(9)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert ControlClient.take(tree.folder(0), 0) is client


def test_a_seat_that_was_left_can_be_taken_anew(tree):
    with closing(ControlClient.take(tree.folder(0), 0)) as left:
        pass
    with closing(ControlClient.take(tree.folder(0), 0)) as client:
        assert client is not left
        left.close()  # once more, which takes nothing from the one that is taken
        assert ControlClient.take(tree.folder(0), 0) is client


@pytest.fixture
def process_that_says(tmp_path):
    """Stands in for a node's process of two ranks; what it says to rank 0's first exchange."""
    board = Board.create(tmp_path / BOARD, 0, 2, 2)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / SOCKET))
    server.listen()
    lines = []

    def serve(message):
        for said in (b"", framed(message)):  # first comes the waker, then the exchange
            line, _ = server.accept()
            lines.append(line)
            line.sendall(framed(packed({"is": "welcome", "ranks": 2})) + said)

    threads = []

    def start(message):
        threads.append(threading.Thread(target=serve, args=[message]))
        threads[0].start()
        return ControlClient(tmp_path, 0)

    start.lines = lines
    yield start
    threads[0].join()
    for line in [*lines, server]:
        line.close()
    board.close()


VALUE = pickle.dumps("a value")
GATHER = {"is": "values", "call": ["0", 0, "gather"]}


@pytest.mark.parametrize(
    "message",
    [
        b"\xff" * 9,
        packed({"is": "values", "call": ["0", 0]}),
        packed(GATHER, b"\xff" * 3),
        packed(GATHER, entry(0, VALUE)[:-1]),
        packed(GATHER, b""),
        packed(GATHER, entry(0, VALUE)),
        packed(GATHER, entry(0, VALUE) * 2),
        packed(GATHER, entry(0, VALUE) + entry(2, VALUE)),
        packed(GATHER, entry(0, VALUE) + entry(1, b"")),
        packed(GATHER, entry(0, VALUE) + entry(1, b"\x80\x05\x95")),
        packed(GATHER, entry(0, VALUE) + entry(1, b"cnowhere\nat_all\n.")),
        packed(GATHER, entry(0, VALUE) + entry(1, b"cos\nat_all\n.")),
        packed(GATHER, entry(0, VALUE) + entry(1, b"0.")),
        packed(GATHER, entry(0, VALUE) + entry(1, b"I1\nI2\nR.")),
    ],
)
def test_values_that_cannot_be_read_are_one_clear_loss(process_that_says, message):
    with closing(process_that_says(message)) as client:
        exchange = client.exchange(10)
        with pytest.raises(ControlLost, match=r"cannot be read: |does not make sense: ") as lost:
            exchange.gather("mine")
    assert "\n" not in str(lost.value)


def test_behind_values_that_cannot_be_read_nothing_is_said(process_that_says):
    with closing(process_that_says(packed(GATHER, b""))) as client:
        exchange = client.exchange(10)
        with pytest.raises(ControlLost, match=r"not the values of 2 ranks$"):
            exchange.gather("mine")
        with pytest.raises(ControlLost, match=r"2 ranks\. What was said after that has no answer"):
            exchange.gather("mine")


def test_a_broadcast_has_rank_0s_value_alone(process_that_says):
    said = {"is": "values", "call": ["0", 0, "gather_on_0"]}
    body = entry(1, VALUE) + entry(0, pickle.dumps("first"))
    with closing(process_that_says(packed(said, body))) as client:
        assert client.exchange(10).gather_on_0("mine") == ["first", "a value"]


def test_the_nodes_process_is_woken_by_a_wish_and_not_by_one_that_it_knows(process_that_says):
    with closing(process_that_says(packed(GATHER))) as client:
        client.exchange(10)
        for stop in (2, 2, 3):
            client.lease.wish(stop=stop)

    [waker, _] = process_that_says.lines
    heard, splitter = [], Splitter()
    while piece := waker.recv(4096):  # until the client's end
        heard += splitter.feed(piece)
    _, *wakes = [unpacked(message)[0] for message in heard]
    assert wakes == [{"is": "ask"}] * 2


def test_behind_a_call_that_not_all_came_to_nothing_is_taken_for_something_else(tree):
    def act(client):
        exchange = client.exchange(0.3 if client.rank else 30)
        if client.rank:
            with pytest.raises(ControlLost, match="not all ranks came"):
                exchange.gather("the first")
            with pytest.raises(ControlLost, match="said after that has no answer"):
                exchange.gather("the second")
            return client.exchange(30).gather(client.rank)
        beside = client.exchange(30)
        everyone = beside.gather(client.rank)  # they have given up by now
        return exchange.gather("late"), everyone

    late, *others = every(act, tree)
    assert late == (["late", *["the first"] * 5], list(range(RANKS)))
    assert others == [list(range(RANKS))] * 5

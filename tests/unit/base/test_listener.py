"""Who may connect to a listener of ours, and what that keeps it from."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import subprocess
import sys
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from hpctrain.cluster.preflight.rendezvous import Coordinator, Peer
from hpctrain.cluster.scheduler.slurm.control import RelayedControl, serve
from hpctrain.core.base import clock, listener
from hpctrain.core.base.listener import ACCEPTS_A_TURN, HEARD_A_TURN, Listener, listen_at
from hpctrain.core.base.records import JobFacts, JobState
from hpctrain.node.agent.liveness import LivenessPlace, _First, _Other
from hpctrain.node.control import endpoint, node_server
from hpctrain.node.control.node_server import NodeServer, TreePlace
from hpctrain.node.memory import copy_line, replica_server
from tests.support.patience import PATIENCE_S, until
from tests.support.ports import free_port
from tests.support.replica_servers import ReplicaServers, copy_by_all, covered_by_all, ready

HERE = "127.0.0.1"
TOP = Path(__file__).parents[3]


class Inn:
    """A listener that lets in who says `secret`; a context manager."""

    def __init__(self, **more):
        self.inside, self.refused, self.said = [], [], []
        self.listener = Listener(
            listen_at(HERE),
            lambda: (b"who?\n", self.hear),
            refused=lambda address, why: self.refused.append((address, why)),
            **more,
        )

    def hear(self, said):
        self.said.append(said)
        if said == b"wrong":
            raise ValueError("a stranger")
        return self.inside.append if said == b"secret" else None

    def __enter__(self):
        self.guests = []
        return self

    def __exit__(self, *_):
        self.listener.close()
        for end in [*self.guests, *self.inside]:
            end.close()

    def connect(self, count=1, says=b""):
        for _ in range(count):
            guest = socket.create_connection((HERE, self.listener.port), timeout=PATIENCE_S)
            guest.sendall(says)
            self.guests.append(guest)
        return self.guests[-count:]

    def turns(self, count):
        for _ in range(count):
            self.listener.turn()

    def here(self):
        return len(self.listener._unproved)


def is_closed(guest):
    """Whether the other end has closed the connection; what it said first is read."""
    guest.settimeout(0)
    try:
        while guest.recv(100):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_who_proves_himself_is_handed_over_and_everybody_hears_the_first_words():
    with Inn() as inn:
        other_user, ours = inn.connect(2)
        inn.turns(1)
        assert [end.recv(100) for end in (other_user, ours)] == [b"who?\n"] * 2
        ours.sendall(b"sec")
        inn.turns(1)
        ours.sendall(b"ret")
        inn.turns(1)
        (inside,) = inn.inside
        ours.sendall(b"more")
        assert inside.recv(100) == b"more"
        inn.turns(1)  # what he says now is no matter of the listener's
        assert inn.said == [b"sec", b"secret"]
        assert inn.here() == 1
    assert inn.refused == []  # who is there at the end was refused nothing


def test_a_turn_accepts_few_and_hears_few_however_many_there_are():
    count = 2 * HEARD_A_TURN
    with Inn() as inn:
        guests = inn.connect(count)
        accepted = []
        while inn.here() < count:
            before = inn.here()
            inn.turns(1)
            accepted.append(inn.here() - before)
        assert max(accepted) == ACCEPTS_A_TURN
        for guest in guests:
            guest.sendall(b"no")
        inn.turns(1)
        assert len(inn.said) == HEARD_A_TURN
        inn.turns(1)
        assert len(inn.said) == count


def test_the_oldest_has_to_go_and_never_the_newest(monkeypatch):
    monkeypatch.setattr(listener, "PLACES", 3)
    with Inn(expected=1) as inn:
        guests = inn.connect(6)
        inn.turns(2)
        assert [is_closed(guest) for guest in guests] == [True, True, False, False, False, False]
        assert inn.refused == [(HERE, "too many came behind it")] * 2


def test_a_proof_that_came_in_time_is_read_before_the_oldest_has_to_go(monkeypatch):
    monkeypatch.setattr(listener, "PLACES", 2)
    monkeypatch.setattr(listener, "HEARD_A_TURN", 0)
    with Inn(expected=0) as inn:
        (ours,) = inn.connect()
        inn.turns(1)
        ours.sendall(b"secret")
        inn.connect(2)
        inn.turns(1)
        assert len(inn.inside) == 1
        assert inn.refused == []


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (b"wrong", "a stranger"),
        (b"x" * 10, "it says more than a proof"),
        (None, "it has closed the connection"),
    ],
)
def test_who_says_something_else_or_leaves_is_closed_at_once(says, why):
    with Inn(most_bytes=10) as inn:
        (guest,) = inn.connect()
        if says is None:
            guest.shutdown(socket.SHUT_WR)
        else:
            guest.sendall(says)
        inn.turns(2)
        assert inn.refused == [(HERE, why)]
        assert is_closed(guest)


def test_one_that_has_gone_as_it_is_taken_over_ends_nothing_else():
    def gone(connection):
        raise BrokenPipeError

    with Inn() as inn:
        inn.inside = type("Gone", (list,), {"append": staticmethod(gone)})()
        (guest,) = inn.connect(1, b"secret")
        inn.turns(2)
        assert is_closed(guest)
        assert inn.here() == 0


def test_a_turn_that_waits_for_somebody_ends_when_another_has_to_go():
    with Inn(proof_s=0.01) as inn:
        (guest,) = inn.connect()
        inn.listener.turn(None)  # it has come
        inn.listener.turn(None)  # and has to go
        assert is_closed(guest)


def test_nobody_stays_silent_for_longer_than_he_may(hands):
    with Inn(proof_s=10.0) as inn:
        early, late = inn.connect()[0], None
        inn.turns(1)
        hands.advance(6.0)
        (late,) = inn.connect()
        inn.turns(1)
        assert inn.listener.due_s == pytest.approx(clock.monotonic() + 4.0)
        hands.advance(4.0)
        inn.turns(1)
        assert [is_closed(early), is_closed(late)] == [True, False]
        assert inn.listener.due_s == pytest.approx(clock.monotonic() + 6.0)


class NoDescriptors:
    """A socket that listens while the process has no descriptor left."""

    def __init__(self, inner):
        self.inner, self.tries = inner, 0

    def accept(self):
        self.tries += 1
        raise OSError(errno.EMFILE, "Too many open files")

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_without_a_descriptor_the_oldest_goes_and_then_there_is_a_pause_and_no_spinning(hands):
    with Inn() as inn:
        (guest,) = inn.connect()
        inn.turns(1)
        real = inn.listener._listening
        none = NoDescriptors(real)
        inn.connect()
        inn.listener._selector.unregister(real)
        inn.listener._listening = none
        inn.listener._selector.register(none, listener.selectors.EVENT_READ)
        inn.turns(1)
        assert is_closed(guest)
        inn.turns(5)
        assert none.tries == 2
        hands.advance(listener.PAUSE_S)
        inn.turns(2)
        assert none.tries == 3
        inn.listener._listening = real


def test_a_turn_that_waits_ends_when_it_is_woken():
    with Inn() as inn:
        turn = threading.Thread(target=inn.listener.turn, args=(None,))
        turn.start()
        inn.listener.wake()
        turn.join(PATIENCE_S)
        assert not turn.is_alive()


# ---- every listener of ours, with four processes that connect as fast as they can

HAMMER = """
import select, socket, sys
is_silent, held, ports, said = sys.argv[1] == "silent", [], [], 0
while True:
    if not ports or select.select([sys.stdin], [], [], 0)[0]:
        ports.append(int(sys.stdin.readline()))
    for port in list(ports):
        try:
            line = socket.create_connection(("127.0.0.1", port), timeout=1)
        except OSError:
            if port != ports[-1]:
                ports.remove(port)
            continue
        if is_silent:
            held = [*held[-200:], line]
        else:
            line.close()
    if said != ports[-1]:
        said = ports[-1]
        print(said, flush=True)
"""


class Strangers:
    """Four processes, two of which stay silent and two of which close at once."""

    def __init__(self):
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-S", "-c", HAMMER, kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for kind in ("silent", "short", "silent", "short")
        ]

    def hammer(self, port):
        """Connect there from now on; each has done so when this returns."""
        for process in self.processes:
            print(port, file=process.stdin)
        for process in self.processes:
            assert int(process.stdout.readline()) == port

    def close(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()


@pytest.fixture
def hammered(monkeypatch):
    """Every listener that is made is hammered before its first turn. Gives the listeners.

    On a busy machine strangers may leave the test less of the CPUs than its limits have in mind.
    """
    for module in (node_server, replica_server, copy_line):
        monkeypatch.setattr(module, "JOIN_S", PATIENCE_S)
    for module in (endpoint, copy_line):
        monkeypatch.setattr(module, "GREET_S", PATIENCE_S)
    other_users, accepted, listeners = Strangers(), [0], []
    make, turn, greet = Listener.__init__, Listener.turn, Listener._greet

    def make_it(self, *args, **more):
        make(self, *args, **more)
        listeners.append(self)
        other_users.hammer(self.port)

    def turn_it(self, *args):
        accepted.append(0)
        turn(self, *args)

    def greet_it(self, *args):
        accepted[-1] += 1
        greet(self, *args)

    monkeypatch.setattr(Listener, "__init__", make_it)
    monkeypatch.setattr(Listener, "turn", turn_it)
    monkeypatch.setattr(Listener, "_greet", greet_it)
    yield listeners
    other_users.close()
    assert listeners
    assert 0 < max(accepted) <= ACCEPTS_A_TURN * len(listeners)  # some run on threads beside others


async def nodes_of_a_round(folder):
    """The control processes of two nodes."""
    places = [TreePlace(node, 2, node, 1, 2, f"n{node}") for node in (0, 1)]
    servers = []
    for place in places:
        (folder / place.name).mkdir()
        servers.append(NodeServer(folder / place.name, place, secret="s", about="round"))
    port = await servers[0].start(HERE)
    await servers[1].start(HERE)
    await servers[1].join(HERE, port)
    assert [server.lost for server in servers] == ["", ""]
    for server in servers:
        server.close()
    await asyncio.sleep(0)  # the connections' ends


def test_hammered_control_processes_find_each_other(hammered, tmp_path):
    asyncio.run(asyncio.wait_for(nodes_of_a_round(tmp_path), PATIENCE_S))


async def lives(port, listeners):
    """A liveness channel of two nodes; the second one says that it is ready and is heard of."""
    mine, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
    own, guarded = socket.socketpair()
    places = [LivenessPlace(node, 2, HERE, port, PATIENCE_S) for node in (0, 1)]
    sides = [_First(places[0], "s", theirs[0], 1), _Other(places[1], "s", theirs[1], 1, guarded)]
    tasks = [asyncio.create_task(side.serve()) for side in sides]
    reader, _ = await asyncio.open_connection(sock=mine[0])
    mine[1].sendall(b'{"ready": 1, "name": "n1", "switch": ""}\n')
    assert b'"ready": 1' in await reader.readline()
    for task in tasks:
        task.cancel()
    loop = asyncio.get_running_loop()
    for transport in list(loop._transports.values()):
        transport.abort()
    loop.remove_reader(listeners[0].fileno())
    listeners[0].close()
    loop.remove_reader(guarded)
    for end in (mine[1], own, guarded):
        end.close()
    await asyncio.sleep(0)


def test_a_hammered_liveness_hears_the_other_node(hammered):
    asyncio.run(asyncio.wait_for(lives(free_port(), hammered), PATIENCE_S))


def test_hammered_replica_servers_of_copies_find_each_other_and_copy(hammered, tmp_path):
    # Closed where it fails, too: its threads would count as those of the next tests.
    with closing(ReplicaServers(tmp_path, nodes=2, ranks=1, to_peer=True)) as replica_servers:
        lines = ready(replica_servers)
        copy_by_all(lines, 10)
        covered_by_all(lines, 10)
    assert len(hammered) == 3  # the words, and the copies of each node


def test_a_hammered_meeting_of_a_preflight_takes_place(hammered):
    port = free_port()

    def come():
        with Peer(1, HERE, port, "key", PATIENCE_S) as peer:
            peer.agree("here", PATIENCE_S)

    other = threading.Thread(target=come)
    other.start()
    with Coordinator(2, port, "key", PATIENCE_S) as first:
        assert first.agree("first", dict, PATIENCE_S) == {0: "first", 1: "here"}
    other.join()


class Slurm:
    """Says that the job runs."""

    def facts(self):
        return JobFacts(JobState.RUNNING, restarts=0)


def test_a_hammered_relay_answers_the_agent(hammered, tmp_path):
    over = threading.Event()
    answering = threading.Thread(
        target=partial(serve, tmp_path / "port", "s", Slurm(), is_over=over.is_set)
    )
    answering.start()
    until((tmp_path / "port").exists, "it does not listen")
    facts = RelayedControl(tmp_path / "port", "s", timeout_s=PATIENCE_S).facts()
    over.set()
    answering.join()
    assert facts == JobFacts(JobState.RUNNING, restarts=0)


LISTENS = re.compile(r"create_server\(|create_unix_server\(|start_server\(|\.listen\(|\.accept\(\)")
OTHERS = {
    "hpctrain/core/base/process.py": "asks whether this machine's loopback connects, and closes it",
    "hpctrain/node/control/node_server.py": "a Unix socket in a folder of this user's alone",
    "hpctrain/node/memory/replica_server.py": "a Unix socket in a folder of this user's alone",
}


def test_no_other_module_accepts_connections_from_anybody():
    listening = {
        str(path.relative_to(TOP))
        for path in (TOP / "hpctrain").rglob("*.py")
        if LISTENS.search(path.read_text())
    }
    assert listening == {"hpctrain/core/base/listener.py", *OTHERS}

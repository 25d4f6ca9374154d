"""What children, parents and ranks may say: whatever it is, it ends in one clear line, or passes.

One node's server runs in the test's loop; the nodes and ranks around it are the test itself.
Its time jumps when all of it waits (`support.jumping_loop`); test_control_client.py has a real
one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.core.base import clock
from hpctrain.errors import ControlLost
from hpctrain.node.control import node_server
from hpctrain.node.control.board import FIRST_WISH, SOCKET, TICK, WAITS, Board
from hpctrain.node.control.collectives import CALL_KINDS, Call
from hpctrain.node.control.endpoint import Endpoint, meet_parent
from hpctrain.node.control.lease import Decision, Lease, Report, Wishes
from hpctrain.node.control.node_server import NodeServer, TreePlace
from hpctrain.node.control.wire import MOST_BYTES, Greeting, Splitter, framed, packed, unpacked
from tests.support.clocks import ManualClock
from tests.support.jumping_loop import run_jumping

HERE = "127.0.0.1"
MOST_S = 5 * node_server.PATIENCE_S
"""Of the loop's time, which jumps: nothing is waited for so long."""
SECRET, ABOUT = "s", "round 0"
FUZZED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
REPORT = Report(1, 4, 4, 0.0, 0.01, Wishes(stop=3), 1)


class Peer:
    """The test, as somebody at the other end of a connection."""

    def __init__(self, endpoint=None, reader=None, writer=None) -> None:
        self.endpoint, self.writer = endpoint, writer
        self.heard: asyncio.Queue[tuple[dict, bytes]] = asyncio.Queue()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if endpoint is not None:
            endpoint.on_message = lambda _, message: self.heard.put_nowait(unpacked(message))
            endpoint.on_end = lambda _, why: self.ended.set_result(why)
        else:
            self.task = asyncio.create_task(self._read(reader))

    async def _read(self, reader):
        splitter = Splitter()
        try:
            while piece := await reader.read(1 << 16):
                for message in splitter.feed(piece):
                    self.heard.put_nowait(unpacked(message))
        except ConnectionResetError:
            pass
        self.ended.set_result("closed")

    def say(self, head, body=b""):
        self.say_bytes(packed(head, body))

    def say_bytes(self, message):
        if self.endpoint is not None:
            self.endpoint.say(message)
        else:
            self.writer.write(framed(message))

    async def hear(self, kind):
        """The next message of a kind."""
        async with asyncio.timeout(MOST_S):
            while True:
                head, body = await self.heard.get()
                if head["is"] == kind:
                    return head, body

    async def end(self):
        async with asyncio.timeout(MOST_S):
            return await self.ended

    def close(self):
        if self.endpoint is not None:
            self.endpoint.close()
        else:
            self.writer.close()


class Node:
    """A server of ranks 0 and 1 (of node 0) or 2 and 3 (of node 1) among three nodes in a chain."""

    def __init__(self, folder, number: int = 0) -> None:
        self.folder = folder
        self.server = NodeServer(
            folder, TreePlace(number, 3, 2 * number, 2, 6, f"n{number}"), secret=SECRET, about=ABOUT
        )
        self.peers: list[Peer] = []

    async def child(self, number: int, *, here: bool = True) -> Peer:
        greeting = Greeting(SECRET, ABOUT)
        peer = Peer(await meet_parent(HERE, self.port, greeting, number))
        self.peers.append(peer)
        if here:
            peer.say({"is": "here", "name": f"n{number}"})
        return peer

    async def rank(self, number: int, channel: object = None) -> Peer:
        reader, writer = await asyncio.open_unix_connection(self.folder / SOCKET)
        peer = Peer(reader=reader, writer=writer)
        self.peers.append(peer)
        hello = {"rank": number} if channel is None else {"rank": number, "channel": channel}
        peer.say(hello)
        return peer

    async def parent(self) -> Peer:
        """The test as the node above, which this one joins."""
        met: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()

        def let_in(reader, writer, said, codes):
            writer.write(framed(said))
            met.set_result(_Sealed(reader, writer, codes))

        await self._join(let_in)
        peer = await met
        self.peers.append(peer)
        return peer

    async def join_one_that(self, behave) -> None:
        """Join a parent that has let this node in, and then does `behave(writer, proof)`."""
        await self._join(lambda _, writer, said, __: behave(writer, framed(said)))

    async def _join(self, let_in) -> None:
        async def greet(reader, writer):
            greeting, splitter = Greeting(SECRET, ABOUT), Splitter()
            writer.write(framed(greeting.challenge()))
            (answer,) = splitter.feed(await reader.read(1 << 16))
            _, said, codes = greeting.admit(answer)
            let_in(reader, writer, said, codes)

        parent = await asyncio.start_server(greet, HERE, 0)
        self.parents = [parent]
        await self.server.join(HERE, parent.sockets[0].getsockname()[1])


class _Sealed(Peer):
    """A parent: what it says and hears has codes."""

    def __init__(self, reader, writer, codes) -> None:
        self.codes = codes
        super().__init__(reader=reader, writer=writer)

    async def _read(self, reader):
        splitter = Splitter()
        try:
            while piece := await reader.read(1 << 16):
                for sealed in splitter.feed(piece):
                    self.heard.put_nowait(unpacked(self.codes.opened(sealed)))
        except ConnectionResetError:
            pass
        self.ended.set_result("closed")

    def say_bytes(self, message):
        self.writer.write(framed(self.codes.seal(message)))


@asynccontextmanager
async def node(folder, number=0):
    server = Node(folder, number)
    server.parents = []
    server.port = await server.server.start(HERE)
    try:
        yield server
    finally:
        for peer in server.peers:
            peer.close()
        server.server.close()
        for parent in server.parents:
            parent.close()
        await asyncio.sleep(0)  # the connections' ends


@pytest.fixture
def run(tmp_path, monkeypatch, caplog):
    """Runs `act(node)`; what asyncio would have printed as a traceback is a failure."""
    monkeypatch.setattr("hpctrain.node.control.collectives.FANOUT", 1)
    count = iter(range(1000))

    def within(act, number=0):
        folder = tmp_path / str(next(count))
        folder.mkdir()
        hands = ManualClock()

        async def live():
            async with asyncio.timeout(2 * MOST_S), node(folder, number) as server:
                server.hands = hands
                return await act(server)

        with caplog.at_level(logging.WARNING, "asyncio"):
            found = run_jumping(live(), hands)
        assert caplog.records == []
        return found

    return within


# ---- anything at all, from somebody who was let in

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, -(2**63) - 1, 10**400])
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["gather", "broadcast", "stop", "\ud800"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)
CALLS = st.tuples(st.just("0") | JSON, st.just(0) | JSON, st.sampled_from(CALL_KINDS) | JSON)
LEASES = st.tuples(
    st.integers(-1, 2**63),
    st.integers(-2, 2**63),
    st.lists(
        st.tuples(
            st.integers(-1, 5), st.sampled_from(["stop", "save"]) | JSON, st.just(1) | JSON
        ).map(list),
        max_size=3,
    ),
).map(list)
REPORTS = st.lists(st.integers(-1, 2**62) | st.floats(0, 1e9) | JSON, min_size=12, max_size=14)
HEADS = st.fixed_dictionaries(
    {"is": st.sampled_from(["here", "report", "values", "lost", "lease", "ask"]) | JSON},
    optional={
        "report": st.just(REPORT.to_plain()) | REPORTS | JSON,
        "lease": st.just(Lease(1, 2).to_plain()) | LEASES | JSON,
        "call": CALLS.map(list) | JSON,
        "why": JSON,
        "name": JSON,
        "urgent": JSON,
        "rank": JSON,
        "channel": JSON,
    },
)


@FUZZED
@given(st.lists(st.tuples(HEADS, st.binary(max_size=20)), max_size=4))
def test_a_child_may_say_what_it_likes(run, said):
    async def act(node):
        child = await node.child(1, here=False)
        for head, body in said:
            child.say(head, body)
        child.say({"is": "lost", "why": "the end"})
        rank = await node.rank(0)
        return (await rank.hear("lost"))[0]["why"]

    why = run(act)
    assert isinstance(why, str)
    assert why.count("\n") == 0


@FUZZED
@given(st.lists(st.tuples(HEADS, st.binary(max_size=20)), max_size=4))
def test_a_parent_may_say_what_it_likes(run, said):
    async def act(node):
        parent = await node.parent()
        rank = await node.rank(2)
        for head, body in said:
            parent.say(head, body)
        parent.say({"is": "lost", "why": "the end"})
        return (await rank.hear("lost"))[0]["why"]

    why = run(act, 1)
    assert isinstance(why, str)
    assert why.count("\n") == 0


@FUZZED
@given(HEADS, st.lists(st.tuples(HEADS, st.binary(max_size=20)), max_size=3), st.booleans())
def test_a_rank_may_say_what_it_likes(run, hello, said, is_known):
    """What a process on this node says as a rank harms nobody but itself."""

    async def act(node):
        strange = await node.rank(1, "0") if is_known else await node.rank(0)
        if not is_known:
            strange.say(hello)
        for head, body in said:
            strange.say(head, body)
        strange.writer.write_eof()
        await strange.end()
        rank = await node.rank(0)
        await rank.hear("welcome")
        return node.server.lost

    lost = run(act)
    assert lost == "" or " where another rank does a " in lost


@FUZZED
@given(HEADS)
def test_a_hello_may_be_anything(run, hello):
    async def act(node):
        strange = await node.rank(0, hello.get("channel"))
        strange.say(hello | {"rank": 0})
        strange.writer.write_eof()
        await strange.end()
        return node.server.lost

    run(act)


@given(st.lists(JSON, max_size=14) | REPORTS | JSON)
def test_other_things_are_no_report(plain):
    try:
        report = Report.of_plain(plain)
    except ValueError:
        return
    assert Report.of_plain(json.loads(json.dumps(report.to_plain()))) == report


@given(LEASES | st.lists(JSON, max_size=4) | JSON)
def test_other_things_are_no_lease(plain):
    try:
        lease = Lease.of_plain(plain)
    except ValueError:
        return
    assert Lease.of_plain(json.loads(json.dumps(lease.to_plain()))) == lease


@given(CALLS.map(list) | st.lists(JSON, max_size=4) | JSON)
def test_other_things_are_no_call(plain):
    try:
        call = Call.of_plain(plain)
    except ValueError:
        return
    assert Call.of_plain(json.loads(json.dumps(call))) == call


def test_the_largest_lease_that_can_be_said_has_room_on_a_board(tmp_path):
    plain = [2**62, 2**62, [[2**62, "profile", 2**62]] * 64]
    board = Board.create(tmp_path / "board", 0, 1)

    assert board.put_lease(Lease.of_plain(plain))
    assert board.newer_lease(0)[1].to_plain() == plain
    board.close()


# ---- failures

DEEP = b'{"is":"lost","why":' + b"[" * 500 + b"]" * 500 + b"}"


@pytest.mark.parametrize(
    "message",
    [
        struct.pack(">I", len(DEEP)) + DEEP,
        packed({"is": "lost", "why": ["no", "text"]}),
        packed({"is": "here", "name": {}}),
        packed({"is": "report", "report": [[]] * 14}),
        packed({"is": "values", "call": [[], 0, "gather"]}),
        packed({"is": "values", "call": ["0", 0, {}]}),
        packed({"is": [1]}),
        b"",
        b"\xff" * 9,
    ],
)
def test_what_nobody_of_ours_says_is_one_clear_failure(run, message):
    async def act(node):
        child = await node.child(1)
        child.say_bytes(message)
        rank = await node.rank(0)
        return (await rank.hear("lost"))[0]["why"]

    assert run(act).startswith("n0 has lost n1: ")


def test_a_rank_hears_of_a_failure_once_whatever_else_fails(run):
    async def act(node):
        rank, child = await node.rank(0), await node.child(1)
        await child.hear("lease")
        node.server.fail("first")
        child.close()
        node.server.fail("second")
        await rank.hear("lost")
        later = await node.rank(1)
        first = (await later.hear("lost"))[0]["why"]
        return first, [head for head, _ in rank.heard._queue]

    assert run(act) == ("first", [])


def test_a_child_that_came_in_and_says_no_more_is_given_up(run, monkeypatch):
    """Also one that stands still before it has said its name."""

    monkeypatch.setattr(node_server, "PATIENCE_S", 6.0)

    async def act(node):
        await node.child(1, here=False)
        rank = await node.rank(0)
        return (await rank.hear("lost"))[0]["why"]

    assert run(act) == "n0 has lost node 1: it was silent for 6 s"


def test_a_node_that_was_stopped_itself_calls_nobody_else_silent(run):
    """A laptop's lid, a debugger, SIGSTOP: the others could not be heard meanwhile."""

    async def act(node):
        child = await node.child(1)
        await child.hear("lease")
        node.hands.advance(3 * node_server.PATIENCE_S)
        # It looks again, and gives the sign of life that is long due.
        await child.hear("lease")
        return node.server.lost

    assert run(act) == ""


def test_a_node_below_gives_its_ranks_a_sign_of_life_only_with_the_roots(run):
    async def act(node):
        parent = await node.parent()
        board = node.server._board
        before = board.server_beat
        for _ in range(3):
            await parent.hear("report")  # it lives, and looks
        unheard = board.server_beat
        waits = await node.rank(2)
        board.words[board.at(0) + WAITS] = 1
        await waits.hear("welcome")
        parent.say({"is": "lease", "lease": Lease(5, 7).to_plain()})
        await waits.hear("lease")
        return unheard == before, board.server_beat == before

    assert run(act, 1) == (True, False)


def test_behind_a_failure_nothing_is_granted_any_more(run):
    async def act(node):
        child = await node.child(1)
        await child.hear("lease")
        node.server.fail("the end")
        await child.hear("lost")
        board = node.server._board
        before = board.newer_lease(0)
        child.say({"is": "report", "report": REPORT.to_plain(), "urgent": True})
        node.server._look()
        await asyncio.sleep(MOST_S)  # that nothing happens is the point
        return board.newer_lease(0) == before, child.heard.qsize()

    assert run(act) == (True, 0)


@pytest.mark.parametrize("how", ["half", "again"])
def test_bytes_that_bring_no_new_message_are_no_sign_of_life(run, monkeypatch, how):
    """A length that was changed on the way would have all that follows taken for one message."""

    monkeypatch.setattr(node_server, "PATIENCE_S", 6.0)

    async def act(node):
        child = await node.child(1)
        transport = child.endpoint._transport
        said = packed({"is": "report", "report": REPORT.to_plain()})
        sealed = framed(child.endpoint.codes.seal(said))
        piece = b"x" * 10
        if how == "half":
            transport.write((MOST_BYTES - 1).to_bytes(4, "big"))
        else:
            piece = sealed
        rank = await node.rank(0)
        while node.server.lost == "":
            transport.write(piece)
            await asyncio.sleep(1.0)
        return (await rank.hear("lost"))[0]["why"]

    assert run(act) == "n0 has lost n1: it was silent for 6 s"


def test_signs_of_life_among_nodes_do_not_wake_ranks(run):
    """A rank that is woken takes its node for one that hears the root."""

    async def act(node):
        await node.parent()
        below = await node.child(2)
        rank = await node.rank(2)
        await rank.hear("welcome")
        board = node.server._board
        board.words[board.at(0) + WAITS] = 1
        for _ in range(4):
            await below.hear("lease")
        return rank.heard.qsize()

    assert run(act, 1) == 0


def test_a_lease_from_above_wakes_the_ranks_that_wait_and_goes_down_once(run):
    async def act(node):
        parent, below = await node.parent(), await node.child(2)
        waits, runs = await node.rank(2), await node.rank(3)
        await waits.hear("welcome")
        await runs.hear("welcome")
        board = node.server._board
        board.words[board.at(0) + WAITS] = 1
        lease = Lease(5, 7, (Decision(7, "save", 1),))
        for _ in range(2):
            parent.say({"is": "lease", "lease": lease.to_plain()})
        parent.say({"is": "lease", "lease": Lease(4, 9).to_plain()})
        await waits.hear("lease")
        parent.say({"is": "lost", "why": "the end"})
        said = []
        while (head := (await below.heard.get())[0])["is"] != "lost":
            said.append(head["lease"])
        return [lease for lease in said if lease[0]], runs.heard.qsize(), board.newer_lease(0)[1]

    lease = Lease(5, 7, (Decision(7, "save", 1),))
    said, unwoken, written = run(act, 1)
    assert said == [lease.to_plain()]
    assert written == lease
    assert unwoken <= 1  # that the round has failed


def test_what_was_wished_before_the_parent_was_there_is_said_to_it(run):
    async def act(node):
        rank = await node.rank(2)
        await rank.hear("welcome")
        board = node.server._board
        board.words[board.at(0) + TICK] = 3
        board.words[board.at(0) + FIRST_WISH] = 4  # a stop
        rank.say({"is": "ask"})
        values = await node.rank(3, "0")
        values.say({"is": "values", "call": ["0", 0, "gather"]}, b"v")
        parent = await node.parent()
        return Report.of_plain((await parent.hear("report"))[0]["report"])

    report = run(act, 1)
    assert report.wishes.stop == 4
    assert report.arrived == 2


def test_a_failure_before_the_parent_was_there_is_said_to_it(run):
    async def act(node):
        node.server.fail("early")
        return (await (await node.parent()).hear("lost"))[0]["why"]

    assert run(act, 1) == "early"


@pytest.mark.parametrize("behind", ["the proof again", "too much"])
def test_a_parent_that_says_more_than_its_proof_is_none(run, behind):
    """Else this node would take a connection that has ended for its parent's, and wait."""

    async def act(node):
        def behave(writer, proof):
            writer.write(proof + (proof if behind == "the proof again" else b"\xff" * 4))
            node.peers.append(writer)

        with pytest.raises(ControlLost, match="is not the parent of node 1"):
            await node.join_one_that(behave)

    run(act, 1)


def test_a_parent_that_ends_right_behind_its_proof_is_a_failure(run):
    """Before or after this node has understood it."""

    async def act(node):
        def behave(writer, proof):
            writer.write(proof)
            writer.close()

        try:
            await node.join_one_that(behave)
        except ControlLost as error:
            return str(error)
        rank = await node.rank(2)
        return (await rank.hear("lost"))[0]["why"]

    assert "127.0.0.1" in run(act, 1)


def test_a_child_that_its_parent_refuses_does_not_connect_again(run):
    """It was let in before: that connection has failed, and with it the round."""

    async def act(node):
        parent = Node(node.folder.parent, 0)
        try:
            port = await parent.server.start(HERE)
            before = await meet_parent(HERE, port, Greeting(SECRET, ABOUT), 1)
            began_s = clock.monotonic()
            with pytest.raises(ControlLost, match="has let node 1 in before"):
                await node.server.join(HERE, port)
            before.close()
            return clock.monotonic() - began_s
        finally:
            parent.server.close()
            await asyncio.sleep(0)

    assert run(act, 1) == 0


def test_what_is_said_to_a_rank_that_has_left_is_not_kept(run):
    async def act(node):
        rank = await node.rank(2, "0")
        await rank.hear("welcome")
        parent = await node.parent()
        values = {"is": "values", "call": ["0", 0, "broadcast"]}
        parent.say(values, b"v")
        await rank.hear("values")
        rank.writer.write_eof()
        await rank.end()  # closed from the other side, which so knows that it has left
        callers = node.server._callers
        later = await node.rank(3, "1")
        parent.say(values, b"v")
        parent.say({"is": "values", "call": ["1", 0, "broadcast"]}, b"v")
        await later.hear("values")
        return [receiver for receiver, kept in callers._kept.items() if kept]

    # rank 3 may yet come to what rank 2 has left, and rank 2 to what rank 3 came to
    assert run(act, 1) == [(3, "0"), (2, "1")]


def test_a_rank_that_is_there_already_keeps_its_place(run):
    async def act(node):
        first, second = await node.rank(0), await node.rank(0)
        assert "already" in (await second.hear("refused"))[0]["why"]
        await second.end()
        node.server.fail("the end")
        return (await first.hear("lost"))[0]["why"]

    assert run(act) == "the end"


STRANGER = 4711
"""Neither root nor who runs the tests."""


@pytest.mark.parametrize(
    ("uid", "is_let_in"), [(os.getuid(), True), (0, True), (STRANGER, False), (-1, False)]
)
def test_a_rank_is_its_users_own_or_roots(run, monkeypatch, uid, is_let_in):
    """As the kernel says of who has connected: process, user, group; -1 is one it cannot name."""
    said = struct.pack("3i", os.getuid(), uid, os.getgid())
    monkeypatch.setattr(Endpoint, "option", lambda *_: said)

    async def act(node):
        strange = await node.rank(0)
        if is_let_in:
            await strange.hear("welcome")
        else:
            await strange.end()
        return strange.heard.qsize()

    assert run(act) == 0


def test_the_kernel_is_asked_who_connects(run):
    asked = []

    async def act(node):
        let_in = node.server._greet_rank

        def greet(peer, message):
            credentials = peer.option(socket.SO_PEERCRED, 12)
            asked.append(struct.unpack("3i", credentials))
            let_in(peer, message)

        node.server._greet_rank = greet
        await (await node.rank(0)).hear("welcome")

    run(act)
    assert asked == [(os.getpid(), os.getuid(), os.getgid())]

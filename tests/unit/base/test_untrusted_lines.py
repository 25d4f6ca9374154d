"""What strangers put into the agents' store or say to the nodes of a preflight, by the thousand."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from hpctrain.cluster.preflight.rendezvous import (
    COORDINATOR,
    PEER,
    Connection,
    Coordinator,
    Peer,
    UnauthenticatedPeer,
)
from hpctrain.core.base.secret import code, sign
from hpctrain.node.agent.rendezvous import SignedStore
from tests.support.fuzzing import VALUES, Faults, cases, chances, odd
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port

SECRET, KEYS = "the secret", [f"round/{n}/{key}" for n in (0, 1) for key in ("news/0", "report/1")]


class Store(dict):
    """torch's store, as far as it is read."""

    def check(self, keys):
        return all(key in self for key in keys)


def spoilt(text, chance):
    """Bytes near a good line: flipped, cut, doubled, spliced, or nothing like it."""
    line = bytearray(text)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(line) + 1)
        change = chance.randrange(6)
        if change == 0 and at < len(line):
            line[at] ^= 1 << chance.randrange(8)
        elif change == 1:
            del line[at:]
        elif change == 2:
            del line[:at]
        elif change == 3:
            line[at:at] = json.dumps(odd(chance)).encode()
        elif change == 4:
            line += line[at:]
        else:
            line[at:at] = chance.randbytes(chance.choice((1, 3, 70)))
    return bytes(line)


@cases(50, 2000)
def test_nothing_that_was_not_said_so_is_read_from_the_store(begin, end, capsys):
    faults = Faults()
    for number, chance in chances(begin, end):
        key, other = chance.sample(KEYS, 2)
        value, plain = odd(chance), json.dumps(odd(chance))
        good = sign(SECRET, key, json.dumps(value)).encode("utf-8", "surrogatepass")
        lines = [
            spoilt(good, chance),
            sign(SECRET, other, plain).encode(),
            sign("another", key, plain).encode(),
            good[:64] + plain.encode(),
            plain.encode(),
        ]
        for line in lines:
            store = SignedStore(Store({key: line}), SECRET)

            def read(store=store, line=line, key=key, good=good, number=number):
                assert line == good or store.get(key) is None, f"{number}: {line!r}"

            faults.of(f"{number}", read)
        assert json.dumps(SignedStore(Store({key: good}), SECRET).get(key)) == json.dumps(value)
    capsys.readouterr()

    assert faults.found == []


@cases(50, 2000)
def test_nothing_that_was_not_said_so_is_heard_on_a_connection(begin, end):
    faults = Faults(OSError)
    for number, chance in chances(begin, end):
        value = chance.choice(VALUES)
        left, right = socket.socketpair()
        speaker, hearer = Connection(left, "s", side=COORDINATOR), Connection(right, "s", side=PEER)
        left_out = chance.randrange(3)  # lines that never came
        for _ in range(left_out):
            speaker.send("left out")
            right.recv(1 << 16)
        speaker.send(value)
        good = right.recv(1 << 20)
        line = good if left_out else spoilt(good[:-1], chance) + b"\n"
        left.sendall(line)
        left.shutdown(socket.SHUT_WR)

        def hear(hearer=hearer, line=line, good=good, left_out=left_out, number=number):
            heard = hearer.hear(1.0)
            assert line.startswith(good), f"{number}: {heard!r}"
            assert not left_out, f"{number}: {heard!r}"

        faults.of(f"{number}", hear)
        speaker.close()
        hearer.close()

    assert faults.found == []


@cases(50, 2000)
def test_strangers_of_all_kinds_neither_come_in_nor_break_the_meeting(begin, end):
    port = free_port()
    host, faults = [], []

    def meet():
        try:
            with Coordinator(2, port, SECRET, PATIENCE_S, address="127.0.0.1") as one:
                host.append(one.agree("host", dict, PATIENCE_S))
        except Exception as error:  # noqa: BLE001 - every one is a fault
            faults.append(error)

    meeting = threading.Thread(target=meet)
    meeting.start()
    for _, chance in chances(begin, end):
        with connected(port) as one:
            their = json.loads(one.makefile("rb").readline())["challenge"]
            hello = {"rank": 1, "challenge": "mine", "proof": code("no", PEER, their, "mine", 1)}
            hello[chance.choice(list(hello))] = odd(chance)
            line = json.dumps(hello).encode() + b"\n"
            try:
                one.sendall(chance.choice((line, spoilt(line, chance), b"x" * 5000)))
                if chance.random() < 0.5:
                    one.shutdown(socket.SHUT_WR)
                    assert one.recv(100) == b""
            except OSError:  # sent away in the middle of a word
                continue
    with Peer(1, "127.0.0.1", port, SECRET, PATIENCE_S) as real:
        answer = real.agree("real", PATIENCE_S)
    meeting.join()

    assert (answer, host, faults) == (
        {"0": "host", "1": "real"},
        [{0: "host", 1: "real"}],
        [],
    )


def connected(port):
    """A connection, as soon as somebody listens."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        except ConnectionRefusedError:
            continue


@cases(50, 2000)
def test_who_answers_in_the_hosts_place_breaks_no_member(begin, end):
    faults = Faults(OSError)
    for number, chance in chances(begin, end):
        ours, theirs = socket.socketpair()
        words = [{"challenge": "c"}, {"proof": "0" * 64}, {"answer": odd(chance)}]
        words[chance.randrange(2)] = chance.choice((odd(chance), {"challenge": odd(chance)}))
        lines = b"\n".join(json.dumps(word).encode() for word in words) + b"\n"
        theirs.sendall(chance.choice((lines, spoilt(lines, chance)))[:100_000])
        theirs.shutdown(socket.SHUT_WR)
        member = Connection(ours)

        def begin_with(member=member, number=number):
            member.begin(SECRET, 1, 1.0)
            pytest.fail(f"{number}: a stranger was believed")

        faults.of(f"{number}", begin_with)
        member.close()
        theirs.close()

    assert faults.found == []
    assert issubclass(UnauthenticatedPeer, OSError)

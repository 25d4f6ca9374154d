"""What is sent between nodes comes whole, once, in order, and from who knows the secret alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.node.control.wire import Codes, Garbled, Greeting, Splitter, framed, packed, unpacked

KEY = b"k" * 32


def both(secret: str = "s", other: str = "s", about: str = "1", others: str = "1"):
    """The codes of both ends, greeted."""
    parent, child = Greeting(secret, about), Greeting(other, others)
    challenge = parent.challenge()
    said, awaited = child.answer(challenge, 7)
    node, told, codes = parent.admit(said)
    assert node == 7
    return codes, child.trusted(challenge, 7, told, awaited)


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 50))
def test_messages_come_back_whole_however_the_bytes_were_cut(messages, size):
    joined = b"".join(map(framed, messages))
    splitter = Splitter()
    pieces = [joined[at : at + size] for at in range(0, len(joined), size)]

    assert [found for piece in pieces for found in splitter.feed(piece)] == messages


def test_a_message_that_is_too_long_is_refused_before_it_has_come():
    with pytest.raises(Garbled, match="65 bytes where 64 are the most"):
        list(Splitter(64).feed(framed(bytes(65))[:4]))


@given(st.dictionaries(st.text(max_size=5), st.integers()), st.binary(max_size=50))
def test_a_head_and_a_body_come_back(head, body):
    assert unpacked(packed(head, body)) == (head, body)


@given(st.binary(max_size=60))
def test_other_bytes_are_no_message(garbage):
    try:
        head, _ = unpacked(garbage)
    except Garbled:
        return
    assert isinstance(head, dict)


@pytest.mark.parametrize("cut", [b"", b"\0\0", (3).to_bytes(4, "big") + b"{}"])
def test_a_message_that_is_shorter_than_it_says_is_none(cut):
    with pytest.raises(Garbled):
        unpacked(cut)


def test_a_deep_head_is_no_message():
    deep = b"[" * 100_000

    with pytest.raises(Garbled):
        unpacked(len(deep).to_bytes(4, "big") + deep)


def test_both_ends_that_know_the_secret_understand_each_other():
    parent, child = both()

    assert parent.opened(child.seal(b"up")) == b"up"
    assert child.opened(parent.seal(b"down")) == b"down"
    assert parent.opened(child.seal(b"")) == b""


@pytest.mark.parametrize("strange", [{"other": "t"}, {"others": "2"}])
def test_who_knows_another_secret_or_round_is_not_let_in(strange):
    with pytest.raises(Garbled, match="unauthenticated"):
        both(**strange)


def test_a_parent_that_does_not_know_the_secret_is_not_believed():
    parent, child = Greeting("other", "1"), Greeting("s", "1")
    challenge = parent.challenge()
    said, awaited = child.answer(challenge, 7)
    told = packed({"code": unpacked(said)[0]["code"]})  # all that it has heard

    with pytest.raises(Garbled, match="unauthenticated"):
        child.trusted(challenge, 7, told, awaited)


def test_a_refusal_is_the_parents_own_and_of_this_connection():
    parent, child = Greeting("s", "1"), Greeting("s", "1")
    challenge = parent.challenge()
    said, awaited = child.answer(challenge, 7)
    refusal = parent.refusal(said)

    assert child.is_refusal(challenge, 7, refusal)
    assert not child.is_refusal(challenge, 8, refusal)
    assert not child.is_refusal(challenge, 7, parent.admit(said)[1])
    assert not child.is_refusal(challenge, 7, Greeting("another", "1").refusal(said))
    assert not child.is_refusal(challenge, 7, Greeting("s", "1").refusal(said))
    with pytest.raises(Garbled, match="unauthenticated"):
        child.trusted(challenge, 7, refusal, awaited)


def test_an_answer_lets_nobody_in_twice_or_as_another_node():
    parent, child = Greeting("s", "1"), Greeting("s", "1")
    said, _ = child.answer(parent.challenge(), 7)
    head, _ = unpacked(said)

    with pytest.raises(Garbled, match="unauthenticated"):
        Greeting("s", "1").admit(said)  # said again on another connection
    with pytest.raises(Garbled, match="unauthenticated"):
        parent.admit(packed(head | {"node": 8}))
    with pytest.raises(Garbled, match="unauthenticated"):
        parent.admit(packed(head | {"node": True}))


@pytest.mark.parametrize("node", [True, [7], "7", None, 7.0])
def test_who_knows_the_secret_and_is_no_number_is_not_let_in(node):
    parent, child = Greeting("s", "1"), Greeting("s", "1")
    said, _ = child.answer(parent.challenge(), node)

    with pytest.raises(Garbled, match="unauthenticated"):
        parent.admit(said)


@pytest.mark.parametrize(
    "challenge", [b"", packed({}), packed({"nonce": 1}), packed({"nonce": ""})]
)
def test_a_challenge_without_a_nonce_is_none(challenge):
    with pytest.raises(Garbled):
        Greeting("s", "1").answer(challenge, 1)


def test_what_is_said_again_is_not_heard_again():
    parent, child = both()
    first, second = child.seal(b"1"), child.seal(b"2")

    assert [parent.opened(sealed) for sealed in (first, first, second, first)] == [
        b"1",
        None,
        b"2",
        None,
    ]


def test_a_gap_a_change_and_ones_own_words_are_refused():
    parent, child = both()
    first, second = child.seal(b"1"), child.seal(b"2")

    with pytest.raises(Garbled, match="message 2 came after message 0"):
        parent.opened(second)
    with pytest.raises(Garbled, match="without the code"):
        parent.opened(first[:-1] + b"x")
    with pytest.raises(Garbled, match="without the code"):
        parent.opened(parent.seal(b"down"))  # sent back to where it came from
    with pytest.raises(Garbled, match="without the code"):
        parent.opened(b"")
    assert parent.opened(first) == b"1"


def test_another_connections_messages_are_refused():
    one, other = both(), both()

    with pytest.raises(Garbled, match="without the code"):
        one[0].opened(other[1].seal(b"up"))


@given(st.binary(max_size=60))
def test_other_bytes_are_never_opened(garbage):
    with pytest.raises(Garbled):
        Codes(KEY, "parent").opened(garbage)

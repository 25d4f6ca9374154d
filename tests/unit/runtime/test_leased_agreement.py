"""Ranks agree by leases as by collectives: the same at the same tick, and each wish done once."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.base.records import StopCause
from hpctrain.errors import ControlLost
from hpctrain.node.control.board import Board
from hpctrain.node.control.client import RankLease
from hpctrain.node.control.lease import Decision, Lease
from hpctrain.train.runtime.agreement import (
    CODES,
    NOTHING,
    STOP_CLOCK,
    STOP_TERM,
    STOP_USER,
    WARNED,
    LeasedAgreement,
    StopRequest,
)
from tests.support.clocks import ManualClock, jumping
from tests.support.control import NodeOnCall

RANKS = 3
SAVE, TELL, PROFILE = StopRequest(save=True), StopRequest(tell=True), StopRequest(profile=1)
COPY = StopRequest(memory=True)


@pytest.fixture
def board(tmp_path):
    board = Board.create(tmp_path / "board", first_rank=0, ranks=RANKS)
    yield board
    board.close()


@pytest.fixture
def ranks(board):
    node = NodeOnCall(board)
    return [LeasedAgreement(RankLease(board, rank, node)) for rank in range(RANKS)]


def told(rank, requests):
    return [rank.tick(request) for request in requests]


def granted(board, *decisions):
    """One rank's agreement under a lease that holds these decisions."""
    board.put_lease(Lease(1, 100, decisions))
    return LeasedAgreement(RankLease(board, 0, SimpleNamespace(ask=lambda: None)))


@pytest.mark.parametrize("wish", [SAVE, TELL, PROFILE], ids=["save", "tell", "profile"])
def test_what_is_wished_until_it_is_done_is_done_once_on_every_rank(hands, ranks, wish):
    agreed: list[StopRequest] = []
    for _ in range(200):
        hands.advance(0.02)
        agreed.append(ranks[0].tick(wish if wish not in agreed else NOTHING))

    assert [told(rank, [NOTHING] * len(agreed)) for rank in ranks[1:]] == [agreed] * 2
    assert [request for request in agreed if request != NOTHING] == [wish]


def test_what_is_wished_again_is_done_again(ranks):
    rank = ranks[0]
    saved = [tick for tick in range(2000) if rank.tick(SAVE).save]

    assert len(saved) > 10
    assert saved == sorted(set(saved))


def test_each_wish_for_a_copy_in_memory_is_one_more(hands, board):
    """Also while the one ahead of it is agreed on and not made yet."""
    node = NodeOnCall(board)
    ranks = [LeasedAgreement(RankLease(board, rank, node)) for rank in range(RANKS)]
    agreed = []
    for _ in range(20):
        agreed.append(ranks[0].tick(COPY).memory)
        hands.advance(0.3)
        node.ask()  # it looks at the board in the middle of a step, too

    assert all(agreed[3:]), "but for the first ticks, when no step's time is known"
    assert [rank.tick(NOTHING).memory for rank in ranks[1:] for _ in agreed] == agreed * 2


def test_a_wish_of_another_kind_is_not_taken_for_one_that_waits(hands, ranks):
    told(ranks[0], [SAVE])
    agreed = told(ranks[0], [TELL, PROFILE, *[NOTHING] * 200])

    assert [sum(getattr(a, kind) for a in agreed) for kind in ("tell", "profile")] == [1, 1]


def test_ranks_stop_at_the_same_tick_for_the_greatest_reason(ranks):
    ranks[1].wish(STOP_USER)
    agreed = [rank.tick(StopRequest(STOP_TERM)) for rank in ranks]

    assert agreed == [StopRequest(STOP_USER)] * RANKS
    assert agreed[0].cause is StopCause.USER
    assert ranks[2].tick(SAVE) == agreed[0], "behind a stop there is only the stop"


@pytest.mark.parametrize("code", [0, WARNED])
def test_what_is_no_stop_is_not_wished_as_one(board, ranks, code):
    ranks[0].wish(code)

    assert board.wishes(0).stop == board.wishes(0).warned == 0
    assert ranks[0].tick(StopRequest(code)).cause is None


@pytest.mark.parametrize("code", [WARNED, len(CODES), 2**62])
def test_a_stop_of_a_code_that_nobody_knows_is_a_stop(board, code):
    rank = granted(board, Decision(0, "stop", code))

    assert rank.tick(NOTHING).cause is StopCause.TERM


@pytest.mark.parametrize("code", range(WARNED + 1, len(CODES)))
def test_a_stop_has_the_cause_that_was_wished(board, code):
    assert granted(board, Decision(0, "stop", code)).tick(NOTHING).cause is CODES[code]


def test_a_stop_counts_for_more_than_a_warning_of_the_same_tick(board):
    rank = granted(board, Decision(0, "stop", STOP_CLOCK), Decision(0, "warned", 7))

    assert rank.tick(NOTHING).stop == STOP_CLOCK


def test_a_warning_is_told_of_and_stops_nobody(ranks):
    agreed = told(ranks[2], [StopRequest(WARNED), *[NOTHING] * 200])
    others = told(ranks[0], [NOTHING] * len(agreed))

    assert [request for request in agreed if request != NOTHING] == [StopRequest(WARNED)]
    assert others == agreed


def test_a_warning_that_is_said_on_and_on_is_counted_once_until_it_is_told(hands, board, ranks):
    for _ in range(50):
        hands.advance(0.02)
        ranks[0].tick(NOTHING)
    said = 1
    while said < 200 and ranks[0].tick(StopRequest(WARNED)).stop != WARNED:
        said += 1
        hands.advance(0.02)

    assert 3 < said < 200
    assert board.wishes(0).warned == 1
    ranks[0].tick(StopRequest(WARNED))
    assert board.wishes(0).warned == 2


def test_a_warning_heard_by_one_is_told_of_also_behind_another_ranks(ranks):
    told(ranks[1], [StopRequest(WARNED), *[NOTHING] * 200])
    first = told(ranks[0], [StopRequest(WARNED), *[NOTHING] * 400])

    assert [request.stop for request in first].count(WARNED) == 2


def test_whoever_takes_over_goes_on_with_the_same_numbers(ranks, board):
    told(ranks[1], [SAVE, StopRequest(WARNED), *[NOTHING] * 200])
    told(ranks[0], [NOTHING] * 202)
    heirs = [LeasedAgreement(ranks[number]._lease) for number in (0, 1)]
    agreed = told(heirs[0], [SAVE, *[NOTHING] * 200])
    warned = told(heirs[1], [StopRequest(WARNED), *[NOTHING] * 400])

    assert [request.save for request in agreed].count(True) == 1
    assert [request.stop for request in warned].count(WARNED) == 1


def test_a_stop_that_another_thread_wishes_is_said_while_this_one_is_in_a_step(board, ranks):
    assert ranks[0].tick(NOTHING) == NOTHING
    heard = threading.Thread(target=ranks[0].wish, args=(STOP_TERM,))
    heard.start()
    heard.join()

    assert board.wishes(0).stop == STOP_TERM
    assert [ranks[0].tick(NOTHING).cause for _ in range(3)][-1] is StopCause.TERM


@pytest.mark.parametrize(("step_s", "ahead"), [(0.021, 25), (1.0, 2), (1e-6, 51)])
def test_a_wish_holds_no_later_than_said(hands, ranks, step_s, ahead):
    rank = ranks[0]
    for _ in range(200):
        rank.tick(NOTHING)
        hands.advance(step_s)
    ahead_said, ticks = rank.steps_ahead, 0
    while ticks < 100 and rank.tick(StopRequest(STOP_CLOCK)).cause is None:
        hands.advance(step_s)
        ticks += 1

    assert ticks <= ahead_said == ahead


def test_before_a_step_was_seen_no_more_than_one_is_ahead(ranks):
    assert ranks[0].steps_ahead == 1
    ranks[0].tick(NOTHING)
    assert ranks[0].steps_ahead == 1


def test_where_the_nodes_process_is_gone_a_wish_says_so(board):
    def gone():
        raise ControlLost("gone")

    rank = LeasedAgreement(RankLease(board, 0, SimpleNamespace(ask=gone)))
    with pytest.raises(ControlLost, match="gone"):
        rank.wish(STOP_TERM)
    with pytest.raises(ControlLost, match="gone"):
        rank.tick(SAVE)


class Caller:
    """A rank as `run.py` is one: it asks on until what it asks for is done.

    Attributes:
        raised: For each kind the ticks at which it began to ask.
        agreed: What came back, tick by tick.
    """

    def __init__(self, agreement: LeasedAgreement) -> None:
        self.agreement = agreement
        self.wanted = NOTHING
        self.raised: dict[str, list[int]] = {"save": [], "tell": [], "profile": [], "stop": []}
        self.agreed: list[StopRequest] = []

    @property
    def is_over(self) -> bool:
        return bool(self.agreed) and self.agreed[-1].cause is not None

    def want(self, kind: str, value: int) -> None:
        if getattr(self.wanted, kind) < value:
            self.wanted = replace(self.wanted, **{kind: value})
            self.raised[kind].append(len(self.agreed))

    def tick(self) -> None:
        agreed = self.agreement.tick(self.wanted)
        self.agreed.append(agreed)
        for kind in ("save", "tell", "profile"):
            if getattr(agreed, kind):
                self.wanted = replace(self.wanted, **{kind: 0})
        if agreed.stop >= WARNED:
            self.wanted = replace(self.wanted, stop=0)


MOVES = st.lists(
    st.tuples(
        st.integers(0, RANKS - 1),
        st.sampled_from(["", "", "", "save", "tell", "profile", "warn"]),
        st.sampled_from([1e-4, 0.02, 0.5]),
    ),
    max_size=150,
)


@given(MOVES, st.sampled_from([0, STOP_TERM, STOP_USER]))
@settings(max_examples=150, deadline=None)
def test_whatever_ranks_wish_all_do_the_same_and_each_wish_once(moves, stop):
    with tempfile.TemporaryDirectory() as folder, jumping() as hands:
        board = Board.create(Path(folder) / "board", first_rank=0, ranks=RANKS)
        node = NodeOnCall(board)
        callers = [Caller(LeasedAgreement(RankLease(board, n, node))) for n in range(RANKS)]
        for number, kind, step_s in moves:
            hands.advance(step_s)
            if kind == "warn":
                callers[number].want("stop", WARNED)
            elif kind:
                callers[number].want(kind, 1)
            callers[number].tick()
        _let_all_be_done(callers, hands, stop)
        board.close()

    first = callers[0].agreed
    assert all(caller.agreed == first for caller in callers)
    assert not any(caller.wanted.save or caller.wanted.tell for caller in callers)
    for kind in ("save", "tell", "profile"):
        _assert_each_once([caller.raised[kind] for caller in callers], first, kind)
    told = [tick for tick, agreed in enumerate(first) if agreed.stop == WARNED]
    warned = [tick for caller in callers for tick in caller.raised["stop"]]
    assert len(told) <= len(warned)
    assert all(any(tick >= raised for tick in told) for raised in warned)
    assert first[-1].cause is CODES[stop]


def _let_all_be_done(callers: list[Caller], hands: ManualClock, stop: int) -> None:
    """All come to the same tick, with nothing left to be done; then they stop, if they are to."""
    for caller in callers:
        while len(caller.agreed) < 600:
            hands.advance(0.02)
            caller.tick()
    if stop:
        callers[-1].agreement.wish(stop)
    for caller in callers:
        for _ in range(60):
            hands.advance(0.02)
            if not caller.is_over:
                caller.tick()


def _assert_each_once(raised: list[list[int]], agreed: list[StopRequest], kind: str) -> None:
    """Between two times that something was done, and before the first, somebody began to ask."""
    done = [tick for tick, request in enumerate(agreed) if getattr(request, kind)]
    asked = sorted(tick for ticks in raised for tick in ticks)
    after = [-1, *done]
    for last, tick in zip(after, done, strict=False):
        assert any(last < begun <= tick for begun in asked), f"{kind} of {tick} was done twice"
    assert all(begun <= done[-1] for begun in asked) if asked else not done

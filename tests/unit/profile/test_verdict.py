"""What training is bound by, and who is waited for."""

from __future__ import annotations

import pytest

from hpctrain.observe.profile.trace import Kind, RankShares
from hpctrain.observe.profile.verdict import (
    advice_on,
    bound_of,
    judge,
)


def rank(number, **shares):
    given = {Kind(name): share for name, share in shares.items()}
    whole = {kind: given.get(kind, 0.0) for kind in Kind}
    whole[Kind.HOST] += 1 - sum(whole.values())
    return RankShares(number, "gpu", {1: 1.0}, 1.0, whole, 0.0)


@pytest.mark.parametrize(
    ("shares", "bound"),
    [
        ({"compute": 0.8}, Kind.COMPUTE),
        ({"communication": 0.55, "compute": 0.4}, Kind.COMMUNICATION),
        ({"data": 0.6}, Kind.DATA),
        ({"memory": 0.51, "compute": 0.49}, Kind.MEMORY),
        ({"compute": 0.2, "data": 0.2}, Kind.HOST),
        ({"compute": 0.35, "communication": 0.3, "data": 0.2}, None),
        ({"compute": 0.4, "communication": 0.2, "data": 0.2}, Kind.COMPUTE),
        # A save of a second in a profile of two says nothing of the steps.
        ({"save": 0.6, "data": 0.3}, Kind.DATA),
        ({"save": 1.0}, None),
    ],
)
def test_a_rank_is_bound_by_what_clearly_takes_most(shares, bound):
    assert bound_of(rank(0, **shares).shares) is bound


def test_ranks_alike_are_judged_by_their_mean():
    verdict = judge([rank(0, communication=0.6), rank(7, communication=0.55)])
    assert (verdict.waited_for, verdict.bound) == (None, Kind.COMMUNICATION)
    assert verdict.shares[Kind.COMMUNICATION] == pytest.approx(0.575)


def test_the_rank_that_the_others_wait_for_decides():
    verdict = judge(
        [rank(0, compute=0.3, communication=0.65), rank(5, compute=0.3, data=0.6)],
    )

    assert (verdict.waited_for, verdict.bound) == (5, Kind.DATA)
    assert verdict.bounds == {0: Kind.COMMUNICATION, 5: Kind.DATA}
    assert verdict.waiting == pytest.approx(0.65)


def test_a_rank_that_merely_computes_longer_is_asked_why():
    late = judge([rank(0, compute=0.3, communication=0.65), rank(5, compute=0.9)])
    alike = judge([rank(0, compute=0.9), rank(5, compute=0.9)])

    assert advice_on(late) == "why is rank 5 slower than the others: more work, or a slower node?"
    assert "the device is busy" in advice_on(alike)
    assert advice_on(judge([rank(0, compute=0.4, data=0.4)])) is None

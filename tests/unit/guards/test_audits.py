"""Who is wrong, where gradients of the same microbatch differ."""

from __future__ import annotations

import pytest

from hpctrain.guards.audits import (
    AuditVerdict,
    Dispute,
    GradientDigests,
    disputes,
    judged,
    right_of,
)

WRONG = "wrong"


def answers(ranks, *, own=(), right=()):
    """What ranks say; these ones are wrong about their own microbatch, or about their neighbour's.

    Each says something else that is wrong.
    """
    return [
        GradientDigests(
            f"{WRONG} {rank}" if rank in own else f"of {rank}",
            f"{WRONG} {rank}" if rank in right else f"of {right_of(rank, ranks)}",
        )
        for rank in range(ranks)
    ]


def verdicts(given, *, liars=()):
    """The verdicts where third ranks are right, but for liars."""
    disputed = disputes(given)
    opinions = {
        each: f"lie {each.third}" if each.third in liars else f"of {each.owner}"
        for each in disputed
        if each.third is not None
    }
    return judged(given, disputed, opinions)


def test_where_all_agree_nobody_is_asked():
    assert disputes(answers(4)) == []
    assert judged(answers(4), [], {}) == []


@pytest.mark.parametrize("ranks", [3, 4, 5, 8])
def test_a_rank_that_is_wrong_in_both_is_named_from_both_sides(ranks):
    for bad in range(ranks):
        given = answers(ranks, own={bad}, right={bad})
        assert len(disputes(given)) == 2
        assert verdicts(given) == [AuditVerdict((bad,), is_certain=True)]


@pytest.mark.parametrize("ranks", [3, 4, 7])
def test_a_rank_that_is_wrong_once_is_named_too(ranks):
    for bad in range(ranks):
        for given in (answers(ranks, own={bad}), answers(ranks, right={bad})):
            (each,) = disputes(given)
            assert bad in {each.owner, each.auditor}
            assert verdicts(given) == [AuditVerdict((bad,), is_certain=True)]


def test_of_two_ranks_nobody_knows_who_it_is():
    given = answers(2, own={1}, right={1})
    assert [each.third for each in disputes(given)] == [None, None]
    assert verdicts(given) == [AuditVerdict((0, 1), is_certain=False)]


def test_a_third_rank_is_one_that_is_in_no_dispute_where_there_is_one():
    assert disputes(answers(4, own={2}, right={2})) == [Dispute(2, 1, 0), Dispute(3, 2, 0)]
    assert disputes(answers(4, own={0}, right={0})) == [Dispute(1, 0, 2), Dispute(0, 3, 2)]
    assert disputes(answers(3, own={0})) == [Dispute(0, 2, 1)]


def test_a_third_rank_with_an_opinion_of_its_own_settles_nothing():
    given = answers(4, own={2})
    assert verdicts(given, liars={0}) == [AuditVerdict((1, 2), is_certain=False)]


def test_what_is_certain_explains_the_doubt_beside_it():
    given = answers(4, own={2}, right={2})
    disputed = disputes(given)
    opinions = {disputed[0]: "of 2", disputed[1]: "a third word"}
    assert judged(given, disputed, opinions) == [AuditVerdict((2,), is_certain=True)]


def test_two_wrong_ranks_are_both_named():
    given = answers(8, own={2, 6}, right={2, 6})
    assert verdicts(given) == [AuditVerdict((2, 6), is_certain=True)]

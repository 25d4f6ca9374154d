"""A suspicion becomes a hang when nothing has moved since; whoever shows life is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.node.hangs.evidence import Collective, Frame, Front, RankEvidence, Recorded
from hpctrain.node.hangs.standing import Stand
from hpctrain.node.hangs.verdict import DOUBTFUL, IO_BYTES, JobLook, Suspicion, Used

LIMIT_S = 60.0
ALL = {"0": (0, 1, 2)}
WAITS = (Frame("/lib/site-packages/torch/d.py", 5, "all_reduce"), Frame("/train.py", 9, "main"))
FETCHES = (Frame("/train.py", 23, "fetch_rows"),)


def rank(number, called, completed, frames):
    numbers = range(1, called + 1)
    calls = tuple(Collective("0", n, "all_reduce", ((4,),), ("Float",)) for n in numbers)
    recorded = Recorded({"0": Front(called, completed)}, calls)
    return RankEvidence(number, "n0", "S", recorded, ALL, frames, 12, "step")


BEHIND = (rank(0, 3, 2, WAITS), rank(1, 2, 2, FETCHES), rank(2, 3, 2, WAITS))


def look(at_s, evidence=BEHIND, *, stood_s=None, used=None, silent=()):
    stood_s = LIMIT_S + at_s if stood_s is None else stood_s
    stands = [Stand(one.rank, one.step, one.phase, stood_s, LIMIT_S) for one in evidence]
    return JobLook(at_s, stands, evidence, used or {}, silent)


def heard(looks):
    suspicion = Suspicion()
    return suspicion, [suspicion.hear(one) for one in looks]


def test_what_stands_on_is_a_hang_after_as_long_again():
    suspicion, found = heard([look(0), look(15), look(59.9), look(60), look(75)])
    assert found == ["suspected", "waiting", "waiting", "hang", "waiting"]
    assert (suspicion.verdict.kind, suspicion.verdict.ranks) == ("behind", (1,))
    assert suspicion.limit_s == LIMIT_S


def test_ranks_that_hang_a_second_time_are_said_to_hang_again():
    looks = [look(0), look(60), look(70, stood_s=1.0), look(200), look(260)]
    assert heard(looks)[1] == ["suspected", "hang", "cleared", "suspected", "hang"]


def test_one_that_has_called_something_else_may_compute_while_it_waits_for_that():
    other = tuple(Collective("0", n, "barrier", (), ()) for n in (1, 2, 3))
    bad = replace(rank(1, 3, 2, WAITS), recorded=Recorded({"0": Front(3, 2)}, other))
    evidence = (BEHIND[0], bad, BEHIND[2])
    looks = [look(at, evidence, used={1: Used(at * 0.9, 0)}) for at in (0, 30, 60)]
    suspicion, found = heard(looks)
    assert (suspicion.verdict.kind, found[-1]) == ("mismatch", "hang")


def test_it_says_when_to_look_again():
    suspicion = Suspicion()
    assert suspicion.look_again_s == float("inf")
    suspicion.hear(look(0))
    assert suspicion.look_again_s == 15
    suspicion.hear(look(58))
    assert suspicion.look_again_s == 60


def test_ranks_that_go_on_are_cleared_and_may_be_suspected_again():
    suspicion, found = heard([look(0), look(20, stood_s=1.0), look(30, stood_s=2.0), look(99)])
    assert found == ["suspected", "cleared", "calm", "suspected"]
    assert suspicion.stood_s == LIMIT_S + 99


def test_one_that_stands_alone_is_looked_at_again():
    suspicion = Suspicion()
    stands = [Stand(0, 5, "data", 70, LIMIT_S), Stand(1, 5, "step", 3, LIMIT_S)]
    assert suspicion.hear(JobLook(0, stands, BEHIND[:2])) == "calm"
    assert suspicion.look_again_s == LIMIT_S / 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (BEHIND, (BEHIND[0], replace(BEHIND[1], frames=WAITS), BEHIND[2])),
        (BEHIND, (BEHIND[0], BEHIND[1], rank(2, 4, 3, WAITS))),
    ],
    ids=["another line", "another collective"],
)
def test_whoever_is_waited_for_and_moves_lives(first, second):
    _, found = heard([look(0, first), look(59, second), look(60, second), look(118, second)])
    assert found == ["suspected", "waiting", "waiting", "waiting"]


def test_one_that_waits_may_move_its_stack_as_it_likes():
    other = (BEHIND[0], BEHIND[1], replace(BEHIND[2], frames=FETCHES))
    assert heard([look(0), look(30, other), look(60)])[1][-1] == "hang"


@pytest.mark.parametrize(("read", "last"), [(IO_BYTES + 1, "waiting"), (IO_BYTES, "hang")])
def test_whoever_is_waited_for_and_reads_or_writes_lives(read, last):
    used = [{1: Used(0.0, 0)}, {1: Used(0.0, 0)}, {1: Used(0.0, read)}]
    looks = [look(at, used=one) for at, one in zip((0, 30, 60), used, strict=True)]
    assert heard(looks)[1][-1] == last


def test_whoever_is_waited_for_and_computes_has_ten_times_as_long():
    looks = [look(at, used={1: Used(at * 0.9, 0), 0: Used(0.0, 0)}) for at in range(0, 605, 15)]
    found = heard(looks)[1]
    assert found.index("hang") == DOUBTFUL * LIMIT_S / 15


def test_one_that_has_computed_and_sleeps_now_is_not_taken_for_stuck_at_once():
    looks = [look(at, used={1: Used(min(at, 15) * 0.05, 0)}) for at in (0, 15, 30, 45, 60, 75)]
    assert "hang" not in heard(looks)[1]


def test_one_that_waits_may_compute_while_it_waits():
    looks = [look(at, used={0: Used(at * 0.9, 0), 1: Used(0.0, 0)}) for at in (0, 30, 60)]
    assert heard(looks)[1][-1] == "hang"


def test_what_is_not_certain_has_ten_times_as_long():
    alone = (replace(BEHIND[1], recorded=None, groups={}),)
    suspicion, found = heard([look(at, alone) for at in range(0, 605, 60)])
    assert (suspicion.verdict.kind, suspicion.verdict.ranks) == ("unknown", (1,))
    assert "the only rank stands at step 12" in suspicion.verdict.summary
    assert "(at train.py:23)" in suspicion.verdict.summary
    assert found.index("hang") == DOUBTFUL


def test_without_collectives_the_one_that_others_have_left_behind_is_named():
    evidence = [replace(one, recorded=None, groups={}) for one in BEHIND]
    stands = [Stand(0, 40, "step", 1, LIMIT_S), Stand(1, 12, "data", 70, LIMIT_S)]
    suspicion = Suspicion()
    assert suspicion.hear(JobLook(0, stands, evidence)) == "suspected"
    assert suspicion.verdict.ranks == (1,)
    assert suspicion.verdict.summary == (
        "rank 1 stands at step 12, in data, for 1m10s (at train.py:23), while others are at step 40"
    )


def test_nodes_that_do_not_answer_are_waited_for():
    evidence = (BEHIND[0], BEHIND[2])
    suspicion, found = heard([look(at, evidence, silent=[1]) for at in (0, 300, 600)])
    assert suspicion.verdict.ranks == (1,)
    assert "which says nothing" in suspicion.verdict.summary
    assert found == ["suspected", "waiting", "hang"]

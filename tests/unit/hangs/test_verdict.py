"""The rank that holds up the others is named, with what they wait in and the line where it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.node.hangs.evidence import Collective, Frame, Front, RankEvidence, Recorded
from hpctrain.node.hangs.verdict import own_frame, ranks_in_words, verdict

LIBRARY = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
IN_TORCH = (Frame(LIBRARY, 3252, "all_reduce"), Frame("/home/u/train.py", 40, "main"))
IN_DATA = (Frame("/home/u/train.py", 23, "fetch_rows"), Frame("/home/u/train.py", 40, "main"))
WORLD = {"0": (0, 1, 2, 3)}


def call(number, name="all_reduce", size=8, group="0", dtype="Float"):
    return Collective(group, number, name, ((size,),), (dtype,))


def rank(number, called, completed, *, last=None, groups=WORLD, **fields):
    """A rank that has called and completed so many of group 0."""
    calls = tuple(last or [call(called)])
    recorded = Recorded({"0": Front(called, completed)}, calls)
    fields = {"recorded": recorded, "groups": groups, "frames": IN_TORCH} | fields
    return RankEvidence(number, f"n{number // 2}", fields.pop("process", "S"), **fields)


def behind(number, **fields):
    return rank(number, 17, 17, **({"frames": IN_DATA, "step": 12, "phase": "data"} | fields))


def waiting(*numbers):
    return [rank(number, 18, 17) for number in numbers]


def test_the_rank_that_has_not_come_is_named_with_its_line():
    ruling = verdict([*waiting(0, 1, 3), behind(2)])

    assert (ruling.kind, ruling.ranks, ruling.is_certain) == ("behind", (2,), True)
    assert ruling.summary == (
        "3 ranks wait for rank 2, which has not come to all_reduce number 18 [8] of ranks 0 to 3; "
        "it is at train.py:23 fetch_rows (step 12, in data)"
    )
    assert ruling.details == (
        "ranks 0, 1 and 3: at train.py:40 main",
        "rank 2: at train.py:23 fetch_rows (step 12, in data)",
    )


def test_several_that_have_not_come_are_all_named():
    ruling = verdict([*waiting(0, 3), behind(1), behind(2)])

    assert ruling.ranks == (1, 2)
    assert ruling.summary.startswith("ranks 1 and 2 hold up the others: 2 ranks wait for rank 1,")
    assert ruling.details[0].startswith("2 ranks wait for rank 2, which has not come to")


def test_a_rank_that_is_not_heard_is_suspected_and_not_more():
    ruling = verdict([*waiting(0, 1, 3), behind(2, recorded=None)])

    assert (ruling.kind, ruling.ranks, ruling.is_certain) == ("behind", (2,), False)
    assert "for rank 2, which says nothing, in all_reduce number 18 [8]" in ruling.summary
    assert verdict(waiting(0, 1, 3)).ranks == (2,)  # was not looked at at all


@pytest.mark.parametrize(
    ("state", "words", "is_certain"),
    [
        ("T", "rank 2 is stopped (by a signal)", True),
        ("t", "rank 2 is stopped (by a debugger)", True),
        ("Z", "rank 2 is dead", True),
        ("", "rank 2 is gone", True),
        ("D", "rank 2 is waiting for a disk or a file server", False),
    ],
)
def test_a_process_that_does_not_run_is_the_cause(state, words, is_certain):
    ruling = verdict([*waiting(0, 1, 3), behind(2, process=state)])

    assert (ruling.kind, ruling.ranks) == ("stopped", (2,))
    assert (ruling.summary, ruling.is_certain) == (words, is_certain)


def test_a_program_that_has_returned_is_not_said_to_be_dead():
    ruling = verdict([*waiting(0, 1, 3), behind(2, process="", recorded=None, has_returned=True)])

    assert (ruling.kind, ruling.ranks, ruling.is_certain) == ("returned", (2,), True)
    assert ruling.summary == (
        "3 ranks wait for rank 2, whose program has returned, in all_reduce number 18 [8] of "
        "ranks 0 to 3"
    )


def test_another_collective_at_the_same_number_is_a_mismatch_and_the_few_are_named():
    odd = rank(2, 18, 17, last=[call(18, "barrier", 1)], frames=IN_DATA)
    ruling = verdict([*waiting(0, 1, 3), odd])

    assert (ruling.kind, ruling.ranks, ruling.is_certain) == ("mismatch", (2,), True)
    assert ruling.summary == (
        "the ranks do not call the same: rank 2 calls barrier number 18 [1] of ranks 0 to 3 at "
        "train.py:23 fetch_rows; ranks 0, 1 and 3 call all_reduce number 18 [8] of ranks 0 to 3"
    )


@pytest.mark.parametrize("other", [{"size": 9}, {"dtype": "Double"}])
def test_another_size_or_type_of_one_collective_is_a_mismatch(other):
    odd = rank(2, 18, 17, last=[call(18, **other)])

    assert verdict([*waiting(0, 1, 3), odd]).kind == "mismatch"


def test_what_each_rank_may_bring_in_its_own_size_is_none():
    ranks = [rank(number, 18, 18, last=[call(18, "gather", number)]) for number in range(4)]

    assert verdict(ranks).kind == "unknown"


def test_of_two_halves_nobody_is_called_wrong():
    ranks = [rank(n, 18, 17, last=[call(18, size=8 + n % 2)]) for n in range(4)]
    ruling = verdict(ranks)

    assert (ruling.kind, ruling.ranks, ruling.is_certain) == ("mismatch", (), False)


def test_the_first_mismatch_is_the_cause_of_the_later_ones():
    early = rank(2, 18, 17, last=[call(16, "barrier"), call(18, "barrier")])
    others = [rank(n, 18, 17, last=[call(16), call(18)]) for n in (0, 1, 3)]

    assert "barrier number 16" in verdict([*others, early]).summary


def test_ranks_that_wait_for_each_other_in_a_circle():
    """Rank 0 waits for rank 1 in a group of both, and rank 1 for rank 0 in that of all."""
    pair = {"0": (0, 1, 2, 3), "1": (0, 1)}
    first = RankEvidence(
        0,
        "n",
        "S",
        Recorded({"0": Front(17, 17), "1": Front(1, 0)}, (call(1, group="1"),)),
        pair,
        IN_TORCH,
    )
    second = rank(1, 18, 17, groups=pair)
    ruling = verdict([first, second, *waiting(2, 3)])

    assert (ruling.kind, ruling.ranks) == ("deadlock", (0, 1))
    assert ruling.summary == (
        "deadlock: rank 0 waits for rank 1 in all_reduce number 1 [8] of ranks 0 and 1 at "
        "train.py:40 main; rank 1 waits for rank 0 in all_reduce number 18 [8] of ranks 0 to 3 at "
        "train.py:40 main"
    )


def test_a_collective_in_the_background_does_not_excuse_who_is_in_the_program():
    pair = {"0": (0, 1, 2, 3), "1": (0, 1)}
    busy = RankEvidence(
        0,
        "n",
        "S",
        Recorded({"0": Front(17, 17), "1": Front(1, 0)}, (call(1, group="1"),)),
        pair,
        IN_DATA,
    )
    ruling = verdict([busy, rank(1, 18, 17, groups=pair), *waiting(2, 3)])

    assert (ruling.kind, ruling.ranks) == ("behind", (0,))


def test_where_all_have_called_the_same_it_is_nobodys_program():
    ruling = verdict(waiting(0, 1, 2, 3))

    assert (ruling.kind, ruling.ranks, ruling.is_certain) == ("network", (), False)
    assert ruling.summary == (
        "all have called all_reduce number 18 [8] of ranks 0 to 3, and it does not end: the "
        "network, or the library"
    )


def test_groups_of_the_same_ranks_are_told_apart_whatever_they_are_called():
    """Ranks that are in other groups besides number theirs differently."""
    mine = {"0": (0, 1), "1": (0, 1)}
    theirs = {"0": (0, 1), "7": (0, 1)}
    first = RankEvidence(
        0, "n", "S", Recorded({"1": Front(3, 2)}, (call(3, group="1"),)), mine, IN_TORCH
    )
    second = RankEvidence(1, "n", "S", Recorded({"7": Front(2, 2)}, ()), theirs, IN_DATA)
    ruling = verdict([first, second])

    assert ruling.ranks == (1,)
    assert "all_reduce number 3 [8] of ranks 0 and 1 (their group 2)" in ruling.summary


def test_nobody_waits():
    assert verdict([rank(n, 18, 18) for n in range(4)]).kind == "unknown"
    assert verdict([]).kind == "unknown"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0 and 1"),
        ([5, 0, 1], "ranks 0, 1 and 5"),
        (range(8), "ranks 0 to 7"),
        (range(0, 2048, 2), "1,024 ranks (0, 2, 4, ...)"),
    ],
)
def test_ranks_in_words(ranks, words):
    assert ranks_in_words(list(ranks)) == words


def test_the_line_that_is_named_is_the_programs_own():
    standard = Frame("/usr/lib/python3.11/threading.py", 5, "wait")
    ours = Frame("/home/u/hpctrain/runtime/run.py", 5, "step")

    assert own_frame([Frame(LIBRARY, 1, "f"), standard, ours, *IN_DATA]) == IN_DATA[0]
    assert own_frame([standard]) == standard
    recipe = Frame("/env/lib/python3.11/site-packages/hpctrain/recipes/lm/train.py", 9, "main")
    assert own_frame([standard, ours, recipe, ours]) == recipe  # the program is ours then
    assert own_frame([standard, recipe, *IN_DATA]) == IN_DATA[0]
    of_another = Frame("/env/lib/python3.11/site-packages/recipes/x.py", 9, "main")
    assert own_frame([standard, of_another]) == standard
    assert own_frame([]) is None
    assert own_frame(None) is None


fronts = st.builds(Front, st.integers(0, 4), st.integers(0, 4))


@given(st.lists(st.tuples(fronts, fronts, st.booleans()), min_size=1, max_size=4), st.data())
def test_whatever_was_found_there_is_a_verdict(at, data):
    """No look may end in a traceback, nor blame a rank that is none of the job's."""
    groups = {"0": tuple(range(4)), "1": (0, 2)}
    looked_at = [
        RankEvidence(
            number,
            "n",
            data.draw(st.sampled_from("SRDTZ")) if data.draw(st.integers(0, 9)) == 0 else "S",
            Recorded({"0": world, "1": pair}, (call(world.called), call(pair.called, group="1"))),
            groups,
            IN_DATA if in_data else IN_TORCH,
        )
        for number, (world, pair, in_data) in enumerate(at)
    ]
    ruling = verdict(looked_at)

    assert set(ruling.ranks) <= set(range(4))
    assert ruling.summary


def test_many_are_said_in_few_words_and_in_order():
    """What was found in any order is told in that of the ranks."""
    world = {"0": tuple(reversed(range(8)))}
    standing = [rank(n, 18, 17, groups=world) for n in (7, 0, 1, 2, 4)]
    late = [behind(n, groups=world) for n in (5, 3, 6)]
    ruling = verdict([*standing, *late])

    assert ruling.ranks == (3, 5, 6)
    assert ruling.summary.startswith(
        "ranks 3, 5 and 6 hold up the others: 5 ranks wait for rank 3, which has not come to "
        "all_reduce number 18 [8] of all 8 ranks"
    )
    six = {"0": tuple(range(6))}
    of_six = [rank(n, 18, 17, groups=six) for n in range(5)] + [behind(5, groups=six)]
    assert "of ranks 0 to 5" in verdict(of_six).summary


def test_a_group_is_the_same_in_whatever_order_its_ranks_are_told():
    other_way = {"0": (3, 2, 1, 0)}
    ruling = verdict([*waiting(0, 1), rank(3, 18, 17, groups=other_way), behind(2)])

    assert ruling.summary.startswith("3 ranks wait for rank 2")


def test_several_that_do_not_run_are_named_with_all_that_is_wrong():
    ruling = verdict([behind(3, process="T"), *waiting(0), behind(1, process="D")])

    assert ruling.ranks == (1, 3)
    assert ruling.summary == (
        "ranks 1 and 3 are stopped (by a signal) or waiting for a disk or a file server"
    )
    assert ruling.is_certain
    assert ruling.details == (
        "rank 3: stopped (by a signal), at train.py:23 fetch_rows (step 12, in data)",
        "rank 1: waiting for a disk or a file server, at train.py:23 fetch_rows (step 12, in data)",
    )


def test_nothing_is_certain_where_nobody_waits():
    assert not verdict([rank(n, 18, 18) for n in range(4)]).is_certain


def test_of_two_mismatches_of_one_number_the_first_group_counts():
    """And ranks are told in order, whoever answered first."""
    odd = rank(0, 18, 17, last=[call(18, "barrier")])
    ruling = verdict([rank(3, 18, 17), rank(1, 18, 17), odd, rank(2, 18, 17)])

    assert ruling.ranks == (0,)
    assert "ranks 1 to 3 call all_reduce number 18 [8]" in ruling.summary


def test_where_it_is_not_known_where_a_rank_is_that_is_said():
    ruling = verdict([*waiting(0, 1, 3), rank(2, 17, 17, frames=None)])

    assert ruling.summary.endswith("which has not come to all_reduce number 18 [8] of ranks 0 to 3")
    assert ruling.details[-1] == "rank 2: where it is is not known"


def test_a_collective_of_which_torch_has_kept_nothing_has_a_number_at_least():
    kept = [rank(n, 18, 17, last=[call(30)]) for n in (0, 1, 3)]

    assert "which has not come to collective number 18 of ranks 0 to 3" in (
        verdict([*kept, behind(2)]).summary
    )

"""Rows on what a run has survived: none where nothing happened, and not known is said so."""

from __future__ import annotations

import pytest

from hpctrain.core.base.text import LABEL
from hpctrain.ledger.history.incidents import Guarded, JobMembers, Survived
from hpctrain.ledger.run import event_types as facts
from hpctrain.observe.status.event_lines import incident_lines

HOLE = facts.BatchSkipped(step=1200, first=8, last=16, why="nonfinite")
BACK = facts.TrainingRewound(step=300, to=250, why="spike")
GONE = facts.NodeLost(node="n3", why="nothing was heard for 10 s")
COPIES = facts.MemoryCopiesSet(steps=4, bytes=2**30, stall_s=0.003, covered_s=0.5, left_out=2)


def test_nothing_is_shown_where_nothing_happened():
    assert incident_lines(Survived()) == []
    assert incident_lines(Survived(members=JobMembers(("n1", "n2"), rounds=3))) == []


@pytest.mark.parametrize(
    ("seen", "row"),
    [
        (
            Survived(members=JobMembers(("n1", "n2"), ("n5",), (GONE,), 2)),
            (
                "round",
                (
                    "n[1-2] in training; n5 waiting as spare; n3 lost (nothing was heard "
                    "for 10 s); round 2 of this job"
                ),
            ),
        ),
        (
            Survived(members=JobMembers(("n1",), ("n2",), (), 1)),
            ("round", "n1 in training; n2 waiting as spare"),
        ),
        (
            Survived(members=JobMembers((), (), (facts.NodeLost(node="n9", was_spare=True),), 1)),
            ("round", "nobody in training; spare n9 lost"),
        ),
        (
            Survived(members=JobMembers(("n1",), (), (GONE,) * 6, 7)),
            (
                "round",
                (
                    f"n1 in training; {'n3 lost (nothing was heard for 10 s); ' * 4}2 more lost "
                    "before; round 7 of this job"
                ),
            ),
        ),
        (
            Survived(out_of_step=facts.RanksOutOfStep(ranks=(2,), summary="rank 2 is one behind")),
            ("out of step", "rank 2 is one behind"),
        ),
        (
            Survived(out_of_step=facts.RanksOutOfStep(summary="rank 2 is one behind", ended=True)),
            ("out of step", "rank 2 is one behind; ended"),
        ),
        (
            Survived(memory=COPIES),
            (
                "memory",
                (
                    "a copy in memory every 4 steps (1.0 GiB, training waits 3 ms, "
                    "complete after 500 ms, 2 left out)"
                ),
            ),
        ),
        (
            Survived(memory=facts.MemoryCopiesSet(steps=0, why="no room")),
            ("memory", "no copies in memory: no room"),
        ),
        (
            Survived(Guarded(3, 1, 2, HOLE, 1, BACK)),
            (
                "guards",
                (
                    "2 updates left out, 1 rewind, 3 steps not finite, 1 spike; "
                    "step 1,200: the update of samples 8 to 15 is left out: not finite; "
                    "step 300: training goes back to step 250 or before: a spike"
                ),
            ),
        ),
        (Survived(Guarded(spikes=1)), ("guards", "1 spike")),
        (
            Survived(
                Guarded(
                    differing=facts.ReplicasDiffer(
                        step=80, clean=64, ranks=(3,), nodes=("n2",), certain=True
                    )
                )
            ),
            (
                "copies",
                (
                    "step 80: the weights of rank 3 on n2 are not those of the others; "
                    "right at step 64"
                ),
            ),
        ),
        (
            Survived(Guarded(differing=facts.ReplicasDiffer(step=80, ranks=(0, 1)))),
            (
                "copies",
                ("step 80: the weights of ranks 0-1 differ, and nobody knows whose are right"),
            ),
        ),
    ],
)
def test_each_has_its_row(seen, row):
    assert incident_lines(seen) == [row]
    assert len(row[0]) < LABEL


PAIRS = ("n1", "n2", "n3", "n4"), ("n3", "n4", "n1", "n2")


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ((), "switches are not known"),
        (("", "", "", ""), "switches are not known"),
        (("a", "a", "b", "b"), "all on another switch"),
        (("a", "a", "a", "b"), "2 of 4 on another switch"),
        (("a", "a", "b", ""), "2 of 4 on another switch, 2 not known"),
        (("a",), "switches are not known"),  # as somebody else has written it
    ],
)
def test_it_is_shown_who_has_whose_copies_and_what_a_switch_takes(switches, words):
    training, peers = PAIRS
    members = JobMembers(training, peers=peers, switches=switches)

    (_, row) = incident_lines(Survived(members=members, memory=COPIES))

    pairs = "copies of n1 on n3, n2 on n4, n3 on n1, n4 on n2"
    assert row == ("peers", f"{pairs}; {words}")


def test_of_many_peers_some_are_shown():
    names = tuple(f"n{number}" for number in range(10))
    members = JobMembers(names, peers=(*names[1:], names[0]))

    (_, row) = incident_lines(Survived(members=members, memory=COPIES))

    assert row[1].endswith("n7 on n8, 2 more (--json has all); switches are not known")


@pytest.mark.parametrize("memory", [None, facts.MemoryCopiesSet(steps=0)])
def test_no_peer_is_shown_where_no_copies_are_made(memory):
    training, peers = PAIRS

    rows = incident_lines(Survived(members=JobMembers(training, peers=peers), memory=memory))

    assert "peers" not in dict(rows)

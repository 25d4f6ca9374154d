"""Evidence comes through JSON as it was, but for what is long and old."""

from __future__ import annotations

import json
import math

import pytest

from hpctrain.node.hangs.evidence import (
    MOST_CALLS,
    MOST_FRAMES,
    Collective,
    Frame,
    Front,
    RankEvidence,
    Recorded,
    evidence_of,
    plain_of,
    plain_stand,
    stand_of,
)
from hpctrain.node.hangs.standing import Stand

CALLS = tuple(Collective("0", number, "all_reduce", ((4,),), ("Float",), 9) for number in (1, 2))
WHOLE = RankEvidence(
    3,
    "n1",
    "S",
    Recorded({"0": Front(2, 1)}, CALLS),
    {"0": (0, 1, 2, 3), "7": (0, 4), "8": (5, 3, 9), "9": (3,), "10": ()},
    (Frame("/a.py", 3, "f"),),
    12,
    "data",
)


def through(evidence):
    return evidence_of(json.loads(json.dumps(plain_of(evidence))))


@pytest.mark.parametrize("evidence", [WHOLE, RankEvidence(1, "n", "T", has_returned=True)])
def test_evidence_is_as_it_was(evidence):
    assert through(evidence) == evidence


def test_of_long_lists_the_end_that_counts_is_kept():
    calls = tuple(
        Collective(group, number, "barrier", (), (), 0) for number in range(100) for group in "01"
    )
    frames = tuple(Frame("/a.py", line, "f") for line in range(100))
    kept = through(RankEvidence(0, "n", "S", Recorded({}, calls), frames=frames))
    numbers = {group: [] for group in "01"}
    for call in kept.recorded.collectives:
        numbers[call.group].append(call.number)
    assert numbers == {group: list(range(100 - MOST_CALLS, 100)) for group in "01"}
    assert kept.frames == frames[:MOST_FRAMES]


def test_a_group_of_many_ranks_is_told_in_a_few_bytes():
    wide = RankEvidence(0, "n", "S", groups={"0": tuple(range(8192)), "1": tuple(range(3, 99, 8))})
    assert len(json.dumps(plain_of(wide))) < 400
    assert through(wide) == wide


@pytest.mark.parametrize("limit_s", [60.0, math.inf])
def test_stands_are_as_they_were(limit_s):
    stand = Stand(3, 12, "data", 70.5, limit_s)
    assert stand_of(json.loads(json.dumps(plain_stand(stand)))) == stand

"""The faults of a drill by their names, and where each promise stands."""

from __future__ import annotations

import pytest

from hpctrain.advise.drill.promises import _JUDGES, FAULTS, chosen
from hpctrain.errors import UsageError


def test_every_fault_has_a_judge():
    assert set(FAULTS) == set(_JUDGES)


def test_faults_are_planted_in_the_drills_own_order_and_all_where_none_is_named():
    assert chosen([]) == list(FAULTS.values())
    assert [one.name for one in chosen(["second_writer", "kill_rank"])] == [
        "kill_rank", "second_writer",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "hint"), [("kil_rank", "did you mean kill_rank?"), ("zzz", "there are kill_rank, ")]
)
def test_a_name_that_is_none_is_refused_with_the_nearest(name, hint):
    with pytest.raises(UsageError) as refused:
        chosen([name])
    assert hint in str(refused.value)

"""From which step to which an attempt went, where not both are known."""

from __future__ import annotations

import pytest

from hpctrain.ledger.history.attempts import AttemptView
from hpctrain.observe.report.summary import NOTHING, steps


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (None, None, NOTHING),
        (1600, None, "1,600 → ?"),
        (None, 12, "0 → 12"),
        (0, 0, "0 → 0"),
        (1600, 2750, "1,600 → 2,750"),
    ],
)
def test_a_last_step_that_nobody_told_is_not_said_to_be_the_first(first, last, said):
    assert steps(AttemptView(1, first_step=first, last_step=last)) == said

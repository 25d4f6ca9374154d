"""What the tests of sealed checkpoints share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.checkpoints import next_attempt

if TYPE_CHECKING:
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir


@pytest.fixture
def attempt(run: RunDir) -> Attempt:
    """The run's first attempt."""
    return next_attempt(run)

"""What the tests of checkpoints share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import checkpoints

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.ledger.run.layout import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run without checkpoints."""
    return checkpoints.new_run(tmp_path)

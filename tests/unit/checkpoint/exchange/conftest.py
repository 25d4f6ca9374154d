"""What the tests of exports and imports share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.exchange import Commands, made_run

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.ledger.run.layout import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with a checkpoint."""
    return made_run(tmp_path)


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Commands:
    """Calls `hpctrain checkpoints` on the folder of that run."""
    return Commands(tmp_path / "runs", capsys)

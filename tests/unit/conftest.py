"""What unit tests of several rooms share; a folder's conftest or a file may give its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hpctrain.ledger.run.layout import RunDir
from tests.support import checkpoints
from tests.support.ledger_runs import Story

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.ledger.run.fence import Attempt


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """An empty run."""
    return RunDir(tmp_path)


@pytest.fixture
def attempt(run: RunDir) -> Attempt:
    """The run's next attempt."""
    return checkpoints.next_attempt(run)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    """A ledger to write, of a run that was submitted."""
    return Story(tmp_path / "lm").submitted()

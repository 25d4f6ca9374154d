"""What the scenario tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.recipe import make_run, train

if TYPE_CHECKING:
    from hpctrain.ledger.run.layout import RunDir


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """60 steps of the tiny recipe on eight ranks, never stopped, without SLURM."""
    root = tmp_path_factory.mktemp("undisturbed") / "run"
    run = make_run(root, train__steps=60, train__dropout=0.0)
    train(run, 8)
    return run

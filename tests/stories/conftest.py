"""Where a story happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.stories import OnLocal, OnSlurm

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.stories import Scheduler


@pytest.fixture
def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Scheduler:
    """The embedded cluster or SLURM, as the parameter says."""
    if request.param == "slurm":
        return OnSlurm(request.getfixturevalue("slurm"))
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    return OnLocal()

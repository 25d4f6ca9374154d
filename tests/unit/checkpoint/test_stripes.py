"""Files of checkpoints are striped as a site says; where that cannot be had it is one line.

The `lfs` here stands for Lustre's: it notes how it was called, and fails where it is told to.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from hpctrain.checkpoint.store import stripes
from hpctrain.core.settings.schema import CheckpointSettings, EvaluateSettings
from hpctrain.train.runtime import saves


@pytest.fixture
def lfs(tmp_path, monkeypatch):
    """A folder that is all of PATH; `lfs(body)` puts an `lfs` there. It returns its calls."""
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", str(place))

    def put(body=""):
        program = place / "lfs"
        program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{body}\n')
        program.chmod(0o755)

    def calls():
        path = tmp_path / "calls"
        return path.read_text().splitlines() if path.exists() else []

    return SimpleNamespace(put=put, calls=calls)


@pytest.mark.parametrize(
    ("count", "mib", "words"),
    [(4, 0, "-c 4"), (-1, 0, "-c -1"), (0, 16, "-S 16M"), (8, 1, "-c 8 -S 1M")],
)
def test_the_folder_is_made_and_striped_as_asked(run, lfs, count, mib, words):
    lfs.put()
    settings = CheckpointSettings(stripe_count=count, stripe_mib=mib)

    assert stripes.lay_out(run.checkpoints, settings) == ""

    assert lfs.calls() == [f"setstripe {words} {run.checkpoints}"]
    assert run.checkpoints.is_dir()


def test_nothing_is_asked_where_no_site_says_so(run, lfs):
    lfs.put()

    assert stripes.lay_out(run.checkpoints, CheckpointSettings()) == ""

    assert lfs.calls() == []
    assert not run.checkpoints.exists()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (None, "there is no lfs on this node to stripe "),
        ("echo 'not a Lustre\nfolder' >&2; exit 22", "lfs setstripe: not a Lustre folder"),
        ("exit 25", "lfs setstripe: exit code 25"),
    ],
)
def test_what_cannot_be_striped_is_one_line(run, lfs, body, said):
    if body is not None:
        lfs.put(body)

    problem = stripes.lay_out(run.checkpoints, CheckpointSettings(stripe_count=2))

    assert problem.startswith(f"checkpoints are not striped: {said}")
    assert "\n" not in problem


def test_a_program_that_hangs_is_given_up(run, lfs, monkeypatch):
    lfs.put("exec /bin/sleep 100000")
    monkeypatch.setattr(stripes, "TIMEOUT_S", 0.2)

    problem = stripes.lay_out(run.checkpoints, CheckpointSettings(stripe_count=2))

    assert "timed out" in problem


def test_a_folder_that_cannot_be_made_is_one_line(run, lfs):
    lfs.put()
    run.checkpoints.write_text("in its place")

    problem = stripes.lay_out(run.checkpoints, CheckpointSettings(stripe_count=2))

    assert problem.startswith("checkpoints are not striped: ")
    assert lfs.calls() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_asks_as_saves_begin_and_says_why_not(run, lfs, caplog, monkeypatch, rank):
    lfs.put("exit 1")
    monkeypatch.setattr(saves, "SavePolicy", lambda *_: None)
    settings = CheckpointSettings(stripe_count=2, mode="sync")
    place = SimpleNamespace(run=run, settings=settings)

    with caplog.at_level(logging.WARNING):
        saves.Saves(place, SimpleNamespace(rank=rank), SimpleNamespace(), EvaluateSettings())

    assert len(lfs.calls()) == len(caplog.records) == 1 - rank

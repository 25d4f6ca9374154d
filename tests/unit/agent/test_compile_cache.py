"""What torch has compiled is taken from a folder that nobody else can have filled."""

from __future__ import annotations

import os
import tempfile

import pytest

from hpctrain.ledger.run.layout import RunDir
from hpctrain.node.agent.environment import COMPILE_CACHE_NAME, compile_cache
from tests.support.users import OWNER


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run, on a node whose temporary folder is empty."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return RunDir(tmp_path / "run")


@pytest.fixture
def usual(tmp_path, run):
    """Where everybody knows that it will be."""
    return tmp_path / "tmp" / COMPILE_CACHE_NAME.format(uid=os.geteuid())


def test_it_is_made_shut_and_used_again(run, usual, capsys):
    assert compile_cache(run) == compile_cache(run) == usual
    assert usual.stat().st_mode & 0o777 == 0o700
    assert capsys.readouterr().out == ""


def _open_for_others(path):
    path.mkdir()
    path.chmod(0o777)


def _link(path):
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to("elsewhere")


def _dangling(path):
    path.symlink_to("nowhere")


def _file(path):
    path.touch()


@pytest.mark.parametrize("squat", [_open_for_others, _link, _dangling, _file])
def test_what_lies_ready_there_is_not_used(run, usual, squat, capsys):
    squat(usual)
    assert compile_cache(run) == run.root / "compiled"
    assert str(usual) in capsys.readouterr().err


@pytest.mark.two_users
def test_another_users_folder_is_not_used(run, usual):
    usual.mkdir(mode=0o700)
    os.chown(usual, OWNER.uid, OWNER.gid)
    assert compile_cache(run) == run.root / "compiled"


def test_a_node_without_a_temporary_folder_has_the_runs(run, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert compile_cache(run) == run.root / "compiled"

"""Which files are looked at, and what is said of those that cannot be read."""

from __future__ import annotations

import os

import pytest

from hpctrain.advise.lint.check import files_to_check
from hpctrain.core.base.files import NotText, read_source
from hpctrain.errors import NotFound


def names(*paths):
    return [str(path) for path, _ in files_to_check([str(path) for path in paths], pytest.fail)]


def test_a_folder_gives_its_programs_and_configurations(tmp_path):
    for name in ("b.py", "a.py", "hpctrain.toml", "other.toml", "notes.txt", "x.json"):
        (tmp_path / name).write_text("")
    for folder in (".git", "venv", "__pycache__", "sub"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "in.py").write_text("")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {}, "bf16": {}}')

    found = [os.path.relpath(path, tmp_path) for path in names(tmp_path)]

    assert found == ["a.py", "b.py", "ds.json", "hpctrain.toml", "sub/in.py"]


def test_a_circle_of_folders_is_walked_once(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text("")
    (tmp_path / "a" / "back").symlink_to(tmp_path)

    assert names(tmp_path, tmp_path) == [str(tmp_path / "a" / "x.py")]


def test_a_link_to_itself_is_said_to_be_unreadable(tmp_path):
    (tmp_path / "x.py").symlink_to(tmp_path / "x.py")

    ((path, _),) = files_to_check([str(tmp_path / "x.py")], pytest.fail)

    with pytest.raises(NotText, match="Too many levels of symbolic links"):
        read_source(path)


def test_what_is_not_there_is_not_found(tmp_path):
    with pytest.raises(NotFound, match="is not there"):
        names(tmp_path / "none.py")


def test_a_folder_that_nobody_may_look_into_is_told(tmp_path, monkeypatch):
    (tmp_path / "shut").mkdir()
    (tmp_path / "x.py").write_text("")
    look = os.scandir
    heard = []

    def scandir(folder):
        if str(folder).endswith("shut"):
            raise PermissionError(13, "Permission denied", str(folder))
        return look(folder)

    monkeypatch.setattr(os, "scandir", scandir)

    found = files_to_check([str(tmp_path)], heard.append)

    assert [path for path, _ in found] == [tmp_path / "x.py"]
    assert heard == [f"{tmp_path / 'shut'} is passed over: Permission denied"]

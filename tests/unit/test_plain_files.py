"""Only ordinary files are opened, and nothing is waited for."""

from __future__ import annotations

import os

import pytest

from hpctrain.plain_files import is_plain, open_plain, read_plain


def test_an_ordinary_file_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b"text")
    (tmp_path / "link").symlink_to("a")
    assert is_plain(tmp_path / "link")
    assert read_plain(tmp_path / "link") == b"text"


@pytest.mark.timeout(10)
def test_a_fifo_and_a_folder_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        assert not is_plain(path)
        with pytest.raises(OSError, match=r"not an ordinary file|Is a directory"):
            open_plain(path)


def test_a_file_that_is_too_long_is_refused_unread(tmp_path):
    with (tmp_path / "big").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="more than 64 bytes"):
        read_plain(tmp_path / "big", 64)


def test_what_is_not_there_is_not_plain(tmp_path):
    (tmp_path / "file").touch()
    assert not is_plain(tmp_path / "none")
    assert not is_plain(tmp_path / "file" / "below")

"""Only ordinary files are opened, and nothing is waited for."""

from __future__ import annotations

import os

import pytest

from hpctrain.core.base.files import is_plain, open_plain, read_plain, replace_text, write_private
from hpctrain.ledger.run.attempt_files import tail_offset
from hpctrain.ledger.run.fence import left_text, read_fence
from hpctrain.ledger.run.layout import RunDir


def test_an_ordinary_file_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b"text")
    (tmp_path / "link").symlink_to("a")
    assert is_plain(tmp_path / "link")
    assert read_plain(tmp_path / "link") == b"text"


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


def test_a_request_and_a_fence_that_are_fifos_are_errors_at_once(tmp_path):
    """Rank 0 looks for requests twice a second, and an agent for its fence."""
    run = RunDir(tmp_path)
    os.mkfifo(run.stop_request)
    os.mkfifo(run.fence)

    for look in (lambda: left_text(run.stop_request), lambda: read_fence(run)):
        with pytest.raises(OSError, match="not an ordinary file"):
            look()


@pytest.mark.parametrize("is_read", [True, False])
def test_a_fifo_in_the_place_of_what_is_staged_is_not_written_into(tmp_path, is_read):
    os.mkfifo(tmp_path / "a.new")
    reader = os.open(tmp_path / "a.new", os.O_RDONLY | os.O_NONBLOCK) if is_read else None

    with pytest.raises(OSError, match=r"not an ordinary file|No such device"):
        replace_text(tmp_path / "a", "text")

    assert list(tmp_path.iterdir()) == []
    if reader is not None:
        os.close(reader)


def test_the_last_lines_of_a_log_with_a_terabyte_of_nothing_in_it_are_found_at_once(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"1\n2\n")
    with log.open("r+b") as file:
        file.truncate(1 << 40)
        file.seek(1 << 40)
        file.write(b"3\n4\n")

    assert tail_offset(log, 1) == ((1 << 40) + 2, 1)
    assert tail_offset(log, 3) == (2, 3)
    assert tail_offset(log, 99) == (0, 4)
    with log.open("r+b") as file:
        file.truncate(1 << 42)
    assert tail_offset(log, 2) == ((1 << 40) + 2, 2)
    os.truncate(log, 1 << 39)
    assert tail_offset(log, 2) == (2, 2)


@pytest.mark.parametrize("write", [replace_text, write_private])
def test_what_cannot_be_written_whole_names_the_file_and_leaves_nothing(tmp_path, write):
    path = tmp_path / "there" / "x.json"
    with pytest.raises(OSError, match=r"x\.json.$") as error:
        write(path, "{}")
    assert error.value.filename == str(path)
    path.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write(path, "{}")
    assert list(path.parent.iterdir()) == [path]

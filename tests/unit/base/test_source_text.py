"""A program is read in the encoding that it names, and what cannot be read is said in words."""

from __future__ import annotations

import contextlib
import os
from encodings.aliases import aliases

import pytest

from hpctrain.core.base.files import MOST_SOURCE_BYTES, NotText, decoded, read_source


def test_a_link_to_itself_is_said_to_be_unreadable(tmp_path):
    (tmp_path / "x.py").symlink_to(tmp_path / "x.py")

    with pytest.raises(NotText, match="Too many levels of symbolic links"):
        read_source(tmp_path / "x.py")


@pytest.mark.parametrize("name", sorted({*aliases.values(), *aliases, "undefined", "x" * 5000}))
def test_a_first_line_may_name_any_encoding(name):
    raw = f"# -*- coding: {name} -*-\nx = 'a-b'".encode() + b"\xff\xfe+-\\x\n"
    for text in (raw, raw[:-6] + b"\n", b"\xef\xbb\xbf" + raw):
        with contextlib.suppress(NotText):
            assert isinstance(decoded(text), str)


@pytest.mark.parametrize("name", ["undefined", "idna", "Punycode", "IDNA"])
def test_an_encoding_of_no_program_is_named(name):
    with pytest.raises(NotText, match=rf"(?i)cannot be read: {name} is no encoding of a program"):
        decoded(f"# coding: {name}\nx = 1\n".encode())


def test_a_fifo_does_not_keep_anybody(tmp_path):
    os.mkfifo(tmp_path / "x.py")

    with pytest.raises(NotText, match="not an ordinary file"):
        read_source(tmp_path / "x.py")


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"x = 1\n\ny = 2\n\xff\n", "is not utf-8 text at byte 13"),
        (b"\xff\xfex\x00", "invalid or missing encoding"),
        (b"# coding: klingon\n", "unknown encoding"),
        (b"x" * (MOST_SOURCE_BYTES + 1), "has more than"),
    ],
)
def test_what_is_no_text_says_why(raw, why):
    with pytest.raises(NotText, match=why):
        decoded(raw)


def test_another_encoding_that_is_named_is_read():
    assert decoded("# coding: latin-1\nx = 'ä'\n".encode("latin-1")).endswith("'ä'\n")

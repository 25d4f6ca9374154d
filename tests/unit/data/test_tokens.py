"""A token file is there and whole, or refused."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from hpctrain.errors import NotFound, UsageError
from hpctrain.train.data.tokens import TokenFile, sidecar, write_tokens
from tests.support.fuzzing import cases, chances, damaged, odd


def write(path, values, *, dtype="uint16", pieces=3):
    data = np.asarray(values).astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    cut = max(1, -(-len(data) // pieces))
    chunks = (data[start : start + cut] for start in range(0, len(data), cut))
    return write_tokens(path, chunks, dtype=dtype, vocabulary=1000, source={"from": "test"})


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_what_is_written_is_read_back(tmp_path, dtype):
    values = np.arange(100) * (600 if dtype == "uint16" else 600_000)

    write(tmp_path / "deep" / "text.tokens", values, dtype=dtype)

    tokens = TokenFile(tmp_path / "deep" / "text.tokens")
    assert (tokens.length, tokens.vocabulary, tokens.dtype) == (100, 1000, dtype)
    assert tokens.source == {"from": "test"}
    assert tokens.sequence(0, 99).tolist() == values.tolist()
    tokens.verify()


def test_sequences_share_one_token_with_the_next_and_lose_none(tmp_path):
    tokens = write(tmp_path / "t", range(41))

    assert tokens.len_sequences(8) == 5
    sequences = [tokens.sequence(i, 8) for i in range(5)]
    assert [sequence.tolist() for sequence in sequences] == [
        list(range(i * 8, i * 8 + 9)) for i in range(5)
    ]
    assert {sequence.dtype for sequence in sequences} == {np.dtype("int64")}
    assert tokens.batch([4, 0], 8).tolist() == [sequences[4].tolist(), sequences[0].tolist()]


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_only_whole_sequences_count(tmp_path, length, expected):
    assert write(tmp_path / "t", range(length)).len_sequences(8) == expected


@pytest.mark.parametrize("i", [-1, 5])
def test_a_sequence_outside_the_file_is_refused(tmp_path, i):
    tokens = write(tmp_path / "t", range(41))

    with pytest.raises(IndexError, match=str(i)):
        tokens.sequence(i, 8)


def test_the_same_tokens_have_the_same_digest_however_they_were_cut(tmp_path):
    one = write(tmp_path / "a", range(50), pieces=1)
    other = write(tmp_path / "b", range(50), pieces=7)
    third = write(tmp_path / "c", range(1, 51))

    assert one.digest == other.digest != third.digest
    assert one.digest.startswith("xxh3_64:")


def cut_short(path):
    os.truncate(path, path.stat().st_size - 1)


def grow(path):
    with path.open("ab") as file:
        file.write(b"\0\0")


def lose_description(path):
    sidecar(path).unlink()


def cut_description(path):
    os.truncate(sidecar(path), 30)


def describe(**changed):
    def damage(path):
        described = json.loads(sidecar(path).read_text()) | changed
        sidecar(path).write_text(json.dumps(described))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        cut_short,
        grow,
        lose_description,
        cut_description,
        describe(format=2),
        describe(dtype="float7"),
        describe(length="many"),
        describe(source=None),
        describe(digest="\x1b[2K\r"),
        lambda path: sidecar(path).write_text("[]"),
        lambda path: sidecar(path).write_text("{}"),
        lambda path: sidecar(path).write_text("[" * 100_000),
    ],
)
def test_a_torn_token_file_is_refused_in_one_line_that_names_it(tmp_path, damage):
    path = tmp_path / "text.tokens"
    write(path, range(41))
    damage(path)

    with pytest.raises(UsageError) as refused:
        TokenFile(path)

    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_changed_byte_is_found_by_reading_it_all(tmp_path):
    tokens = write(tmp_path / "t", range(41))
    with tokens.path.open("r+b") as file:
        file.seek(20)
        file.write(b"\xff")

    with pytest.raises(UsageError, match="digest"):
        TokenFile(tokens.path).verify()


def test_a_missing_token_file_is_named(tmp_path):
    with pytest.raises(NotFound, match=r"nothing\.tokens"):
        TokenFile(tmp_path / "nothing.tokens")


def test_half_a_token_is_refused_before_anything_is_published(tmp_path):
    with pytest.raises(ValueError, match="3 bytes"):
        write_tokens(tmp_path / "t", [b"abc"], dtype="uint16", vocabulary=257, source={})

    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("before", [False, True])
def test_a_writer_killed_midway_leaves_nothing_that_looks_finished(tmp_path, before):
    path = tmp_path / "t"
    if before:
        write(path, range(41))
    code = f"""
import os, pathlib, signal
from hpctrain.train.data.tokens import write_tokens
def chunks():
    yield b"ab" * 41
    os.kill(os.getpid(), signal.SIGKILL)
write_tokens(pathlib.Path({str(path)!r}), chunks(), dtype="uint16", vocabulary=257, source={{}})
"""

    killed = subprocess.run([sys.executable, "-c", code], check=False)

    assert killed.returncode == -signal.SIGKILL
    with pytest.raises((UsageError, NotFound)):
        TokenFile(path)
    assert write(path, range(9)).len_sequences(8) == 1


@cases(300, 20_000)
def test_damaged_token_files_are_one_line(tmp_path, begin, end):
    """Read as their description says and no further, or refused; never another error."""
    path = tmp_path / "t"
    write(path, range(41))
    tokens, described = path.read_bytes(), sidecar(path).read_text()
    refused = []
    for number, chance in chances(begin, end):
        path.write_bytes(tokens[: chance.choice((41 * 2, chance.randrange(41 * 2)))])
        text = damaged(described, chance)
        if chance.random() < 0.5:
            fields = json.loads(described)
            fields[chance.choice(list(fields))] = odd(chance)
            text = json.dumps(fields)
        sidecar(path).write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            file = TokenFile(path)
            sequences = [file.sequence(i, 8) for i in range(file.len_sequences(8))]
            assert all(len(sequence) == 9 for sequence in sequences), number
            file.verify()
        except UsageError as error:
            refused.append(str(error))

    assert len(refused) > (end - begin) * 0.6
    assert not [line for line in refused if len(line.splitlines()) > 1]


@pytest.mark.parametrize("name", ["t", "t.json"])
def test_a_fifo_is_not_waited_for(tmp_path, name):
    write(tmp_path / "t", range(41))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)

    with pytest.raises(UsageError, match="not an ordinary file"):
        TokenFile(tmp_path / "t")

"""Every key of a settings file is found again at its own line."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.settings.layers import key_lines, read_toml
from hpctrain.errors import NotFound, UsageError

TRICKY = '''# a comment with [brackets] and key = 1
site = "juniper" # nodes = 3

[slurm]
nodes = "2-4"
extra = [
  "--switches=1", # ] = "
  "--x=[y]",
]
setup = ["""
[not a table]
not_a_key = 1
""", 'it''s']
time="1:00" # "

[ "train" ]
"lr" = 1e-3
data = 'C:\\[x]\\'
[env]
A.B = "dotted"
'''


def test_each_key_has_its_own_line_whatever_its_value_looks_like():
    text = TRICKY.replace("'it''s'", "'its'")
    tomllib.loads(text)

    lines = key_lines(text)

    expected = {
        ("site",): "site =",
        ("slurm",): "[slurm]",
        ("slurm", "nodes"): "nodes =",
        ("slurm", "extra"): "extra =",
        ("slurm", "setup"): "setup =",
        ("slurm", "time"): "time=",
        ("train",): '[ "train" ]',
        ("train", "lr"): '"lr"',
        ("train", "data"): "data =",
        ("env",): "[env]",
        ("env", "A", "B"): "A.B",
    }
    assert set(lines) == set(expected)
    rows = text.split("\n")
    assert {
        key: rows[line - 1].startswith(expected[key]) for key, line in lines.items()
    } == dict.fromkeys(expected, True)


VALUES = [
    '"x"',
    "1",
    "[1, 2]",
    '[\n "a", # ]\n "b"\n]',
    '"""\n[x]\na = 1\n"""',
    "'''\n'a'\n'''",
    "{a = 1}",
]


@given(st.lists(st.tuples(st.sampled_from(VALUES), st.booleans()), max_size=12))
def test_lines_agree_with_where_the_text_was_put(entries):
    rows: list[str] = []
    expected: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, (value, new_table) in enumerate(entries):
        if new_table:
            table = (f"t{number}",)
            expected[table] = "\n".join([*rows, ""]).count("\n") + 1
            rows.append(f"[t{number}] # comment = 1")
        expected[(*table, f"k{number}")] = "\n".join([*rows, ""]).count("\n") + 1
        rows.append(f"k{number} = {value} # [end]")

    text = "\n".join(rows)
    tomllib.loads(text)

    assert key_lines(text) == expected


def test_a_key_of_an_inline_table_is_told_by_its_table(tmp_path):
    path = tmp_path / "hpctrain.toml"
    path.write_text('\nenv = {A = "1"}\n')

    file = read_toml(path, shown="hpctrain.toml")

    assert file.where("env", "A") == "hpctrain.toml:2"
    assert file.where("nothing", "A") == "hpctrain.toml"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"[slurm\nnodes = 1\n", r"hpctrain.toml is not valid TOML: .*line 1"),
        (b"a = 1\na = 2\n", r"not valid TOML: .*overwrite.*line 2"),
        (b"a = '\xff'\n", r"not UTF-8 text"),
    ],
)
def test_a_broken_file_is_refused_in_one_line_with_the_place(tmp_path, content, match):
    path = tmp_path / "hpctrain.toml"
    path.write_bytes(content)

    with pytest.raises(UsageError, match=match) as caught:
        read_toml(path)

    assert "\n" not in str(caught.value)


def test_a_missing_file_is_not_found_and_a_folder_cannot_be_read(tmp_path):
    with pytest.raises(NotFound, match="is not there"):
        read_toml(tmp_path / "no.toml")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_toml(tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 9223372036854775808", "an integer of 64 bits; there are 64 with its sign"),
        ("[a]\nb = [{c = 0x1" + "0" * 5000 + "}]", "an integer of 20001 bits"),
        ("x = " + "9" * 5000, "is not valid TOML"),
        ("x = " + "[" * 2000 + "]" * 2000, "too deep in each other"),
    ],
)
def test_what_no_program_could_hold_is_refused_in_one_line(tmp_path, text, why):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(UsageError, match=why) as refused:
        read_toml(tmp_path / "x.toml")
    assert len(str(refused.value)) < 300


def test_a_file_that_windows_saved_is_read(tmp_path):
    (tmp_path / "hpctrain.toml").write_bytes(b"\xef\xbb\xbf[slurm]\r\nnodes = 2\r\n")

    file = read_toml(tmp_path / "hpctrain.toml")

    assert file.values == {"slurm": {"nodes": 2}}
    assert file.where("slurm", "nodes").endswith("hpctrain.toml:2")

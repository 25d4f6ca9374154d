"""Any folder of text becomes the same tokens, once, for every process that asks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.errors import UsageError
from hpctrain.recipes.lm import corpus
from hpctrain.train.data.tokens import TokenFile, sidecar
from tests.support.patience import PATIENCE_S


def fill(folder, **texts):
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def all_tokens(path):
    tokens = TokenFile(path)
    return tokens.sequence(0, tokens.length - 1).tolist()


def names(folder, found):
    return [path.relative_to(folder).as_posix() for path in found]


def test_tokens_are_the_bytes_of_each_file_and_an_end(tmp_path):
    text = fill(tmp_path / "text", b_txt="\u00e9\n", a_txt="ab")

    out = corpus.build(str(text), 0, tmp_path / "out" / "tokens")

    assert out == tmp_path / "out" / "tokens"
    assert all_tokens(out) == [*b"ab", corpus.END, *"\u00e9\n".encode(), corpus.END]
    assert TokenFile(out).vocabulary == corpus.VOCABULARY


def test_files_come_in_the_order_of_their_relative_paths(tmp_path):
    fill(tmp_path, z_py="1", a__b_py="2", a_py="3", B_md="4", a__a__c_txt="5")

    found = corpus.find_files(tmp_path, 0)

    assert names(tmp_path, found) == ["B.md", "a.py", "a/a/c.txt", "a/b.py", "z.py"]


def test_what_is_not_readable_text_is_left_out(tmp_path):
    fill(tmp_path, good_txt="x", binary_txt=b"MZ\0", other_csv="1,2", _hidden__deep__a_txt="y")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.txt").mkdir()
    os.mkfifo(tmp_path / "pipe.txt")

    found = corpus.find_files(tmp_path, 0)

    assert names(tmp_path, found) == ["good.txt"]


def test_text_is_taken_up_to_the_limit_and_no_further(tmp_path):
    text = fill(tmp_path / "text", a_txt="a" * 600, b_txt="b" * 600, c_txt="c" * 600)

    found = corpus.find_files(text, 1000)
    out = corpus.build(str(text), 0.001, tmp_path / "tokens")

    assert names(text, found) == ["a.txt", "b.txt"]
    assert all_tokens(out) == [*b"a" * 600, corpus.END, *b"b" * 400, corpus.END]


def test_the_standard_library_without_its_tests_is_the_default(tmp_path):
    folder = corpus.text_folder("")

    out = corpus.build("", 1.0, tmp_path / "tokens")
    found = corpus.find_files(folder, 0, skip_folders=corpus.NOT_LIBRARY)

    assert folder == Path(os.__file__).parent
    assert TokenFile(out).length > 1_000_000
    assert folder / "json" / "decoder.py" in found
    assert not {"test", "tests", "site-packages"} & {
        part for path in found for part in path.relative_to(folder).parts
    }


def test_tests_are_left_out_of_the_standard_library_only(tmp_path):
    text = fill(tmp_path / "text", tests__a_py="mine")

    found = corpus.find_files(text, 0, skip_folders=corpus.NOT_LIBRARY)
    out = corpus.build(str(text), 0, tmp_path / "tokens")

    assert found == []
    assert all_tokens(out) == [*b"mine", corpus.END]


def test_a_run_keeps_the_tokens_that_it_began_with(tmp_path):
    text = fill(tmp_path / "text", a_txt="first")
    out = corpus.build(str(text), 0, tmp_path / "tokens")
    before = (out.stat().st_ino, out.stat().st_mtime_ns)
    (text / "a.txt").unlink()
    text.rmdir()

    corpus.build(str(text), 0, out)

    assert (out.stat().st_ino, out.stat().st_mtime_ns) == before


def test_tokens_of_other_text_are_not_taken_for_ours(tmp_path):
    text = fill(tmp_path / "text", a_txt="first")
    out = corpus.build(str(text), 0, tmp_path / "tokens")

    with pytest.raises(UsageError, match="start a new run"):
        corpus.build(str(text), 0.5, out)

    assert all_tokens(out) == [*b"first", corpus.END]


def test_an_unfinished_token_file_is_built_again(tmp_path):
    text = fill(tmp_path / "text", a_txt="first")
    out = corpus.build(str(text), 0, tmp_path / "tokens")
    sidecar(out).unlink()
    out.write_bytes(b"half")

    corpus.build(str(text), 0, out)

    assert all_tokens(out) == [*b"first", corpus.END]


def test_a_finished_token_file_that_was_cut_is_refused_not_replaced(tmp_path):
    text = fill(tmp_path / "text", a_txt="first")
    out = corpus.build(str(text), 0, tmp_path / "tokens")
    os.truncate(out, 4)

    with pytest.raises(UsageError, match="4 bytes"):
        corpus.build(str(text), 0, out)


def test_many_processes_at_once_build_it_one_time(tmp_path):
    text = fill(tmp_path / "text", a_txt="a" * 300_000)
    out = tmp_path / "tokens"
    code = (
        "import pathlib, sys\n"
        "from hpctrain.recipes.lm import corpus\n"
        "writes = []\n"
        "write = corpus.write_tokens\n"
        "corpus.write_tokens = lambda *a, **k: (writes.append(1), write(*a, **k))\n"
        "sys.stdin.read()\n"
        f"corpus.build({str(text)!r}, 0, pathlib.Path({str(out)!r}))\n"
        "print(len(writes))"
    )
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    builders = [subprocess.Popen(command, **pipes) for _ in range(6)]
    for builder in builders:
        builder.stdin.close()
        builder.stdin = None

    printed = [builder.communicate(timeout=PATIENCE_S)[0].strip() for builder in builders]

    assert sorted(printed) == ["0"] * 5 + ["1"]
    TokenFile(out).verify()


@pytest.mark.parametrize(
    ("folder", "limit_mb", "found"),
    [
        ("nowhere", 0, r"nowhere' \(train.data\) is not a folder"),
        ("text/a.txt", 0, r"a\.txt' \(train.data\) is not a folder"),
        ("other", 0, r"other \(train.data\) is text \(\.py, \.txt, \.md\)"),
        ("text", -1, r"train\.data_limit_mb is -1"),
    ],
)
def test_what_cannot_be_built_is_said_in_one_line(tmp_path, folder, limit_mb, found):
    fill(tmp_path / "text", a_txt="x")
    fill(tmp_path / "other", main_rs="x")

    with pytest.raises(UsageError, match=found) as refused:
        corpus.build(str(tmp_path / folder), limit_mb, tmp_path / "tokens")

    assert "\n" not in str(refused.value)
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize("n_sequences", [2, 3, 19, 20, 21, 1000, 12_345])
def test_the_last_twentieth_is_kept_for_validation(n_sequences):
    train, validation = corpus.split(n_sequences)

    assert train == validation.start
    assert validation.stop == n_sequences
    assert len(validation) == max(1, n_sequences // 20)


@pytest.mark.parametrize(("n_sequences", "global_batch"), [(0, 1), (1, 1), (32, 32), (0, 32)])
def test_too_little_text_for_one_batch_is_refused(n_sequences, global_batch):
    with pytest.raises(UsageError, match=r"too little text.*train\.data"):
        corpus.split(n_sequences, global_batch=global_batch)


def test_text_for_exactly_one_batch_is_enough():
    assert corpus.split(33, global_batch=32) == (32, range(32, 33))

"""Who does not know a run's secret says nothing that is believed."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpctrain.core.base.secret import CODE_LENGTH, Forged, code, is_code, new_secret, sign, verify
from hpctrain.errors import ChecksFailed
from hpctrain.ledger.run import ownership
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.ownership import renew_secret, start_secret
from tests.support.users import OWNER, STRANGER, run_as

SECRET = new_secret()


@pytest.mark.parametrize("value", ["", "x", '{"a": 1}', "\0", "\u20ac \ud7ff", "x" * 100_000])
def test_what_was_signed_is_read_as_it_was(value):
    assert verify(SECRET, "round/0/news/0", sign(SECRET, "round/0/news/0", value)) == value
    assert verify(SECRET, "k", sign(SECRET, "k", value).encode()) == value


@pytest.mark.parametrize(
    "given",
    [
        "",
        "value",
        b"\xff" * 100,
        "\u20ac" * CODE_LENGTH + "value",
        "0" * CODE_LENGTH + "value",
        sign(new_secret(), "about", "value"),
        sign(SECRET, "about something else", "value"),
        sign(SECRET, "about", "value") + "s",
        sign(SECRET, "about", "value")[:-1],
        sign(SECRET, "ab", "outvalue"),
    ],
    ids=itertools.count(),  # the same in each of pytest's workers, which a secret is not
)
def test_what_was_not_signed_so_is_refused(given):
    with pytest.raises(Forged):
        verify(SECRET, "about", given)


def test_words_are_told_apart_by_their_borders_and_kinds():
    codes = [("a", "bc"), ("ab", "c"), ("abc",), ("1",), (1,), ('a", "bc',), ()]

    assert len({code(SECRET, *words) for words in codes}) == len(codes)
    assert not is_code(None, SECRET, "a")
    assert not is_code(code(SECRET, "a").upper(), SECRET, "a")


def test_each_start_of_a_job_has_its_own(tmp_path):
    run = RunDir(tmp_path)
    starts = [("7", 0), ("7", 1), ("71", 0), ("8", 0)]

    found = {start_secret(run, *start) for start in starts}

    assert len(found) == len(starts)
    assert start_secret(run, "7", 0) in found
    assert run.secret.read_text().strip() not in found
    renew_secret(run)
    assert start_secret(run, "7", 0) not in found


def test_of_nodes_that_come_at_once_to_a_run_without_one_all_have_the_same(tmp_path):
    with ThreadPoolExecutor(16) as nodes:
        found = set(nodes.map(lambda _: start_secret(RunDir(tmp_path), "7", 0), range(200)))

    assert len(found) == 1
    assert RunDir(tmp_path).secret.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_one_that_others_know_or_can_set_is_none(tmp_path, mode):
    run = RunDir(tmp_path)
    renew_secret(run)
    run.secret.chmod(mode)

    with pytest.raises(ChecksFailed, match="is no secret; remove it"):
        start_secret(run, "7", 0)


@pytest.mark.parametrize("content", [b"", b"short\n", b"x" * 1000, b"\xff" * 200])
def test_a_file_that_holds_none_is_refused(tmp_path, hands, content):
    run = RunDir(tmp_path)
    renew_secret(run)
    run.secret.write_bytes(content)

    with pytest.raises(ChecksFailed, match="holds no secret"):
        start_secret(run, "7", 0)
    assert hands.passed_s == pytest.approx(ownership.WAIT_S, abs=1.0), "another may be writing it"


@pytest.mark.two_users
def test_another_user_neither_reads_a_runs_secret_nor_sets_it(common_path):
    runs = common_path / "runs"
    runs.mkdir(mode=0o777)
    runs.chmod(0o1777)
    code_text = (
        "import pathlib, sys; from hpctrain.ledger.run.layout import RunDir;"
        "from hpctrain.ledger.run.ownership import start_secret;"
        "print(start_secret(RunDir(pathlib.Path(sys.argv[1])), '7', 0))"
    )
    ask = [sys.executable, "-c", code_text, str(runs / "r")]
    run_as(OWNER, ["mkdir", str(runs / "r")])
    mine = run_as(OWNER, ask).stdout

    theirs = run_as(STRANGER, ask, check=False)
    os.chown(runs / "r" / "secret", STRANGER.uid, STRANGER.gid)
    planted = run_as(OWNER, ask, check=False)

    assert len(mine) == CODE_LENGTH + 1
    assert (theirs.returncode, theirs.stdout) == (1, "")
    assert (planted.returncode, planted.stdout) == (1, "")


def test_it_is_read_without_torch():
    loaded = subprocess.run(
        [sys.executable, "-c", "import hpctrain.core.base.secret, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()

    assert not {"torch", "numpy", "click"} & set(loaded)

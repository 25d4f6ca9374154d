"""`hpctrain report --nodes`: which nodes were found slow, over all runs."""

from __future__ import annotations

import json
import os
from datetime import datetime

import pytest

from hpctrain.cli.main import main
from tests.support.ledger_runs import Story
from tests.support.users import OWNER


@pytest.fixture
def runs(tmp_path):
    """Three runs, of which two found n7 slow."""
    for number, slow in enumerate(("n7", "n7", "")):
        told = Story(tmp_path / f"lm-{number}", t=1_763_700_000.0 + number)
        told.add("submitted", token="t", job_id="1", cluster="slurm")
        told.started(1, nodes=("n6", "n7"), slurm_cluster="alps").steps(1, 1, 10)
        if slow:
            told.add("straggler", 1, kind_of="node", ranks=[2, 3], nodes=[slow], by=0.11)
    return tmp_path


def table(capsys):
    out, err = capsys.readouterr()
    return [line.split() for line in out.splitlines()], err


def test_the_table_has_the_nodes_that_were_slow_of_all_runs_in_the_folder(runs, capsys):
    assert main(["report", "--nodes", "--runs", str(runs)]) == 0

    (_, row, last), err = table(capsys)
    day = datetime.fromtimestamp(1_763_700_005).astimezone().strftime("%Y-%m-%d")
    assert row == ["n7", "alps", "2", "of", "3", "2", "11", "%", day, "lm-1,", "lm-0"]
    assert " ".join(last) == "3 runs; 1 node besides served, and nobody found them slow"
    assert err == ""


def test_runs_that_are_named_count_alone(runs, capsys):
    assert main(["report", "--nodes", "lm-0", "lm-2", "--runs", str(runs), "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert (told["runs"], told["unread"], told["left_out"]) == (2, [], None)
    slow, well = told["nodes"]
    assert slow.pop("newest_t") > 0
    assert slow == {
        "cluster": "alps",
        "node": "n7",
        "served": 2,
        "slow": ["lm-0"],
        "findings": 1,
        "worst": 0.11,
    }
    assert (well["node"], well["served"], well["slow"], well["newest_t"]) == ("n6", 2, [], None)


def test_nobody_was_slow_in_no_run_at_all(tmp_path, capsys):
    assert main(["report", "--nodes", "--runs", str(tmp_path / "none")]) == 0

    assert capsys.readouterr().out == "0 runs; no node of a cluster has served in them\n"


def test_a_ledger_that_cannot_be_read_is_named_and_the_others_count(runs, capsys):
    (runs / "lm-2" / "events.jsonl").unlink()
    (runs / "lm-2" / "events.jsonl").mkdir()

    assert main(["report", "--nodes", "--runs", str(runs)]) == 0
    out, err = capsys.readouterr()
    assert "2 of 2" in out
    assert "1 folder that cannot be read, not counted" in err

    assert main(["report", "--nodes", "lm-0", "lm-2", "--runs", str(runs)]) == 0
    out, err = capsys.readouterr()
    assert "1 of 1" in out
    assert err.startswith(f"hpctrain: not counted: {runs / 'lm-2'}: ")


@pytest.mark.two_users
def test_what_another_user_has_put_there_counts_for_nothing_unless_it_is_named(runs, capsys):
    os.chown(runs / "lm-0", OWNER.uid, OWNER.gid)

    assert main(["report", "--nodes", "--runs", str(runs)]) == 0
    out, err = capsys.readouterr()
    assert "1 of 2" in out
    assert err == f"hpctrain: {runs} has besides 1 run of other users, not counted\n"

    assert main(["report", "--nodes", "lm-0", "--runs", str(runs)]) == 0
    assert "1 of 1" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--open", "-o=page.html"])
def test_what_asks_for_a_page_is_refused_beside_it(runs, capsys, flag):
    assert main(["report", "--nodes", *flag.split("="), "--runs", str(runs)]) == 2

    assert "--nodes prints a table and writes no page" in capsys.readouterr().err


def test_without_it_a_run_has_to_be_named(runs, capsys):
    assert main(["report", "--runs", str(runs)]) == 2

    said = "hpctrain: error: Missing argument 'RUN...'. See `hpctrain report --help`.\n"
    assert capsys.readouterr().err == said

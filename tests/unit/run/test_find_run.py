"""Which run is meant, by whatever a user may type."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.errors import NotFound
from hpctrain.ledger.run.find_run import find_run, look_into
from hpctrain.ledger.run.layout import runs_root
from tests.support.ledger_runs import Story, write_event


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """Three runs; the one submitted last is neither the last by name nor the last written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCTRAIN_RUNS", raising=False)
    root = tmp_path / "runs"
    Story(root / "lm-1", t=1000).submitted("17").started(1, "17").started(2, "17")
    Story(root / "lm-2", t=3000).submitted("18", "tok-2").submitted("19", "tok-3")
    Story(root / "vision", t=2000).submitted("170")
    (root / "notes").mkdir()
    (root / "file.txt").write_text("x")
    os.utime(root / "lm-2" / "events.jsonl", (1, 1))
    os.utime(root / "lm-2", (1, 1))
    return root


def test_a_name_means_that_run(runs):
    assert find_run("lm-1").root == runs / "lm-1"


@pytest.mark.parametrize(("job_id", "name"), [("17", "lm-1"), ("18", "lm-2"), ("170", "vision")])
def test_a_job_id_means_the_run_that_had_it_also_an_older_one(runs, job_id, name):
    assert find_run(job_id).name == name


def test_a_name_goes_before_a_job_id(runs):
    Story(runs / "17").submitted("999")
    assert find_run("17").name == "17"


def test_an_adopted_job_and_one_submitted_by_hand_are_found(runs):
    write_event(find_run("lm-1"), "submit_adopted", token="t", job_id="55")
    Story(runs / "by-hand").started(1, "56")
    assert find_run("55").name == "lm-1"
    assert find_run("56").name == "by-hand"


def test_a_unique_beginning_is_enough(runs):
    assert find_run("vis").name == "vision"


def test_an_ambiguous_beginning_is_refused_with_the_names(runs):
    with pytest.raises(NotFound, match=r"'lm' is not one run but 2: lm-2, lm-1"):
        find_run("lm")


def test_a_dash_means_the_newest_submission_not_the_newest_file(runs):
    assert find_run("-").name == "lm-2"
    write_event(find_run("vision"), "submitted", token="t", job_id="171")
    assert find_run("-").name == "vision"


def test_runs_are_listed_newest_submission_first_and_nothing_else_is_a_run(runs):
    assert [run.name for run in look_into(runs).runs] == ["lm-2", "vision", "lm-1"]


def test_a_path_means_the_run_there_wherever_it_lies(runs, tmp_path, monkeypatch):
    other = Story(tmp_path / "elsewhere" / "x").run
    assert find_run(str(other.root)).root == other.root
    assert find_run("elsewhere/x/").root == other.root
    assert find_run("./elsewhere/../elsewhere/x").root == other.root
    monkeypatch.chdir(other.root)
    assert find_run(".").root == other.root
    monkeypatch.chdir(other.root.parent)
    assert find_run("x", runs=runs).root == other.root


def test_a_path_to_something_else_says_what_is_missing(runs):
    with pytest.raises(NotFound, match="runs/notes is not a run's directory"):
        find_run("runs/notes")


def test_a_wrong_name_gets_the_nearest(runs):
    with pytest.raises(NotFound, match=r"no run or job 'visoin' in .*; did you mean vision\?"):
        find_run("visoin")


@pytest.mark.parametrize("text", ["zzzzzz", "99999", ""])
def test_a_name_near_to_none_gets_the_newest(runs, text):
    with pytest.raises(NotFound, match="the newest are lm-2, vision, lm-1"):
        find_run(text)


@pytest.mark.parametrize("text", ["-", "x"])
def test_a_folder_without_runs_says_so_and_how_to_name_another(tmp_path, text):
    with pytest.raises(NotFound, match=r"no runs in .*empty.*--runs DIR or HPCTRAIN_RUNS"):
        find_run(text, runs=tmp_path / "empty")


def test_the_folder_of_runs_is_the_option_then_the_environment_then_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCTRAIN_RUNS", raising=False)
    assert runs_root(None) == tmp_path / "runs"
    monkeypatch.setenv("HPCTRAIN_RUNS", "/scratch/runs")
    assert runs_root(None) == Path("/scratch/runs")
    assert runs_root("mine") == tmp_path / "mine"


def test_a_run_made_but_not_submitted_is_a_run(runs):
    Story(runs / "fresh")
    assert find_run("fresh").name == "fresh"
    assert look_into(runs).runs[-1].name == "fresh"

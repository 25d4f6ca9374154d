"""The user's index of runs: found from every folder, never needed, never in the way."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.errors import NotFound
from hpctrain.ledger.run import find_run as run_index
from hpctrain.ledger.run.find_run import IndexedRun, find_run, index_path, indexed, record
from hpctrain.ledger.run.layout import RunDir
from tests.support.ledger_runs import Story, local_job
from tests.support.users import OWNER, STRANGER, run_as


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """A folder without runs, in which commands are typed; the runs are in `project/runs`."""
    monkeypatch.delenv("HPCTRAIN_RUNS", raising=False)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


@pytest.fixture
def live(elsewhere, tmp_path) -> Story:
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    story = Story(tmp_path / "project" / "runs" / "lm").submitted("local-17")
    story.started(1, "local-17").restored(1).steps(1, 1, 50)
    record([IndexedRun(story.run, frozenset({"local-17"}))])
    return story


@pytest.fixture
def over(elsewhere, tmp_path) -> Story:
    story = (
        Story(tmp_path / "project" / "runs" / "old").submitted("local-16").started(1, "local-16")
    )
    story.add("done", 1, step=4)
    record([IndexedRun(story.run, frozenset({"local-16"}))])
    return story


def shown(capsys, *words: str) -> tuple[int, str]:
    code = main(["status", *words])
    out, err = capsys.readouterr()
    return code, out + err


@pytest.mark.parametrize("word", ["lm", "local-17"])
def test_a_name_and_a_job_id_are_found_from_every_folder(live, word):
    assert find_run(word) == live.run


def test_a_run_of_the_folder_goes_first_and_a_beginning_is_no_name_elsewhere(live, elsewhere):
    near = Story(elsewhere / "runs" / "lm").submitted("9")
    assert find_run("lm") == near.run
    near.run.root.rename(elsewhere / "runs" / "other")
    with pytest.raises(NotFound, match="no run or job 'l'"):
        find_run("l")
    assert find_run("lm") == live.run


def test_where_another_folder_was_named_no_other_one_counts(live, elsewhere):
    with pytest.raises(NotFound):
        find_run("lm", runs=elsewhere / "others")


def test_of_two_runs_of_a_name_elsewhere_none_is_taken(live, tmp_path):
    other = Story(tmp_path / "second" / "runs" / "lm").submitted("local-18")
    record([IndexedRun(other.run)])
    with pytest.raises(NotFound, match=f"one of several: {other.run.root}, {live.run.root}"):
        find_run("lm")


def test_status_lists_live_runs_of_all_folders_and_all_of_them_when_asked(live, over, capsys):
    code, text = shown(capsys)
    assert code == 0
    assert "lm " in text
    assert "old" not in text
    assert text.splitlines()[0].endswith("  in")
    assert [one.is_over for one in indexed() if one.run == over.run] == [True], "it was seen"

    assert "old " in shown(capsys, "--all")[1]
    runs = str(live.run.root.parent)
    assert "old " in shown(capsys, "--runs", runs)[1]
    assert shown(capsys, "--all", "--runs", runs)[0] == 2


def test_where_all_are_over_the_way_to_them_is_named(over, capsys):
    assert "no runs in" in shown(capsys)[1]
    assert "`hpctrain status --all` lists those of other folders" in shown(capsys)[1]
    assert "old " in shown(capsys, "--all")[1]


def test_a_run_that_is_over_is_looked_at_once(live, over, capsys):
    shown(capsys)
    over.run.events.unlink()
    over.run.events.mkdir()  # reading it fails
    assert shown(capsys)[0] == 0


def test_a_run_of_the_folder_that_the_index_lacks_is_added_with_its_job(live, capsys, elsewhere):
    index_path().unlink()
    os.chdir(live.run.root.parents[1])
    shown(capsys)
    os.chdir(elsewhere)
    assert find_run("local-17") == live.run
    before = index_path().read_bytes()
    os.chdir(live.run.root.parents[1])
    shown(capsys)
    assert index_path().read_bytes() == before, "once"


def test_a_run_that_goes_on_after_its_end_is_live_again(over, capsys):
    shown(capsys)
    record([IndexedRun(over.run, frozenset({"local-20"}))])
    [one] = indexed()
    assert (one.is_over, one.jobs) == (False, {"local-16", "local-20"})


@pytest.mark.parametrize("parent", [".rehearsal-1", "evaluations"])
def test_runs_that_soon_go_and_runs_of_a_run_are_not_in_it(live, tmp_path, parent):
    inside = Story(live.run.root / parent / "it").submitted("1")
    record([IndexedRun(inside.run)])
    assert [one.run for one in indexed()] == [live.run]


def test_a_run_that_is_gone_and_lines_that_are_none_are_passed_over(live, over):
    over.run.spec.unlink()
    over.run.events.unlink()
    with index_path().open("ab") as file:
        file.write(b'\n[]\n{"dir": 3}\n{"dir": "rel"}\n\xff\xfe\n{"t": 1, "dir": "/torn')
    record([IndexedRun(live.run, frozenset({"18"}))])
    assert [(one.run, one.jobs) for one in indexed()] == [(live.run, {"local-17", "18"})]


def test_a_link_to_a_folder_makes_no_second_run(live, tmp_path):
    (tmp_path / "link").symlink_to(live.run.root.parent)
    record([IndexedRun(RunDir(tmp_path / "link" / "lm"))])
    assert len(indexed()) == 1


def test_only_the_newest_of_a_long_index_are_looked_for(live, monkeypatch):
    monkeypatch.setattr(run_index, "MOST_RUNS", 1)
    record([IndexedRun(RunDir(Path("/gone")))])
    assert indexed() == []


def no_room(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("state", ["/proc/none", "full", "link"])
def test_an_index_that_cannot_be_written_or_read_stops_nothing(
    live, tmp_path, monkeypatch, capsys, state
):
    if state == "full":
        monkeypatch.setattr(run_index.os, "write", no_room)
    elif state == "link":  # another one's file, or a pipe
        index_path().rename(tmp_path / "moved")
        index_path().symlink_to(tmp_path / "nothing")
    else:
        monkeypatch.setenv("XDG_STATE_HOME", state)
    os.chdir(live.run.root.parents[1])

    record([IndexedRun(live.run)])

    assert shown(capsys)[0] == 0
    assert not (tmp_path / "nothing").exists()


def test_submit_and_resume_write_it(elsewhere, monkeypatch):
    (elsewhere / "train.py").write_text("print('hi')\n")
    submitted = ["submit", "--cluster", "local", "--name", "mine", "--no-submit", "--", "train.py"]
    assert main(submitted) == 0
    assert indexed() == []
    monkeypatch.setattr(
        "hpctrain.cluster.scheduler.local.LocalCluster.submit", lambda *_: "local-5"
    )
    assert main(["resume", "mine"]) == 0
    [line] = [json.loads(line) for line in index_path().read_text().split("\n") if line]
    assert (line["dir"], line["jobs"]) == (str(elsewhere / "runs" / "mine"), ["local-5"])
    assert index_path().stat().st_mode & 0o777 == 0o600


WRITES = """
from pathlib import Path
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.find_run import IndexedRun, indexed, record
record([IndexedRun(RunDir(Path("/gone")))])
print(len(indexed()))
"""


@pytest.mark.two_users
def test_another_user_leaves_no_file_in_a_home_that_is_not_his(common_path):
    """As under sudo, which keeps HOME; and what others have written there is not read."""
    home = common_path / "home"
    home.mkdir()
    home.chmod(0o777)
    os.chown(home, OWNER.uid, OWNER.uid)
    command = [sys.executable, "-c", WRITES]
    run_as(STRANGER, command, XDG_STATE_HOME=str(home))
    assert list(home.iterdir()) == []
    run_as(OWNER, command, XDG_STATE_HOME=str(home))
    written = (home / "hpctrain" / "runs.jsonl").read_text()
    assert written.count("/gone") == 1
    run_as(STRANGER, command, XDG_STATE_HOME=str(home))
    assert (home / "hpctrain" / "runs.jsonl").read_text() == written


@pytest.mark.two_users
def test_an_index_that_another_has_written_is_not_read(live):
    assert len(indexed()) == 1
    os.chown(index_path(), OWNER.uid, OWNER.gid)
    assert indexed() == []


@pytest.mark.two_users
def test_another_users_run_in_the_folder_is_not_in_my_index(live, capsys):
    theirs = Story(live.run.root.parent / "theirs").submitted("9")
    os.chown(theirs.run.root, OWNER.uid, OWNER.gid)
    os.chdir(live.run.root.parents[1])
    shown(capsys)
    assert "theirs" not in index_path().read_text()


def test_a_run_of_the_folder_is_listed_once(live, capsys):
    os.chdir(live.run.root.parents[1])
    assert sum(line.startswith("lm ") for line in shown(capsys)[1].splitlines()) == 1


def test_a_line_with_a_relative_path_means_no_run_of_this_folder(live, elsewhere):
    Story(elsewhere / "runs" / "near").submitted("9")
    with index_path().open("a") as file:
        file.write("\n" + json.dumps({"dir": "runs/near", "jobs": []}))
    assert [one.run for one in indexed()] == [live.run]

"""Whose run is it: what others own or can write is neither meant by a prefix nor carried out."""

from __future__ import annotations

import os
import sys
import time

import pytest

from hpctrain.cli.main import main
from hpctrain.errors import ChecksFailed, UsageError
from hpctrain.ledger.run.find_run import find_run
from hpctrain.ledger.run.ownership import (
    distrust,
    job_spec,
    own_spec,
    refuse_foreign,
    refuse_planted,
)
from tests.support.ledger_runs import Story
from tests.support.users import OWNER, STRANGER, run_as

HPCTRAIN = [sys.executable, "-m", "hpctrain"]


@pytest.fixture
def run(tmp_path):
    """A run of this user's that nobody else can write."""
    run = Story(tmp_path / "runs" / "lm").submitted().run
    (run.root / "snapshot").mkdir(mode=0o755)
    run.jobs.mkdir(mode=0o755)
    for path in (run.root, run.spec):
        path.chmod(path.stat().st_mode & ~0o022)
    return run


def test_an_own_run_is_trusted(run):
    assert own_spec(run, named="lm").name == "lm"


@pytest.mark.parametrize("part", ["", "spec.json", "snapshot", "jobs"])
@pytest.mark.parametrize(("bit", "who"), [(0o020, "its group"), (0o002, "every user")])
def test_a_run_that_others_can_write_is_refused(run, part, bit, who):
    path = run.root / part
    path.chmod(path.stat().st_mode | bit)
    with pytest.raises(ChecksFailed, match=rf"{path} can be written by {who}.*chmod -R go-w"):
        own_spec(run, named="lm")


def test_a_command_without_the_flag_does_not_offer_it(run):
    run.spec.chmod(0o666)
    with pytest.raises(ChecksFailed) as refused:
        own_spec(run, named="lm")
    assert "--foreign" not in str(refused.value)
    with pytest.raises(ChecksFailed, match="with --foreign"):
        own_spec(run, named="lm", foreign=False)


def test_a_foreign_run_is_taken_by_its_path_and_the_flag_alone(run):
    run.root.chmod(0o777)
    with pytest.raises(UsageError, match=f"--foreign takes the run's path, not 'lm': {run.root}"):
        own_spec(run, named="lm", foreign=True)
    assert own_spec(run, named=str(run.root), foreign=True).name == "lm"


def test_a_time_in_the_future_counts_as_the_files(tmp_path):
    Story(tmp_path / "ahead", t=9e9).submitted()
    Story(tmp_path / "newest", t=time.time() - 50).submitted()
    os.utime(tmp_path / "ahead" / "events.jsonl", (1000, 1000))
    assert find_run("-", runs=tmp_path).name == "newest"


@pytest.mark.two_users
def test_a_job_runs_foreign_code_only_where_its_user_has_asked_for_it(run):
    (run.root / "snapshot").chmod(0o700)
    os.chown(run.snapshot, OWNER.uid, OWNER.gid)
    with pytest.raises(ChecksFailed, match=f"belongs to user {OWNER.uid}"):
        job_spec(run)
    own_spec(run, named=str(run.root), foreign=True).dump(run.spec)
    assert job_spec(run).name == "lm"
    os.chown(run.snapshot, os.geteuid(), os.getegid())
    own_spec(run, named="lm").dump(run.spec)
    os.chown(run.snapshot, OWNER.uid, OWNER.gid)
    with pytest.raises(ChecksFailed):
        job_spec(run)


@pytest.mark.two_users
def test_a_planted_run_is_neither_the_newest_nor_resumed(common_path):
    runs = common_path / "runs"
    runs.mkdir()
    runs.chmod(0o1777)
    payload = common_path / "payload.sh"
    payload.write_text(f"#!/bin/sh\nid -u > {common_path}/ran\n")
    payload.chmod(0o755)
    for name, user, t in (("mine", OWNER, 1e9), ("zz", STRANGER, 9e9)):
        story = (
            Story(runs / name, t=t)
            .submitted("17", f"{name}-1")
            .started(1, "17")
            .ended(1, "crashed", "stop")
        )
        spec = story.run.spec
        spec.write_text(spec.read_text().replace('"python": ""', f'"python": "{payload}"'))
        for path in (story.run.root, *story.run.root.iterdir()):
            os.chown(path, user.uid, user.gid)
    common_path.chmod(0o777)

    for text, code in (("-", 0), ("z", 4), ("17", 0)):
        told = run_as(OWNER, [*HPCTRAIN, "status", text, "--runs", str(runs)], check=False)
        assert told.returncode == code, told
        assert "mine" in told.stdout + told.stderr
        assert "zz" not in told.stdout + told.stderr
    for words in (["resume", "zz"], ["cancel", str(runs / "zz")], ["profile", "zz", "--now"]):
        told = run_as(OWNER, [*HPCTRAIN, *words, "--runs", str(runs)], check=False)
        assert told.returncode == 3, told
        assert f"{runs}/zz belongs to user {STRANGER.uid}" in told.stderr
    assert not (common_path / "ran").exists()


@pytest.fixture
def shared(common_path):
    """Where everybody may put files, and the owner has a script."""
    work = common_path / "work"
    work.mkdir()
    work.chmod(0o1777)
    (work / "train.py").write_text("print()\n")
    os.chown(work / "train.py", OWNER.uid, OWNER.gid)
    return work


def dry_run(work, *words):
    told = [*HPCTRAIN, "submit", "--cluster=local", "--no-submit", "--name=r", *words, "train.py"]
    return run_as(OWNER, told, cwd=work, check=False, HPCTRAIN_RUNS=str(work / "runs"))


@pytest.mark.two_users
def test_settings_that_another_has_put_there_count_only_where_they_are_named(shared):
    name, flag = "hpctrain.toml", "--config"
    (shared / name).write_text(f'[slurm]\nsetup = ["touch {shared / "ran"}"]\n')
    os.chown(shared / name, STRANGER.uid, STRANGER.gid)

    refused = dry_run(shared)

    assert refused.returncode == ChecksFailed.exit_code, refused
    assert refused.stderr.count("\n") == 1
    assert f"{shared / name} belongs to user {STRANGER.uid}, and it would decide" in refused.stderr
    assert flag in refused.stderr
    assert not (shared / "runs").exists()
    taken = dry_run(shared, f"{flag}=./{name}")
    assert taken.returncode == 0, taken.stderr


@pytest.mark.two_users
def test_a_link_that_another_has_made_chooses_no_settings(shared, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text("")
    link = shared / "hpctrain.toml"
    link.symlink_to(own)
    assert distrust(link, group=True, roots=True) == ""
    os.chown(link, STRANGER.uid, STRANGER.gid, follow_symlinks=False)
    with pytest.raises(ChecksFailed, match=rf"{link} is a link, which belongs to "):
        refuse_planted(link, flag="--config hpctrain.toml")


CHANGES = {
    "report": ["report", "{run}"],
    "pin": ["checkpoints", "pin", "{run}", "10"],
    "unpin": ["checkpoints", "pin", "{run}", "10", "--remove"],
    "rm": ["checkpoints", "rm", "{run}", "10"],
    "prune": ["checkpoints", "prune", "{run}"],
    "import": ["checkpoints", "import", "{run}", "--run", "{run}", "--step", "1"],
    "rm run": ["rm", "{run}", "--yes"],
    "local": ["local", "preempt", "{run}"],
}


@pytest.mark.two_users
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_a_run_is_refused_for_another_users(run, name, capsys):
    before = sorted(run.root.rglob("*"))
    os.chown(run.root, STRANGER.uid, STRANGER.gid)

    assert main([word.format(run=run.root) for word in CHANGES[name]]) == 3

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hpctrain: error: {run.root} belongs to ")
    assert "who alone may change it" in line
    assert sorted(run.root.rglob("*")) == before


@pytest.mark.two_users
def test_a_page_on_another_users_run_goes_into_a_file_of_ones_own(run, tmp_path, capsys):
    os.chown(run.root, STRANGER.uid, STRANGER.gid)
    page = tmp_path / "page.html"

    assert main(["report", str(run.root)]) == 3
    assert capsys.readouterr().err.endswith("; name a file of your own for the page: -o FILE\n")
    assert main(["report", str(run.root), "-o", str(page)]) == 0
    assert page.exists()


@pytest.mark.two_users
def test_a_run_that_its_group_may_change_is_its_groups(run):
    os.chown(run.root, STRANGER.uid, os.getegid())
    run.root.chmod(0o755)
    with pytest.raises(ChecksFailed, match="who alone may change it"):
        refuse_foreign(run)
    run.root.chmod(0o775)
    refuse_foreign(run)
    with pytest.raises(ChecksFailed, match="who alone may change it"):
        refuse_foreign(run, group=False)


@pytest.mark.two_users
def test_settings_that_all_can_write_are_not_taken_and_those_of_admins_are(shared):
    (shared / "hpctrain.toml").write_text("[run]\nlog_every_s = 1.0\n")
    assert dry_run(shared).returncode == 0  # root's
    (shared / "hpctrain.toml").chmod(0o666)
    refused = dry_run(shared)
    assert refused.returncode == ChecksFailed.exit_code
    assert "can be written by every user" in refused.stderr

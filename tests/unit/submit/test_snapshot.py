"""The code that runs is the code that was submitted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpctrain.core.settings.schema import Settings
from hpctrain.core.settings.spec import Entry, Spec, load_spec
from hpctrain.errors import ChecksFailed, UsageError
from hpctrain.launch import snapshot
from hpctrain.ledger.run.layout import RunDir


def git(folder, *arguments):
    who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "protocol.file.allow=always")
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def make_checkout(root):
    (root / "lib").mkdir(parents=True)
    (root / "train.py").write_text("print('committed')\n")
    (root / "lib" / "model.py").write_text("SIZE = 1\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return root


@pytest.fixture
def checkout(tmp_path):
    return make_checkout(tmp_path / "code")


@pytest.fixture
def run(tmp_path):
    root = tmp_path / "runs" / "r-1"
    root.mkdir(parents=True)
    return RunDir(root)


def spec_for(script, cwd="/"):
    entry = Entry(kind="script", path=str(script), cwd=str(cwd))
    return Spec("r-1", "id", 0.0, "local", "", entry, Settings())


def take(run, script, mode="auto"):
    spec = spec_for(script)
    plan = snapshot.plan_snapshot(spec.entry, mode)
    assert plan.checkout is not None, plan.notes
    snapshot.take_snapshot(run, spec, plan.checkout)
    return spec, plan


def copied(run):
    return {str(p.relative_to(run.snapshot)) for p in run.snapshot.rglob("*") if not p.is_dir()}


def test_uncommitted_edits_are_copied_and_untracked_files_are_not(checkout, run):
    (checkout / "train.py").write_text("print('edited')\n")
    (checkout / "token.txt").write_text("secret")
    (checkout / "helper.py").write_text("x = 1\n")

    spec, plan = take(run, checkout / "train.py")

    assert copied(run) == {"train.py", "lib/model.py", "run.sh"}
    assert (run.snapshot / "train.py").read_text() == "print('edited')\n"
    assert spec.entry.path == str(run.snapshot / "train.py")
    assert spec.entry.cwd == "/"
    assert spec.snapshot is not None
    assert spec.snapshot.commit == git(checkout, "rev-parse", "HEAD")
    assert spec.snapshot.dirty
    assert spec.snapshot.files == 3
    assert [note for note in plan.notes if "helper.py" in note and "token" not in note]


def test_later_edits_do_not_reach_the_copy_and_modes_stay(checkout, run):
    spec, _ = take(run, checkout / "train.py")
    (checkout / "lib" / "model.py").write_text("SIZE = 2\n")

    assert (run.snapshot / "lib" / "model.py").read_text() == "SIZE = 1\n"
    assert os.access(run.snapshot / "run.sh", os.X_OK)
    assert spec.snapshot is not None
    assert not spec.snapshot.dirty


def test_spec_json_keeps_what_was_copied(checkout, run):
    spec, _ = take(run, checkout / "train.py")
    spec.dump(run.spec)

    assert load_spec(run.spec) == spec


def test_a_deleted_tracked_file_is_left_out_and_counts_as_an_edit(checkout, run):
    (checkout / "run.sh").unlink()

    spec, _ = take(run, checkout / "train.py")

    assert copied(run) == {"train.py", "lib/model.py"}
    assert spec.snapshot is not None
    assert spec.snapshot.dirty


def test_a_checkout_without_a_commit_is_copied_too(tmp_path, run):
    root = tmp_path / "new"
    root.mkdir()
    (root / "train.py").write_text("")
    git(root, "init", "-q")
    git(root, "add", ".")

    spec, _ = take(run, root / "train.py")

    assert spec.snapshot is not None
    assert (spec.snapshot.commit, spec.snapshot.dirty) == ("", True)


def test_submodules_are_copied(tmp_path, checkout, run):
    other = make_checkout(tmp_path / "other")
    git(checkout, "submodule", "--quiet", "add", str(other), "dep")

    take(run, checkout / "train.py")

    assert "dep/lib/model.py" in copied(run)


def test_names_that_git_would_quote_are_copied(checkout, run):
    name = 'na"me \u00e9\n.py'
    (checkout / name).write_text("")
    git(checkout, "add", ".")

    take(run, checkout / "train.py")

    assert name in copied(run)


def test_links_keep_their_meaning(tmp_path, checkout, run):
    data = tmp_path / "data"
    data.mkdir()
    (checkout / "same.py").symlink_to("train.py")
    (checkout / "whole.py").symlink_to(checkout / "train.py")
    (checkout / "data").symlink_to("../data")
    git(checkout, "add", ".")

    take(run, checkout / "train.py")

    assert (run.snapshot / "same.py").resolve() == run.snapshot / "train.py"
    assert (run.snapshot / "whole.py").resolve() == run.snapshot / "train.py"
    assert (run.snapshot / "data").resolve() == data


def test_a_script_reached_through_a_link_is_found_in_its_checkout(tmp_path, checkout, run):
    (tmp_path / "home").symlink_to(tmp_path)

    spec, _ = take(run, tmp_path / "home" / "code" / "train.py")

    assert spec.entry.path == str(run.snapshot / "train.py")


def test_import_path_entries_of_the_checkout_move_into_the_copy(tmp_path, checkout, run):
    venv = checkout / ".venv"
    venv.mkdir()
    take(run, checkout / "train.py")
    entries = [str(checkout), str(checkout / "lib"), str(venv), str(tmp_path), "", str(checkout)]

    moved = snapshot.remap_path(entries, checkout, run.snapshot)

    assert moved == [str(run.snapshot), str(run.snapshot / "lib")]


def test_the_programs_own_folder_is_no_import_path_of_the_users(tmp_path):
    code = "from hpctrain.launch.snapshot import import_path; print(*import_path(), sep='\\n')"
    env = {**os.environ, "PYTHONPATH": "/from/pythonpath"}

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )

    entries = done.stdout.split("\n")
    assert "/from/pythonpath" in entries
    assert "" not in entries[:-1]
    assert str(tmp_path) not in entries


def test_the_recipe_and_no_snapshot_copy_nothing(checkout):
    script = spec_for(checkout / "train.py").entry

    assert snapshot.plan_snapshot(script, "no") == snapshot.SnapshotPlan(None, [])
    assert snapshot.plan_snapshot(Entry(kind="recipe"), "auto") == snapshot.SnapshotPlan(None, [])


def test_copies_in_runs_are_no_files_that_one_should_add(checkout):
    """From the second run on, `git add runs/first/snapshot/train.py` was the advice."""
    inside = checkout / "runs" / "first" / "snapshot"
    inside.mkdir(parents=True)
    (inside / "train.py").write_text("")
    (inside.parent / "spec.json").write_text("{}")
    (checkout / "own.py").write_text("")

    [note] = snapshot.plan_snapshot(spec_for(checkout / "train.py").entry, "auto").notes

    assert "own.py" in note
    assert "runs/" not in note


def test_an_untracked_script_runs_from_where_it_is_and_this_is_said(checkout):
    (checkout / "new.py").write_text("")

    plan = snapshot.plan_snapshot(spec_for(checkout / "new.py").entry, "auto")

    assert plan.checkout is None
    assert len(plan.notes) == 1
    assert "git does not track new.py" in plan.notes[0]


def test_a_large_checkout_is_copied_only_on_request(checkout):
    with (checkout / "big.bin").open("wb") as file:
        file.truncate(snapshot.MAX_AUTO_BYTES)
    git(checkout, "add", ".")
    entry = spec_for(checkout / "train.py").entry

    plan = snapshot.plan_snapshot(entry, "auto")

    assert plan.checkout is None
    assert "over 64" in plan.notes[0]
    assert snapshot.plan_snapshot(entry, "yes").checkout is not None


def test_without_a_checkout_auto_is_silent_and_yes_is_refused(tmp_path):
    (tmp_path / "train.py").write_text("")
    entry = spec_for(tmp_path / "train.py").entry

    assert snapshot.plan_snapshot(entry, "auto") == snapshot.SnapshotPlan(None, [])
    with pytest.raises(UsageError, match=r"--snapshot: .* is not inside a git checkout"):
        snapshot.plan_snapshot(entry, "yes")
    with pytest.raises(UsageError, match="the shipped recipe is no script"):
        snapshot.plan_snapshot(Entry(kind="recipe"), "yes")


def test_a_git_hooks_variables_do_not_lead_to_another_checkout(tmp_path, checkout, monkeypatch):
    other = make_checkout(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))

    found = snapshot.find_checkout(checkout)

    assert found is not None
    assert found.root == checkout


def test_a_copy_that_cannot_be_written_is_told_in_one_line(checkout, run):
    run.snapshot.write_text("in the way")
    plan = snapshot.plan_snapshot(spec_for(checkout / "train.py").entry, "auto")
    assert plan.checkout is not None

    with pytest.raises(ChecksFailed, match=r"the code cannot be copied to .*; make room") as caught:
        snapshot.take_snapshot(run, spec_for(checkout / "train.py"), plan.checkout)

    assert "\n" not in str(caught.value)


def test_nobody_is_to_add_the_python_of_an_environment_to_git(tmp_path):
    root = tmp_path / "work"
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / ".venv" / "bin" / "python").write_text("#!/bin/sh\n")
    (root / "train.py").write_text("")
    git(root, "init", "-q")
    git(root, "add", "train.py")
    entry = Entry("program", path=str(root / ".venv" / "bin" / "python"), cwd=str(root))

    [note] = snapshot.plan_snapshot(entry, "auto").notes

    assert "git does not track python, and later edits of what it runs count" in note
    assert "git add" not in note

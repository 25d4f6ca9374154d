"""What the batch script's last act reads of a start in a container, and what it removes."""

from __future__ import annotations

import os
import tempfile

from hpctrain.core.base import locks
from hpctrain.entry import slurm_after
from hpctrain.entry.slurm_after import last_words
from tests.unit.base.test_locks import killed_with

STEP = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-23T06:00:00 ***"


def test_the_last_words_are_the_tasks_own(tmp_path):
    logs = tmp_path / "to[k]"
    (tmp_path / "to[k]-0.out").write_text(f"starting\n{STEP}\n")
    (tmp_path / "to[k]-1.out").write_text(f"\x00\nFATAL: no image\n\n{STEP}\n")
    (tmp_path / "tok-0.out").write_text("another's\n")

    assert last_words(logs, since=None) == "starting"
    (tmp_path / "to[k]-0.out").write_text(f"{STEP}\n")
    assert last_words(logs, since=None) == "FATAL: no image"


def test_an_earlier_starts_words_and_none_are_told_apart(tmp_path):
    log = tmp_path / "tok-0.out"
    log.write_text("of the start before\n")
    os.utime(log, (100, 100))

    assert last_words(tmp_path / "tok", since=99.0) == "of the start before"
    assert "left no word in" in last_words(tmp_path / "tok", since=200.0)
    assert "left no word in" in last_words(tmp_path / "gone", since=None)


def test_where_no_task_came_so_far_srun_has_the_word(tmp_path):
    (tmp_path / "tok.out").write_text(
        "hpctrain: warning: of the batch script\n"
        "srun: unrecognized option '--container-image=x'\n"
        'Try "srun --help" for more information\n'
        "srun: error: n1: task 0: Exited with exit code 1\n"
    )

    assert last_words(tmp_path / "tok", since=None) == (
        "srun: unrecognized option '--container-image=x'"
    )


def test_an_image_with_an_older_python_is_told_by_what_it_does_not_know(tmp_path):
    usage = "usage: python3 [option] ... [-c cmd | -m mod | file | -] [arg] ..."
    words = f"Unknown option: -P\n{usage}\nTry `python -h' for more information.\n"
    (tmp_path / "tok-0.out").write_text(words)

    assert last_words(tmp_path / "tok", since=None) == "Unknown option: -P"


def test_of_a_long_log_the_end_is_read(tmp_path):
    (tmp_path / "tok-0.out").write_bytes(b"x" * 100_000 + b"\nthe end\xff\n")

    assert last_words(tmp_path / "tok", since=None) == "the end\ufffd"


def test_folders_of_agents_that_were_killed_on_this_node_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(locks, "MEMORY", tmp_path)
    monkeypatch.setattr(slurm_after, "finish", lambda *_: 3)
    killed_with(tmp_path)
    assert list(tmp_path.iterdir())

    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    code = slurm_after.after(str(tmp_path / "run"), "", rc=3, term=False, env=env)

    assert code == 3
    assert list(tmp_path.iterdir()) == []

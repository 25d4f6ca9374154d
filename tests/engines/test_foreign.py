"""Programs that are no Python of ours, and modules: real local runs, as a user starts them."""

from __future__ import annotations

from tests.support import patience
from tests.support.local_runs import await_end, events, hpctrain, start

SHOW = """#!/bin/bash
echo "$RANK of $WORLD_SIZE, local $LOCAL_RANK of $LOCAL_WORLD_SIZE, $# words: $1"
[ -n "$MASTER_ADDR" ] && [ -n "$MASTER_PORT" ] && touch "met-$RANK"
"""
FAILS = """#!/bin/bash
echo "reading the data"
echo "data.bin: no such file" >&2
exit 3
"""
KILLED = """#!/bin/bash
[ "$RANK" = 1 ] || exec sleep 600
[ -e again ] && exit 0
touch again
kill -KILL $$
"""
SAVES = """#!/bin/bash
# Rank 0 saves at SIGTERM, which takes it a while; all others die of it at once.
[ -e "saved" ] && { touch "back-$RANK"; exit 0; }
if [ "$RANK" = 0 ]; then
    save() { sleep 1; echo step 7 > saved; exit 0; }
    trap save TERM
fi
touch "ready-$RANK"
while :; do sleep 0.1; done
"""
LEAVES_CHILD = """#!/bin/bash
# No trap: the shell dies of SIGTERM, and what it has started saves.
[ -e saved ] && exit 0
python3 -c '
import pathlib, signal, time
def save(*_):
    time.sleep(1)
    pathlib.Path("saved").write_text("yes")
    raise SystemExit
signal.signal(signal.SIGTERM, save)
pathlib.Path("ready-0").touch()
while True:
    time.sleep(0.1)
'
exit 0
"""


def script(folder, name, text):
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return f"./{name}"


def log(run, rank, attempt=1):
    return (run / "attempts" / f"{attempt:04d}" / f"rank-{rank:05d}.log").read_text()


def await_files(folder, *names):
    patience.until(
        lambda: all((folder / name).exists() for name in names),
        lambda: sorted(path.name for path in folder.iterdir()),
    )


def test_a_shell_script_is_a_rank_with_torchruns_environment(tmp_path):
    run = start(tmp_path, "r", 1, 2, "--", script(tmp_path, "show.sh", SHOW), "a b", "c")

    assert await_end(run)["reason"] == "completed"
    assert log(run, 0) == "0 of 2, local 0 of 2, 2 words: a b\n"
    assert log(run, 1) == "1 of 2, local 1 of 2, 2 words: a b\n"
    assert (tmp_path / "met-0").exists()
    assert (tmp_path / "met-1").exists()


def test_a_module_runs_as_python_m_runs_it(tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "util.py").write_text("WHAT = 'relative'\n")
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "import sys\nimport beside\nfrom . import util\n"
        "print(util.WHAT, beside.WHAT, __name__, __package__, *sys.argv)\n"
    )
    (tmp_path / "beside.py").write_text("WHAT = 'beside'\n")
    run = start(tmp_path, "r", 1, 1, "--", "-m", "pkg.train", "--lr", "1")

    assert await_end(run)["reason"] == "completed"
    assert log(run, 0) == f"relative beside __main__ pkg {package}/train.py --lr 1\n"


def test_a_launchers_command_runs_as_that_launcher_would(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ['ACCELERATE_MIXED_PRECISION'])\n"
    )
    by_deepspeed = ["srun", "deepspeed", "--num_gpus", "2", "train.py", "--deepspeed"]
    mixed = ["--env", "ACCELERATE_MIXED_PRECISION=bf16"]
    run = start(tmp_path, "r", 1, 2, *mixed, "--", *by_deepspeed)

    assert await_end(run)["reason"] == "completed"
    assert log(run, 0) == "['--local_rank=0', '--deepspeed'] bf16\n"
    assert log(run, 1) == "['--local_rank=1', '--deepspeed'] bf16\n"

    by_accelerate = ["accelerate", "launch", "--mixed_precision", "fp16", "train.py"]
    run = start(tmp_path, "r2", 1, 1, "--", *by_accelerate)

    assert await_end(run)["reason"] == "completed"
    assert log(run, 0) == "[] fp16\n"


def test_an_exit_code_is_told_with_what_the_program_said_last(tmp_path):
    run = start(tmp_path, "r", 1, 2, "--", script(tmp_path, "fails.sh", FAILS))

    assert await_end(run)["reason"] == "user_error"
    (failure,) = events(run, "failure")
    assert (failure["kind_of"], failure["summary"]) == ("exit", "fails.sh: exit code 3")
    assert failure["traceback"].splitlines()[-1] == "data.bin: no such file"
    assert "fails.sh: exit code 3" in hpctrain(tmp_path, "status", "r")


def test_a_killed_program_is_a_crash_and_its_rank_starts_again(tmp_path):
    run = start(tmp_path, "r", 1, 2, "--", script(tmp_path, "killed.sh", KILLED))
    ended = await_end(run)
    hpctrain(tmp_path, "cancel", "r")

    assert (ended["reason"], ended["next"]) == ("crashed", "restart")
    (failure, *_) = events(run, "failure")
    assert failure["rank"] == 1
    assert failure["summary"].startswith("killed.sh: killed by SIGKILL")


def test_what_cannot_be_started_is_told_in_a_line(tmp_path):
    name = script(tmp_path, "odd.sh", "#!/nowhere/sh\n")
    run = start(tmp_path, "r", 1, 1, "--", name)

    assert await_end(run)["reason"] == "user_error"
    (failure,) = events(run, "failure")
    assert failure["summary"].startswith("odd.sh: cannot be started: No such file")


def test_a_preempted_shell_script_saves_while_the_other_ranks_die_and_comes_back(tmp_path):
    run = start(tmp_path, "r", 1, 2, "--", "bash", script(tmp_path, "saves.sh", SAVES))
    await_files(tmp_path, "ready-0", "ready-1")
    hpctrain(tmp_path, "local", "preempt", "r", "--leave", "1", "--grace", "20")

    assert await_end(run, 2)["reason"] == "completed"
    assert [event["reason"] for event in events(run, "attempt_ended")] == ["preempted", "completed"]
    assert (tmp_path / "saved").read_text() == "step 7\n"
    assert (tmp_path / "back-0").exists()
    assert not events(run, "failure")


def test_what_a_shell_leaves_behind_at_a_stop_may_save(tmp_path):
    run = start(tmp_path, "r", 1, 1, "--", script(tmp_path, "leaves.sh", LEAVES_CHILD))
    await_files(tmp_path, "ready-0")
    hpctrain(tmp_path, "local", "preempt", "r", "--leave", "1", "--grace", "20")

    assert await_end(run, 2)["reason"] == "completed"
    assert [event["reason"] for event in events(run, "attempt_ended")] == ["preempted", "completed"]
    assert (tmp_path / "saved").exists()

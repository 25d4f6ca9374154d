"""`hpctrain submit` shows, makes and submits; what is refused leaves nothing behind."""

from __future__ import annotations

import json
import sys

import pytest

from hpctrain.cli.main import main
from hpctrain.cli.progress import progress
from hpctrain.core.settings.spec import load_spec
from hpctrain.launch import environment_archive, launch
from tests.support.memory import entries


@pytest.fixture
def work(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text("print('hi')\n")
    monkeypatch.chdir(folder)
    for name in ("HPCTRAIN_RUNS", "HPCTRAIN_SITE", "HPCTRAIN_SITE_PATH"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Put an sbatch of the test's own before everything else on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def install(body):
        (folder / "sbatch").write_text(f"#!/bin/sh\n{body}\n")
        (folder / "sbatch").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return install


@pytest.fixture
def no_sbatch(work, monkeypatch):
    """The working folder, with nothing on PATH."""
    monkeypatch.setenv("PATH", str(work))
    return work


def test_the_settings_file_that_is_named_is_read(work, sbatch, capsys):
    sbatch("exit 99")
    (work / "other.toml").write_text("[slurm]\nnodes = 3\n")

    assert main(["submit", "--dry-run", "--config", "other.toml", "--", "train.py"]) == 0

    assert "\n#SBATCH --nodes=3\n" in capsys.readouterr().out


def test_a_dry_run_shows_what_matters_and_with_script_all_of_it_and_leaves_nothing(
    work, sbatch, capsys
):
    sbatch("exit 99")
    setup = [f"--set=slurm.setup=module load m{n}" for n in range(6)]
    argv = ["submit", "--dry-run", "--nodes", "2-4", *setup]
    program = ["--", "train.py", "--nodes", "9"]

    assert main([*argv, *program]) == 0

    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 20
    assert "\n#SBATCH --nodes=2-4\n" in out
    assert out.startswith("#SBATCH --job-name=train-1\n")
    assert "module load m3\n# ... 2 more\n" in out
    assert f"# each rank (nodes 2-4, ranks per node 1), in {work}:\n" in out
    assert "train.py --nodes 9\n\n# --script shows the full batch script\n" in out
    assert main([*argv, "--script", *program]) == 0
    whole = capsys.readouterr().out
    assert whole.startswith("#!/bin/bash\n")
    assert "module load m5" in whole
    assert {line for line in out.splitlines() if line.startswith("#SBATCH")} <= set(
        whole.splitlines()
    )
    assert entries(work) == ["train.py"]
    assert main(["submit", "--script", *program]) == 2


def test_a_dry_run_shows_how_a_task_starts_in_its_container(work, sbatch, capsys):
    sbatch("exit 99")
    argv = ["submit", "--dry-run", "--script", "--container", "docker://debian"]
    there = ["--set", "container.runtime=apptainer", "--set", "slurm.setup=module load apptainer"]

    assert main([*argv, *there, "--", "bash", "run.sh"]) == 0

    out = capsys.readouterr().out
    binds = f"--bind={work}:{work} --pwd={work}"
    assert f'hpctrain_task=(apptainer exec {binds} docker://debian "${{hpctrain_inside[@]}}"' in out
    assert entries(work) == ["train.py"]


def test_a_dry_run_here_prints_what_each_rank_runs(work, capsys):
    argv = ["submit", "--dry-run", "--cluster", "local", "--env", "A=b c", "--", "train.py", "x y"]
    assert main(argv) == 0

    out = capsys.readouterr().out
    assert f"cd {work} && env 'A=b c' {sys.executable} {work}/train.py 'x y'\n" in out
    assert entries(work) == ["train.py"]


def test_a_dry_run_as_json_is_one_object_with_the_spec(work, capsys):
    argv = ["submit", "--dry-run", "--json", "--cluster", "slurm", "--nodes", "3", "--time", "2"]
    assert main(argv) == 0

    shown = json.loads(capsys.readouterr().out)
    assert shown["run_dir"] == str(work / "runs" / "lm-1")
    assert shown["spec"]["settings"]["slurm"]["nodes"] == "3"
    assert shown["spec"]["origins"]["slurm.nodes"] == "flag --nodes"
    assert "#SBATCH --nodes=3\n" in shown["script"]
    assert "40 s before the time limit" in shown["notes"][0]
    assert entries(work) == ["train.py"]


def test_what_was_dropped_from_the_environment_is_said(work, sbatch, capsys, monkeypatch):
    sbatch("exit 99")
    monkeypatch.setenv("SBATCH_EXPORT", "x")

    main(["submit", "--dry-run"])

    assert "not passed on to the job: SBATCH_EXPORT" in capsys.readouterr().err


def test_no_submit_makes_the_run_and_says_what_comes_next(work, capsys):
    argv = ["submit", "--cluster", "local", "--no-submit", "--name", "mine", "--nodes", "2"]
    assert main(argv) == 0

    out = capsys.readouterr().out
    assert f"run  {work}/runs/mine\n" in out
    assert "\n  hpctrain resume mine\n" in out
    assert load_spec(work / "runs" / "mine" / "spec.json").settings.slurm.nodes == "2"
    assert entries(work / "runs") == [".gitignore", "mine", "mine/spec.json"]


def test_commands_that_come_next_name_another_folder_of_runs(work, capsys):
    main(["submit", "--cluster", "local", "--no-submit", "--runs", "else where", "--name", "mine"])

    assert f"hpctrain status '{work}/else where/mine'\n" in capsys.readouterr().out


def test_every_flag_reaches_the_spec_with_its_origin(work):
    argv = ["submit", "--cluster", "local", "--no-submit", "--name", "mine"]
    flags = {
        "nodes": "2",
        "gpus-per-node": "0",
        "ranks-per-node": "3",
        "time": "30",
        "partition": "p",
        "account": "a",
        "qos": "q",
    }
    for name, value in flags.items():
        argv += [f"--{name}", value]

    assert main([*argv, "--no-snapshot", "--set", "train.steps=3"]) == 0

    spec = load_spec(work / "runs" / "mine" / "spec.json")
    for name, value in flags.items():
        key = name.replace("-", "_")
        assert str(getattr(spec.settings.slurm, key)) == value
        assert spec.origins[f"slurm.{key}"] == f"flag --{name}"
    assert spec.settings.run.snapshot == "no"
    assert spec.origins["run.snapshot"] == "flag --no-snapshot"
    assert spec.origins["train.steps"] == "flag --set train.steps"


def test_a_second_submit_into_a_run_is_refused_with_what_to_do(work, capsys):
    argv = ["submit", "--cluster", "local", "--no-submit", "--name", "mine"]
    assert main(argv) == 0
    capsys.readouterr()

    assert main(argv) == 5

    assert capsys.readouterr().err == (
        f"hpctrain: error: {work}/runs/mine exists: `hpctrain status mine` shows it, "
        "`hpctrain resume mine` continues it once its job has ended; or choose another --name\n"
    )


def test_a_submission_that_slurm_refuses_leaves_nothing(work, sbatch, capsys):
    sbatch("echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")

    assert main(["submit", "--partition", "nope"]) == 6

    err = capsys.readouterr().err
    assert "invalid partition specified: nope" in err
    assert err.count("\n") == 1
    assert entries(work) == ["train.py"]


def test_a_submission_tells_its_run_its_job_and_three_commands(work, sbatch, capsys):
    sbatch("echo 'Submitted batch job 4711'")

    assert main(["submit", "--nodes", "2", "--", "train.py"]) == 0

    out = capsys.readouterr().out
    assert f"run  {work}/runs/train-1\n" in out
    assert "job  4711 on slurm (nodes 2, ranks per node 1)\n" in out
    following = ["status train-1", "logs -f train-1", "cancel train-1"]
    assert out.endswith("\n\n" + "".join(f"  hpctrain {line}\n" for line in following))
    assert load_spec(work / "runs" / "train-1" / "spec.json").name == "train-1"


@pytest.mark.parametrize(
    ("program", "following"),
    [
        ("import hpctrain\nhpctrain.init()\n", "cancel --save"),
        ("import torch\n", "cancel"),
        (None, "cancel --save"),
    ],
)
def test_a_cancel_that_saves_is_offered_only_where_the_program_hears_it(
    work, sbatch, capsys, program, following
):
    sbatch("echo 'Submitted batch job 4711'")
    (work / "train.py").write_text(program or "")

    assert main(["submit", "--name", "it", *(["--", "train.py"] if program else [])]) == 0

    assert capsys.readouterr().out.splitlines()[-1] == f"  hpctrain {following} it"


def test_a_submission_tells_of_the_nodes_that_wait(work, sbatch, capsys):
    sbatch("echo 'Submitted batch job 4711'")

    assert main(["submit", "--nodes", "3+2", "--", "train.py"]) == 0
    assert "(nodes 3 and 2 spares, ranks per node 1)\n" in capsys.readouterr().out
    argv = ["submit", "--cluster", "local", "--no-submit", "--nodes", "3+2", "--", "train.py"]
    assert main(argv) == 0
    assert "(nodes 3, ranks per node 1" in capsys.readouterr().out


def test_a_submission_as_json_is_one_object(work, sbatch, capsys):
    sbatch("echo 'Submitted batch job 4711'")

    assert main(["submit", "--json", "--name", "mine"]) == 0

    shown = json.loads(capsys.readouterr().out)
    assert shown["run"] == "mine"
    assert shown["run_dir"] == str(work / "runs" / "mine")
    assert shown["job_id"] == "4711"
    assert shown["next"][0] == "hpctrain status mine"


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--nodes", "0"], 2, "0 nodes cannot train"),
        (["--nodes", "4-2"], 2, "maximum below its minimum"),
        (["--site", "nowhere"], 4, 'no site "nowhere"'),
        (["--set", "slurm.partiton=x"], 2, "did you mean slurm.partition?"),
        (["--", "nope.py"], 4, "script nope.py is not there"),
        (["--cluster", "slurm"], 6, "no sbatch on PATH"),
        (["--cluster", "pbs"], 2, "'pbs' is not one of 'slurm', 'local'"),
        (["--runs", "train.py/x"], 3, "cannot be written"),
        (["--gpus-per-node", "many"], 2, "'many' is not N or TYPE:N, e.g. 4 or a100:4"),
        (["--snapshot", "--dry-run"], 2, "the shipped recipe is no script"),
        (["--snapshot", "--", "train.py"], 2, "not inside a git checkout"),
        (["train.py", "--lr", "1"], 2, "a script's own options go behind --"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(no_sbatch, capsys, argv, code, message):
    assert main(["submit", *argv]) == code

    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert entries(no_sbatch) == ["train.py"]


def test_how_far_long_work_is_is_shown_by_submit_and_by_resume(work, monkeypatch):
    """Packing an environment takes minutes on some file systems."""
    given = []

    def staging_for(spec, runs, progress):
        given.append(progress)
        return None, []

    monkeypatch.setattr(environment_archive, "staging_for", staging_for)
    argv = ["--cluster=local", "--set=environment.stage=yes", "--set=slurm.time=1"]
    monkeypatch.setattr(launch, "_submit", lambda *_, **__: "local-1")

    assert main(["submit", *argv, "--name=made", "--no-submit", "--", "train.py"]) == 0
    assert main(["submit", *argv, "--name=begun", "--", "train.py"]) == 0
    assert main(["resume", "made"]) == 0
    assert given == [progress] * 3

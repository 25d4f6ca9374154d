"""What people type of sbatch's options, and what they are answered: taken, or the line to type."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from hpctrain.cli import check
from hpctrain.cli.main import main
from hpctrain.cli.submit import command
from hpctrain.core.settings.spec import load_spec
from hpctrain.launch import prepare as prepare_module
from hpctrain.launch.change import ResumeRequest, change_spec

ANSWERS = Path(__file__).parents[2] / "data" / "slurm-answers"


@pytest.fixture
def work(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text("print('hi')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def slurm_of(work, *argv):
    assert main(["submit", "--cluster", "slurm", "--no-submit", "--name", "r", *argv]) == 0
    return load_spec(work / "runs" / "r" / "spec.json").settings.slurm


TAKEN = [
    ("-N 2", {"nodes": "2"}),
    ("-N2-4", {"nodes": "2-4"}),
    ("-p grace", {"partition": "grace"}),
    ("-A lab -q high", {"account": "lab", "qos": "high"}),
    ("-t 12h", {"time": "12h"}),
    ("--time=2d", {"time": "2d"}),
    ("-C a100", {"constraint": "a100"}),
    ("--constraint a100&ib", {"constraint": "a100&ib"}),
    ("--reservation=course", {"reservation": "course"}),
    ("-x n1,n2", {"exclude": "n1,n2"}),
    ("--mem 64G", {"mem": "64G"}),
    ("-c 8", {"cpus_per_rank": 8}),
    ("--exclusive", {"exclusive": "yes"}),
    ("--gpus-per-node 4", {"gpus_per_node": 4, "gpu_type": ""}),
    ("--gpus-per-node a100:4", {"gpus_per_node": 4, "gpu_type": "a100"}),
    ("--gpus-per-node=gpu:4", {"gpus_per_node": 4, "gpu_type": ""}),
    ("--gres=gpu:h100_80gb:2", {"gpus_per_node": 2, "gpu_type": "h100_80gb"}),
    ("--gres gpu", {"gpus_per_node": 1, "gpu_type": ""}),
    ("--gres=gpu:2,nvme:1", {"gpus_per_node": 2, "extra": ["--gres=nvme:1"]}),
    ("-w n3", {"extra": ["--nodelist=n3"]}),
    ("--mail-type END,FAIL --mail-user me@x.org",
     {"extra": ["--mail-type=END,FAIL", "--mail-user=me@x.org"]}),
    ("--sbatch --switches=1 --sbatch=--licenses=matlab:2",
     {"extra": ["--switches=1", "--licenses=matlab:2"]}),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "expected"), TAKEN, ids=[typed for typed, _ in TAKEN])
def test_what_sbatch_takes_is_taken(work, typed, expected):
    slurm = slurm_of(work, *typed.split())

    assert {key: getattr(slurm, key) for key in expected} == expected


def test_the_short_name_of_sbatchs_job_is_the_runs(work):
    assert main(["submit", "--cluster", "slurm", "--no-submit", "-J", "mine"]) == 0

    assert (work / "runs" / "mine" / "spec.json").exists()


def test_options_of_a_settings_file_stay_where_none_is_typed(work):
    (work / "hpctrain.toml").write_text('[slurm]\nextra = ["--switches=1"]\n')

    assert slurm_of(work, "-N", "2").extra == ["--switches=1"]


def test_fsdp_is_fsdp2(work):
    argv = ["submit", "--cluster", "slurm", "--no-submit", "--name", "r", "--engine", "fsdp"]
    assert main(argv) == 0

    assert load_spec(work / "runs" / "r" / "spec.json").settings.engine.kind == "fsdp2"


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("--gpus-per-node a100:4", "#SBATCH --gpus-per-node=a100:4"),
        ("--gpus-per-node 4", "#SBATCH --gpus-per-node=4"),
        ("--time 12h", "#SBATCH --time=12:00:00"),
        ("--time 1d12h", "#SBATCH --time=36:00:00"),
        ("--time 90m", "#SBATCH --time=1:30:00"),
        ("--time 90S", "#SBATCH --time=0:01:30"),
        ("--time 90", "#SBATCH --time=90"),
        ("--time 1-12", "#SBATCH --time=1-12"),
        ("--mail-type=END", "#SBATCH --mail-type=END"),
        ("--mem=64G -c 4 --ranks-per-node 2", "#SBATCH --mincpus=8"),
    ],
)
def test_the_batch_script_says_it_in_sbatchs_words(work, capsys, typed, line):
    assert main(["submit", "--cluster", "slurm", "--dry-run", *typed.split()]) == 0

    assert f"\n{line}\n" in capsys.readouterr().out


REFUSED = [
    ("--gpus 4", "--gpus: GPUs are asked for by node: --nodes N --gpus-per-node [TYPE:]G"),
    ("-G 4", "-G: GPUs are asked for by node: --nodes N --gpus-per-node [TYPE:]G"),
    ("--gpus-per-task=1", ("--gpus-per-task: GPUs are asked for by node: --nodes N "
     "--gpus-per-node [TYPE:]G; each rank gets one")),
    ("-n 8", "-n: ranks are asked for by node: --nodes N --ranks-per-node R"),
    ("--ntasks=8", "--ntasks: ranks are asked for by node: --nodes N --ranks-per-node R"),
    ("--ntasks-per-node 4", ("--ntasks-per-node: ranks are asked for by node: --nodes N "
     "--ranks-per-node R")),
    ("--tasks-per-node 4", ("--tasks-per-node: ranks are asked for by node: --nodes N "
     "--ranks-per-node R")),
    ("--cpus-per-task 8", "--cpus-per-task: CPUs are asked for by rank: --cpus-per-rank C"),
    ("--cpus-per-gpu 8", ("--cpus-per-gpu: CPUs are asked for by rank, and a rank has one GPU: "
     "--cpus-per-rank C")),
    ("--mem-per-cpu=4G", "--mem-per-cpu: memory is asked for by node: --mem SIZE"),
    ("--mem-per-gpu 4G", "--mem-per-gpu: memory is asked for by node: --mem SIZE"),
    ("--job-name x", "--job-name: the run's name is the job's: --name NAME"),
    ("--array=0-3", ("--array: a run is one job: submit each by itself, e.g. in a loop, with a "
     "--name of its own")),
    ("-a 0-3", ("-a: a run is one job: submit each by itself, e.g. in a loop, with a --name of "
     "its own")),
    ("-d afterok:12", "-d: name the run that must be done before: --after RUN"),
    ("--dependency=afterok:12", "--dependency: name the run that must be done before: --after RUN"),
    ("-o out.txt", "-o: logs lie in the run's directory; hpctrain logs RUN shows them"),
    ("--error=e.txt", "--error: logs lie in the run's directory; hpctrain logs RUN shows them"),
    ("--wrap=./x", "--wrap: the program goes behind --, e.g. -- ./train.sh"),
    ("--parsable", "--parsable: --json prints the job's id for programs"),
    ("--requeue", "--requeue: sbatch's --requeue is hpctrain's to set; use the [budget] settings"),
    ("--signal=USR1@60", ("--signal: sbatch's --signal is hpctrain's to set; use "
     "slurm.signal_lead_s")),
    ("--open-mode=append", ("--open-mode: sbatch's --open-mode is hpctrain's to set; use nothing: "
     "it is always append")),
    ("-D /work", "-D: a run works in the folder in which submit is typed: go there"),
    ("--test-only", ("--test-only: sbatch would submit nothing: use hpctrain check or hpctrain "
     "submit --dry-run")),
    ("-W", ("-W: submit would not return until the job's end: use hpctrain logs RUN -f, which "
     "shows why the job waits, or hpctrain status RUN --watch --exit-status in scripts")),
    ("-M other", "-M: nobody would find the job again: submit on a login node of that cluster"),
    ("--switches=1", "--switches is an option of sbatch's; pass it on with `--sbatch=--switches=1"),
    ("--nice 100", "--nice is an option of sbatch's; pass it on with `--sbatch=--nice=100"),
    ("-L matlab:2", "-L is an option of sbatch's; pass it on with `--sbatch=--licenses=matlab:2"),
    ("-Lmatlab:2", "-L is an option of sbatch's; pass it on with `--sbatch=--licenses=matlab:2"),
    ("--comment 'a b'", ("--comment is an option of sbatch's; pass it on with "
     "`--sbatch='--comment=a b'")),
    ("--spread-job --nodes 2", "pass it on with `--sbatch=--spread-job`"),
    ("-H", "-H is an option of sbatch's; pass it on with `--sbatch=--hold"),
    ("--begin now+1hour --nodes 2", ("--begin is an option of sbatch's; pass it on with "
     "`--sbatch=--begin=now+1hour")),
    ("--lr 3e-4", ("error: no such option --lr; a script's own options go behind --, e.g. `-- "
     "train.py --lr 3e-4`.")),
    ("--epochs 40", "error: no such option --epochs; a script's own options go behind --"),
    ("--batch-size=8", "error: no such option --batch-size; a script's own options go behind --"),
    ("--node 2", "error: no such option --node (did you mean --nodes?); a script's own"),
    ("--ranks 2", "error: no such option --ranks (did you mean --ranks-per-node?); a script's"),
    ("--partiton x", "error: no such option --partiton (did you mean --partition?); a script's"),
    ("-z", "error: no such option -z; a script's own options go behind --"),
    ("--gpus-per-node a100", "'a100' is not N or TYPE:N, e.g. 4 or a100:4."),
    ("--gpus-per-node many:x", "'many:x' is not N or TYPE:N, e.g. 4 or a100:4."),
    ("--gres=gpu:x:y", "'gpu:x:y' is not N or TYPE:N, e.g. 4 or a100:4."),
    ("--gres=gpu:2 --gpus-per-node 2", ("--gres gpu:2 and --gpus-per-node both ask for GPUs; keep "
     "one")),
    ("--sbatch switches=1", ("--sbatch switches=1: not an option of sbatch's; write e.g. "
     "--sbatch=--switches=1.")),
    ("--sbatch=--array=0-3", "slurm.extra has --array=0-3, which hpctrain sets; use one run per"),
    ("--sbatch=--export=NONE", ("flag --sbatch: slurm.extra has --export=NONE: ranks would lack "
     "what they start with")),
    ("--set slurm.gpu_type=a100", "say how many each node has: --gpus-per-node a100:4"),
    ("--time 1y", ('flag --time: slurm.time: "1y" is not a time limit; it takes '
     "[days-]hours:minutes:seconds, minutes, or units as in 12h, 90m, 1d12h")),
    ("--time 0h", "a time limit of 0h leaves no time to train; raise it"),
    ("--engine fsdp3", "'fsdp3' is not one of"),
    ("-N two", '"two" is not a number of nodes; it takes N or MIN-MAX'),
    ("-N 4-2", "4-2 has its maximum below its minimum; did you mean 2-4?"),
    ("-N 2 --set slurm.nodes=3", ("slurm.nodes is given twice: flag --nodes and flag --set "
     "slurm.nodes=3; keep one")),
    ("-p", "-p lacks its value."),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "answer"), REFUSED, ids=[typed for typed, _ in REFUSED])
def test_what_is_refused_is_answered_with_what_to_type(work, capsys, typed, answer):
    argv = ["submit", "--cluster", "slurm", "--no-submit", *shlex.split(typed)]
    code = main([*argv, "--", "train.py"])

    captured = capsys.readouterr()
    assert code == 2
    assert answer in captured.err
    assert captured.out == ""
    assert not (work / "runs").exists()


ANSWERED = re.compile(r"pass it on with `(?P<words>--sbatch=.*)`\. See")


@pytest.mark.parametrize("typed", ["--switches=1", "-L matlab:2", "--comment 'a b'", "-H"])
def test_the_line_that_is_printed_works(work, capsys, typed):
    main(["submit", "--cluster", "slurm", *shlex.split(typed)])
    words = ANSWERED.search(capsys.readouterr().err.strip())["words"]

    assert slurm_of(work, *shlex.split(words)).extra


@pytest.mark.parametrize("version", sorted(p.name for p in ANSWERS.iterdir() if p.is_dir()))
def test_no_option_that_a_version_of_sbatch_has_is_called_unknown(work, capsys, version):
    """Each is taken, or answered by what it is there."""
    own = {name for option in command.params for name in option.opts}
    text = (ANSWERS / version / "sbatch_help.txt").read_text()
    listed = set(re.findall(r"^\s+(?:-\w, )?(--[a-z0-9-]+)", text, re.MULTILINE))
    assert len(listed) > 80
    for name in sorted(listed - own):
        main(["submit", "--cluster", "slurm", f"{name}=x", "--", "train.py"])
        error = capsys.readouterr().err
        assert "No such option" not in error, name


def test_a_resume_takes_the_same_options(work, capsys):
    slurm_of(work)

    main(["resume", "r", "--runs", str(work / "runs"), "--dry-run", "--gpus", "4"])

    assert "--gpus: GPUs are asked for by node" in capsys.readouterr().err


def test_a_resume_changes_what_is_given_and_nothing_else(work, capsys):
    slurm_of(work, "--gpus-per-node", "a100:4", "--sbatch=--switches=1", "-N", "2")

    main(["resume", "r", "--dry-run", "--json", "-N", "4", "--mem", "64G"])
    spec = load_spec(work / "runs" / "r" / "spec.json")
    flags = {"slurm.nodes": ("--nodes", "4"), "slurm.extra": ("--sbatch", None)}
    slurm = change_spec(spec, ResumeRequest(flags))[0].settings.slurm
    assert (slurm.nodes, slurm.gpus_per_node, slurm.gpu_type) == ("4", 4, "a100")
    assert slurm.extra == ["--switches=1"]


def test_a_number_of_gpus_alone_keeps_the_type_that_was_set(work):
    (work / "hpctrain.toml").write_text('[slurm]\ngpu_type = "a100"\ngpus_per_node = 8\n')

    slurm = slurm_of(work, "--gpus-per-node", "4")

    assert (slurm.gpus_per_node, slurm.gpu_type) == (4, "a100")


def test_a_preflight_takes_the_same_options_and_has_a_time_limit_of_its_own(work, monkeypatch):
    asked = []
    monkeypatch.setattr(check, "_print_report", lambda *_, **__: 0)
    monkeypatch.setattr(prepare_module, "prepare", lambda request: asked.append(request) or 1 / 0)

    for words in (["--gpus-per-node", "a100:4", "-w", "n3"], ["-t", "5m"]):
        with pytest.raises(ZeroDivisionError):
            main(["preflight", "--cluster", "slurm", "--login-only", *words])

    first, second = (request.flags for request in asked)
    assert first["slurm.gpu_type"] == ("--gpus-per-node", "a100")
    assert first["slurm.extra"] == ("--sbatch", ["--nodelist=n3"])
    assert (first["slurm.time"][1], second["slurm.time"][1]) == (check.JOB_TIME, "5m")


# ---- what holds for all of a user's runs


def test_a_users_own_settings_lie_below_the_projects(work, tmp_path, monkeypatch):
    folder = tmp_path / "config" / "hpctrain"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder.parent))
    (folder / "hpctrain.toml").write_text(
        '[slurm]\naccount = "mine"\nqos = "mine"\n[env]\nA = "1"\nB = "1"\n'
    )
    (work / "hpctrain.toml").write_text(
        'cluster = "slurm"\n[slurm]\nqos = "ours"\n[env]\nB = "2"\n'
    )

    assert main(["submit", "--no-submit", "--name", "r"]) == 0

    spec = load_spec(work / "runs" / "r" / "spec.json")
    assert (spec.settings.slurm.account, spec.settings.slurm.qos) == ("mine", "ours")
    assert spec.origins["slurm.account"] == f"{folder}/hpctrain.toml:2"
    assert spec.env == {"A": "1", "B": "2"}


def test_a_users_own_settings_name_cluster_and_site(work, tmp_path, monkeypatch):
    folder = tmp_path / "config" / "hpctrain"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder.parent))
    (folder / "hpctrain.toml").write_text('cluster = "slurm"\nsite = "none"\n')

    assert main(["submit", "--no-submit", "--name", "r"]) == 0
    assert load_spec(work / "runs" / "r" / "spec.json").cluster == "slurm"


def test_a_strangers_file_in_the_place_of_a_users_own_is_refused(
    work, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "config" / "hpctrain"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder.parent))
    (folder / "hpctrain.toml").write_text("")
    (folder / "hpctrain.toml").chmod(0o666)

    assert main(["submit", "--no-submit", "--name", "r"]) == 3
    assert f"{folder}/hpctrain.toml can be written" in capsys.readouterr().err


def test_sbatchs_variables_of_the_shell_count_where_nothing_else_is_said(work, monkeypatch):
    for name in ("ACCOUNT", "PARTITION", "QOS"):
        monkeypatch.setenv(f"SBATCH_{name}", f"of-shell-{name.lower()}")
    (work / "hpctrain.toml").write_text('[slurm]\nqos = "ours"\n')

    slurm = slurm_of(work, "--partition", "typed")

    assert (slurm.account, slurm.qos, slurm.partition) == ("of-shell-account", "ours", "typed")
    spec = load_spec(work / "runs" / "r" / "spec.json")
    assert spec.origins["slurm.account"] == "SBATCH_ACCOUNT of your shell"
    assert spec.dropped_env == []


# ---- the Python of the ranks


def test_a_program_that_imports_what_is_not_there_is_refused_before_it_is_queued(work, capsys):
    (work / "train.py").write_text("import json\nimport mine\nimport no_such_thing_at_all.x\n")
    (work / "mine.py").write_text("from no_other_thing import y\n")

    assert main(["submit", "--cluster", "slurm", "--no-submit", "--", "train.py"]) == 3

    error = capsys.readouterr().err
    assert f"{work}/train.py:3 imports no_such_thing_at_all, which " in error
    assert " does not have (nor no_other_thing): every rank would end there. Install it: " in error
    assert " -m pip install no_such_thing_at_all no_other_thing; or name its folder: " in error
    assert not (work / "runs").exists()


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import no_such_thing\nexcept ImportError:\n    pass\n",
        "def main():\n    import no_such_thing\n",
        "if False:\n    import no_such_thing\n",
        "import sys\nsys.path.insert(0, '/lib')\nimport no_such_thing\n",
        "import site\nsite.addsitedir('/lib')\nimport no_such_thing\n",
        "import os, sys, torch\nimport hpctrain\n",
        "from . import no_such_thing\n",
        "import (\n",
    ],
)
def test_what_may_be_there_all_the_same_is_not_refused(work, text):
    (work / "train.py").write_text(text)

    code = main(["submit", "--cluster", "slurm", "--no-submit", "--", "train.py"])

    assert code == (2 if text == "import (\n" else 0)


def test_what_the_ranks_pythonpath_has_is_there(work, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "no_such_thing.py").write_text("")
    (work / "train.py").write_text("import no_such_thing\n")
    argv = ["submit", "--cluster", "slurm", "--no-submit"]

    assert main([*argv, "--env", f"PYTHONPATH=x:{tmp_path}/lib", "--", "train.py"]) == 0


def test_what_a_module_may_bring_is_a_note(work, capsys):
    (work / "train.py").write_text("import no_such_thing\n")
    argv = ["submit", "--cluster", "slurm", "--no-submit", "--set", "slurm.setup=module load x"]

    assert main([*argv, "--", "train.py"]) == 0
    assert "every rank ends there unless the job's modules or setup bring it" in (
        capsys.readouterr().err
    )


def test_another_environment_that_is_active_is_named(work, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "mine"))

    assert main(["submit", "--cluster", "slurm", "--no-submit", "--", "train.py"]) == 0

    assert f"and not with the active environment {tmp_path}/mine: to use that" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("argv", [["--container", "x.sif"], []])
def test_the_environment_that_runs_this_is_no_other(work, monkeypatch, capsys, argv):
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    monkeypatch.setenv("CONDA_PREFIX", "/opt/conda")

    main(["submit", "--cluster", "slurm", "--dry-run", *argv, "--", "train.py"])

    assert "active environment" not in capsys.readouterr().err


def test_no_import_of_the_program_is_run(work):
    (work / "train.py").write_text("import mine\n")
    (work / "mine.py").write_text("open('ran', 'w')\n")

    assert main(["submit", "--cluster", "slurm", "--no-submit", "--", "train.py"]) == 0

    assert not (work / "ran").exists()

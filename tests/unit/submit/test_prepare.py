"""A request becomes a checked spec, and a spec becomes a run directory: once, or not at all."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hpctrain.core.settings.schema import Settings
from hpctrain.core.settings.spec import Entry, Spec, load_spec
from hpctrain.errors import ChecksFailed, ClusterError, NotFound, RunExists, UsageError
from hpctrain.launch import checks
from hpctrain.launch.change import flags_of
from hpctrain.launch.prepare import (
    create_run,
    default_cluster,
    discard_run,
    free_name,
    make_run,
    prepare,
)
from hpctrain.launch.snapshot import Checkout
from tests.support import small_disk
from tests.support.memory import entries
from tests.support.patience import PATIENCE_S
from tests.support.submit_requests import request_of


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text("print('hi')\n")
    return folder


@pytest.fixture
def with_sbatch(tmp_path):
    """An environment with an sbatch on its PATH; it is looked for, not called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (folder / "sbatch").chmod(0o755)
    return {"PATH": str(folder)}


def ask(work, **changes):
    given = {"cwd": work, "environ": {"PATH": "/nowhere"}, "runs": Path("runs")}
    return prepare(request_of(**{**given, **changes}))


def a_spec(name="r-1"):
    return Spec(name, "id", 0.0, "local", "", Entry("recipe"), Settings())


def test_flags_that_were_not_given_set_nothing_and_the_others_keep_their_names():
    assert flags_of() == {}
    assert flags_of(snapshot=False) == {"run.snapshot": ("--no-snapshot", "no")}
    assert flags_of(snapshot=True, checkpoint=("a",)) == {
        "run.snapshot": ("--snapshot", "yes"),
        "checkpoint.sealed": ("--checkpoint", ["a"]),
    }
    assert flags_of(gpus_per_node=0) == {"slurm.gpus_per_node": ("--gpus-per-node", 0)}


def test_without_a_script_the_recipe_runs_here_where_there_is_no_sbatch(work):
    prepared = ask(work)

    assert prepared.spec.cluster == "local"
    assert prepared.spec.site == "local"
    assert prepared.spec.name == "lm-1"
    assert prepared.spec.entry == Entry(kind="recipe", cwd=str(work))
    assert prepared.spec.python == sys.executable
    assert prepared.runs == work / "runs"
    assert entries(work) == ["train.py"]


def test_with_an_sbatch_slurm_is_the_default_and_no_site_is_guessed(work, with_sbatch):
    spec = ask(work, environ=with_sbatch).spec

    assert (spec.cluster, spec.site) == ("slurm", "")
    assert default_cluster({"PATH": ""}) == "local"


def test_layers_come_in_order_and_each_value_knows_its_own(work, tmp_path):
    sites = tmp_path / "sites"
    sites.mkdir()
    (sites / "juniper.toml").write_text(
        "[settings.slurm]\nnodes = 8\npartition = 'gpu'\nqos = 'low'\n"
        "[env.common]\nA = 'site'\nB = 'site'\nC = 'site'\n"
    )
    (work / "hpctrain.toml").write_text(
        "site = 'juniper'\n[slurm]\nnodes = 6\npartition = 'big'\n[env]\nB = 'file'\nC = 'file'\n"
    )
    environ = {"PATH": "", "HPCTRAIN_SITE_PATH": str(sites), "WANDB_API_KEY": "secret"}

    prepared = ask(work, environ=environ, nodes="2-4", env=("C=flag",), sets=("train.steps=5",))

    spec = prepared.spec
    slurm = spec.settings.slurm
    assert (slurm.nodes, slurm.partition, slurm.qos) == ("2-4", "big", "low")
    assert spec.env == {"B": "file", "C": "flag"}
    assert spec.preset["env"]["common"] == {"A": "site", "B": "site", "C": "site"}
    origins = spec.origins
    assert origins["slurm.nodes"] == "flag --nodes"
    assert origins["slurm.partition"] == "hpctrain.toml:4"
    assert origins["slurm.qos"] == f"site juniper ({sites}/juniper.toml:4)"
    assert origins["train.steps"] == "flag --set train.steps"
    assert origins["train.lr"] == "default"
    assert prepared.notes == ["site juniper, as hpctrain.toml:1 says"]
    assert spec.env_origins["B"] == "hpctrain.toml:6"
    assert spec.env_origins["C"] == "flag --env"


def test_the_submitting_shells_environment_stays_out_of_spec_json(work):
    environ = {"PATH": "", "WANDB_API_KEY": "s3cret", "SBATCH_PARTITION": "x", "SLURM_JOB_ID": "7"}

    prepared = ask(work, environ=environ)
    run = make_run(prepared, None)

    text = run.spec.read_text()
    assert "s3cret" not in text
    assert "WANDB_API_KEY" not in text
    assert prepared.spec.dropped_env == ["SBATCH_PARTITION", "SLURM_JOB_ID"]


def test_site_comes_from_the_flag_then_the_environment_then_the_file(work, tmp_path):
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.toml").write_text("")
    environ = {"PATH": "", "HPCTRAIN_SITE_PATH": str(tmp_path)}
    (work / "hpctrain.toml").write_text("site = 'three'\n")
    assert ask(work, environ=environ).spec.site == "three"

    environ["HPCTRAIN_SITE"] = "two"
    by_shell = ask(work, environ=environ)
    by_flag = ask(work, environ=environ, site="one")

    assert (by_shell.spec.site, by_flag.spec.site) == ("two", "one")
    assert by_shell.notes == ["site two, as HPCTRAIN_SITE says"]
    assert by_flag.notes == []


def test_a_script_is_kept_with_its_arguments_and_names_the_run(work):
    spec = ask(work, command=("./train.py", "--lr", "3e-4")).spec

    assert spec.entry.path == str(work / "train.py")
    assert spec.entry.args == ["--lr", "3e-4"]
    assert spec.entry.cwd == str(work)
    assert spec.name == "train-1"


def test_a_scripts_odd_name_still_names_a_run(work):
    (work / "my train (2).py").write_text("")

    assert ask(work, command=("my train (2).py",)).spec.name == "my-train-2-1"


def test_names_count_past_the_highest_that_there_is(tmp_path):
    for name in ("lm-1", "lm-7", "lm-x", "lm-9-old", "other-20"):
        (tmp_path / name).mkdir()

    assert free_name(tmp_path, "lm") == "lm-8"
    assert free_name(tmp_path / "missing", "lm") == "lm-1"


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"nodes": "0"}, UsageError, "flag --nodes: .*0 nodes cannot train"),
        ({"nodes": "4-2"}, UsageError, "maximum below its minimum"),
        ({"time": "soon"}, UsageError, "flag --time: .*is not a time limit"),
        ({"site": "nowhere"}, NotFound, 'there is no site "nowhere"'),
        (
            {"command": ("trian.py",)},
            NotFound,
            r"script trian.py is not there; did you mean train.py\?",
        ),
        ({"command": ("no/x.py",)}, NotFound, "script no/x.py is not there; looked in /"),
        ({"command": (".",)}, UsageError, "is a folder"),
        ({"command": ("mpirun", "train.py")}, UsageError, "hpctrain starts the ranks"),
        ({"command": ("-m", "no_such_package")}, NotFound, "no module no_such_package in /"),
        ({"cluster": "slurm"}, ClusterError, "no sbatch on PATH"),
        ({"sets": ("slurm.partiton=x",)}, UsageError, "did you mean slurm.partition"),
        ({"env": ("TOKEN",)}, UsageError, "NAME=VALUE"),
        ({"config": Path("no.toml")}, NotFound, "no.toml is not there"),
        ({"name": "a/b"}, UsageError, "cannot name a run"),
        ({"name": ""}, UsageError, "cannot name a run"),
        ({"name": "my run"}, UsageError, "not beginning with . or -; e.g. --name my-run$"),
        ({"name": ".."}, UsageError, "cannot name a run"),
        ({"name": "-"}, UsageError, "cannot name a run"),
        ({"name": "a\n"}, UsageError, "cannot name a run"),
        ({"name": "x" * 101}, UsageError, "cannot name a run"),
        ({"name": "4711"}, UsageError, "could be taken for a job id"),
        ({"runs": Path("train.py/runs")}, ChecksFailed, "train.py is not a folder"),
        ({"runs": Path("train.py")}, ChecksFailed, "train.py is not a folder"),
    ],
)
def test_bad_input_is_told_in_one_line_and_leaves_nothing(work, changes, error, match):
    with pytest.raises(error, match=match) as caught:
        make_run(ask(work, **changes), None)

    assert "\n" not in str(caught.value)
    assert entries(work) == ["train.py"]


def test_an_unknown_key_of_the_settings_file_is_told_with_its_line(work):
    (work / "hpctrain.toml").write_text("[slurm]\nnodes = 1\npartiton = 'x'\n")

    with pytest.raises(UsageError, match=r"^hpctrain.toml:3: slurm.partiton .* slurm.partition\?$"):
        ask(work)


def test_a_cluster_of_the_settings_file_is_told_with_its_line(work):
    (work / "hpctrain.toml").write_text("cluster = 'slrum'\n")
    with pytest.raises(UsageError, match=r'^hpctrain.toml:1: there is no cluster "slrum"'):
        ask(work)

    (work / "hpctrain.toml").write_text("cluster = 'slurm'\n")
    with pytest.raises(ClusterError, match=r"^hpctrain.toml:1: slurm was asked for"):
        ask(work)


def test_an_image_is_a_flag_and_a_local_run_is_a_rehearsal_without_it(
    work, with_sbatch, monkeypatch
):
    monkeypatch.setattr(checks, "missing_tracker", "".join)
    sets = ["container.runtime=apptainer", "track.loggers=wandb"]
    there = ask(
        work,
        environ=with_sbatch,
        container="docker://torch",
        sets=[*sets, "slurm.setup=['module load apptainer']"],
    )
    here = ask(work, container="docker://torch")

    assert there.spec.settings.container.image == "docker://torch"
    assert there.spec.origins["container.image"] == "flag --container"
    assert "container.image docker://torch has no effect with --cluster local" in here.notes
    with pytest.raises(UsageError, match="cannot import"):  # the image may have it, this one not
        ask(work, sets=sets)


def test_spares_and_shrinking_have_no_effect_on_this_machine_and_that_is_said(work):
    notes = ask(work, nodes="2-3+1", sets=["alive.shrink=auto"]).notes

    assert "alive.spares 1 has no effect with --cluster local" in notes
    assert "alive.shrink auto has no effect with --cluster local" in notes
    assert not [note for note in ask(work, nodes="2").notes if "alive." in note]


def test_what_copies_in_memory_take_is_said_not_to_be_known_before_a_checkpoint(work):
    notes = ask(work, nodes="2", sets=["alive.memory=auto"]).notes

    (said,) = [note for note in notes if note.startswith("alive.memory:")]
    assert "not known before the first checkpoint: 2 times its part" in said


def test_flags_without_effect_are_said(work):
    sets = ("slurm.constraint=x", "train.steps=3")

    notes = ask(work, partition="gpu", sets=sets, command=("train.py",)).notes

    assert len(notes) == 3
    assert "--partition has no effect with --cluster local" in notes
    assert "--set slurm.constraint has no effect with --cluster local" in notes
    assert "--set train.steps is the shipped recipe's; train.py has its own settings" in notes


def test_a_run_that_exists_is_refused_with_what_to_do_instead(work):
    run = make_run(ask(work, name="mine"), None)
    before = run.spec.read_text()

    with pytest.raises(
        RunExists, match=rf"`hpctrain resume {run.typed}` continues it once .* --name$"
    ):
        ask(work, name="mine")
    with pytest.raises(RunExists, match=f"hpctrain resume {run.typed}"):
        create_run(a_spec("mine"), work / "runs")
    assert run.spec.read_text() == before


def test_a_half_made_run_is_told_apart_from_a_whole_one(work):
    (work / "runs" / "mine").mkdir(parents=True)

    with pytest.raises(RunExists, match="and has no spec"):
        ask(work, name="mine")


def test_a_run_is_made_with_its_spec(work):
    prepared = ask(work, command=("train.py", "--x"))

    run = make_run(prepared, None)

    assert run.root == work / "runs" / "train-1"
    assert load_spec(run.spec) == prepared.spec
    assert entries(run.root) == ["spec.json"]


def test_an_automatic_name_that_was_taken_meanwhile_counts_on(work):
    first, second = ask(work), ask(work)
    assert first.spec.name == second.spec.name == "lm-1"

    runs = [make_run(first, None).name, make_run(second, None).name]

    assert runs == ["lm-1", "lm-2"]
    assert load_spec(work / "runs" / "lm-2" / "spec.json").name == "lm-2"


def _create(runs, barrier, answers, auto_name):
    spec = a_spec("lm-1")
    barrier.wait()
    try:
        answers.put(create_run(spec, runs, auto_name=auto_name).name)
    except RunExists:
        answers.put(None)


@pytest.mark.parametrize("auto_name", [False, True])
def test_of_processes_that_make_the_same_run_at_once_exactly_one_wins(tmp_path, auto_name):
    context = multiprocessing.get_context("fork")
    for round_ in range(10):
        runs = tmp_path / f"runs-{round_}"
        barrier, answers = context.Barrier(4), context.Queue()
        workers = [
            context.Process(target=_create, args=(runs, barrier, answers, auto_name))
            for _ in range(4)
        ]
        for worker in workers:
            worker.start()
        names = [answers.get(timeout=PATIENCE_S) for _ in workers]
        for worker in workers:
            worker.join()

        made = sorted(name for name in names if name)
        assert made == (["lm-1", "lm-2", "lm-3", "lm-4"] if auto_name else ["lm-1"])
        assert sorted(p.name for p in runs.iterdir()) == [".gitignore", *made]
        assert {json.loads((runs / n / "spec.json").read_text())["name"] for n in made} == set(made)


def test_a_copy_that_fails_takes_the_whole_run_back(work):
    """Nothing is left, not even the folders that were made on the way to it."""
    (work / "older").mkdir()
    prepared = ask(work, runs=Path("older/deep/runs"))
    gone = Checkout(work / "gone", "", dirty=True, files=["x.py"], size_bytes=1, untracked=[])

    with pytest.raises(ChecksFailed, match="the code cannot be copied"):
        make_run(prepared, gone)

    assert entries(work) == ["older", "train.py"]


def test_taking_a_run_back_leaves_other_runs_and_older_folders(work):
    (work / "a").mkdir()
    prepared = ask(work, runs=Path("a/runs"))
    run = make_run(prepared, None)
    make_run(ask(work, runs=Path("a/runs")), None)

    discard_run(run, prepared.new_parent)

    assert entries(work / "a") == [
        "runs",
        "runs/.gitignore",
        "runs/lm-2",
        "runs/lm-2/spec.json",
    ]


def test_a_folder_that_refuses_only_when_written_is_told_in_one_line(work):
    """/proc passes every check for root and lets nobody make a folder."""
    prepared = ask(work)

    with pytest.raises(
        ChecksFailed, match=r"^/proc/hpctrain-runs/lm-1 cannot be written: .*--runs$"
    ):
        create_run(prepared.spec, Path("/proc/hpctrain-runs"))


@pytest.mark.two_users  # only root mounts disks
def test_a_read_only_file_system_is_told_even_to_root(work, tmp_path):
    with small_disk.mounted(tmp_path / "disk", 1 << 20) as folder:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)

        with pytest.raises(ChecksFailed, match=r"mounted read-only; choose another folder"):
            ask(work, runs=folder / "runs")


def test_a_disk_that_cannot_hold_runs_is_refused_before_anything_is_made(work, monkeypatch):
    monkeypatch.setattr(checks, "file_system", lambda folder: "fuse.s3fs")

    with pytest.raises(ChecksFailed, match=r"\(fuse\.s3fs\) cannot hold a run"):
        ask(work)

    assert not (work / "runs").exists()


def test_a_folder_without_permission_is_told(work):
    """In a child that is nobody where this is root, whom permission bits do not bind."""
    ask(work)  # so that all is imported: nobody may not read root's Python
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shut").mkdir(mode=0o500)
        folder.chmod(0o755)

        child = multiprocessing.get_context("fork").Process(target=_ask_as_nobody, args=(folder,))
        child.start()
        child.join(30)

    assert child.exitcode == 0


def _ask_as_nobody(folder):
    if os.geteuid() == 0:
        os.setuid(65534)
    with pytest.raises(ChecksFailed, match="no permission to write in"):
        ask(folder, runs=Path("shut/runs"))

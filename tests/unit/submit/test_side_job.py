"""A job beside a run is checked when the run is submitted, and has its settings but for a few."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpctrain.core.settings.spec import Entry, load_spec
from hpctrain.errors import NotFound, UsageError
from hpctrain.launch.after import NOT_SEALED, live_notes, side_spec
from hpctrain.launch.change import ResumeRequest, change_spec
from hpctrain.launch.live_job import as_own_run
from hpctrain.launch.prepare import make_run, prepare
from hpctrain.launch.resume import prepare_resume
from hpctrain.launch.snapshot import plan_snapshot
from hpctrain.ledger.run.layout import RunDir
from tests.support.memory import entries
from tests.support.submit_requests import request_of


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text("print('hi')\n")
    (folder / "evaluate.py").write_text("print('well')\n")
    return folder


def ask(work, *sets, **changes):
    given = {"cwd": work, "environ": {"PATH": "/usr/bin"}, "runs": Path("runs"), "sets": sets}
    return prepare(request_of(**{**given, **changes}))


def evaluating(work, *sets, script="evaluate.py --tasks all", **changes):
    return ask(work, f"evaluate.script={script}", *sets, **changes)


def evaluation(prepared):
    return side_spec(prepared.spec, "evaluate", name="r-eval-100")[0]


def test_its_program_is_found_where_the_run_is_submitted(work):
    spec = evaluating(work).spec

    assert spec.beside["evaluate"] == Entry(
        "script", str(work / "evaluate.py"), args=["--tasks", "all"], cwd=str(work)
    )


def test_a_program_of_blanks_is_refused(work):
    (work / "hpctrain.toml").write_text("[evaluate]\nscript = '  '\n")

    with pytest.raises(UsageError, match=r"^hpctrain.toml:2: evaluate.script has nothing but blan"):
        ask(work)


def test_a_run_without_one_has_nothing_beside_it(work):
    assert ask(work).spec.beside == {}


@pytest.mark.parametrize(
    ("script", "error", "match"),
    [
        ("evaluat.py", NotFound, r"evaluate.script: script evaluat.py .* did you mean evaluate.py"),
        ("evaluate.py 'x", UsageError, "evaluate.script cannot be taken apart into words"),
        ("torchrun --nproc-per-node 2 evaluate.py", UsageError, ".* name what it starts"),
        ("-m no.such", NotFound, "evaluate.script: .* no module no"),
    ],
)
def test_a_program_that_cannot_run_is_refused_before_anything_is_made(work, script, error, match):
    with pytest.raises(error, match=f"^flag --set evaluate.script: {match}"):
        evaluating(work, script=script)

    assert entries(work) == ["evaluate.py", "train.py"]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ("nodes=0", r"flag --set evaluate.nodes \(evaluate.nodes\).* at least 1"),
        ("nodes=many", r"evaluate.nodes\).* is not a number of nodes"),
        ("time=soon", r"evaluate.time\).* is not a time limit"),
        ("partition=a b", "evaluate.partition"),
        ("at_once=0", "evaluate.at_once is 0; it takes at least 1"),
        ("every=-1", "evaluate.every is -1; it takes at least 0"),
        ("ranks_per_node=-2", "evaluate.ranks_per_node is -2"),
    ],
)
def test_an_allocation_that_cannot_be_is_refused_before_anything_is_made(work, wrong, match):
    with pytest.raises(UsageError, match=match):
        evaluating(work, f"evaluate.{wrong}")

    assert entries(work) == ["evaluate.py", "train.py"]


def test_what_has_no_effect_is_said(work):
    assert (
        "evaluate.every has no effect without evaluate.script"
        in ask(work, "evaluate.every=3").notes
    )
    assert [n for n in evaluating(work, "evaluate.every=3").notes if "evaluate" in n] == []
    never = evaluating(work, "evaluate.every=0", "evaluate.last=false").notes
    assert "evaluate.every is 0 and evaluate.last is false: nothing is due" in never


def test_that_a_programs_own_checkpoints_are_not_evaluated_is_said(work):
    notes = evaluating(work, "checkpoint.sealed=out/*.pt").notes

    assert NOT_SEALED in notes
    assert NOT_SEALED not in evaluating(work).notes


def test_its_allocation_is_its_own_where_it_is_given_and_else_the_runs(work):
    prepared = evaluating(
        work,
        "evaluate.nodes=1",
        "evaluate.gpus_per_node=0",
        "evaluate.time=0:20:00",
        "slurm.account=us",
        nodes="4",
        gpus_per_node=8,
        time="12:00:00",
        partition="big",
    )
    slurm = evaluation(prepared).settings.slurm

    assert (slurm.nodes, slurm.gpus_per_node, slurm.time) == ("1", 0, "0:20:00")
    assert (slurm.partition, slurm.account) == ("big", "us")
    assert prepared.spec.settings.slurm.nodes == "4"


def test_what_is_about_the_runs_own_program_is_left_out(work):
    spec = evaluation(
        evaluating(
            work,
            "checkpoint.sealed=out/*",
            "profile.steps=1:2",
            "profile.ranks=3",
            "run.resume_args=--again",
            nodes="4",
        )
    )
    settings = spec.settings

    assert (settings.checkpoint.sealed, settings.profile.steps) == ([], "")
    assert (settings.run.resume_args, settings.evaluate.script) == ("", "")
    assert (spec.beside, spec.name) == ({}, "r-eval-100")


def test_it_is_another_run_than_the_one_it_stands_beside(work):
    prepared = evaluating(work, env=["A=b"])
    spec = evaluation(prepared)

    assert spec.run_id != prepared.spec.run_id
    assert (spec.env, spec.python) == ({"A": "b"}, prepared.spec.python)


def test_a_mesh_that_its_ranks_cannot_have_is_left_out_with_a_word(work):
    prepared = evaluating(work, "evaluate.nodes=1", nodes="4", engine="fsdp2", mesh={"pp": "4"})
    spec, notes = side_spec(prepared.spec, "evaluate", name="x")

    assert (spec.settings.engine.kind, spec.settings.engine.pp) == ("fsdp2", "1")
    assert [note for note in notes if note.startswith("evaluate: without the run's mesh: ")]
    assert notes[0] in prepared.notes


def test_a_mesh_that_fits_is_the_runs(work):
    spec = evaluation(evaluating(work, nodes="4", engine="fsdp2", mesh={"pp": "4"}))

    assert spec.settings.engine.pp == "4"


SITE = """
[slurm]
forbidden = ["--qos"]
[partitions.small]
max_nodes = 2
max_time = "0:30:00"
[partitions.big]
max_nodes = 64
"""


@pytest.fixture
def site(work):
    """A preset, and an sbatch that nobody calls."""
    (work / "cedar.toml").write_text(SITE)
    (work / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (work / "sbatch").chmod(0o755)
    return {"site": str(work / "cedar.toml"), "environ": {"PATH": str(work)}, "nodes": "8"}


def test_the_site_chooses_for_its_size(work, site):
    prepared = evaluating(work, "evaluate.nodes=1", "evaluate.time=0:10:00", **site)

    assert prepared.spec.settings.slurm.partition == "big"
    assert evaluation(prepared).settings.slurm.partition == "small"


@pytest.mark.parametrize(
    ("sets", "match"),
    [
        (["partition=small"], r"evaluate.partition\): slurm.partition is small"),
        (["qos=high"], r"evaluate.qos\): slurm.qos asks for --qos=high"),
    ],
)
def test_what_the_site_does_not_take_is_refused(work, site, sets, match):
    with pytest.raises(UsageError, match=match):
        evaluating(work, *[f"evaluate.{text}" for text in sets], **site)


def test_a_limit_that_is_too_short_for_the_warning_is_refused(work):
    with pytest.raises(UsageError, match=r"signal_lead_s is 300, .*\(evaluate.time\): slurm.time"):
        evaluating(work, "slurm.signal_lead_s=300", "evaluate.time=5")


# ---- the copy of the code


@pytest.fixture
def checkout(work):
    def git(*words):
        who = ["-c", "user.name=x", "-c", "user.email=x@y"]
        subprocess.run(["git", *who, *words], cwd=work, check=True, capture_output=True)

    git("init", "-q")
    git("add", "train.py", "evaluate.py")
    git("commit", "-qm", "x")
    return work


def test_its_program_is_the_copy_that_was_submitted(checkout):
    prepared = evaluating(checkout, command=["train.py"])
    plan = plan_snapshot(prepared.spec.entry, "yes")
    assert live_notes(prepared.spec, plan.checkout) == []
    run = make_run(prepared, plan.checkout)

    entry = load_spec(run.spec).beside["evaluate"]
    assert entry.path == str(run.snapshot / "evaluate.py")
    assert (entry.cwd, entry.args) == (str(checkout), ["--tasks", "all"])


def test_one_that_is_not_in_the_copy_stays_where_it_is_with_a_word(checkout):
    (checkout / "mine.py").write_text("print('mine')\n")
    prepared = evaluating(checkout, script="mine.py", command=["train.py"])
    plan = plan_snapshot(prepared.spec.entry, "yes")
    notes = live_notes(prepared.spec, plan.checkout)
    run = make_run(prepared, plan.checkout)

    assert load_spec(run.spec).beside["evaluate"].path == str(checkout / "mine.py")
    assert notes == [
        "evaluate: later edits of mine.py count: it is not in the run's copy of the code"
    ]


def test_of_our_own_program_and_where_there_is_no_copy_nothing_untrue_is_said(checkout):
    ours = evaluating(checkout, script="-m hpctrain.recipes.lm.evaluate", command=["train.py"])
    theirs = evaluating(checkout, command=["train.py"])
    plan = plan_snapshot(ours.spec.entry, "yes")

    assert live_notes(ours.spec, plan.checkout) == []
    assert live_notes(theirs.spec, None) == ["evaluate: later edits of evaluate.py count"]


# ---- at a resume


@pytest.fixture
def run(work):
    return make_run(evaluating(work, name="r"), None)


def resumed(run, *sets):
    return prepare_resume(run, load_spec(run.spec), ResumeRequest({}, sets), {"PATH": ""})


def test_a_resume_keeps_the_program_though_its_file_is_gone(run, work):
    (work / "evaluate.py").unlink()

    assert resumed(run).spec.beside == load_spec(run.spec).beside


def test_a_resume_names_another(run, work):
    (work / "more.py").write_text("print('more')\n")

    entry = resumed(run, "evaluate.script=more.py").spec.beside["evaluate"]
    assert entry.path == str(work / "more.py")


def test_a_resume_leaves_it_out(run):
    assert resumed(run, "evaluate.script=").spec.beside == {}


def test_a_resume_is_refused_one_that_is_not_there(run):
    with pytest.raises(NotFound, match=r"evaluate.script: script other.py is not there"):
        resumed(run, "evaluate.script=other.py")


def test_a_run_without_one_gets_one_at_a_resume(work):
    run = make_run(ask(work, name="r"), None)

    spec = resumed(run, "evaluate.script=evaluate.py").spec
    assert spec.beside["evaluate"].path == str(work / "evaluate.py")


def test_a_copy_of_a_run_has_its_own(checkout, tmp_path):
    prepared = evaluating(checkout, command=["train.py"], name="r")
    run = make_run(prepared, plan_snapshot(prepared.spec.entry, "yes").checkout)
    run.events.write_text(
        f'{{"t": 1.0, "kind": "submit_intent", "token": "t", "script": "{run.script("t")}"}}\n'
    )
    copy = run.root.with_name("copy")
    subprocess.run(["cp", "-r", run.root, copy], check=True)
    own, _ = as_own_run(RunDir(copy), load_spec(run.spec))

    assert own.beside["evaluate"].path == str(copy / "snapshot" / "evaluate.py")


def test_changing_settings_leaves_the_given_spec_as_it_was(run):
    spec = load_spec(run.spec)
    change_spec(spec, ResumeRequest({}, ["evaluate.every=2"]))

    assert spec == load_spec(run.spec)

"""`--nodes MIN-MAX --time auto`: what is chosen, and what is submitted where nothing is known."""

from __future__ import annotations

import json

import pytest

from hpctrain.cli.main import main
from hpctrain.cluster.scheduler.slurm import facts as slurm_facts
from hpctrain.core.settings.spec import load_spec
from hpctrain.entry import slurm_after
from hpctrain.errors import ClusterError
from hpctrain.launch import shape
from hpctrain.launch.shape import choose_again
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import ShapeChosen
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.shapes.queue import JobShape
from tests.support.ledger_runs import write_event

SINFO = "echo 'work*|n1|alloc|LIMIT'; echo 'work*|n2|idle|LIMIT'"
IN = r"""
nodes=$(sed -n 's/^#SBATCH --nodes=//p' "$2"); limit=$(sed -n 's/^#SBATCH --time=//p' "$2")
echo "$nodes $limit" >> "$ASKED"
echo "sbatch: Job 7 to start at $(($(date +%s) + 259200)) using 8 processors on nodes n1" >&2
"""
SITE = """
name = "here"
description = "two nodes"
stability = "local"
{slurm}
[partitions.work]
max_time = "1-00:00:00"
max_nodes = {most}
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder beside a SLURM of scripts: one idle node, one taken, 3 days for `--test-only`."""
    folder, commands = tmp_path / "work", tmp_path / "bin"
    folder.mkdir()
    commands.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    monkeypatch.setenv("HPCTRAIN_SITE_PATH", str(tmp_path / "sites"))
    for name in ("HPCTRAIN_RUNS", "HPCTRAIN_SITE"):
        monkeypatch.delenv(name, raising=False)
    bodies = {
        "sinfo": SINFO.replace("LIMIT", "1-00:00:00"),
        "squeue": "exit 0",
        "scontrol": "exit 0",
        "sacct": "exit 0",
        "sbatch": f'case "$1" in --test-only) {IN} ;; *) cat "$2" >/dev/null; echo 17 ;; esac',
    }
    for name, body in bodies.items():
        (commands / name).write_text(f"#!/bin/sh\n{body}\n")
        (commands / name).chmod(0o755)
    return folder


def put(work, name, body):
    (work.parent / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")


def site(work, most=16, slurm=""):
    folder = work.parent / "sites"
    folder.mkdir()
    (folder / "here.toml").write_text(SITE.format(most=most, slurm=slurm))
    return "--site=here"


def dry(capsys, *words):
    code = main(["submit", "--dry-run", "--json", "--site=none", *words])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def header(value):
    lines = [line.split("=", 1) for line in value["script"].splitlines() if "=" in line]
    return {name: text for name, text in lines if name.startswith("#SBATCH")}


def asked(work):
    return (work.parent / "asked").read_text().split("\n")[:-1]


def test_the_candidates_are_asked_about_and_one_is_chosen(work, capsys):
    value = dry(capsys, "--nodes=1-2", "--time=auto")

    told = value["shape"]
    shown = header(value)
    assert len(asked(work)) == len(told["candidates"]) <= 12
    # One node is free at once: the queue shows it, though --test-only says three days.
    assert told["chosen"]["nodes"] == 1
    assert shown["#SBATCH --nodes"] == "1"
    assert shown["#SBATCH --time"] == "24:00:00"
    assert len(told["why"]) == 2
    starts = {row["nodes"]: row["start_s"] for row in told["candidates"]}
    assert starts[1] == pytest.approx(0, abs=5)
    assert starts[2] == pytest.approx(1.6 * 3 * 86400, rel=0.01)  # of the longest limit


def test_how_long_a_limit_is_goes_by_the_partitions_longest(work, capsys):
    put(work, "sinfo", SINFO.replace("LIMIT", "8-00:00:00"))

    value = dry(capsys, "--nodes=2", "--time=auto", "--set=shape.choose=time")

    starts = {row["limit_s"]: row["start_s"] for row in value["shape"]["candidates"]}
    assert starts[8 * 86400] == pytest.approx(1.6 * 3 * 86400, rel=0.01)
    day = starts[86400]
    assert day == pytest.approx(0.25 * (1 / 8) ** 0.25 * 3 * 86400, rel=0.01)


def test_a_dry_run_prints_the_table_and_marks_the_chosen_row(work, capsys):
    assert main(["submit", "--dry-run", "--site=none", "--nodes=1-2", "--time=auto"]) == 0

    out = capsys.readouterr().out
    table, _, rest = out.partition("#SBATCH")
    assert "nodes" in table.splitlines()[0]
    assert "starts in" in table.splitlines()[0]
    assert sum(line.startswith(">") for line in table.splitlines()) == 1
    assert "does most work per hour of waiting and running of 12 candidates" in table
    assert "--nodes=1\n" in rest


def test_submit_prints_the_choice_and_the_ledger_has_all_candidates(work, capsys):
    assert main(["submit", "--site=none", "--name=r", "--nodes=1-2", "--time=auto"]) == 0

    out = capsys.readouterr().out
    assert "shape  1 node x 1d0h: does most work" in out
    run = RunDir(work / "runs" / "r")
    (fact,) = [e.fact for e in ledger.read(run) if isinstance(e.fact, ShapeChosen)]
    assert (fact.by, fact.nodes, fact.limit_s) == ("submit", 1, 86400)
    assert len(fact.candidates) == 12
    spec = load_spec(run.spec)
    assert (spec.settings.slurm.nodes, spec.settings.shape.choose) == ("1-2", "both")
    (script,) = run.jobs.glob("*.sh")
    assert "#SBATCH --nodes=1\n" in script.read_text()


def test_a_fixed_number_of_nodes_leaves_the_time_to_choose_and_the_other_way_round(work, capsys):
    assert dry(capsys, "--nodes=2", "--time=auto")["spec"]["settings"]["shape"]["choose"] == "time"
    value = dry(capsys, "--nodes=auto", "--time=2h", "--site", site(work, most=2)[7:])

    assert value["spec"]["settings"]["shape"]["choose"] == "nodes"
    assert {row["limit_s"] for row in value["shape"]["candidates"]} == {7200}
    assert {row["nodes"] for row in value["shape"]["candidates"]} == {1, 2}


def test_a_range_with_a_time_limit_is_slurms_to_choose_as_before(work, capsys):
    value = dry(capsys, "--nodes=1-2", "--time=2h")

    assert "shape" not in value
    assert header(value)["#SBATCH --nodes"] == "1-2"
    assert not (work.parent / "asked").exists()


def test_candidates_keep_the_global_batch_and_have_a_mesh(work, capsys):
    words = ["--nodes=1-16", "--ranks-per-node=2", "--time=auto", "--set=train.global_batch=8"]

    sizes = {row["nodes"] for row in dry(capsys, *words)["shape"]["candidates"]}

    assert sizes == {1, 2, 3, 4}  # 8 data ranks at most

    meshed = dry(capsys, *words, "--engine=fsdp2", "--mesh=pp=3", "--set=train.layers=6")
    assert {row["nodes"] for row in meshed["shape"]["candidates"]} == {3, 6, 9, 12}


def test_what_the_site_does_not_allow_is_no_candidate(work, capsys):
    value = dry(capsys, "--nodes=1-16", "--time=auto", "--partition=work", site(work, most=2))

    rows = value["shape"]["candidates"]
    assert {row["nodes"] for row in rows} == {1, 2}
    assert max(row["limit_s"] for row in rows) == 86400


# ---- one clear line each


def refused(capsys, *words):
    code = main(["submit", "--dry-run", "--site=none", *words])
    return code, capsys.readouterr().err.strip()


def plain(capsys, *words):
    """The one note with which the job is submitted all the same."""
    value = dry(capsys, *words)
    (note,) = [note for note in value["notes"] if "plain shape" in note]
    assert value["shape"]["candidates"] == []
    assert header(value)["#SBATCH --nodes"] == str(value["shape"]["chosen"]["nodes"])
    return note


def test_a_range_that_no_mesh_fits(work, capsys):
    words = ["--nodes=1-2", "--time=auto", "--engine=fsdp2", "--mesh=pp=3", "--set=train.layers=6"]

    code, said = refused(capsys, *words)

    assert code == 2
    assert "needs a multiple of 3 ranks" in said
    assert len(said.splitlines()) == 1


def test_a_range_whose_ranks_cannot_share_the_global_batch(work, capsys):
    words = ["--nodes=9-12", "--time=auto", "--set=train.global_batch=8"]

    code, said = refused(capsys, *words)

    assert code == 2
    assert "can the ranks share train.global_batch 8; use fewer nodes" in said
    assert len(said.splitlines()) == 1


def test_nodes_auto_where_nobody_says_how_many_there_are(work, capsys):
    put(work, "sinfo", "exit 1")

    code, said = refused(capsys, "--nodes=auto", "--time=auto")

    assert code == 2
    assert said.endswith("says how many a job may have; give a range, as in --nodes 1-16")


def test_a_partition_without_limits(work, capsys):
    put(work, "sinfo", SINFO.replace("LIMIT", "infinite"))

    value = dry(capsys, "--nodes=1-2", "--time=auto")

    assert value["notes"][-1] == (
        "the default partition has no time limit: limits up to 1d0h are candidates; --time gives "
        "another"
    )
    assert value["shape"]["chosen"] == {"nodes": 1, "limit_s": 86400}


def test_a_limit_that_nobody_could_read_is_said_to_be_unknown(work, capsys):
    put(work, "squeue", "exit 1")

    notes = dry(capsys, "--nodes=1-2", "--time=auto")["notes"]

    assert "the default partition has a time limit that is not known: limits" in "\n".join(notes)


def test_where_the_site_forbids_test_only_nobody_asks_and_the_queue_must_do(work, capsys):
    forbids = site(work, slurm='[slurm]\nforbidden = ["--test-only"]')

    value = dry(capsys, "--nodes=1-2", "--time=auto", "--partition=work", forbids)

    assert value["shape"]["chosen"]["nodes"] == 1
    assert not (work.parent / "asked").exists()


def test_where_nobody_may_ask_anything_the_plain_shape_is_submitted(work, capsys):
    forbids = site(work, slurm='[slurm]\nforbidden = ["--test-only"]')
    put(work, "squeue", "echo 'slurm_load_jobs error: Access denied' >&2; exit 1")

    note = plain(capsys, "--nodes=1-2", "--time=auto", "--partition=work", forbids)

    assert note.startswith("the job is submitted with the plain shape, 1 node x 1d0h: site here (")
    assert note.endswith("forbids sbatch --test-only")


def test_a_slow_slurmctld_is_not_waited_for(work, capsys, monkeypatch):
    monkeypatch.setattr(slurm_facts.ask_queue, "__kwdefaults__", {"timeout_s": 0.2})
    monkeypatch.setitem(slurm_facts.ask_starts.__kwdefaults__, "timeout_s", 0.2)
    for name in ("sinfo", "squeue", "sbatch"):
        put(work, name, "exec sleep 600")

    note = plain(capsys, "--nodes=1-2", "--time=auto")

    assert "sbatch gave no answer within 0.2 s: slurmctld may be down or busy" in note


def test_all_questions_together_take_five_seconds_at_most():
    assert slurm_facts.VIEW_S + slurm_facts.STARTS_S <= 5.0
    assert slurm_facts.ask_queue.__kwdefaults__ == {"timeout_s": slurm_facts.VIEW_S}
    assert slurm_facts.ask_starts.__kwdefaults__["timeout_s"] == slurm_facts.STARTS_S


def test_an_estimate_of_never(work, capsys):
    put(work, "squeue", "exit 1")
    put(work, "sbatch", 'echo "sbatch: Job 7 to start at 9999999999 using 8" >&2')

    note = plain(capsys, "--nodes=1-2", "--time=auto")

    assert note.endswith(": sbatch --test-only names a start that never comes")


def test_a_shape_that_slurm_refuses_is_not_chosen(work, capsys):
    put(work, "sbatch", 'grep -q "nodes=1$" "$2" && { echo QOSMinNodes >&2; exit 1; }\n' + IN)

    told = dry(capsys, "--nodes=1-2", "--time=auto")["shape"]

    assert told["chosen"]["nodes"] == 2
    assert {r["refused"] for r in told["candidates"] if r["nodes"] == 1} == {
        "SLURM refused: QOSMinNodes (sbatch, exit 1)"
    }


def test_a_wrong_word_is_refused_with_what_it_takes(work, capsys):
    code, said = refused(capsys, "--nodes=2", "--time=later")
    assert code == 2
    assert '"later" is not a time limit' in said
    assert main(["submit", "--dry-run", "--nodes=1-2", "--time=auto", "--prefer=speed"]) == 2
    assert "'time', 'cost', 'balanced'" in capsys.readouterr().err


def test_on_this_machine_there_is_no_queue_and_nothing_is_chosen(work, capsys):
    assert main(["submit", "--dry-run", "--json", "--cluster=local", "--nodes=1-2", "-tauto"]) == 0

    value = json.loads(capsys.readouterr().out)
    assert "shape" not in value
    assert value["spec"]["settings"]["slurm"]["time"] == "1:00:00"


def test_waits_of_earlier_runs_correct_what_slurm_estimates(work, capsys):
    for name in "abc":
        assert main(["submit", "--site=none", f"--name={name}", "--nodes=2", "--time=auto"]) == 0
        run = RunDir(work / "runs" / name)
        start = {"job_id": "17", "restarts": 0, "nodes": ["n1", "n2"], "world_size": 2}
        began = ledger.read(run)[-1].t + 3600.0
        write_event(run, "attempt_started", attempt=1, t=began, by="start", **start)
    capsys.readouterr()

    rows = dry(capsys, "--nodes=2", "--time=auto")["shape"]["candidates"]

    assert "3 waits of own jobs" in rows[-1]["wait_source"]


# ---- at a requeue


@pytest.fixture
def requeued(work, capsys):
    """A run on one node for a day that was preempted, and its nodes are free again."""
    assert main(["submit", "--site=none", "--name=r", "--nodes=1-2", "--time=auto"]) == 0
    capsys.readouterr()
    run = RunDir(work / "runs" / "r")
    start = {"job_id": "17", "restarts": 0, "nodes": ["n1"], "world_size": 1, "by": "start"}
    write_event(run, "attempt_started", attempt=1, **start)
    write_event(run, "attempt_ended", attempt=1, reason="preempted", next="requeue")
    return run


def again(run, give, *, job="17", restarts=0):
    choose_again(run, load_spec(run.spec), job, restarts, give)
    return [e.fact for e in ledger.read(run) if isinstance(e.fact, ShapeChosen)][1:]


def test_a_requeued_job_is_given_the_shape_that_is_better_now(work, requeued):
    put(work, "sinfo", SINFO.replace("LIMIT", "1-00:00:00").replace("alloc", "idle"))
    given = []

    (fact,) = again(requeued, given.append)

    assert given == [JobShape(2, 86400)]
    assert (fact.by, fact.nodes, fact.kept, fact.failed) == ("requeue", 2, False, "")
    assert 1 < len(fact.candidates) <= 12


def test_the_nodes_of_the_job_that_ends_count_as_free(work, requeued):
    put(work, "squeue", "echo '17|COMPLETING|work|n1|(null)|N/A|N/A|1-00:00:00'")
    given = []

    again(requeued, given.append)

    assert given == [JobShape(2, 86400)]


def test_a_shape_that_is_not_clearly_better_is_not_given(work, requeued):
    given = []

    (fact,) = again(requeued, given.append)

    assert given == []
    assert (fact.nodes, fact.kept) == (1, True)


def test_a_refused_change_is_on_record_and_the_next_choice_knows_the_old_shape(work, requeued):
    put(work, "sinfo", SINFO.replace("LIMIT", "1-00:00:00").replace("alloc", "idle"))

    def refuse(shape):
        raise ClusterError("SLURM refused: no")

    (fact,) = again(requeued, refuse)
    assert fact.failed == "SLURM refused: no"

    given = []
    again(requeued, given.append)
    assert given == [JobShape(2, 86400)]


def test_where_slurm_says_nothing_the_job_keeps_its_shape_and_that_is_on_record(work, requeued):
    for name in ("sinfo", "squeue", "sbatch"):
        put(work, name, "exit 1")
    given = []

    (fact,) = again(requeued, given.append)

    assert given == []
    assert (fact.nodes, fact.limit_s) == (1, 86400)
    assert fact.failed.startswith("the job keeps its shape, 1 node x 1d0h: ")


@pytest.mark.parametrize("start", [{"job": "18"}, {"restarts": 1}])
def test_only_the_start_that_is_followed_chooses(work, requeued, start):
    assert again(requeued, [].append, **start) == []


def test_a_run_that_is_over_chooses_nothing(work, requeued):
    write_event(requeued, "attempt_ended", attempt=1, reason="completed", next="stop")

    assert again(requeued, [].append) == []


def test_the_last_act_of_the_batch_script_never_fails_by_it(work, requeued, monkeypatch, caplog):
    def broken(*_):
        raise ClusterError("broken")

    monkeypatch.setattr(shape, "choose_again", broken)

    slurm_after.reshape_next(requeued, "17", 0, [].append)

    assert "the job keeps its nodes and its time limit: broken" in caplog.text

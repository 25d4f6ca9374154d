"""What the batch script is told of staging, and what becomes of the nodes' lines."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm.script import (
    notes_of,
    outcome,
    render_script,
    shell_variables,
)
from hpctrain.core.settings.schema import EnvironmentSettings, Settings, SlurmSettings
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.entry import slurm_batch
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.staging import EnvironmentArchive, Staging
from hpctrain.observe.status.event_lines import staged
from tests.support.ledger_runs import all_fields

SBATCH = Path(__file__).parents[3] / "sbatch"
ARCHIVE = EnvironmentArchive("k", "/a b/k.tar", "5a", 7, 8, 9, "zstd", "/env's", "bin/python")


def script(**environment):
    spec = Spec("gpt", "id", 0.0, "slurm", "", Entry("recipe"), python="/venv/bin/python")
    spec.settings = Settings(
        slurm=SlurmSettings(nodes="2"), environment=EnvironmentSettings(**environment)
    )
    return render_script(spec, RunDir(Path("/runs/gpt")), "gpt-12ab")


def test_a_script_has_both_parts_word_for_word_and_gives_the_nodes_its_own(tmp_path):
    text = script(stage="yes")

    assert (SBATCH / "stage.sh").read_text() in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    head = text[: text.index("# shellcheck shell=bash disable")]
    lines = head[head.index("IFS=") :] + '\nprintf %s "$hpctrain_stage_node"\n'
    told = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True).stdout
    assert told == (SBATCH / "stage_node.sh").read_text()


@pytest.mark.parametrize("environment", [{}, {"stage": "auto"}])
def test_a_script_that_stages_nothing_has_none_of_it(environment):
    assert "sbcast" not in script(**environment)


def test_the_shell_reads_what_it_is_told():
    staging = Staging(ARCHIVE, "", ["$TMPDIR/x", "/a b"], 30.0)
    lines = "\n".join(shell_variables(staging))
    ask = (
        'printf "%s|" "$hpctrain_stage_archive" "$hpctrain_stage_prefix" "$hpctrain_stage_bytes"'
        ' "$hpctrain_stage_timeout" "${hpctrain_stage_places[@]}"'
    )

    done = subprocess.run(
        ["bash", "-uc", f"{lines}\n{ask}"], capture_output=True, text=True, check=True
    )

    assert done.stdout == "/a b/k.tar|/env's|7|30|$TMPDIR/x|/a b|"


def told(lines, nodes, why=""):
    return outcome(lines, nodes, ("17", 2), way="sbcast", seconds=3.4, why=why)


def test_each_nodes_line_counts_once_and_silence_is_told():
    lines = [
        "hpctrain-stage n1 staged /tmp/e\n",
        "hpctrain-stage n2 reused /tmp/e",
        "noise n3 staged /tmp/e",
        "hpctrain-stage n4 no no room in /tmp",
        "hpctrain-stage n5 no no room in /tmp",
    ]

    fact = told(lines, ["n1", "n2", "n3", "n4", "n5"])

    assert (fact.staged, fact.reused, fact.not_staged) == (1, 1, 3)
    assert fact.why == "n[4-5]: no room in /tmp; n3: no answer"
    assert (fact.way, fact.folder, fact.job_id, fact.restarts) == ("sbcast", "/tmp/e", "17", 2)  # noqa: S108
    assert staged(fact) == (
        "environment staged by sbcast on 1 node, reused on 1 node, not staged on 3 nodes in "
        "3.40 s: n[4-5]: no room in /tmp; n3: no answer"
    )


def test_a_reason_for_all_nodes_is_theirs():
    fact = told([], ["n1", "n2"], why="its archive is gone")

    assert staged(fact) == "environment not staged on 2 nodes: n[1-2]: its archive is gone"
    assert (fact.way, fact.folder) == ("", "")


def test_many_reasons_are_cut():
    lines = [f"hpctrain-stage n{number} no reason {number}" for number in range(9)]

    assert told(lines, []).why.endswith("n4: reason 4; 4 more reasons")


def test_before_prints_it_and_staged_writes_it_down(tmp_path, monkeypatch, capsys):
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    Staging(ARCHIVE, "", ["/tmp"], 30.0).write(run)  # noqa: S108
    assert "hpctrain_stage_wanted=1" in slurm_batch._staging(str(run.root))
    run.staging.write_text("{")
    (why,) = [
        line
        for line in slurm_batch._staging(str(run.root))
        if line.startswith("hpctrain_stage_why")
    ]
    assert f"{run.staging} cannot be read" in why
    run.staging.unlink()
    assert slurm_batch._staging(str(run.root)) == []

    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setattr("sys.stdin", ["hpctrain-stage n1 staged /tmp/e"])
    words = ["--way", "read", "--seconds", "2", "--why", ""]
    assert slurm_batch.main(["staged", str(run.root), *words]) == 0

    (event,) = ledger.read(run)
    assert all_fields(event)["staged"] == 1
    assert json.loads(run.events.read_text())["kind"] == "environment_staged"
    assert "environment staged on 1 node in 2.00 s" in capsys.readouterr().err


def test_submit_says_where_nodes_would_look(monkeypatch):
    def notes(nodes="2", **environment):
        slurm = SlurmSettings(nodes=nodes)
        return notes_of(Settings(slurm=slurm, environment=EnvironmentSettings(**environment)), None)

    assert notes(stage="yes", stage_dir="/nvme")[0].endswith("in the first of /nvme")
    assert notes(stage="auto") == ["environment.stage auto: not with fewer than 8 nodes"]
    assert len(notes(stage="auto", nodes="8")) == 1

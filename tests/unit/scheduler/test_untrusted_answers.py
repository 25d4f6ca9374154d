"""Whatever a name, a setting, a file or an answer of SLURM's holds: no traceback."""

from __future__ import annotations

import re
import socket
from dataclasses import fields
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm import client, control
from hpctrain.cluster.scheduler.slurm.command import job_context
from hpctrain.cluster.scheduler.slurm.facts import read_facts
from hpctrain.cluster.scheduler.slurm.jobs import is_alive, job_info
from hpctrain.cluster.scheduler.slurm.parse import parse_records
from hpctrain.cluster.scheduler.slurm.script import render_script
from hpctrain.cluster.site.detect import draft
from hpctrain.cluster.site.load import load_site
from hpctrain.cluster.site.validate import validate
from hpctrain.core.settings.schema import sections
from hpctrain.entry.slurm_batch import exports
from hpctrain.errors import ClusterError, HpctrainError
from hpctrain.launch.prepare import prepare
from hpctrain.ledger.run.layout import RunDir
from tests.support.fuzzing import Faults, cases, chances, damaged, odd_text
from tests.support.submit_requests import request_of

LEGAL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
SETTINGS = [(name, one.name) for name, cls in sections().items() for one in fields(cls)]
SITES = sorted((Path(__file__).parents[3] / "site-configs").glob("*.toml"))
ANSWERS = {
    path.stem: path.read_text()
    for path in (Path(__file__).parents[2] / "data" / "slurm-answers").glob("show_*.txt")
}
QUEUE = "17|RUNNING|/runs/gpt/jobs/gpt-1.sh\n18|PENDING|/a b/c|d.sh\n"
ACCOUNT = "17|PREEMPTED|1763700000|1763700100|n[1-2]\n17|RUNNING|1763700200|Unknown|n[1-3,7]\n"


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder to submit from, with an sbatch that is never called."""
    folder = tmp_path / "work"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (folder / "bin" / "sbatch").chmod(0o755)
    (folder / "train.py").write_text("print('hi')\n")
    monkeypatch.chdir(folder)
    return folder


def submitted(work, **request):
    """What would be submitted: its script too, whose header holds options alone."""
    environ = {"PATH": str(work / "bin"), "HPCTRAIN_SITE_PATH": str(work / "sites")}
    given = {"cwd": work, "environ": environ, "runs": Path("runs"), "snapshot": False, **request}
    spec = prepare(request_of(**given)).spec
    assert LEGAL.fullmatch(spec.name)
    if spec.cluster == "slurm":
        header = render_script(spec, RunDir(work / "runs" / spec.name), "t-1").partition("\n\n")[0]
        assert all(
            line.startswith(("#SBATCH -", "#!/bin/bash", "# ")) for line in header.split("\n")
        )
    return spec


@cases(60, 2_500)
def test_names(work, begin, end):
    faults = Faults(HpctrainError)
    for number, chance in chances(begin, end):
        name = odd_text(chance)
        faults.of(f"{number} {name[:40]!r}", lambda name=name: submitted(work, name=name))
    assert faults.found == []
    assert sorted(path.name for path in work.iterdir()) == ["bin", "train.py"]


@cases(120, 10_000)
def test_settings_by_flag(work, begin, end):
    faults = Faults(HpctrainError)
    for number, chance in chances(begin, end):
        section, key = SETTINGS[number % len(SETTINGS)]
        sets = [f"{section}.{key}={odd_text(chance)}"]
        faults.of(f"{number} {sets[0][:60]!r}", lambda sets=sets: submitted(work, sets=sets))
    assert faults.found == []


@cases(60, 2_500)
def test_settings_files(work, begin, end):
    faults = Faults(HpctrainError)
    file = work / "hpctrain.toml"
    for number, chance in chances(begin, end):
        chosen = [SETTINGS[chance.randrange(len(SETTINGS))] for _ in range(3)]
        values = [
            chance.choice((odd_text(chance), chance.choice(("4", '"x"', "true")))) for _ in chosen
        ]
        text = "".join(f"[{s}]\n{k} = {v}\n" for (s, k), v in zip(chosen, values, strict=True))
        text += chance.choice(("", '[env]\nA = "b"\n', f"site = {values[0]}\n"))
        file.write_text(chance.choice((text, damaged(text, chance))))
        faults.of(f"{number}", lambda: submitted(work))
    assert faults.found == []


@cases(40, 2_500)
def test_site_files(work, begin, end):
    faults = Faults(HpctrainError)
    (work / "sites").mkdir()
    environ = {"HPCTRAIN_SITE_PATH": str(work / "sites"), "XDG_CONFIG_HOME": str(work / "config")}
    for number, chance in chances(begin, end):
        text = SITES[number % len(SITES)].read_text()
        (work / "sites" / "odd.toml").write_text(damaged(text, chance))

        def read():
            validate(load_site("odd", environ=environ))

        faults.of(f"{number} {SITES[number % len(SITES)].stem}", read)
    assert faults.found == []


def _answered(text, monkeypatch):
    """Every question that hpctrain has, with this answer."""
    for module in (client, control):
        monkeypatch.setattr(module, "run", lambda *_, **__: text)
    monkeypatch.setattr(control, "run_until", lambda *_, **__: text)
    cluster, own = client.SlurmCluster(), control.SlurmControl("17", restarts=0, nodes=["n1"])
    return (
        lambda: cluster.find_job("gpt-1"), lambda: cluster.job("17"),
        lambda: cluster.starts(["17"]),
        own.facts, own.requeue, own.previous_end, own.previous_stop, lambda: own.exclude(["n9"]),
        lambda: draft(read_facts(text, ANSWERS["show_partitions"], text), name="x", today="2026"),
        lambda: draft(read_facts("", text, ANSWERS["show_nodes"]), name="x", today="2026"),
    )  # fmt: skip


@cases(100, 5_000)
def test_answers_of_slurm(monkeypatch, begin, end):
    faults = Faults(ClusterError)
    texts = [*ANSWERS.values(), QUEUE, ACCOUNT]
    for number, chance in chances(begin, end):
        answer = damaged(texts[number % len(texts)], chance)
        for index, ask in enumerate(_answered(answer, monkeypatch)):
            faults.of(f"{number} question {index}", ask)
    assert faults.found == []


def _no_name_service(name, *_, **__):
    """Refuses what Python refuses, and knows nobody."""
    name.encode("idna")
    raise socket.gaierror(name)


@cases(100, 5_000)
def test_node_lists_of_the_environment(monkeypatch, capsys, begin, end):
    faults = Faults(ClusterError)
    monkeypatch.setattr("hpctrain.entry.slurm_batch._asked", lambda *_: {})
    monkeypatch.setattr(socket, "getaddrinfo", _no_name_service)
    for number, chance in chances(begin, end):
        nodes = damaged("gpu[001-4,7],n[1-2]x[3-4],login", chance)
        env = {"SLURM_JOB_ID": "17", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": nodes}
        faults.of(f"{number} {nodes!r} before", lambda env=env: exports(env))
        faults.of(f"{number} {nodes!r} task", lambda env=env: job_context(env))
    capsys.readouterr()
    assert faults.found == []


@pytest.mark.parametrize("name", [name for name in ANSWERS if name.startswith("show_job_")])
def test_a_live_job_is_not_over_because_its_answer_was_cut_off(name):
    text = ANSWERS[name]
    if not all(is_alive(record["JobState"]) for record in parse_records(text)):
        return
    for length in range(0, len(text), 7):
        assert all(job_info(record).alive for record in parse_records(text[:length]))


@pytest.mark.parametrize("field", ["Reason", "SubmitLine", "Features", "TresPerNode", "Comment"])
def test_a_users_text_cannot_pass_itself_off_as_the_jobs_state(field):
    text = ANSWERS["show_job_time_limit"]
    said = f"{text.rstrip()}\n   {field}=x JobState=DONE Restarts=99\n"
    assert job_info(parse_records(said)[0]) == job_info(parse_records(text)[0])

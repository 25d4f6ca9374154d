"""Submit and resume under a site's preset: what is chosen, filled in, told and refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.cluster.scheduler.base import Accounting
from hpctrain.cluster.scheduler.slurm.limits import (
    Need,
    check_site,
    choose_partition,
    cpu_notes,
    misfits,
    time_limit,
)
from hpctrain.cluster.site import load
from hpctrain.cluster.site.load import load_site
from hpctrain.cluster.site.schema import Partition, Preemption
from hpctrain.core.settings.layers import flag_layer, resolve
from hpctrain.core.settings.schema import Settings
from hpctrain.core.settings.spec import load_spec
from hpctrain.errors import UsageError
from hpctrain.launch.change import ResumeRequest, change_spec
from hpctrain.launch.launch import without_nodes
from hpctrain.launch.prepare import make_run, prepare
from hpctrain.ledger.run.layout import RunDir
from tests.support.submit_requests import request_of
from tests.support.users import STRANGER

FRONTIER = Partition(
    gpus_per_node=8,
    walltime_bins={"1-91": "2:00:00", "92-183": "6:00:00", "184-": "12:00:00"},
    max_time="12:00:00",
)


def need(nodes=2, hours=1.0, gpus=0, least=None, cpus=0):
    return Need(least or nodes, nodes, gpus, int(hours * 3600), cpus)


# ---- limits


@pytest.mark.parametrize(
    ("least", "most", "hours"), [(1, 91, 2), (91, 92, 2), (92, 183, 6), (184, 900, 12), (2, 900, 2)]
)
def test_of_the_bins_that_a_range_of_nodes_touches_the_shortest_counts(least, most, hours):
    limit = time_limit(FRONTIER, need(most, least=least))

    assert limit is not None
    assert limit[0] == hours * 3600


@pytest.mark.parametrize(
    ("partition", "asked", "why"),
    [
        (FRONTIER, need(92, hours=6.5), ["at most 6h00m (jobs of 92-183 nodes)"]),
        (FRONTIER, need(2, gpus=9), ["8 GPUs per node"]),
        (Partition(max_time="1-00:00:00"), need(hours=25), ["at most 1d0h"]),
        (Partition(max_nodes=4), need(5), ["at most 4 nodes"]),
        (Partition(min_nodes=4), need(8, least=2), ["at least 4 nodes"]),
        (Partition(cpus_per_node=56), need(cpus=64), ["56 usable CPUs per node"]),
        (Partition(), need(10_000, hours=9999, gpus=99, cpus=999), []),
        (Partition(gpus_per_node=0), need(gpus=1), ["no GPUs per node"]),
    ],
)
def test_a_limit_that_is_known_refuses_and_one_that_is_not_does_not(partition, asked, why):
    assert misfits(partition, asked) == why


def preempted(**more):
    return Partition(preemption=Preemption(mode="requeue"), **more)


@pytest.mark.parametrize(
    ("partitions", "asked", "best"),
    [
        ({"a": Partition(), "b": Partition()}, need(), "a"),
        ({"low": preempted(), "plain": Partition()}, need(), "plain"),
        ({"low": preempted(), "plain": Partition(max_nodes=1)}, need(2), "low"),
        ({"dev": Partition(auto=False), "b": Partition()}, need(), "b"),
        ({"gpu": Partition(gpus_per_node=4), "cpu": Partition(gpus_per_node=0)}, need(), "cpu"),
        (
            {"x8": Partition(gpus_per_node=8), "x4": Partition(gpus_per_node=4)},
            need(gpus=4),
            "x4",
        ),
        ({"short": Partition(max_time="1:00:00"), "long": Partition()}, need(hours=2), "long"),
    ],
)
def test_the_partition_is_chosen_from_the_limits(partitions, asked, best):
    assert choose_partition(partitions, asked, "site x")[0] == best


def test_why_a_partition_is_taken_is_said():
    partitions = {"batch": FRONTIER, "extended": Partition(max_nodes=64)}

    assert choose_partition(partitions, need(2, hours=2, gpus=8), "site x (x.toml:3)")[1] == (
        "partition batch is taken, as site x (x.toml:3) says it takes 2 nodes with 8 GPUs for 2h00m"
        " (so would extended: --partition)"
    )


def test_where_none_fits_each_says_why():
    partitions = {"batch": FRONTIER, "extended": Partition(max_nodes=64)}

    with pytest.raises(
        UsageError,
        match=r"^no partition of site x takes 100 nodes for 12h00m \(batch: at most 6h00m "
        r"\(jobs of 92-183 nodes\); extended: at most 64 nodes\); ask for less",
    ):
        choose_partition(partitions, need(100, hours=12), "site x")


# ---- submit

JUNIPER = """
[slurm]
account_required = true
account_env = ["PROJECT", "SBATCH_ACCOUNT"]
account_hint = "myprojects"
qos_default = "normal"
kill_wait_s = 30
[partitions.batch]
gpus_per_node = 8
cpus_per_node = 56
max_nodes = 64
max_time = "2:00:00"
[partitions.debug]
auto = false
gpus_per_node = 8
cpus_per_node = 56
max_time = "0:30:00"
qos = "debug"
[partitions.spare]
gpus_per_node = 8
[partitions.spare.preemption]
mode = "requeue"
grace_s = 20
[settings.slurm]
gpus_per_node = 8
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder to submit from, with the site `juniper` and an sbatch that nobody calls."""
    monkeypatch.setattr(load, "ROOT", os.geteuid())
    folder = tmp_path / "work"
    (folder / "sites").mkdir(parents=True)
    (folder / "train.py").write_text("")
    (folder / "sites" / "juniper.toml").write_text(JUNIPER)
    (folder / "bin").mkdir()
    (folder / "bin" / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (folder / "bin" / "sbatch").chmod(0o755)
    return folder


def shell(work, **more):
    return {"PATH": f"{work}/bin", "HPCTRAIN_SITE_PATH": f"{work}/sites", **more}


def ask(work, *, environ=None, **changes):
    given = {
        "cwd": work,
        "environ": environ or shell(work, PROJECT="lab"),
        "runs": Path("runs"),
        "site": "juniper",
        "time": "1:30:00",
    }
    return prepare(request_of(**{**given, **changes}))


def told(prepared):
    """The notes, but for the CPUs that some partitions above do not tell."""
    return [note for note in prepared.notes if not note.startswith("no CPUs are asked for")]


def slurm_of(prepared):
    return prepared.spec.settings.slurm


def add(work, text):
    path = work / "sites" / "juniper.toml"
    path.write_text(path.read_text() + text)


def test_what_the_user_does_not_say_comes_from_the_preset(work):
    prepared = ask(work, nodes="4")

    slurm, origins = slurm_of(prepared), prepared.spec.origins
    file = f"site juniper ({work}/sites/juniper.toml"
    assert (slurm.partition, slurm.qos, slurm.cpus_per_rank) == ("batch", "normal", 7)
    assert (slurm.account, origins["slurm.account"]) == ("lab", "PROJECT of your shell")
    assert origins["slurm.partition"] == f"chosen from the limits of {file}:9)"
    assert origins["slurm.cpus_per_rank"] == f"chosen from {file}:10)"
    (note,) = prepared.notes
    assert note == (
        f"partition batch is taken, as {file}:9) says it takes 4 nodes with 8 GPUs for 1h30m "
        "(so would spare: --partition)"
    )


def test_the_preset_of_the_submit_is_in_the_spec(work):
    run = make_run(ask(work), None)

    spec = load_spec(run.spec)

    assert spec.preset is not None
    assert spec.preset["partitions"]["batch"]["max_nodes"] == 64
    assert (spec.site, spec.unlocked, spec.format) == ("juniper", [], 3)


@pytest.mark.parametrize(
    ("environ", "changes", "account"),
    [
        ({"SBATCH_ACCOUNT": "ours"}, {}, "ours"),
        ({"SBATCH_ACCOUNT": "ours", "PROJECT": "lab"}, {}, "lab"),
        ({"PROJECT": "lab"}, {"account": "mine"}, "mine"),
    ],
)
def test_an_account_comes_from_the_flag_or_from_the_shell(work, environ, changes, account):
    prepared = ask(work, environ=shell(work, **environ), **changes)

    assert slurm_of(prepared).account == account
    assert prepared.spec.dropped_env == []


def test_the_projects_own_account_wins_over_the_shells(work):
    (work / "hpctrain.toml").write_text("[slurm]\naccount = 'project'\n")

    assert slurm_of(ask(work)).account == "project"


def test_a_missing_account_is_refused_with_where_to_find_one(work):
    with pytest.raises(UsageError) as caught:
        ask(work, environ=shell(work))

    assert str(caught.value) == (
        f"site juniper ({work}/sites/juniper.toml:3) says that a job needs an account and none of "
        "PROJECT, SBATCH_ACCOUNT is set: give one with --account (`myprojects` shows yours)"
    )


def test_what_the_shell_may_not_decide_is_dropped_and_told(work):
    environ = shell(work, PROJECT="lab", SBATCH_QOS="high", SBATCH_ACCOUNT="x")
    assert ask(work, environ=environ).spec.dropped_env == ["SBATCH_QOS"]

    (work / "sites" / "juniper.toml").write_text(
        JUNIPER.replace("[slurm]\n", "[slurm]\nsbatch_env = ['SBATCH_QOS']\n")
    )
    prepared = ask(work, environ=environ)

    assert prepared.spec.dropped_env == ["SBATCH_ACCOUNT"]
    assert slurm_of(prepared).qos == "high"
    assert prepared.spec.origins["slurm.qos"] == "SBATCH_QOS of your shell"
    assert slurm_of(ask(work, environ=environ, qos="mine")).qos == "mine"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"partition": "batch", "nodes": "65"},
            r"^flag --partition: slurm.partition is batch, .* 65 nodes with 8 GPUs for 1h30m: b",
        ),
        ({"partition": "batch", "time": "3:00:00"}, "batch takes at most 2h00m"),
        ({"partition": "batch", "gpus_per_node": 16}, "batch takes 8 GPUs per node"),
        ({"partition": "batch,debug", "time": "3:00:00"}, "2h00m .*; debug takes at most 30m00s"),
        ({"sets": ("slurm.cpus_per_rank=8",), "partition": "batch"}, "56 usable CPUs per node"),
        ({"nodes": "65", "time": "400:00:00", "gpus_per_node": 9}, "no partition of site juniper"),
    ],
)  # fmt: skip
def test_what_no_partition_takes_is_refused_before_anything_is_made(work, changes, match):
    before = sorted(work.rglob("*"))

    with pytest.raises(UsageError, match=match) as caught:
        make_run(ask(work, **changes), None)

    assert "\n" not in str(caught.value)
    assert sorted(work.rglob("*")) == before


def test_of_several_partitions_those_that_do_not_fit_are_told(work):
    notes = told(ask(work, partition="batch,debug"))

    assert len(notes) == 1
    assert "debug takes at most 30m00s" in notes[0]


def test_a_partition_that_the_preset_does_not_know_is_told_and_left_to_slurm(work):
    prepared = ask(work, partition="bacth")

    assert slurm_of(prepared).partition == "bacth"
    assert prepared.notes[0].endswith("knows no limits of bacth; did you mean batch?")


def test_a_time_limit_that_nobody_gave_follows_the_partitions(work):
    prepared = ask(work, partition="debug", time=None)

    assert (slurm_of(prepared).time, slurm_of(prepared).qos) == ("0:30:00", "debug")
    assert "the time limit is 0:30:00, not 1:00:00: site juniper allows no more" in prepared.notes


@pytest.mark.parametrize(
    ("changes", "cpus"),
    [
        ({}, 7),
        ({"gpus_per_node": 2}, 7),
        ({"sets": ("slurm.ranks_per_node=2",)}, 28),
        ({"sets": ("slurm.cpus_per_rank=3",)}, 3),
        ({"gpus_per_node": 0, "sets": ("slurm.exclusive=no",)}, 0),
        ({"gpus_per_node": 0}, 56),
        ({"partition": "spare"}, 0),
    ],
)
def test_ranks_share_the_cpus_that_a_job_can_use(work, changes, cpus):
    assert slurm_of(ask(work, **changes)).cpus_per_rank == cpus


def test_forbidden_flags_are_refused_before_anything_is_made(work):
    text = JUNIPER.replace("[slurm]\n", "[slurm]\nforbidden = ['--mem']\n")
    (work / "sites" / "juniper.toml").write_text(text)

    with pytest.raises(UsageError, match=r"^flag --set slurm.mem: slurm.mem asks for --mem=4G"):
        ask(work, sets=("slurm.mem=4G",))


def test_accounts_and_qos_are_asked_of_accounting_where_it_answers(work):
    def known(accounts, qos):
        return Accounting(accounts=lambda: accounts, qos=lambda: qos)

    ask(work, accounting=known(["lab"], ["normal"]))
    ask(work, accounting=known(None, None))
    with pytest.raises(UsageError, match=r"slurm.account is lab, .*; there are none"):
        ask(work, accounting=known([], None))
    with pytest.raises(UsageError, match=r"slurm.account is lab, which .*; did you mean lab2"):
        ask(work, accounting=known(["lab2"], None))
    with pytest.raises(UsageError, match=r"slurm.qos is normal, which .*; there are low, xl"):
        ask(work, accounting=known(None, ["xl", "low"]))


def test_on_this_machine_the_schedulers_part_of_a_preset_does_not_count(work):
    prepared = ask(work, cluster="local", environ=shell(work), gpus_per_node=0)

    assert prepared.spec.site == "juniper"
    assert slurm_of(prepared).partition == ""


# ---- what preemption costs


def notes_of(work, text, **changes):
    replaced = JUNIPER.replace('mode = "requeue"\ngrace_s = 20\n', text)
    (work / "sites" / "juniper.toml").write_text(replaced)
    return told(ask(work, **{"partition": "spare", **changes}))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "mode = 'requeue'\ngrace_s = 20\n",
            r"kills 20 s after the notice .*, sooner than .*_s \(90 s\) .* are lost$",
        ),
        ("mode = 'requeue'\ngrace_s = 0\n", r"kills 30 s after .*, sooner than .* are lost$"),
        ("mode = 'requeue'\n", r"how much grace the preset does not say: .* are lost$"),
        ("mode = 'suspend'\ngrace_s = 600\n", "suspends what it preempts .* ranks stand still"),
        ("mode = 'cancel'\ngrace_s = 600\n", "cancels what it preempts .*`hpctrain resume`"),
    ],
)  # fmt: skip
def test_what_a_preemption_costs_is_said(work, text, match):
    (note,) = notes_of(work, text)

    assert re.search(match, note), note


@pytest.mark.parametrize("text", ["mode = 'none'\n", "mode = 'requeue'\ngrace_s = 600\n", ""])
def test_where_a_preemption_costs_nothing_nothing_is_said(work, text):
    assert notes_of(work, text) == []


def test_a_script_of_the_users_is_told_what_signal_comes(work):
    text = "mode = 'requeue'\ngrace_s = 600\n"
    replaced = JUNIPER.replace("kill_wait_s = 30", "kill_wait_s = 30\nsend_user_signal = false")
    replaced = replaced.replace('mode = "requeue"\ngrace_s = 20\n', text)
    (work / "sites" / "juniper.toml").write_text(replaced)

    (note,) = told(ask(work, partition="spare", command=("train.py",)))

    assert "SIGTERM and no SIGUSR2" in note
    assert told(ask(work, partition="spare")) == []


def test_where_jobs_are_not_requeued_the_user_is_told_what_to_do(work):
    text = JUNIPER.replace("kill_wait_s = 30", "kill_wait_s = 30\nrequeue = false")
    (work / "sites" / "juniper.toml").write_text(text)

    notes = told(ask(work))

    assert "jobs are not requeued here" in notes[-1]
    assert "the run waits for `hpctrain resume`" in notes[-1]


# ---- which site


def test_a_site_that_is_known_here_is_taken_and_told(work):
    add(work, '[detect.env]\nCLUSTER = "juni.*"\n')

    prepared = ask(work, site=None, environ=shell(work, PROJECT="lab", CLUSTER="juniper-2"))

    assert prepared.spec.site == "juniper"
    assert "because the variable CLUSTER is juniper-2" in prepared.notes[0]
    without = ask(work, site="none", environ=shell(work, CLUSTER="juniper-2"))
    assert (without.spec.site, without.spec.preset, without.notes) == ("", None, [])


def test_two_sites_that_match_alike_are_refused_with_both_reasons(work):
    add(work, '[detect.env]\nCLUSTER = "juni.*"\n')
    (work / "sites" / "juno.toml").write_text('[detect.env]\nCLUSTER = "jun.*"\n')

    with pytest.raises(UsageError, match=r"(?s)juniper because .*juno because|juno because .*juni"):
        ask(work, site=None, environ=shell(work, CLUSTER="juniper"))


def test_slurms_cluster_name_is_asked_where_the_shell_has_scontrol(work, monkeypatch):
    add(work, "[detect]\nslurm_cluster = ['juniper']\n")
    monkeypatch.setenv("PATH", f"{work}/bin:/usr/bin:/bin")
    environ = shell(work, PROJECT="lab")
    assert ask(work, site=None, environ=environ).spec.site == ""

    (work / "bin" / "scontrol").write_text("#!/bin/sh\necho 'ClusterName  = juniper'\n")
    (work / "bin" / "scontrol").chmod(0o755)

    assert ask(work, site=None, environ=environ).spec.site == "juniper"


# ---- locks

LOCK = """
[env.common]
NCCL_CROSS_NIC = "1"
NCCL_DEBUG = "WARN"
[lock]
keys = ["env.common.NCCL_CROSS_NIC", "settings.slurm.gpus_per_node"]
"""


@pytest.mark.parametrize(
    ("changes", "path", "by"),
    [
        ({"env": ("NCCL_CROSS_NIC=0",)}, "env.NCCL_CROSS_NIC", "flag --env"),
        ({"gpus_per_node": 4}, "settings.slurm.gpus_per_node", "flag --gpus-per-node"),
        (
            {"environ": {"NCCL_CROSS_NIC": "2"}},
            "env.NCCL_CROSS_NIC",
            "NCCL_CROSS_NIC of your shell",
        ),
    ],
)
def test_a_locked_value_is_changed_only_when_allowed_and_then_recorded(work, changes, path, by):
    add(work, LOCK)
    if "environ" in changes:
        changes = {"environ": shell(work, PROJECT="lab", **changes["environ"])}

    with pytest.raises(
        UsageError, match=f"^{path} is locked by .* and changed by {by}; .*-locked$"
    ):
        ask(work, **changes)

    allowed = ask(work, allow_locked=True, **changes)
    assert allowed.spec.unlocked == [path]
    assert any(path in note and "--allow-locked" in note for note in allowed.notes)


@pytest.mark.parametrize("name", ["defaults.toml", "site juniper.toml"])
def test_no_name_of_a_settings_file_gets_round_a_lock(work, name):
    add(work, LOCK)
    (work / name).write_text("[slurm]\ngpus_per_node = 4\n")

    with pytest.raises(UsageError, match=r"settings\.slurm\.gpus_per_node is locked"):
        ask(work, config=Path(name))


def test_the_presets_own_value_and_what_is_not_locked_are_free(work):
    add(work, LOCK)

    mine = shell(work, PROJECT="x", NCCL_DEBUG="y", NCCL_CROSS_NIC="1")
    by_flag = ask(work, env=("NCCL_CROSS_NIC=1", "NCCL_DEBUG=INFO"), gpus_per_node=8)
    by_shell = ask(work, environ=mine)

    assert (by_flag.spec.unlocked, by_shell.spec.unlocked) == ([], [])


def test_a_locked_setting_is_held_at_resume_too(work):
    add(work, LOCK)
    spec = ask(work).spec
    flags = {"slurm.gpus_per_node": ("--gpus-per-node", 4)}

    with pytest.raises(UsageError, match=r"^settings.slurm.gpus_per_node is locked"):
        change_spec(spec, ResumeRequest(flags))
    changed, notes = change_spec(spec, ResumeRequest(flags, allow_locked=True))

    assert changed.unlocked == ["settings.slurm.gpus_per_node"]
    assert "--allow-locked" in notes[0]
    again, notes = change_spec(changed, ResumeRequest({}))
    assert (again.unlocked, again.settings.slurm.gpus_per_node) == (changed.unlocked, 4)


# ---- resume


def test_a_resume_keeps_the_preset_of_the_submit_and_chooses_anew_from_it(work):
    spec = ask(work).spec
    (work / "sites" / "juniper.toml").unlink()

    changed, notes = change_spec(spec, ResumeRequest({"slurm.nodes": ("--nodes", "65")}))

    assert spec.settings.slurm.partition == "batch"
    assert changed.settings.slurm.partition == "spare"
    assert changed.settings.slurm.cpus_per_rank == 0
    assert notes[0].startswith("partition spare is taken")
    assert "sooner than slurm.signal_lead_s" in notes[1]


def test_a_resume_does_not_change_what_the_user_chose(work):
    spec = ask(work, partition="batch").spec

    with pytest.raises(UsageError, match="batch takes at most 64 nodes"):
        change_spec(spec, ResumeRequest({"slurm.nodes": ("--nodes", "65")}))


def test_a_lowered_time_limit_is_not_mistaken_for_the_users(work):
    spec = ask(work, partition="debug", time=None).spec

    changed, _ = change_spec(spec, ResumeRequest({"slurm.partition": ("--partition", "batch")}))

    assert changed.settings.slurm.time == Settings().slurm.time


def test_bad_nodes_are_kept_out_of_one_job_only(work):
    spec = ask(work, sets=("slurm.exclude=n1",)).spec

    assert without_nodes(spec, ["n7", "n8"]).settings.slurm.exclude == "n1,n7,n8"
    assert without_nodes(spec, []).settings.slurm.exclude == "n1"
    assert spec.settings.slurm.exclude == "n1"


# ---- the commands


@pytest.fixture
def shell_here(work, monkeypatch):
    monkeypatch.chdir(work)
    for name, value in shell(work, PROJECT="lab", HPCTRAIN_SITE="juniper").items():
        monkeypatch.setenv(name, value)
    return work


def test_the_commands_show_notes_and_take_allow_locked(shell_here, capsys):
    add(shell_here, LOCK)
    argv = ["submit", "--gpus-per-node", "4", "--no-submit", "--name", "mine"]

    assert main(argv) == 2
    assert "say --allow-locked" in capsys.readouterr().err
    assert main([*argv, "--allow-locked"]) == 0
    err = capsys.readouterr().err
    assert "site juniper, as HPCTRAIN_SITE says" in err
    assert "partition batch is taken" in err

    run = RunDir(shell_here / "runs" / "mine")
    assert load_spec(run.spec).unlocked == ["settings.slurm.gpus_per_node"]
    resume = ["resume", "mine", "--dry-run", "--gpus-per-node", "2"]
    assert main(resume) == 0  # unlocked once, unlocked for this run


def test_a_dry_run_shows_the_environment_that_the_ranks_would_get(shell_here, capsys):
    add(shell_here, "[env.multi_node]\nNCCL_NET = 'IB'\nNCCL_DEBUG = 'WARN'\n")
    argv = ["submit", "--dry-run", "--gpus-per-node", "8", "--nodes", "1-2"]
    argv += ["--env", "NCCL_DEBUG=INFO"]

    assert main([*argv, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["environment"]
    assert main([*argv, "--cluster", "local"]) == 0
    command = capsys.readouterr().out

    assert {name: value["value"] for name, value in shown["values"].items()} == {
        "NCCL_NET": "IB",
        "NCCL_DEBUG": "INFO",
    }
    assert shown["values"]["NCCL_DEBUG"]["origin"] == "flag --env"
    assert "env NCCL_NET=IB NCCL_DEBUG=INFO " in command


# ---- what a job lacks


def cpus_said(*sets, gpus=4, site=None, default=None):
    settings, _ = resolve([flag_layer({}, (f"slurm.gpus_per_node={gpus}", *sets))])
    asked = Accounting(lambda: None, lambda: None, (default or {}).get)
    return cpu_notes(settings, site, asked)


@pytest.mark.parametrize("partition", ["", "gpu"])
def test_a_partition_that_gives_cpus_for_each_gpu_is_no_reason_for_a_note(partition):
    sets = [f"slurm.partition={partition}"] if partition else []
    assert cpus_said(*sets, default={partition: 16}) == []
    assert len(cpus_said(*sets, default={"another": 16})) == 1
    assert len(cpus_said(*sets, default={partition: 0})) == 1


def test_a_partition_that_gives_fewer_cpus_than_ranks_is_told_of_with_its_number():
    (said,) = cpus_said("slurm.ranks_per_node=8", default={"": 1})

    assert "with DefCpuPerGPU=1 SLURM gives 4 CPUs of a node for its 8 ranks" in said


def test_a_job_with_gpus_that_asks_for_no_cpus_is_told_so_in_one_line():
    (said,) = cpus_said()

    assert said.startswith("no CPUs are asked for: without DefCpuPerGPU")
    assert "one core of a node for its 4 ranks" in said
    assert said.endswith("add --cpus-per-rank C, or --exclusive")


@pytest.mark.parametrize(
    "sets",
    [
        ("slurm.cpus_per_rank=8",),
        ("slurm.exclusive=yes",),
        ('slurm.extra=["--cpus-per-gpu=8"]',),
        ('slurm.extra=["--mincpus=8"]',),
    ],
)
def test_a_job_that_asks_for_cpus_or_whole_nodes_is_left_in_peace(sets):
    assert cpus_said(*sets) == []
    assert cpus_said(gpus=0) == []


def test_the_cpus_of_a_preset_that_does_not_tell_them_are_missed_too(tmp_path):
    (tmp_path / "juniper.toml").write_text(
        "[partitions.gpu]\ngpus_per_node = 4\n[partitions.whole]\nexclusive = true\n"
    )
    site = load_site(str(tmp_path / "juniper.toml"))

    assert len(cpus_said("slurm.partition=gpu", site=site)) == 1
    assert cpus_said("slurm.partition=whole", site=site) == []


def test_setup_lines_of_the_preset_that_a_users_own_replace_are_named(tmp_path):
    path = tmp_path / "juniper.toml"
    path.write_text('[settings.slurm]\nsetup = ["source plugin.sh", "ulimit -l unlimited"]\n')
    site = load_site(str(path))

    def said(*sets):
        settings, origins = resolve([site.layer, flag_layer({}, sets)])
        return check_site(settings, origins, site, is_script=False, accounting=None).notes

    assert said() == []
    (note,) = said('slurm.setup=["source plugin.sh"]')
    assert note.startswith("flag --set slurm.setup: slurm.setup replaces that of site juniper (")
    assert note.endswith("and lacks of it: ulimit -l unlimited")
    assert said('slurm.setup=["source plugin.sh", "ulimit -l unlimited", "more"]') == []


def test_a_site_file_beside_the_settings_must_be_named_and_is_not_passed_over_in_silence(work):
    (work / "site.toml").write_text("[slurm]\naccount_required = false\nmpi = 'pmix'\n")
    environ = shell(work)

    alone = ask(work, environ=environ, site=None)
    named = ask(work, environ=environ, site=str(work / "site.toml"))

    assert alone.spec.preset is None
    assert [note for note in alone.notes if note.startswith("site.toml is not used: name it")]
    assert named.spec.preset["slurm"]["mpi"] == "pmix"
    assert not [note for note in named.notes if "is not used" in note]


@pytest.fixture
def admins(work):
    """The site's preset with locks, known by a variable, in root's hands."""
    path = work / "sites" / "juniper.toml"
    path.write_text(JUNIPER + LOCK + "[detect]\nenv.JUNIPER = '1'\n")
    return path


@pytest.fixture
def mine(work):
    """A user's own folder of sites, with another preset of that name."""
    path = work / "mine" / "juniper.toml"
    path.parent.mkdir()
    path.write_text(
        "[settings.slurm]\ngpus_per_node = 2\n[lock]\nkeys = ['settings.slurm.exclude']\n"
    )
    return path


@pytest.mark.two_users
def test_a_folder_that_the_shell_names_is_no_admins_unless_root_wrote_it(work, admins, mine):
    path = f"{mine.parent}:{work / 'sites'}"
    environ = shell(work, PROJECT="lab") | {"HPCTRAIN_SITE_PATH": path}
    assert ask(work, environ=environ).spec.preset["lock"]["keys"] == ["settings.slurm.exclude"]

    os.chown(mine, STRANGER.uid, STRANGER.gid)
    with pytest.raises(UsageError, match=r"gpus_per_node is locked by .* and changed by system"):
        ask(work, environ=environ)

    allowed = ask(work, environ=environ, allow_locked=True).spec
    assert "settings.slurm.gpus_per_node" in allowed.unlocked
    assert "settings.slurm.exclude" not in allowed.preset["lock"]["keys"]


@pytest.mark.two_users
@pytest.mark.parametrize("named", ["none", "other.toml"])
def test_locks_that_fall_because_another_site_was_named_are_recorded(work, admins, named):
    (work / "other.toml").write_text("name = 'other'\n[slurm]\naccount_required = false\n")
    environ = shell(work, PROJECT="lab", JUNIPER="1")
    site = str(work / named) if named != "none" else named

    made = ask(work, environ=environ, site=site, nodes="1")

    locks = "juniper: settings.slurm.gpus_per_node"
    assert locks in made.spec.unlocked
    assert any(note.startswith("locks that do not hold") and locks in note for note in made.notes)
    assert ask(work, environ=environ, site=None).spec.unlocked == []
    assert ask(work, environ=environ, site="juniper").spec.unlocked == []

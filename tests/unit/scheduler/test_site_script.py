"""What a site's preset makes of a batch script, and what it does not let into one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm.command import clean, kept_settings
from hpctrain.cluster.scheduler.slurm.script import check_options, export_arguments, render_script
from hpctrain.cluster.site.load import load_site
from hpctrain.core.settings.schema import AliveSettings, Settings, SlurmSettings
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.entry import slurm_batch
from hpctrain.errors import ClusterUnreachable, UsageError
from hpctrain.ledger.run.layout import RunDir


@pytest.fixture
def site(tmp_path):
    """Makes the site `juniper` of a text."""

    def make(text):
        path = tmp_path / "juniper.toml"
        path.write_text(text)
        return load_site(str(path))

    return make


def render(site, **slurm):
    spec = Spec("gpt", "id", 0.0, "slurm", "juniper", Entry("recipe"), python="/venv/bin/python")
    spec.settings = Settings(slurm=SlurmSettings(**slurm))
    spec.preset = site.as_plain()
    return render_script(spec, RunDir(Path("/runs/gpt")), "gpt-12ab")


def header(text):
    return [line[8:] for line in text.splitlines() if line.startswith("#SBATCH ")]


def srun_args(text):
    (line,) = [line for line in text.splitlines() if line.startswith("hpctrain_srun_args=")]
    return line


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("", ["--gpus-per-node=4"]),
        ("gpu_request = 'gres'", ["--gres=gpu:4"]),
        ("gpu_request = 'gres'\ngres_name = 'gpu:a100l'", ["--gres=gpu:a100l:4"]),
        ("gpu_request = 'gpus'", ["--gpus=8"]),
        ("gpu_request = 'gpus-per-task'", ["--ntasks-per-node=1", "--gpus-per-task=4"]),
        ("gpu_request = 'none'", []),
    ],
)
def test_gpus_are_asked_for_as_the_site_wants_them(site, style, expected):
    lines = header(render(site(f"[slurm]\n{style}\n"), nodes="2", gpus_per_node=4))

    asked = [
        line for line in lines if "gpu" in line.removeprefix("--job-name=gpt") or "task" in line
    ]
    assert asked == expected
    assert "--exclusive" not in lines


@pytest.mark.parametrize("style", ["gpus", "gpus-per-task"])
def test_a_total_of_gpus_does_not_go_with_a_range_of_nodes(site, tmp_path, style):
    made = site(f"[slurm]\ngpu_request = '{style}'\n")

    with pytest.raises(
        UsageError,
        match=rf"slurm.nodes is 2-4, and site juniper \({tmp_path}/juniper.toml:2\) asks for GPUs "
        rf"by --{style}",
    ):
        render(made, nodes="2-4", gpus_per_node=4)
    assert "--nodes=2-4" in header(render(made, nodes="2-4"))


def test_features_of_the_user_and_of_the_site_must_both_be_there(site):
    made = site("[slurm]\nconstraint = 'gpu'\n")

    def asked(own):
        (line,) = [x for x in header(render(made, constraint=own)) if x.startswith("--constraint")]
        return line.partition("=")[2].strip('"')

    assert [asked(own) for own in ("", "gpu", "hbm80g", "gpu&hbm80g", "a100|h100")] == [
        *("gpu", "gpu", "gpu&hbm80g", "gpu&hbm80g", "gpu&(a100|h100)")
    ]


def test_required_and_extra_options_come_in_where_the_user_says_nothing(site):
    made = site(
        "[slurm]\nrequired = ['--network=disable_rdzv_get', '--licenses=scratch']\n"
        "extra = ['--switches=1', '--comment=site']\n"
    )

    lines = header(render(made, network="job_vni", extra=["--comment=mine"]))

    assert "--network=job_vni,disable_rdzv_get" in lines
    assert lines[-3:] == ["--licenses=scratch", "--switches=1", "--comment=mine"]
    for same in ("", "disable_rdzv_get"):
        assert "--network=disable_rdzv_get" in header(render(made, network=same))


def test_a_required_option_cannot_be_changed(site, tmp_path):
    made = site("[slurm]\nrequired = ['--licenses=scratch']\n")

    with pytest.raises(
        UsageError,
        match=rf"^--licenses=home does not go with site juniper \({tmp_path}/juniper.toml:2\), "
        "which requires --licenses=scratch: leave it out$",
    ):
        render(made, extra=["--licenses=home"])


@pytest.mark.parametrize(
    ("slurm", "option", "path"),
    [
        ({"mem": "4G"}, "--mem=4G", "slurm.mem"),
        ({"gpus_per_node": 2}, "--gpus-per-node=2", "slurm.gpus_per_node"),
        ({"cpus_per_rank": 3}, "--mincpus=3", "slurm.cpus_per_rank"),
        ({"exclusive": "yes"}, "--exclusive", "slurm.exclusive"),
        ({"extra": ["--wckey=x"]}, "--wckey=x", "slurm.extra"),
        ({"extra": ["-G4"]}, "-G4", "slurm.extra"),
        ({"srun_args": ["--mem=0"]}, "--mem=0", "slurm.srun_args"),
        ({"setup": ["srun --mem=0 hostname"]}, "--mem=0", "slurm.setup"),
        ({"setup": ["#SBATCH --wckey x"]}, "--wckey", "slurm.setup"),
    ],
)
def test_a_forbidden_option_is_refused_with_who_asks_and_who_forbids(
    site, tmp_path, slurm, option, path
):
    made = site(
        "[slurm]\nforbidden = ['--mem', '--gpus-per-node', '--mincpus', '--exclusive', '--wckey', "
        "'--gpus']\n"
    )
    spec = Spec("gpt", "id", 0.0, "slurm", "juniper", Entry("recipe"))
    spec.settings = Settings(slurm=SlurmSettings(**slurm))

    with pytest.raises(UsageError) as caught:
        check_options(spec.settings.slurm, made, {path: "flag --x"})

    assert str(caught.value) == (
        f"flag --x: {path} asks for {option}, which site juniper ({tmp_path}/juniper.toml:2) says "
        "is refused here: leave it out"
    )
    with pytest.raises(UsageError, match="is refused here"):
        render(made, **slurm)


def test_flags_of_other_programs_in_setup_lines_are_not_sbatchs(site):
    made = site("[slurm]\nforbidden = ['--mem']\n")

    assert "tool --mem=4G" in render(made, setup=["tool --mem=4G", "echo 'it\"s --mem"])


def test_whole_nodes_are_not_asked_for_by_default_where_that_is_forbidden(site):
    assert "--exclusive" not in header(render(site("[slurm]\nforbidden = ['--exclusive']\n")))


@pytest.mark.parametrize("option", ["--nodelist=n1", "--nodel=n1", "-wn1", "-w n1", "-Hw n1"])
@pytest.mark.parametrize("place", ["extra", "srun_args", "setup"])
def test_what_is_refused_here_is_refused_however_it_is_spelt(site, option, place):
    made = site("[slurm]\nforbidden = ['--nodelist']\n")
    given = [f"sbatch {option} x.sh"] if place == "setup" else [option]

    with pytest.raises(UsageError, match="is refused here"):
        render(made, **{place: given})


@pytest.mark.parametrize("option", ["--licenses=none", "--licens=none", "-Lnone", "-HLnone"])
def test_what_is_required_is_not_changed_however_it_is_spelt(site, option):
    made = site("[slurm]\nrequired = ['--licenses=scratch:1']\n")

    with pytest.raises(UsageError, match="does not go with"):
        render(made, extra=[option])


@pytest.mark.parametrize(
    ("text", "flag"), [("", "--requeue"), ("[slurm]\nrequeue = false\n", "--no-requeue")]
)
def test_requeueing_is_said_in_any_case(site, text, flag):
    assert [line for line in header(render(site(text))) if "requeue" in line] == [flag]


@pytest.mark.parametrize(
    ("export", "in_header", "in_srun", "on_command_line"),
    [
        ("all", [], False, ["--export=ALL"]),
        ("none", ["--export=NONE"], True, []),
        ("unset", [], False, []),
    ],
)
def test_the_shells_environment_reaches_the_job_as_the_site_says(
    site, export, in_header, in_srun, on_command_line
):
    text = render(site(f"[slurm]\nexport = '{export}'\n"), setup=["#SBATCH --export=NONE"])

    assert [line for line in header(text.partition("\n\n")[0]) if "export" in line] == in_header
    assert ("--export=ALL" in srun_args(text)) is in_srun
    assert export_arguments(text) == on_command_line


def test_srun_gets_the_sites_options_before_the_users(site):
    made = site("[slurm]\nmpi = 'pmix'\nsrun_args = ['--distribution=block:block']\n")

    assert srun_args(render(made, cpus_per_rank=2, srun_args=["--mpi=none"])) == (
        "hpctrain_srun_args=(--cpus-per-task=2 --mpi=pmix --distribution=block:block --mpi=none)"
    )


@pytest.mark.parametrize("launcher", ["ibrun", "mpirun"])
def test_another_launcher_is_refused_in_one_line(site, tmp_path, launcher):
    made = site(f"[slurm]\nlauncher = '{launcher}'\n")

    with pytest.raises(UsageError, match=f"the launcher is {launcher}") as caught:
        render(made)

    assert str(caught.value).startswith(f"site juniper ({tmp_path}/juniper.toml:2): ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("nodes", "refused"), [("2", False), ("2-4", True)])
def test_a_task_layout_of_the_site_needs_a_fixed_number_of_nodes(site, nodes, refused):
    made = site("[slurm]\nrequired = ['--ntasks-per-node=1']\n")

    if refused:
        with pytest.raises(UsageError, match="could not come back on fewer nodes"):
            render(made, nodes=nodes)
    else:
        assert "--ntasks-per-node=1" in header(render(made, nodes=nodes))


def run_setup(text, tmp_path, module):
    """Run the script's setup function with a `module` of the test's own."""
    begin = text.index("hpctrain_setup() {")
    setup = text[begin : text.index("\n}\n", begin) + 3]
    script = f"module() {{ {module}; }}\n{setup}hpctrain_setup; echo went on\n"
    return subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )


MODULES = """
[modules]
init = "init.sh"
purge = true
use = ["/opt/my modules"]
load = ["cuda/12.4", "nccl-plugin"]
"""


def test_modules_are_loaded_before_the_users_setup(site, tmp_path):
    (tmp_path / "init.sh").write_text("echo init\n")
    text = render(site(MODULES), setup=["echo mine"])

    done = run_setup(text, tmp_path, 'echo "module $*"')

    assert done.stdout.splitlines() == [
        *("init", "module purge", "module use /opt/my modules", "module load cuda/12.4"),
        *("module load nccl-plugin", "mine", "went on"),
    ]


def test_the_lines_of_modules_are_named_by_their_preset(site, tmp_path):
    """What follows from one that fails is in test_script_ends.py."""
    lines = render(site(MODULES), setup=["echo mine"]).splitlines()

    begin = lines.index("hpctrain_setup() {") + 1
    where = f"[modules], site juniper ({tmp_path}/juniper.toml:3)"
    assert lines[begin : begin + 2] == [f"hpctrain_lines_of='{where}'", "source init.sh"]
    assert lines[begin + 6 : begin + 9] == ["hpctrain_lines_of=slurm.setup", "echo mine", ":"]


def test_kept_variables_of_the_shell_become_settings_and_are_not_dropped():
    shell = {"SBATCH_ACCOUNT": "lab", "SBATCH_QOS": "", "SBATCH_DEBUG": "1", "SLURM_NTASKS": "3"}
    kept = ["SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_DEBUG"]

    assert kept_settings(shell, kept) == {"slurm.account": "SBATCH_ACCOUNT"}
    assert clean(shell, ["SBATCH_ACCOUNT"]).dropped == [
        *("SBATCH_DEBUG", "SBATCH_QOS", "SLURM_NTASKS")
    ]
    assert "SBATCH_ACCOUNT" in clean(shell).dropped


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here[1-2]"}


@pytest.fixture
def scontrol(monkeypatch):
    """slurmctld's answers, and a resolver that knows `here1i`."""

    def answer(*args):
        return "NodeName=here1 NodeAddr=10.0.0.9 NodeHostName=other\n" if "node" in args else ""

    def look_up(name, _port, family=0):
        known = {("here1i", slurm_batch.socket.AF_INET): "10.1.0.1", ("here1i", 0): "10.1.0.1"}
        if (name, family) not in known:
            raise OSError("Name or service not known")
        return [(None, None, None, None, (known[name, family], 0))]

    monkeypatch.setattr(slurm_batch, "_scontrol", answer)
    monkeypatch.setattr(slurm_batch.socket, "getaddrinfo", look_up)


@pytest.mark.parametrize(
    ("template", "resolve", "expected"),
    [
        ("", "name", "10.0.0.9"),
        ("{host}i", "name", "here1i"),
        ("{host}i", "ipv4", "10.1.0.1"),
    ],
)
def test_ranks_meet_under_the_name_or_address_that_the_site_says(
    scontrol, template, resolve, expected
):
    found = slurm_batch.exports(JOB, slurm_batch.MeetingPoint(template, resolve))

    assert found["HPCTRAIN_MASTER_ADDR"] == expected


@pytest.mark.parametrize("meeting", [("{host}x", "name"), ("{host}i", "ipv6")])
def test_a_meeting_name_that_means_nothing_is_told_and_not_used(scontrol, meeting, capsys):
    found = slurm_batch.exports(JOB, slurm_batch.MeetingPoint(*meeting))

    assert found["HPCTRAIN_MASTER_ADDR"] == "10.0.0.9"
    assert "ranks meet at its own address instead" in capsys.readouterr().err


def test_ranks_meet_where_the_site_says_also_where_slurm_cannot_be_asked(scontrol, monkeypatch):
    def silent(*_args):
        raise ClusterUnreachable("no scontrol in this container")

    monkeypatch.setattr(slurm_batch, "_scontrol", silent)

    assert (
        slurm_batch.exports(JOB, slurm_batch.MeetingPoint("{host}i"))["HPCTRAIN_MASTER_ADDR"]
        == "here1i"
    )
    assert "HPCTRAIN_MASTER_ADDR" not in slurm_batch.exports(JOB)


def test_the_meeting_point_is_the_one_of_the_runs_preset(site, tmp_path):
    made = site("[network]\nrendezvous_host = '{host}i'\nresolve = 'ipv4'\n")
    (tmp_path / "spec.json").write_text(json.dumps({"preset": made.as_plain()}))
    spec = slurm_batch._raw_spec(str(tmp_path))
    assert slurm_batch._meeting_point(spec) == ("{host}i", "ipv4")

    assert slurm_batch._meeting_point({"preset": None}) is None
    assert slurm_batch._meeting_point(slurm_batch._raw_spec(str(tmp_path / "gone"))) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"beside": {"evaluate": {}}}', "1"),
        ('{"beside": {}}', ""),
        ("{}", ""),
        ('{"beside": 1}', ""),
        ("[1]", ""),
        ("no json", ""),
    ],
)
def test_the_script_is_told_whether_checkpoints_are_evaluated(
    tmp_path, monkeypatch, capsys, text, said
):
    (tmp_path / "spec.json").write_text(text)
    monkeypatch.setattr(slurm_batch, "exports", lambda *_: {})
    monkeypatch.setattr(slurm_batch, "_is_held_back", lambda _root, _spec: False)

    assert slurm_batch.main(["before", str(tmp_path), "tok"]) == 0
    assert capsys.readouterr().out == f"hpctrain_evaluate={said}\n"


@pytest.mark.parametrize(
    ("alive", "said"),
    [
        ({"spares": 1, "shrink": "no"}, True),
        ({"spares": 0, "shrink": "auto"}, True),
        ({"spares": 0, "shrink": "no"}, False),
        (None, False),
    ],
)
def test_the_script_is_told_whether_the_run_outlives_its_nodes(
    tmp_path, monkeypatch, capsys, alive, said
):
    settings = {} if alive is None else {"alive": alive}
    (tmp_path / "spec.json").write_text(json.dumps({"settings": settings}))
    monkeypatch.setattr(slurm_batch, "exports", lambda *_: {})
    monkeypatch.setattr(slurm_batch, "_is_held_back", lambda _root, _spec: False)

    assert slurm_batch.main(["before", str(tmp_path), "tok"]) == 0
    assert ("hpctrain_alive=1" in capsys.readouterr().out) is said
    assert alive is None or AliveSettings(**alive).is_on() is said

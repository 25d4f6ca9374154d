"""`hpctrain sites list | show | detect`: what they print, for people and for programs."""

from __future__ import annotations

import json

import pytest

from hpctrain.cli.main import main
from hpctrain.cli.options import complete_site
from hpctrain.cli.sites import command as sites
from hpctrain.cli.sites import detect_command, show_command
from hpctrain.cluster.scheduler.slurm import command as slurm_command
from hpctrain.cluster.site import load

JUNIPER = """\
description = "a machine"
stability = "reference"
reviewed = "2026-01-31"
[sources]
guide = "a page"
[detect.env]
SITE_OF_A_TEST = "juniper"
[env.common]
source = "guide"
A = "1"
[env.multi_node]
B = { value = "2", why = "w" }
[settings.slurm]
partition = "gpu"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The only folder with sites; no SLURM."""
    for name in ("SITE_OF_A_TEST", "XDG_CONFIG_HOME", "HPCTRAIN_SITE_PATH", "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load, "SYSTEM_SITES", tmp_path / "sites")
    monkeypatch.setattr(load, "data_dir", lambda kind: tmp_path / "packaged")
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "juniper.toml").write_text(JUNIPER)
    (tmp_path / "sites" / "fabric.toml").write_text("stability = 'base'\n")
    return tmp_path / "sites"


def test_list_has_a_line_for_each_site_and_bases_with_all(folder, capsys):
    assert main(["sites", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["juniper", "reference", "2026-01-31", "a", "machine", str(folder / "juniper.toml")]
    ]

    assert main(["sites", "list", "--all", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["stability"]) for row in rows] == [
        ("fabric", "base"),
        ("juniper", "reference"),
    ]
    assert rows[1]["files"] == [{"layer": "system", "path": str(folder / "juniper.toml")}]


def test_list_tells_of_a_broken_file_and_still_lists_the_others(folder, capsys):
    (folder / "bad.toml").write_text("zzz = 1\n")

    assert main(["sites", "list"]) == 0

    captured = capsys.readouterr()
    assert [line.split()[:2] for line in captured.out.splitlines()[1:]] == [
        ["bad", "broken"],
        ["juniper", "reference"],
    ]
    assert "bad.toml:1): zzz is not a key of a site preset" in captured.err
    assert captured.err.count("\n") == 1


def test_show_has_every_value_and_with_origin_its_place(folder, capsys):
    assert main(["sites", "show", "juniper"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("juniper: a machine\n  stability  reference\n")
    assert [line.split() for line in out.splitlines()[-3:]] == [
        ["env.common.A", '"1"'],
        ["env.multi_node.B", '"2"'],
        ["settings.slurm.partition", '"gpu"'],
    ]

    assert main(["sites", "show", "juniper", "--origin"]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("env.common.A"))
    assert row.split() == ["env.common.A", '"1"', "system", f"{folder}/juniper.toml:10", "guide"]
    assert out.splitlines()[-1].split() == ["guide", "a", "page"]

    assert main(["sites", "show", "juniper", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["sources"] == {"guide": "a page"}
    assert shown["values"]["env.multi_node.B"] == {
        "value": "2",
        "layer": "system",
        "file": f"{folder}/juniper.toml",
        "line": 12,
        "source": "",
        "why": "w",
        "origin": f"site juniper ({folder}/juniper.toml:12)",
    }


def test_show_env_is_what_ranks_get_on_so_many_nodes(folder, capsys):
    assert main(["sites", "show", "juniper", "--env"]) == 0
    one = capsys.readouterr().out
    assert main(["sites", "show", "juniper", "--env", "--nodes", "2", "--json"]) == 0
    two = json.loads(capsys.readouterr().out)["environment"]

    assert "\nA=1\n" in one
    assert "\nB=" not in one
    assert two["B"] == {"value": "2", "origin": f"site juniper ({folder}/juniper.toml:12)"}


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["show", "junper"], 4, 'there is no site "junper"; did you mean juniper?'),
        (["show", "./zzz.toml"], 4, "zzz.toml is not there; check the path"),
        (["show", "juniper", "--nodes", "2"], 2, "--nodes is for --env; add it."),
        (["zzz"], 2, "No such command 'zzz'"),
    ],
)
def test_bad_input_is_one_line(folder, capsys, argv, code, message):
    assert main(["sites", *argv]) == code

    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_detect_lists_matches_with_their_reasons_and_marks_the_choice(folder, capsys, monkeypatch):
    assert main(["sites", "detect"]) == 0
    assert capsys.readouterr().out.startswith("no site matches here")
    assert main(["sites", "detect", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"site": None, "tied": [], "matches": []}

    monkeypatch.setenv("SITE_OF_A_TEST", "juniper")
    assert main(["sites", "detect"]) == 0
    assert capsys.readouterr().out == "*  juniper  the variable SITE_OF_A_TEST is juniper\n"
    assert main(["sites", "detect", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["site"], found["matches"][0]["signal"]) == ("juniper", "variable")


def test_detect_refuses_a_tie_with_both_reasons_and_still_prints_the_matches(
    folder, capsys, monkeypatch
):
    (folder / "willow.toml").write_text("[detect.env]\nSITE_OF_A_TEST = '.*'\n")
    monkeypatch.setenv("SITE_OF_A_TEST", "juniper")

    assert main(["sites", "detect", "--json"]) == 2

    captured = capsys.readouterr()
    assert json.loads(captured.out)["tied"] == ["juniper", "willow"]
    assert json.loads(captured.out)["site"] is None
    assert captured.err.count("because the variable SITE_OF_A_TEST is juniper") == 2
    assert captured.err.count("\n") == 1


def test_detect_asks_slurm_for_its_name(folder, capsys, tmp_path, monkeypatch):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text("#!/bin/sh\necho 'Configuration data'\necho 'ClusterName     = jun'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(scontrol.parent))
    (folder / "juniper.toml").write_text("[detect]\nslurm_cluster = ['jun']\n")

    assert main(["sites", "detect"]) == 0
    assert capsys.readouterr().out == "*  juniper  SLURM's ClusterName is jun\n"

    scontrol.write_text(
        "#!/bin/sh\necho 'slurm_load_ctl_conf error: Unable to contact' >&2; exit 1\n"
    )
    assert slurm_command.cluster_name() is None


def test_names_of_sites_complete(folder):
    def names(incomplete):
        return [(item.value, item.type) for item in complete_site(None, None, incomplete)]

    assert names("j") == [("juniper", "plain")]
    assert names("") == [("fabric", "plain"), ("juniper", "plain")]
    assert names("./d") == [("./d", "file")]
    argument = next(one for one in show_command.params if one.name == "name")
    assert argument._custom_shell_complete is complete_site


def test_help_lists_every_command_and_has_examples(capsys):
    assert main(["sites", "--help"]) == 0
    out = capsys.readouterr().out
    for name in sites.commands:
        assert f"\n  {name} " in out
    assert "hpctrain sites show frontier --env --nodes 2" in out
    for command in (show_command, detect_command):
        assert f"hpctrain sites {command.name}" in command.help

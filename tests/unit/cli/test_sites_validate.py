"""`hpctrain sites validate`: what it prints, and its exit codes."""

from __future__ import annotations

import json
import re

import pytest

from hpctrain.cli.main import main

GOOD = 'contact = "me"\n'
DOUBTFUL = GOOD + '[env.common]\nNCCL_NET_GDR_LEVEL = "PHB"\nNCCL_NET = "Omni"\n'
WRONG = GOOD + '[env.common]\nNCCL_CROSS_NIC = "yes"\n'


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Writes a preset into a site folder of this machine's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sites").mkdir()
    monkeypatch.setenv("HPCTRAIN_SITE_PATH", str(tmp_path / "sites"))

    def write(name: str, text: str) -> str:
        (tmp_path / "sites" / f"{name}.toml").write_text(text)
        return f"sites/{name}.toml"

    return write


def test_a_wrong_value_is_shown_with_its_line_and_exits_3(site, capsys):
    file = site("juniper", WRONG)

    assert main(["sites", "validate", file]) == 3

    out, err = capsys.readouterr()
    header, line, count = out.splitlines()
    assert header.split() == ["WHERE", "LEVEL", "VALUE"]
    assert line.split()[:3] == ["sites/juniper.toml:3", "error", "env.common.NCCL_CROSS_NIC"]
    assert line.endswith('reads 0, without a message; write "1"')
    assert count == "1 site checked: 1 error"
    assert err == "hpctrain: error: 1 error in juniper\n"


def test_a_good_preset_exits_0_with_one_line(site, capsys):
    site("juniper", GOOD)

    assert main(["sites", "validate", "juniper"]) == 0
    assert capsys.readouterr() == ("1 site checked: nothing found\n", "")


def test_doubts_fail_only_under_strict(site, capsys):
    site("juniper", DOUBTFUL)
    site("larch", GOOD)

    assert main(["sites", "validate", "juniper", "larch"]) == 0
    counted = "2 sites checked: 1 warning, 1 value without a reason"
    assert capsys.readouterr().out.splitlines()[-1] == counted
    assert main(["sites", "validate", "juniper", "larch", "--strict"]) == 3
    assert capsys.readouterr().err.endswith("1 warning, 1 value without a reason in juniper\n")


def test_what_a_base_says_is_told_once(site, capsys):
    site("fabric", 'stability = "base"\n[env.common]\nNCCL_CROSS_NIC = "yes"\n')
    site("juniper", GOOD + 'extends = "fabric"\n')
    site("larch", GOOD + 'extends = "fabric"\n')

    assert main(["sites", "validate", "juniper", "larch"]) == 3

    out, err = capsys.readouterr()
    assert out.count("NCCL_CROSS_NIC=yes") == 1
    assert err.endswith("1 error in juniper, larch\n")


def test_json_has_every_finding_and_nothing_else_on_stdout(site, capsys):
    site("juniper", WRONG)

    assert main(["sites", "validate", "juniper", "--json"]) == 3

    (found,) = json.loads(capsys.readouterr().out)
    assert found["site"] == "juniper"
    (finding,) = found["findings"]
    assert finding["level"] == "error"
    assert finding["path"] == "env.common.NCCL_CROSS_NIC"
    assert finding["value"] == "yes"
    assert finding["where"].endswith("/sites/juniper.toml:3")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[network\n", "is not valid TOML"),
        ("[networks]\n", "did you mean network?"),
        ("[partitions.gpu]\nmax_nodes = 'four'\n", "partitions.gpu.max_nodes"),
    ],
)
def test_what_is_no_preset_at_all_is_one_line_and_exits_2(site, capsys, text, told):
    file = site("juniper", text)

    assert main(["sites", "validate", file]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.count("\n") == 1


def test_an_unknown_name_exits_4_and_none_exits_2(site, capsys):
    site("juniper", GOOD)

    assert main(["sites", "validate", "junipr"]) == 4
    assert "did you mean juniper?" in capsys.readouterr().err
    assert main(["sites", "validate"]) == 2
    assert "See `hpctrain sites validate --help`." in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "completed"), [("jun", ["juniper"]), ("./mine.t", ["./mine.t"])])
def test_names_and_files_are_completed(site, typed, completed):
    from hpctrain.cli.sites import validate_command as command

    site("juniper", GOOD)
    (argument,) = [one for one in command.params if one.name == "sites"]

    found = argument.shell_complete(command.make_context("validate", ["x"]), typed)

    assert [one.value for one in found] == completed


def test_a_file_that_was_named_by_its_path_may_have_any_name(site, capsys):
    """`sites init >mine.toml` writes the cluster's name into it."""
    file = site("mine", f'name = "juniper"\n{GOOD}')
    assert main(["sites", "validate", file]) == 0
    assert main(["sites", "show", file]) == 0
    assert "juniper" in capsys.readouterr().out
    assert main(["sites", "validate", "mine"]) == 2
    assert 'name is "juniper" in a file that is called mine' in capsys.readouterr().err


def test_each_fault_of_a_file_that_is_no_preset_has_a_line_with_its_place(site, capsys):
    file = site("bad", GOOD + "".join(f"z{n} = 1\n" for n in range(9)))

    assert main(["sites", "validate", file]) == 2

    *faults, last = capsys.readouterr().err.splitlines()
    assert [line.split(":")[:2] for line in faults] == [
        ["sites/bad.toml", str(n)] for n in range(2, 11)
    ]
    assert last == "hpctrain: error: 9 faults in a preset: it cannot be read"
    main(["submit", "--site", file, "--dry-run"])
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(rf"; 8 other faults: `hpctrain sites validate .*{file}`\n$", err)

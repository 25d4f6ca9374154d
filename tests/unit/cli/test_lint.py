"""`hpctrain lint`: what it prints, what it changes, and its exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.advise.lint.rule import RULES
from hpctrain.cli.main import main

HANGS = "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n"
WARNS = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
HINTS = "import torch\nstate = torch.load('x.pt')\n"


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, name="train.py"):
        (tmp_path / name).write_text(text)
        return name

    return write


def test_an_error_is_told_with_its_line_and_exits_3(program, capsys):
    assert main(["lint", program(HANGS)]) == 3

    out, err = capsys.readouterr()
    rule = RULES["HT101"]
    assert out.splitlines() == [
        "train.py:3:5  HT101 error  barrier() is called only where dist.get_rank() == 0 (line 2)",
        "      3 | dist.barrier()",
        f"   why: {rule.why}",
        f"   fix: {rule.remedy}",
        "1 error in 1 file",
    ]
    assert err == "hpctrain: error: 1 error in 1 file\n"


def test_warnings_pass_and_fail_with_strict(program, capsys):
    name = program(WARNS)

    assert main(["lint", name]) == 0
    assert "HT401 warning" in capsys.readouterr().out
    assert main(["lint", name, "--strict"]) == 3


def test_hints_are_counted_and_shown_when_asked_for(program, capsys):
    name = program(HINTS)

    assert main(["lint", name]) == 0
    assert capsys.readouterr().out == ("nothing found in 1 file; 1 hint not shown (--level info)\n")
    assert main(["lint", name, "--level", "info"]) == 0
    assert "HT603 info" in capsys.readouterr().out
    assert main(["lint", name, "--select", "HT6"]) == 0
    assert "HT603 info" in capsys.readouterr().out


def test_rules_are_chosen_by_the_beginnings_of_their_codes(program, capsys):
    name = program(HANGS)

    assert main(["lint", name, "--select", "HT2,HT3"]) == 0
    assert main(["lint", name, "--ignore", "HT1"]) == 0
    assert main(["lint", name, "--select", "HT1", "--ignore", "HT101"]) == 0
    assert main(["lint", name, "--select", "HT101"]) == 3
    assert main(["lint", name, "--select", "HT9"]) == 2
    assert "no rule's code begins with HT9" in capsys.readouterr().err


def test_json_has_every_finding(program, capsys):
    assert main(["lint", program(HANGS), "--json"]) == 3

    value = json.loads(capsys.readouterr().out)
    (finding,) = value.pop("findings")
    assert value == {"files": 1, "errors": 1, "warnings": 0, "infos": 0}
    assert finding["code"] == "HT101"
    assert (finding["path"], finding["line"], finding["column"]) == ("train.py", 3, 5)
    assert finding["docs"] == "docs/check.md#ht101"


def test_editors_give_a_program_at_stdin(program, capsys, monkeypatch):
    program("")

    def give(text):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    give(HANGS)
    assert main(["lint", "--stdin", "--stdin-filename", "src/t.py"]) == 3
    assert capsys.readouterr().out.startswith("src/t.py:3:5  HT101")
    give(WARNS)
    assert main(["lint", "--stdin"]) == 0
    assert capsys.readouterr().out.startswith("<stdin>:2:10  HT401")


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["none.py"], 4, "none.py is not there; check the path"),
        ([], 2, "name a PATH, or give a program at --stdin."),
        (["train.py", "--stdin"], 2, "name a PATH, or give a program at --stdin."),
        (["train.py", "--stdin-filename", "x"], 2, "--stdin-filename is for --stdin; add it."),
        (["--explain", "HT999"], 4, "there is no rule HT999"),
        (["empty"], 4, "no program and no configuration in empty"),
    ],
)
def test_wrong_usage_is_one_line(program, capsys, argv, code, said):
    program(HANGS)
    Path("empty").mkdir()

    assert main(["lint", *argv]) == code

    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"def f(:\n", "x.py:1:1  HT001 error  no Python that this version reads"),
        (b"x = 1\n\0", "x.py:2:1  HT001 error  holds NUL bytes"),
        (b"\xff\xfe", "x.py  HT001 error  cannot be read: invalid or missing encoding"),
        (b"# coding: undefined\n", "x.py  HT001 error  cannot be read: undefined is no encoding"),
        (b"(" * 100_000, "x.py:1:1  HT001 error  no Python that this version reads"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_finding(program, capsys, raw, said):
    program("")
    Path("x.py").write_bytes(raw)

    assert main(["lint", "x.py"]) == 3

    out, err = capsys.readouterr()
    assert out.startswith(said)
    assert err == "hpctrain: error: 1 error in 1 file\n"


def test_what_a_terminal_obeys_is_not_printed(program, capsys):
    program(HANGS.replace("dist.barrier()", "dist.barrier()  # \x1b[2J"))

    main(["lint", "train.py"])

    assert "\x1b" not in capsys.readouterr().out


def test_a_rule_is_explained(capsys):
    assert main(["lint", "--explain", "HT401"]) == 0

    out = capsys.readouterr().out
    assert RULES["HT401"].why in out
    assert out.endswith("More: hpctrain help check.md\n")


def test_torch_is_not_imported(program):
    program(HANGS)
    code = (
        "import sys; from hpctrain.cli.main import main; code = main(['lint', 'train.py']);"
        "assert code == 3; assert 'torch' not in sys.modules; assert 'deepspeed' not in sys.modules"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_workers_are_held_against_cpus_that_are_named(program, capsys):
    name = program("from torch.utils.data import DataLoader\nx = DataLoader(y, num_workers=8)\n")

    assert main(["lint", name]) == 0
    assert "HT308" not in capsys.readouterr().out
    assert main(["lint", name, "--cpus", "4"]) == 0
    assert "HT308 warning  8 workers on 4 CPUs" in capsys.readouterr().out

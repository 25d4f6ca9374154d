"""What stands behind `--` is known for what it is, or refused before anything waits in a queue."""

from __future__ import annotations

import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from hpctrain.errors import HpctrainError, NotFound, UsageError
from hpctrain.launch.prepare import prepare
from hpctrain.launch.program import read_program
from tests.support.submit_requests import request_of

SHELL = shutil.which("bash")


@pytest.fixture
def work(tmp_path):
    """A folder of programs of all kinds."""
    folder = tmp_path / "work"
    (folder / "pkg" / "part").mkdir(parents=True)
    (folder / "space").mkdir()
    (folder / "bare").mkdir()
    files = {
        "train.py": "print('hi')\n",
        "bad.py": "def f(:\n",
        "zero.py": "a = 1\0\n",
        "run.sh": "#!/bin/bash\necho hi\n",
        "plain.sh": "#!/bin/bash\necho hi\n",
        "tool": "#!/usr/bin/env python3\nprint(1)\n",
        "tool-u": "#!/usr/bin/env -S python3 -u\nprint(1)\n",
        "no-head": "for i in 1 2; do echo $i; done\n",
        "pkg/__init__.py": "raise SystemExit('imported')\n",
        "pkg/train.py": "from . import util\n",
        "pkg/part/__init__.py": "",
        "pkg/part/__main__.py": "",
        "space/train.py": "",
        "bare/__init__.py": "",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    for name in ("run.sh", "tool", "no-head"):
        (folder / name).chmod(0o755)
    shutil.copy("/bin/true", folder / "binary.py")
    (folder / "binary.py").chmod(0o755)
    shutil.copy("/bin/true", folder / "object")
    (folder / "object").chmod(0o644)
    with zipfile.ZipFile(folder / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "")
    os.mkfifo(folder / "pipe")
    return folder


def read(work, *command, path="/usr/bin:/bin"):
    return read_program(command, work, {"PATH": path})


@pytest.mark.parametrize(
    ("command", "kind", "path", "args"),
    [
        (("train.py", "--lr", "1"), "script", "train.py", ["--lr", "1"]),
        (("./tool", "-m"), "script", "tool", ["-m"]),
        (("tool-u",), "script", "tool-u", []),
        (("app.pyz",), "script", "app.pyz", []),
        (("./run.sh", "a b"), "program", "run.sh", ["a b"]),
        (("run.sh",), "program", "run.sh", []),
        (("binary.py",), "program", "binary.py", []),
    ],
)
def test_the_first_bytes_decide_not_the_name(work, command, kind, path, args):
    named = read(work, *command)

    entry = named.entry
    assert (entry.kind, entry.path, entry.args) == (kind, str(work / path), args)
    assert entry.cwd == str(work)
    assert named.notes == []


def test_a_command_on_path_is_taken_with_its_whole_path(work):
    entry = read(work, "bash", "plain.sh", "--fast", path=str(Path(SHELL).parent)).entry

    assert (entry.kind, entry.path, entry.args) == ("program", SHELL, ["plain.sh", "--fast"])


def test_above_a_link_is_above_what_it_names(work, tmp_path):
    (tmp_path / "other" / "sub").mkdir(parents=True)
    (tmp_path / "other" / "train.py").write_text("")
    (work / "link").symlink_to(tmp_path / "other" / "sub")

    assert read(work, "link/../train.py").entry.path == str(tmp_path / "other" / "train.py")


@pytest.mark.parametrize("in_place", [True, False])
def test_a_command_of_another_environment_is_started_as_it_stands(work, tmp_path, in_place):
    """conda and poetry have a Python of their own, with packages that this one lacks."""
    folder = tmp_path / "other" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to("/usr/bin/python3")
    (folder / "poetry").write_text(f"#!{folder}/python\nfrom poetry import main\n")
    (folder / "poetry").chmod(0o755)
    (work / "poetry").symlink_to(folder / "poetry")
    command = str(folder / "poetry") if in_place else "poetry"

    entry = read(work, command, "run", "python", "train.py").entry

    assert (entry.kind, entry.args) == ("program", ["run", "python", "train.py"])


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nproc_per_node 4 train.py",
        "CUDA_VISIBLE_DEVICES=0,1 A=$B torchrun train.py",
        "cd sub && time torchrun train.py",
        "if true; then torchrun train.py; fi",
        "uv run accelerate launch train.py",
        "  nohup python3 -m accelerate.commands.launch train.py",
        "A=1 python -u -m torch.distributed.launch train.py",
    ],
)
@pytest.mark.parametrize("command", [["bash", "no-head"], ["./run.sh"], ["bash", "-ec"]])
def test_a_launcher_in_a_shells_lines_is_told_of(work, command, line):
    (work / "no-head").write_text(f"set -e\n{line}\n")
    (work / "run.sh").write_text(f"#!/bin/bash\n{line}\n")

    (note,) = read(work, *command, *([line] if "-ec" in command else [])).notes

    assert "would start ranks of its own in each rank" in note


@pytest.mark.parametrize(
    "command",
    ["accelerate launch train.py", "env A=1 B=2 C=3 torchrun --nproc_per_node 4 train.py"],
)
def test_a_launcher_behind_another_command_is_told_of(work, command):
    (note,) = read(work, "timeout", "-k", "9", "9", *command.split()).notes

    assert note.startswith("timeout calls ")


@pytest.mark.parametrize(
    "line",
    ["# torchrun train.py", "pip install deepspeed", "echo 'use torchrun'", "module load srun"],
)
def test_a_launcher_that_is_only_named_is_not(work, line):
    (work / "run.sh").write_text(f"#!/bin/bash\n{line}\n")

    assert read(work, "bash", "run.sh", "--strategy", "deepspeed").notes == []


@pytest.mark.parametrize("command", ["accelerate launch", "-m accelerate.commands.launch"])
@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME", "HF_HOME"])
def test_the_config_that_accelerate_reads_unasked_is_told_of(work, tmp_path, command, variable):
    below = {"HOME": ".cache/huggingface", "XDG_CACHE_HOME": "huggingface", "HF_HOME": ""}
    config = tmp_path / "h" / below[variable] / "accelerate" / "default_config.yaml"
    config.parent.mkdir(parents=True)
    environ = {"PATH": "/usr/bin:/bin", variable: str(tmp_path / "h")}
    words = [*command.split(), "train.py"]

    assert not any("would read" in one for one in read_program(words, work, environ).notes)
    config.write_text("mixed_precision: bf16\n")
    assert f"would read {config}" in read_program(words, work, environ).notes[-1]
    assert not any("would read" in one for one in read_program(["train.py"], work, environ).notes)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("pkg.train", "pkg/train.py"),
        ("pkg.part", "pkg/part/__main__.py"),
        ("pkg.part.__main__", "pkg/part/__main__.py"),
        ("space.train", "space/train.py"),
        ("train", "train.py"),
    ],
)
def test_a_module_is_found_as_python_m_would_and_nothing_is_imported(work, name, path):
    entry = read(work, "-m", name, "--lr", "1").entry

    assert (entry.kind, entry.module, entry.path) == ("module", name, str(work / path))
    assert (entry.args, entry.python_path) == (["--lr", "1"], [str(work)])


def test_a_module_that_is_installed_is_found(work):
    assert read(work, "-m", "json.tool").entry.path.endswith("json/tool.py")


@pytest.mark.parametrize(
    ("command", "kind", "what"),
    [
        (("python", "train.py", "-u"), "script", "train.py"),
        (("python3", "-u", "train.py"), "script", "train.py"),
        ((sys.executable, "-u", "-q", "train.py"), "script", "train.py"),
        (("python", "-m", "pkg.train", "x"), "module", "-m pkg.train"),
    ],
)
def test_our_own_interpreter_is_taken_off_and_that_is_said(work, command, kind, what):
    named = read(work, *command, path=str(Path(sys.executable).parent))

    assert named.entry.kind == kind
    assert named.notes == [
        f"{command[0]} is left out: the ranks are Python already, and run {what}"
    ]
    assert "python" not in named.entry.args
    assert named.entry.args == [word for word in command[-1:] if word in {"-u", "x"}]


@pytest.mark.parametrize(
    ("command", "kind", "path"),
    [
        (("bash", "-c", "true"), "program", "bash"),  # not /usr/bin/bash, where the image has none
        (("megatron-train", "--x"), "program", "megatron-train"),
        (("-m", "not_here.train"), "module", ""),
        (("python3", "-m", "pkg.train"), "module", "{work}/pkg/train.py"),
        (("run.sh",), "program", "{work}/run.sh"),
        (("python3.12", "train.py"), "script", "{work}/train.py"),
    ],
)
def test_in_an_image_commands_and_modules_are_the_images(work, command, kind, path):
    entry = read_program(command, work, {"PATH": "/usr/bin:/bin"}, inside=True).entry

    assert (entry.kind, entry.path) == (kind, path.format(work=work))
    with pytest.raises(NotFound, match="gone"):
        read_program(["./gone.sh"], work, {"PATH": ""}, inside=True)


def test_python_that_is_not_on_path_is_ours(work):
    assert read(work, "python", "train.py", path="/nowhere").entry.kind == "script"


def test_another_interpreter_or_option_is_started_as_it_stands(work, tmp_path):
    other = tmp_path / "other" / "python3"
    other.parent.mkdir()
    shutil.copy("/bin/true", other)

    by_path = read(work, str(other), "train.py").entry
    by_name = read(work, "python3", "train.py", path=str(other.parent)).entry
    optimised = read(work, sys.executable, "-O", "train.py").entry
    in_line = read(work, sys.executable, "-c", "print(1)").entry

    assert by_path == by_name
    assert (by_path.kind, by_path.path, by_path.args) == ("program", str(other), ["train.py"])
    assert (optimised.kind, optimised.args) == ("program", ["-O", "train.py"])
    assert (in_line.kind, in_line.args) == ("program", ["-c", "print(1)"])


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        (("bad.py",), UsageError, "bad.py is no Python: line 1: "),
        (("zero.py",), UsageError, "zero.py is no Python: "),
        (("no-head",), UsageError, "no Python: line 1: .*begins with #!"),
        (
            ("plain.sh",),
            UsageError,
            "a script for bash, and not executable: chmod .* bash plain.sh",
        ),
        (("object",), UsageError, "object is a program, and not executable: chmod \\+x object$"),
        (("pipe",), UsageError, "no regular file"),
        (("pkg",), UsageError, "pkg is a folder"),
        (("x" * 5000,), NotFound, "cannot be there: File name too long"),
        (("trian.py",), NotFound, "did you mean train.py"),
        (("bash", "trian.py"), NotFound, "script trian.py is not there; did you mean train.py"),
        (("no-such-command",), NotFound, "looked in /"),
        (("python",), UsageError, "name the script"),
        (("python", "-"), UsageError, "name the script"),
        (("-m",), UsageError, "name the module"),
        (("-m", "train.py"), NotFound, "no module train.py in"),
        (("-m", "./train.py"), UsageError, "not the name of a module; .* -- ./train.py"),
        (("-m", "pkg.trian"), NotFound, "no module pkg.trian in"),
        (("-m", "bare"), UsageError, "a package without a __main__.py"),
        (("-m", "space"), UsageError, "a package without a __main__.py"),
        (("-m", "sys"), UsageError, "part of Python itself"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(work, command, error, message):
    with pytest.raises(error, match=message) as caught:
        read(work, *command)

    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, HpctrainError)


def asked_of(work, command=("train.py",), **asked):
    return request_of(cwd=work, environ={"PATH": ""}, runs=Path("runs"), command=command, **asked)


@pytest.mark.parametrize(
    ("asked", "note"),
    [
        (
            {"resume_args": "-r x"},
            "from the second start on, or where it has a registered checkpoint: -r x",
        ),
        (
            {"resume_args": "-r", "resume_if": "o/*"},
            "where o/\\* matches, or where it has a registered",
        ),
        (
            {"resume_args": "-r {checkpoint}"},
            "arguments where it has a registered checkpoint: -r {check",
        ),
        ({"resume_args": "-r {step}"}, "arguments where it has a registered checkpoint: -r {step}"),
    ],
)
def test_what_later_starts_get_is_said(work, asked, note):
    request = request_of(
        cwd=work, environ={"PATH": ""}, runs=Path("runs"), command=("train.py",), **asked
    )
    prepared = prepare(request)

    assert prepared.spec.settings.run.resume_args == asked["resume_args"]
    assert [said for said in prepared.notes if re.search(note, said)]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"resume_args": "'open"}, "--resume-args: run.resume_args .*into words: No closing"),
        (
            {"resume_if": "out/*"},
            "--resume-if: run.resume_if .*is of no use without run.resume_args",
        ),
    ],
)
def test_arguments_for_later_starts_that_make_no_sense_are_refused(work, asked, message):
    request = request_of(
        cwd=work, environ={"PATH": ""}, runs=Path("runs"), command=("train.py",), **asked
    )
    with pytest.raises(UsageError, match=message):
        prepare(request)


def test_the_shipped_recipe_needs_no_such_arguments(work):
    request = asked_of(work, command=(), resume_args="-r")

    assert any("the shipped recipe resumes by itself" in note for note in prepare(request).notes)

"""What a program imports is read, through its own files, and nothing of it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.launch.program import imports_of


@pytest.fixture
def program(tmp_path):
    def write(text, others=None):
        for name, other in (others or {}).items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(other)
        (tmp_path / "train.py").write_text(text)
        return imports_of(tmp_path / "train.py", [tmp_path])

    return write


def test_each_import_has_its_place_and_names(program):
    found = program("import torch.nn as nn\nfrom torch.distributed import all_reduce, barrier\n")

    assert [(one.module, one.names, one.line) for one in found.others] == [
        ("torch.nn", (), 1),
        ("torch.distributed", ("all_reduce", "barrier"), 2),
    ]
    assert all(one.is_sure for one in found.others)


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import apex\nexcept ImportError:\n    apex = None\n",
        "try:\n    import apex\nexcept (ModuleNotFoundError, OSError):\n    pass\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import apex\n",
    ],
)
def test_what_a_program_can_do_without_is_not_asked(program, text):
    assert "apex" not in [one.module for one in program(text).others]


@pytest.mark.parametrize(
    ("text", "is_sure"),
    [
        ("def f():\n    import apex\n", False),
        ("if x:\n    import apex\n", False),
        ("with x:\n    import apex\n", True),
        ("try:\n    import apex\nexcept ValueError:\n    pass\n", True),
        ("match x:\n    case 1:\n        import apex\n", False),
    ],
)
def test_what_may_never_be_imported_is_told_apart(program, text, is_sure):
    (one,) = program(text).others

    assert (one.module, one.is_sure) == ("apex", is_sure)


def test_a_programs_own_files_are_followed_and_their_imports_told_with_their_place(program):
    found = program(
        "from package import part\nimport helper\n",
        {
            "helper": "import numpy\n",
            "package/__init__": "",
            "package/part": "from .deep import thing\nfrom . import other\n",
            "package/deep": "import einops\nraise SystemExit('it was run')\n",
            "package/other": "import yaml\n",
        },
    )

    told = {(one.module, Path(one.path).name) for one in found.others}
    assert told == {("numpy", "helper.py"), ("einops", "deep.py"), ("yaml", "other.py")}
    assert found.files == 6
    assert not found.missing


def test_a_missing_module_of_its_own_package_is_told(program):
    found = program("import package.gone\n", {"package/__init__": ""})

    assert [(one.module, one.line) for one in found.missing] == [("package.gone", 1)]


def test_a_folder_that_only_has_a_packages_name_does_not_hide_it(program):
    found = program("import wandb.sdk\n", {"wandb/plot": ""})

    assert [one.module for one in found.others] == ["wandb.sdk"]
    assert not found.missing


def test_a_folder_of_data_is_no_module(program, tmp_path):
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "a.txt").touch()

    assert [one.module for one in program("import datasets\n").others] == ["datasets"]


def test_two_files_that_import_each_other_end(program):
    assert program("import a\n", {"a": "import b\n", "b": "import a\n"}).files == 3


def test_many_files_are_not_all_read_and_that_is_said(program, tmp_path):
    program("import a\n", {"a": "import b\n", "b": "import torch\n"})

    found = imports_of(tmp_path / "train.py", [tmp_path], most=2)

    assert (found.files, found.is_whole, found.others) == (2, False, [])


def test_a_module_that_cannot_be_read_as_python_is_passed_over(program):
    assert program("import a\nimport torch\n", {"a": "x = (\n"}).others[0].module == "torch"


def test_who_calls_hpctrain_is_known(program):
    assert program("import hpctrain.frameworks\n").knows_hpctrain
    assert not program("import torch\n").knows_hpctrain

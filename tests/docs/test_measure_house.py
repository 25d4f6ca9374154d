"""What docs/measure_house.py measures does not get worse; its own answers on small houses."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.check  # reads all of hpctrain's syntax trees

TOP = Path(__file__).parents[2]
PROGRAM = runpy.run_path(str(TOP / "docs" / "measure_house.py"))
House = PROGRAM["House"]


@pytest.fixture(scope="module")
def house():
    return House(TOP)


def test_no_module_imports_itself_in_a_circle(house):
    assert house.cycles(type_checking=False) == []


def test_no_module_imports_itself_in_a_circle_for_type_checking_either(house):
    assert house.cycles(type_checking=True) == []


def test_a_class_name_means_one_thing(house):
    assert house.double_classes() == {}


def test_modules_and_lines_do_not_grow_unseen(house):
    """Whoever needs more says so here, and why in the commit."""
    assert len(house.modules) <= 328
    assert sum(house.lines.values()) <= 106_134


def test_modules_are_not_cut_thin_and_functions_fit_a_screen(house):
    assert len(house.thin()) <= 4
    assert len(house.long_functions()) <= 8
    assert all(lines <= 700 for lines in house.lines.values())


def test_commands_do_not_walk_through_more_rooms():
    most = {"submit --dry-run": 33, "submit": 48, "status": 40, "logs": 20}

    entered = PROGRAM["entered"](TOP)

    assert entered.keys() == most.keys()
    assert {name: modules for name, (modules, _) in entered.items() if modules > most[name]} == {}
    assert all(modules > 5 for modules, _ in entered.values())


def write(top, **modules):
    """A package: each module's text by its path, with `__` for a folder."""
    for name, text in modules.items():
        path = top / "hpctrain" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in (path.parent, *path.parent.parents):
            if folder == top:
                break
            (folder / "__init__.py").touch()
        path.write_text(text)
    return House(top)


def test_a_circle_is_found_also_inside_functions_and_through_a_package(tmp_path):
    small = write(
        tmp_path,
        room__a="from hpctrain.room import b\n",
        room__b="def f():\n    import hpctrain.c\n",
        c="from hpctrain.room.a import x\nfrom hpctrain.d import x\n",
        d="import os\n",
    )

    circle = ["hpctrain.c", "hpctrain.room.a", "hpctrain.room.b"]
    assert small.cycles(type_checking=False) == [circle]


def test_a_circle_for_type_checking_alone_is_told_from_one_at_run_time(tmp_path):
    small = write(
        tmp_path,
        a="if TYPE_CHECKING:\n    from hpctrain.b import B\n",
        b="from hpctrain.a import A\n",
    )

    assert small.cycles(type_checking=False) == []
    assert small.cycles(type_checking=True) == [["hpctrain.a", "hpctrain.b"]]


def test_classes_of_one_name_are_found_wherever_they_are_defined(tmp_path):
    small = write(tmp_path, a="class X: pass\n", b="def f():\n    class X: pass\n")

    assert small.double_classes() == {"X": ["hpctrain.a", "hpctrain.b"]}


def test_functions_are_measured_from_def_to_their_last_line(tmp_path):
    body = "    x = 1\n"
    small = write(tmp_path, a=f"def fits():\n{body * 49}def over():\n{body * 50}")

    assert small.long_functions() == ["hpctrain.a:over"]

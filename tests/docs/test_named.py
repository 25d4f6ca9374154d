"""Modules and functions that the pages on the code name are there: a rename breaks these tests.

In those pages what stands between backticks with dots in it, and begins with a room of hpctrain, is
a module, a name in it, or a setting.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from hpctrain.core.settings.schema import sections
from tests.support.rooms import homes, inner_rooms, top_rooms

TOP = Path(__file__).parents[2]
DOCS = TOP / "docs"
DEVELOPMENT = DOCS / "development"
PAGES = [DEVELOPMENT / f"{name}.md" for name in ("architecture", "lives", "contributing")]
LIVES = dict(
    re.findall(
        r"^## The life of (.+)\n((?:(?!## ).*\n)*)",
        (DEVELOPMENT / "lives.md").read_text(),
        re.MULTILINE,
    )
)
"""Their sections of the page, by what lives."""
DOTTED = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)+)`")
CODE = re.compile(r"`([\w.]+)`")
SETTINGS = {
    f"{name}.{key}" for name, section in sections().items() for key in section.__annotations__
}
FILE_ENDINGS = {"json", "jsonl", "lock", "md", "py", "sh", "toml"}


@cache
def rooms():
    return {path.stem for path in (*top_rooms(), *inner_rooms())}


@cache
def names_in(path):
    """Everything that can be written behind a module's name: functions, classes, their members."""
    return _defined(ast.parse(path.read_text()).body)


def _defined(body):
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {node.name, *(f"{node.name}.{name}" for name in _defined(node.body))}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def split(name):
    """A dotted name as the file of its module and what is named in it; None for no module."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        for home in homes():
            base = home.joinpath(*parts[:count])
            for path in (base.with_name(base.name + ".py"), base / "__init__.py"):
                if path.exists():
                    return path, ".".join(parts[count:])
    return None


def is_there(name):
    place = split(name)
    return place is not None and (not place[1] or place[1] in names_in(place[0]))


def named(page):
    """Dotted names of the code in a page."""
    for name in DOTTED.findall(page.read_text()):
        first, last = name.split(".")[0], name.rsplit(".", 1)[1]
        is_code = first in rooms() or first[0].isupper()
        if is_code and name not in SETTINGS and last not in FILE_ENDINGS:
            yield name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page):
    assert [name for name in named(page) if not is_there(name)] == []


def test_rooms_are_told_apart_without_the_room_that_they_lie_in():
    """Texts leave it out."""
    names = [path.stem for path in inner_rooms() if path.is_dir()]

    assert len(names) == len(set(names))
    assert not set(names) & {path.stem for path in top_rooms()}


def test_a_name_that_is_not_there_is_found_out():
    assert is_there("plan.decide.decide")
    assert is_there("agent.ending.AttemptEnding.conclude")
    assert not is_there("plan.decide.decided")
    assert not is_there("agent.ending.AttemptEnding.concluded")
    assert not is_there("plan.decided")


@pytest.mark.parametrize("life", LIVES)
def test_each_step_of_a_life_names_its_process_and_the_functions_that_do_it(life):
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in LIVES[life].splitlines()
        if re.match(r"\| *\d+ \|", line)
    ]

    assert [row[0] for row in rows] == [str(n + 1) for n in range(len(rows))]
    assert len(rows) >= 5
    for number, process, where, what in rows:
        names = CODE.findall(where)
        assert process, number
        assert names, number
        assert what, number
        assert all(is_there(name) and split(name)[1] for name in names), where


def test_a_stop_a_checkpoint_a_scalar_and_an_event_have_each_their_section():
    assert list(LIVES) == ["a stop", "a checkpoint", "a scalar", "an event"]

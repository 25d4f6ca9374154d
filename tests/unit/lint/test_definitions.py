"""Assignments reach a use in the order of the statements, branches apart."""

from __future__ import annotations

import ast

import pytest

from hpctrain.advise.lint.definitions import NameDefinitions, definitions_in
from hpctrain.advise.lint.syntax import ProgramSyntax

PROGRAMS = [
    ("x = 1\nx = 2\nuse(x)\n", {2}, False),
    ("x = 1\nif a:\n    x = 2\nuse(x)\n", {1, 2}, False),
    ("if a:\n    x = 1\nelse:\n    x = 2\nuse(x)\n", {1, 2}, False),
    ("if a:\n    x = 1\nelse:\n    use(x)\n", set(), True),
    ("use(x)\nx = 1\n", set(), True),
    ("x = 1\nfor a in b:\n    use(x)\n    x = 2\n", {1, 2}, False),
    ("x = 1\nfor a in b:\n    x = 2\n    use(x)\n", {2}, False),
    ("x = 1\nif a:\n    x = 2\n    exit()\nuse(x)\n", {1, 2}, False),
    ("x = 1\nfor a in b:\n    if a:\n        x = 2\n        continue\n    use(x)\n", {1, 2}, False),
    ("for b in c:\n    if a:\n        x = 2\n        break\n    x = 3\n    use(x)\n", {3}, False),
    ("x = 1\ntry:\n    x = 2\nexcept E:\n    use(x)\n", {1, 2}, False),
    ("x = 1\nwith a:\n    x = 2\nuse(x)\n", {2}, False),
    ("x = 1\nwhile use(x):\n    x = 2\n", {1, 2}, False),
    ("x = 1\nuse([x for x in a])\n", {"loop"}, False),
    ("for x in a:\n    use(x)\n", {"loop"}, False),
    ("y, x = f()\nuse(x)\n", {"f()"}, False),
]


@pytest.mark.parametrize(("text", "values", "starts"), PROGRAMS, ids=range(len(PROGRAMS)))
def test_what_reaches_a_use(text, values, starts):
    syntax = ProgramSyntax(text, "program.py")
    names = NameDefinitions(syntax)
    for one in definitions_in(syntax.scopes[0]):
        if isinstance(one.target, ast.Name) and one.target.id == "x":
            names.all.append(one)
    (call,) = syntax.calls_to("use")
    use = next(one for one in ast.walk(call) if isinstance(one, ast.Name) and one.id == "x")

    found, is_open = names.reaching(use)

    said = {
        one.value.value
        if isinstance(one.value, ast.Constant)
        else ("loop" if one.kind == "loop" else ast.unparse(one.value))
        for one in found
    }
    assert (said, is_open) == (values, starts)

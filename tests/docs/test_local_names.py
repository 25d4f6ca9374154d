"""Names that say nothing of what they hold stand in no function, but for a moment."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hpctrain

pytestmark = pytest.mark.check  # reads all of hpctrain's syntax trees

BANNED = frozenset({"one", "found", "told", "known", "mine", "far"})
A_MOMENT = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


def _banned(tree: ast.AST) -> set[str]:
    """What of the banned names a tree binds outside of comprehensions."""
    inside = {
        id(n) for node in ast.walk(tree) if isinstance(node, A_MOMENT) for n in ast.walk(node)
    }
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = node.name
        else:
            continue
        if id(node) not in inside:
            bound.add(name)
    return bound & BANNED


def test_a_local_says_what_it_holds():
    package = Path(hpctrain.__file__).parent
    trees = {path: ast.parse(path.read_text()) for path in package.rglob("*.py")}

    assert {str(path): names for path, tree in trees.items() if (names := _banned(tree))} == {}


def test_the_look_itself_sees_a_name_and_leaves_comprehensions_alone():
    assert _banned(ast.parse("def f(told): found = [one for one in told]")) == {"told", "found"}

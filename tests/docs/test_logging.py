"""What speaks to a user prints, all else logs; and nothing logs where that could hang."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hpctrain

pytestmark = pytest.mark.check  # reads all of hpctrain's syntax trees

PACKAGE = Path(hpctrain.__file__).parent
SPEAKERS = ("cli", "recipes", "entry")
"""Rooms that print for a user, or for the shell that called them."""


@pytest.fixture(scope="module")
def modules():
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in paths}


def names_called(tree):
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [ast.unparse(call) for call in calls]


def test_only_what_speaks_to_a_user_prints(modules):
    """Programs (`python -m`) may: what they print is read by whoever started them."""
    prints = [
        str(path)
        for path, tree in modules.items()
        if "print" in names_called(tree)
        and path.parts[0] not in SPEAKERS
        and not any(
            isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body
        )
    ]

    assert prints == []


def test_signal_handlers_and_what_runs_between_fork_and_exec_log_nothing(modules):
    """Another thread may hold the stream's lock; in the child of a fork, for ever."""
    handlers, logging_ones = 0, []
    for path, tree in modules.items():
        functions = {
            node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
        }
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            called = ast.unparse(call.func)
            given = [call.args[1]] if called == "signal.signal" else []
            given += [word.value for word in call.keywords if word.arg in {"preexec_fn", "before"}]
            for function in given:
                handlers += 1
                waiting, seen = [function], set()
                while waiting:
                    node = waiting.pop()
                    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                    names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                    if any(name.startswith(("log.", "logging.")) for name in names_called(node)):
                        logging_ones.append(f"{path}:{call.lineno}")
                    waiting += [functions[name] for name in names & functions.keys() - seen]
                    seen |= names
    assert handlers > 10
    assert logging_ones == []

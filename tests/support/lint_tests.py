"""A check of the tests' own source: none bounds how long something real takes, none sleeps.

    python -m tests.support.lint_tests

A bound on a duration passes until a machine is busier, and a sleep grants somebody time that a busy
machine does not give. Assert an order or a count, CPU time (`time.process_time`), or a lower bound;
wait with `tests.support.patience.until`, or shut a gate (`tests.support.gates`).
`tests/unit/support/test_lint_tests.py` has examples.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parents[1]
PROGRAMS = ("data/", "support/scripts/", "gpu/scripts/")
"""Training programs as users write them, whose work takes time."""
CLOCKS = frozenset({"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time"})
SLEEP = frozenset({"sleep"})
SLEEPS = {
    "docs/test_worked_examples.py": 1,
    "e2e/test_submitit_own.py": 1,
    "engines/test_agreement.py": 3,
    "engines/test_checkpoint_faults.py": 1,
    "engines/test_in_place.py": 2,
    "engines/test_node_agent.py": 1,
    "engines/test_profile_run.py": 1,
    "engines/test_slow_campaign.py": 2,
    "engines/test_external_loop.py": 1,
    "slurm/test_alive_campaign.py": 1,
    "slurm/test_submitit.py": 1,
    "support/agent_stand_in.py": 1,
    "support/campaign.py": 1,
    "support/client_disk.py": 3,
    "support/control_faults.py": 1,
    "support/cpus.py": 1,
    "support/hang_scenes.py": 3,
    "support/node_faults.py": 3,
    "support/patience.py": 1,
    "support/slurm_boot.py": 1,
    "support/slurm_subreaper.py": 1,
    "support/small_disk.py": 1,
    "unit/control/test_control_client.py": 1,
    "unit/preflight/test_probe.py": 1,
    "unit/preflight/test_rendezvous.py": 1,
    "unit/scheduler/test_slurm_script.py": 1,
}
"""File to its number of `time.sleep`: polls, steps that take their time, and pauses in which
nothing may happen. No other file may have any, and none more."""


class Finding(NamedTuple):
    """Something that a test should not do."""

    line: int
    text: str


def findings(source: str, sleeps: int = 0) -> list[Finding]:
    """Return what is wrong with a file.

    Args:
        source: Its text.
        sleeps: How often it may call `time.sleep`; fewer calls are a finding too.
    """
    tree = ast.parse(source if "time." in source else "")
    found = [*_bounds(tree)]
    calls = sorted(node.lineno for node in ast.walk(tree) if _is_call(node, SLEEP))
    if len(calls) > sleeps:
        told = f"{len(calls)} calls of time.sleep, {sleeps} are allowed: wait for what is awaited"
        found.append(Finding(calls[sleeps], f"{told} (patience.until), or hold it (gates)"))
    if len(calls) < sleeps:
        found.append(Finding(1, f"{len(calls)} calls of time.sleep: lower its number in SLEEPS"))
    return found


def _bounds(tree: ast.AST) -> Iterator[Finding]:
    for scope in ast.walk(tree):
        if isinstance(scope, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            own = list(_own(scope))
            durations = _durations(own)
            for node in own:
                if isinstance(node, ast.Assert) and _is_bounded(node.test, durations):
                    yield Finding(
                        node.lineno,
                        "an upper bound on a real duration: assert an order, a count or CPU time",
                    )


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope without those of functions in it, and without loops.

    An assert in a `while` ends a poll.
    """
    left = list(ast.iter_child_nodes(scope))
    while left:
        node = left.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.While):
            yield node
            left += ast.iter_child_nodes(node)


def _durations(nodes: list[ast.AST]) -> set[str]:
    """Names that hold a difference of clocks."""
    return {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and _has_difference(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _has_difference(node: ast.AST) -> bool:
    return any(
        isinstance(one, ast.BinOp)
        and isinstance(one.op, ast.Sub)
        and (_reads_clock(one.left) or _reads_clock(one.right))
        for one in ast.walk(node)
    )


def _reads_clock(node: ast.AST) -> bool:
    return any(_is_call(one, CLOCKS) for one in ast.walk(node))


def _is_call(node: ast.AST, names: frozenset[str]) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr=name)):
            return name in names
    return False


def _is_bounded(test: ast.AST, durations: set[str]) -> bool:
    """Whether a comparison in it has a duration, or now, on its smaller side."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for operator, left, right in zip(node.ops, sides, sides[1:], strict=False):
                smaller = left if isinstance(operator, ast.Lt | ast.LtE) else None
                smaller = right if isinstance(operator, ast.Gt | ast.GtE) else smaller
                if smaller is not None and _is_duration(smaller, durations):
                    return True
    return False


def _is_duration(node: ast.AST, durations: set[str]) -> bool:
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return _has_difference(node) or _is_call(node, CLOCKS) or bool(names & durations)


def main() -> int:
    """Check all of tests/; 1 where something was found."""
    code, seen = 0, set()
    for path in sorted(TESTS.rglob("*.py")):
        name = str(path.relative_to(TESTS))
        if name.startswith(PROGRAMS):
            continue
        seen.add(name)
        for line, text in findings(path.read_text(), SLEEPS.get(name, 0)):
            print(f"tests/{name}:{line}: {text}", file=sys.stderr)
            code = 1
    for name in sorted(SLEEPS.keys() - seen):
        print(f"tests/support/lint_tests.py: {name} is not there", file=sys.stderr)
        code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())

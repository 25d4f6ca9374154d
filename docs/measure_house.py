"""Measures how hard the package is to find one's way in; prints one table, a column a checkout.

    python docs/measure_house.py                        # this checkout
    python docs/measure_house.py /tmp/before .          # two of them, side by side
    python docs/measure_house.py --static               # without running commands

What stands in the files comes from their syntax trees. What four commands enter comes from running
them under `sys.setprofile`, with a SLURM of shell scripts that says "17" to everything. A module
counts as entered where one of its functions was called by the command, not by an import.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TOP = Path(__file__).parents[1]
PACKAGE = "hpctrain"
THIN_LINES = 60
LONG_LINES = 50
FAKES = {
    "sbatch": "echo 17",
    "srun": "exit 1",
    "sinfo": "exit 0",
    "scontrol": "exit 0",
    "sacct": "exit 0",
    "squeue": "exit 0",
}
SITE = """
name = "here"
description = "nodes of four GPUs on InfiniBand"
stability = "local"
extends = "ib-ndr"
[partitions.gpu]
gpus_per_node = 4
max_time = "1-00:00:00"
"""
EVENTS = (
    {"kind": "attempt_started", "job_id": "17", "nodes": ["n1", "n2"], "world_size": 4}
    | {"ranks_per_node": 2, "restarts": 0, "token": "x", "by": "start"},
    {"kind": "restored", "step": 0, "checkpoint": None, "world_size": 4, "skipped": []},
    {"kind": "steps", "first": 1, "last": 40, "sample_first": 0, "sample_last": 320}
    | {"loss": 2.5, "seconds": 20.0},
    {"kind": "saved", "step": 40, "bytes": 4096, "seconds": 0.1, "checkpoint": "step-0000000040"},
)
"""Of the run that `status` and `logs` look at, beside what its submit wrote."""
SUBMIT = ["--site", "here", "--nodes", "4", "--name", "measured"]
COMMANDS = {
    "submit --dry-run": ["submit", "--dry-run", *SUBMIT],
    "submit": ["submit", *SUBMIT],
    "status": ["status", "measured"],
    "logs": ["logs", "measured"],
}
ENTER = """
import inspect, json, sys, threading
from pathlib import Path

top = Path(sys.argv[1]).resolve() / "hpctrain"
sys.path.insert(0, str(top.parent))
from hpctrain.cli.main import main
assert Path(sys.modules["hpctrain"].__file__).parent == top, "another hpctrain was imported"

importing, calls = 0, set()

def module_of(frame):
    while frame is not None and not frame.f_code.co_filename.startswith(str(top)):
        frame = frame.f_back
    return frame and frame.f_code.co_filename

def profiler(frame, event, argument):
    global importing
    code = frame.f_code
    if not code.co_filename.startswith(str(top)):
        return
    if code.co_name == "<module>":
        importing += {"call": 1, "return": -1}.get(event, 0)
    elif event == "call" and not importing and code.co_flags & inspect.CO_OPTIMIZED:
        calls.add((module_of(frame.f_back) or "", code.co_filename))

threading.setprofile(profiler)
sys.setprofile(profiler)
code = main(sys.argv[3:])
sys.setprofile(None)
Path(sys.argv[2]).write_text(json.dumps(sorted(calls)))
sys.exit(code)
"""


class House:
    """The modules of one checkout.

    Attributes:
        trees: Syntax tree of each module, by its dotted name; a package is its `__init__`.
        lines: Lines of each.
    """

    def __init__(self, top: Path) -> None:
        self.trees: dict[str, ast.Module] = {}
        self.lines: dict[str, int] = {}
        self._packages: set[str] = set()
        for path in sorted((top / PACKAGE).rglob("*.py")):
            parts = path.relative_to(top).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if parts[-1] == "__init__":
                self._packages.add(name)
            text = path.read_text(encoding="utf-8")
            self.trees[name] = ast.parse(text)
            self.lines[name] = text.count("\n")

    @property
    def modules(self) -> list[str]:
        """All but the `__init__` of packages, which hold a docstring."""
        return [name for name in self.trees if name not in self._packages]

    def thin(self) -> list[str]:
        """Modules of few lines."""
        return [name for name in self.modules if self.lines[name] < THIN_LINES]

    def functions(self) -> list[tuple[str, int]]:
        """Every function as "module:name", with its lines, from `def` to its last."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [
            (f"{name}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
            for name, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, kinds)
        ]

    def long_functions(self) -> list[str]:
        """Those that no screen holds."""
        return [name for name, lines in self.functions() if lines > LONG_LINES]

    def double_classes(self) -> dict[str, list[str]]:
        """Names of classes that more than one class has, with the modules of these."""
        where = defaultdict(list)
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    where[node.name].append(name)
        return {name: modules for name, modules in sorted(where.items()) if len(modules) > 1}

    def double_files(self) -> dict[str, int]:
        """File names that more than one module has."""
        names = Counter(name.rpartition(".")[2] for name in self.modules)
        return {name: count for name, count in sorted(names.items()) if count > 1}

    def cycles(self, *, type_checking: bool) -> list[list[str]]:
        """Groups of modules that import each other in a circle.

        Args:
            type_checking: Whether imports for type checking count too. Those inside functions do
                in any case.
        """
        arrows = {
            name: set(self._imports(tree, type_checking=type_checking)) - {name}
            for name, tree in self.trees.items()
        }
        return _circles(arrows)

    def _imports(self, node: ast.AST, *, type_checking: bool) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names if alias.name in self.trees)
            elif isinstance(child, ast.ImportFrom) and child.module in self.trees:
                for alias in child.names:
                    inside = f"{child.module}.{alias.name}"
                    yield inside if inside in self.trees else child.module
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                taken = [*child.body, *child.orelse] if type_checking else child.orelse
                for part in taken:
                    yield from self._imports(ast.Module([part], []), type_checking=type_checking)
            else:
                yield from self._imports(child, type_checking=type_checking)


def _circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected groups of more than one, by reachability: a few hundred modules."""
    reached = {name: _reached(name, arrows) for name in arrows}
    groups = {
        tuple(sorted(other for other in there if name in reached[other]))
        for name, there in reached.items()
        if name in there
    }
    return [list(group) for group in sorted(groups)]


def _reached(start: str, arrows: dict[str, set[str]]) -> set[str]:
    there: set[str] = set()
    ahead = [start]
    while ahead:
        for name in arrows[ahead.pop()] - there:
            there.add(name)
            ahead.append(name)
    return there


def entered(top: Path) -> dict[str, tuple[int, int]]:
    """Modules that each command enters, and pairs of them of which one calls the other."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        _furnish(work)
        found = {}
        for title, argv in COMMANDS.items():
            calls = _calls(top, work, argv)
            modules = {called for _, called in calls}
            arrows = {pair for pair in calls if pair[0] and pair[0] != pair[1]}
            found[title] = len(modules), len(arrows)
            if title == "submit":
                _pretend_an_attempt(work / "runs" / "measured")
        return found


def _furnish(work: Path) -> None:
    (work / "bin").mkdir()
    for name, said in FAKES.items():
        path = work / "bin" / name
        path.write_text(f"#!/bin/sh\n{said}\n")
        path.chmod(0o755)
    sites = work / ".config" / "hpctrain" / "sites"
    sites.mkdir(parents=True)
    (sites / "here.toml").write_text(SITE)


def _calls(top: Path, work: Path, argv: list[str]) -> list[tuple[str, str]]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("HPCTRAIN_")}
    env = {**ours, "PATH": f"{work}/bin:/usr/bin:/bin", "HOME": str(work), "NO_COLOR": "1"}
    answer = work / "calls.json"
    command = [sys.executable, "-c", ENTER, str(top), str(answer), *argv]
    done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{top}: hpctrain {' '.join(argv)}: {done.stderr}{done.stdout}")
    return [(caller, called) for caller, called in json.loads(answer.read_text())]


def _pretend_an_attempt(run: Path) -> None:
    """Add what one attempt would have left behind."""
    ledger = run / "events.jsonl"
    t = json.loads(ledger.read_text().splitlines()[-1])["t"]
    with ledger.open("a") as file:
        for number, event in enumerate(EVENTS, 1):
            line = {"t": t + number, "kind": event["kind"], "attempt": 1, **event}
            file.write(json.dumps(line) + "\n")
    log = run / "attempts" / "0001" / "rank-00000.log"
    log.parent.mkdir(parents=True)
    log.write_text("step 1 loss 2.5\n")


def words_of_docs(top: Path) -> int:
    """Words of README and docs/, without the pages of presets, as `wc -w` counts them."""
    pages = [top / "README.md", *top.glob("docs/*.md"), *top.glob("docs/development/*.md")]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def measure(top: Path, *, static: bool = False) -> dict[str, str]:
    """The table's column of one checkout.

    Args:
        top: The checkout.
        static: Leave out what takes running commands, some 5 s.
    """
    house = House(top)
    modules, thin = len(house.modules), len(house.thin())
    functions = house.functions()
    column = {
        "modules": f"{modules}",
        "lines": f"{sum(house.lines.values()):,}",
        f"modules below {THIN_LINES} lines": f"{thin} ({100 * thin / modules:.0f} %)",
        "file names used more than once": f"{len(house.double_files())}",
        "functions": f"{len(functions):,}",
        f"functions over {LONG_LINES} lines": f"{len(house.long_functions())}",
        "class names with two meanings": f"{len(house.double_classes())}",
        "import cycles": f"{len(house.cycles(type_checking=False))}",
        "import cycles, type checking counted": f"{len(house.cycles(type_checking=True))}",
        "words of README and docs": f"{words_of_docs(top):,}",
        "pages for users and administrators": f"{len([*top.glob('docs/[!i]*.md')])}",
    }
    if not static:
        for title, (count, arrows) in entered(top).items():
            column[f"modules that `{title}` enters (hops)"] = f"{count} ({arrows})"
    return column


def main(argv: list[str]) -> None:
    """Print the table."""
    static = "--static" in argv
    tops = [Path(name).resolve() for name in argv if name != "--static"] or [TOP]
    columns = [measure(top, static=static) for top in tops]
    print(f"| measure | {' | '.join(top.name for top in tops)} |")
    print(f"|---|{'---|' * len(tops)}")
    for title in columns[0]:
        print(f"| {title} | {' | '.join(column[title] for column in columns)} |")


if __name__ == "__main__":
    main(sys.argv[1:])

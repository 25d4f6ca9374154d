"""gpu-results.json and gpu-results.md: what ran on the GPU, written anew after each test.

Both files are complete at every moment, so a run that is cut off leaves what it has. A test that
did not end is "not run"; one that ended on a CPU is "rehearsed". Neither ever counts as passed.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

JSON_NAME, TABLE_NAME = "gpu-results.json", "gpu-results.md"
PASSED, FAILED, NOT_RUN, REHEARSED = "passed", "failed", "not run", "rehearsed"
REASON_CHARS = 300


@dataclass
class Row:
    """One test, or one part of the run.

    Attributes:
        outcome: "passed", "failed", "not run" or "rehearsed".
        why: Of a failure, or of a test that did not run.
        seconds: It took.
        numbers: What it measured: what, value, goal, unit, and whether the goal is reached.
        needs_cuda: On a CPU: what it left out.
    """

    outcome: str = NOT_RUN
    why: str = ""
    seconds: float = 0.0
    numbers: list[dict[str, Any]] = field(default_factory=list)
    needs_cuda: list[str] = field(default_factory=list)


@dataclass
class Results:
    """Everything that one run has to say.

    Attributes:
        about: When, on what, and of which commit.
        parts: By name, in the order in which they run.
        tests: By node id.
    """

    about: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Row] = field(default_factory=dict)
    tests: dict[str, Row] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Read what a run has written so far."""
        raw = json.loads((folder / JSON_NAME).read_text())
        rows = {key: {k: Row(**v) for k, v in raw[key].items()} for key in ("parts", "tests")}
        return cls(raw["about"], **rows)

    def write(self, folder: Path) -> None:
        """Write both files."""
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / JSON_NAME, json.dumps(asdict(self), indent=1) + "\n")
        _replace(folder / TABLE_NAME, self.as_markdown())

    @property
    def counts(self) -> Counter[str]:
        """How many tests have which outcome."""
        return Counter(row.outcome for row in self.tests.values())

    @property
    def is_good(self) -> bool:
        """Return whether every part ran to its end and no test failed."""
        rows = [*self.parts.values(), *self.tests.values()]
        return bool(self.tests) and not any(row.outcome in {FAILED, NOT_RUN} for row in rows)

    def as_markdown(self) -> str:
        """Return all of it for people: what failed first, then numbers, then every test."""
        lines = ["# Results on a GPU", ""]
        lines += [f"- {name}: {value}" for name, value in self.about.items()]
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        lines += [f"- tests: {counts or 'none'}", ""]
        lines += _table(("part", "outcome", "seconds", "why"), _failed_first(self.parts))
        lines += _table(
            ("measured", "value", "goal", "reached", "test"),
            (_number(number, name) for name, row in self.tests.items() for number in row.numbers),
        )
        lines += _table(("test", "outcome", "seconds", "why"), _failed_first(self.tests))
        left_out = [
            (text, short(name)) for name, row in self.tests.items() for text in row.needs_cuda
        ]
        lines += _table(("needs CUDA, not run", "test"), left_out)
        return "\n".join(lines)


def _failed_first(rows: dict[str, Row]) -> list[tuple[str, ...]]:
    names = sorted(rows, key=lambda name: rows[name].outcome != FAILED)
    return [
        (short(name), rows[name].outcome, f"{rows[name].seconds:.1f}", rows[name].why)
        for name in names
    ]


def _number(number: dict[str, Any], name: str) -> tuple[str, ...]:
    is_reached = {True: "yes", False: "MISSED", None: ""}[number["reached"]]
    value = f"{number['value']:.4g} {number['unit']}".strip()
    return number["what"], value, number["goal"], is_reached, short(name)


def short(nodeid: str) -> str:
    """Return a node id without its folder."""
    return nodeid.removeprefix("tests/gpu/")


def _table(heads: tuple[str, ...], rows: Any) -> list[str]:
    body = [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    head = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return [*head, *body, ""] if body else []


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")[:REASON_CHARS]


def _replace(path: Path, text: str) -> None:
    """Write a file whole; the runner and a test's process never write at the same time."""
    staged = path.with_name(f"{path.name}.new")
    staged.write_text(text)
    staged.replace(path)

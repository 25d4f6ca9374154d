"""What `hpctrain lint` finds in folders of programs, and how long it takes for 2,000 lines.

python benchmarks/lint_programs.py [FOLDER...]: without folders, the time alone.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

from hpctrain.advise.lint.check import check_text, files_to_check
from hpctrain.core.base.files import NotText, read_source

TOP = Path(__file__).parents[1]
LINES = 2_000
ROUNDS = 5
LEFT_OUT = ("/tests/", "/test/", "/test_", "conftest", "/setup.py")


def main() -> None:
    """Print the time, then a row for each folder."""
    median, lines = speed()
    print(f"{lines} lines of a training program: {median * 1000:.0f} ms (median of {ROUNDS})")
    if not sys.argv[1:]:
        return
    print("| folder | files | lines | errors | warnings | hints |\n|---|---|---|---|---|---|")
    for folder in sys.argv[1:]:
        print(row(folder))


def speed() -> tuple[float, int]:
    """Seconds of CPU for one program of 2,000 lines, made of functions that train."""
    piece = (TOP / "tests" / "unit" / "lint" / "planted.txt").read_text()
    head, body = piece.split("\n\n\n", 1)
    text = head + "\n"
    number = 0
    while text.count("\n") < LINES:
        text += "\n\n" + body.replace("def train(", f"def train_{number}(")
        number += 1
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        check_text(text, "program.py")
        times.append(time.process_time() - began)
    return sorted(times)[ROUNDS // 2], text.count("\n")


def row(folder: str) -> str:
    """A line of the table in docs/check.md."""
    levels: Counter[str] = Counter()
    files = lines = 0
    for path, together in files_to_check([folder], print):
        name = str(path)
        if path.suffix != ".py" or any(part in name for part in LEFT_OUT):
            continue
        try:
            text = read_source(path)
        except NotText as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        files += 1
        lines += text.count("\n")
        for one in check_text(text, name, folder=together):
            levels[one.rule.level] += 1
            if one.rule.level != "info":
                print(f"{name}:{one.line} {one.rule.code} {one.message}", file=sys.stderr)
    counts = " | ".join(str(levels[level]) for level in ("error", "warning", "info"))
    return f"| {folder} | {files} | {lines:,} | {counts} |"


if __name__ == "__main__":
    main()

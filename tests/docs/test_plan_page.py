"""docs/plan.md and its tables: each error is what the formulas of today make of the exact peak.

The peaks were measured by torch (benchmarks/plan_memory.py). A formula that is changed shows here
at once, before anything is measured again.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support import plan_cases, published

TOP = Path(__file__).parents[2]
PAGE = TOP / "docs" / "plan.md"
PEAKS = TOP / "tests" / "data" / "plan-peaks.md"
PUBLISHED = TOP / "tests" / "data" / "plan-published.md"
MIB = 1 << 20
ROW = re.compile(r"^\| ((?:llama|gpt2|bert|mixtral)-\S+ .+?) \| ([\d,]+) \| ([+-]?[\d.]+) % \|")
CLOSE, NEAR = 5.0, 10.0


def rows():
    """Case to exact peak in MiB and what the table says of the plan's error, in percent."""
    found = {}
    for line in PEAKS.read_text().splitlines():
        if row := ROW.match(line):
            assert row[1] not in found, f"{row[1]} is there twice"
            found[row[1]] = (int(row[2].replace(",", "")), float(row[3]))
    return found


CASES = {plan_cases.title(case): case for case in plan_cases.ALL}


def test_published_runs_stand_in_the_table_as_the_plan_takes_them_today():
    rows = PUBLISHED.read_text().splitlines()
    text = PAGE.read_text()

    assert [row for row in published.page_rows() if row not in rows] == [], (
        "run: python -m tests.support.published, and put its rows into tests/data/plan-published.md"
    )
    near, steps = (
        published.within_a_quarter_at_best(),
        len([r for r in published.runs() if r.step_s]),
    )
    assert f"chosen afterwards, reaches {near} of {steps}" in text
    for held_out, kind in (
        (False, "P and A: used for calibration"),
        (True, "H1 to H90, since fixed"),
    ):
        some = [run for run in published.runs() if run.is_held_out is held_out]
        steps = [run.step_ratio for run in some if run.step_ratio]
        fits, near = sum(run.row.is_held for run in some), sum(abs(r - 1) <= 0.25 for r in steps)
        assert f"| {kind} | {fits} of {len(some)} | {near} of {len(steps)} |" in text


def test_the_table_has_a_row_for_each_case():
    assert set(rows()) == set(CASES)


def test_each_error_is_what_the_formulas_say_today():
    """The table's peaks are whole MiB, its errors tenths of a percent."""
    off = {}
    for name, (peak, said) in rows().items():
        nbytes = plan_cases.predicted(CASES[name]).nbytes
        least, most = (100 * (nbytes / MIB / (peak + half) - 1) for half in (0.5, -0.5))
        if not least - 0.051 <= said <= most + 0.051:
            off[name] = (said, round(least, 2), round(most, 2))
    assert off == {}


def test_the_summary_counts_the_rows():
    errors = [abs(said) for _, said in rows().values()]
    close, near = (sum(error <= most for error in errors) for most in (CLOSE, NEAR))

    summary = f"| `hpctrain plan` | {len(errors)} | {close} | {near} | {max(errors)} % |"
    assert summary in PAGE.read_text()

"""What the documents say of the code is what the code says."""

from __future__ import annotations

import configparser
import re
import runpy
from pathlib import Path

import pytest

from hpctrain.cluster.site.load import load_site
from hpctrain.core.base.records import JobFacts, StopCause
from hpctrain.core.settings.layers import resolve
from hpctrain.errors import EXIT_CODES
from hpctrain.ledger.plan.decide import decide
from tests.support.rooms import inner_rooms, top_rooms

TOP = Path(__file__).parents[2]
DOCS = TOP / "docs"
SITES = sorted((TOP / "site-configs").glob("*.toml"))


def table(page, title):
    """Rows of the table whose first column has this title, as lists of cells."""
    lines = page.read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {title} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_exit_codes_are_those_of_the_code():
    rows = {int(code): meaning for code, meaning, *_ in table(DOCS / "doctor.md", "code")}

    assert rows == EXIT_CODES


def test_settings_page_is_current():
    written = runpy.run_path(str(DOCS / "generate_settings.py"))["page"]()

    assert (DOCS / "settings.md").read_text() == written, "run: make settings"


def test_events_of_the_ledgers_page_are_current():
    written = runpy.run_path(str(DOCS / "generate_ledger.py"))["page"]()

    assert (DOCS / "development" / "ledger.md").read_text() == written, "run: make settings"


def test_every_room_has_its_paragraph():
    named = re.findall(r"^(?:  )?- `(\w+)`:", _architecture(), re.MULTILINE)

    assert sorted(named) == sorted(path.stem for path in (*top_rooms(), *inner_rooms()))


def test_order_of_rooms_is_the_one_that_lint_enforces():
    contracts = configparser.ConfigParser()
    contracts.read(TOP / ".importlinter")
    enforced = {
        section["containers"]: [sorted(re.findall(r"\w+", line)) for line in lines]
        for section in contracts.values()
        if (lines := section.get("layers", "").split("\n")[1:])
    }
    rows = _architecture().split("```\nentry\n")[1].split("```")[0]
    names = dict(re.findall(r"^(\w.*?)(?:  +(.*))?$", "entry\n" + rows, re.MULTILINE))

    assert [name.split(", ") for name in names] == enforced.pop("hpctrain")
    assert {
        f"hpctrain.{name}": [sorted(layer.split(", ")) for layer in inner.split(" > ")]
        for name, inner in names.items()
        if inner
    } == enforced


@pytest.mark.parametrize("path", SITES, ids=lambda path: path.stem)
def test_every_site_config_loads(path):
    site = load_site(str(path))

    resolve([site.layer])
    assert site.about.description


@pytest.mark.parametrize("row", table(DOCS / "staying-alive.md", "ranks"), ids=" ".join)
def test_decision_table_is_what_the_code_decides(row):
    outcome, cause, state, restarts, preempt_time, reason, recorded, following = row
    facts = JobFacts(
        state="COMPLETING" if state == "any" else state,
        restarts={"more": 3, "same": 2}.get(restarts),
        preempt_time=1.0 if preempt_time.startswith("set") else None,
        comes_back=preempt_time == "set, comes back",
        reason=None if reason in {"-", "any", "held"} else reason,
        held=reason == "held",
    )

    decided = decide(
        None if state == "not asked" else facts,
        2,
        None if cause == "-" else StopCause(cause),
        outcome,
    )

    assert decided == (recorded, following)


def _architecture():
    return (DOCS / "development" / "architecture.md").read_text()


def test_every_fact_about_slurm_stands_in_the_table_of_versions():
    text = (TOP / "tests" / "slurm" / "test_cluster_facts.py").read_text()

    rows = table(DOCS / "development" / "slurm-versions.md", "what SLURM does")

    assert sorted(test for _, _, test in rows) == sorted(
        re.findall(r"^def test_(\w+)", text, re.MULTILINE)
    )

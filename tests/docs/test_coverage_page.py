"""coverage.md: each place that it names is there, and no rule of a guide has fallen away."""

from __future__ import annotations

import dataclasses
import re
import shlex
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from hpctrain.advise.doctor.faults import FAULTS
from hpctrain.advise.lint.rule import RULES
from hpctrain.cli.main import COMMANDS, cli
from hpctrain.core.settings.schema import sections

TOP = Path(__file__).parents[2]
PAGE = TOP / "docs" / "development" / "coverage.md"
RUN = TOP / "hpctrain" / "train" / "runtime" / "run.py"
PLAN_PAGE = TOP / "docs" / "plan.md"
ROWS = {
    "Advice that has aged": 43,
    "Systems": 36,
    "Rules, steps and decisions": 53,
    "Found besides": 18,
}
"""Rows of each table: one that goes away is taken out here too, and with a reason.

Twelve rows said what another row says, with the same place, and were taken out.
"""
NOT_DONE = re.compile(r"Not done(?: as the default)?: (.+)$")
CODE = re.compile(r"\[(HT\d{3})\]\(([^)]+)\)")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#([^)\s]+))?\)")
WORDS = re.compile(r"`([^`]+)`")
SETTINGS = {
    f"{section}.{field.name}"
    for section, kind in sections().items()
    for field in dataclasses.fields(kind)
}
WORDS_OF_OTHERS = {
    *("ds_to_universal", "elastic_checkpoint", "set_epoch", "config.json"),
    *("deepspeed", "torchrun", "accelerate launch"),
}
"""Names of other projects, that a place may mention."""


class PageRow(NamedTuple):
    """A row of the page: what guides say, and where that is here."""

    table: str
    says: str
    place: str


def rows():
    table, found = "", []
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            table = line[3:]
        elif line.startswith("| ") and not line.endswith("| here |"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            found.append(PageRow(table, cells[0], cells[-1]))
    return found


EVERY = rows()


def test_no_row_has_fallen_away():
    counts = {}
    for row in EVERY:
        counts[row.table] = counts.get(row.table, 0) + 1

    assert counts == ROWS
    for table in ROWS:
        says = [row.says for row in EVERY if row.table == table]
        assert len(set(says)) == len(says), table


def test_each_row_has_a_place_or_says_why_not():
    for row in EVERY:
        reason = NOT_DONE.search(row.place)
        place = NOT_DONE.sub("", row.place)

        assert ("Not done" in row.place) == (reason is not None), row.place
        assert reason is not None or LINK.search(place) or WORDS.search(place), row
        assert reason is None or len(reason[1].split()) >= 2, row


def test_each_name_in_a_place_is_there():
    gone = [
        f"{row.says}: `{name}`"
        for row in EVERY
        for name in WORDS.findall(NOT_DONE.sub("", row.place))
        if not _is_there(name)
    ]

    assert not gone


def test_each_link_of_a_place_leads_to_its_heading():
    links = {(row.says, *link) for row in EVERY for link in LINK.findall(row.place)}
    dead = [link for link in links if link[2] and link[2] not in _anchors(link[1])]

    assert not dead


def _is_there(name):
    """Whether a name in a place is a command, a setting, a call, a file of the plan."""
    if name.startswith("hpctrain "):
        return _is_command(shlex.split(name)[1:])
    if name.startswith("# hpctrain: ignore "):
        return name.rsplit(" ", 1)[1] in RULES
    if f"| `{name}` |" in PLAN_PAGE.read_text():
        return True
    section, _, key = name.partition(".")
    if section in sections():
        call = section == "run" and f"    def {key}(" in RUN.read_text()
        return name in SETTINGS or key == "*" or call
    if name.startswith("["):
        return f"## {name}\n" in (TOP / "docs" / "site-presets.md").read_text()
    return name in WORDS_OF_OTHERS | {"check"} or _is_choice(name)


def _is_choice(name):
    """What a setting or a class of time is called, where that stands on its page."""
    texts = [
        (TOP / "docs" / page).read_text()
        for page in ("plan.md", "settings.md", "development/ledger.md")
    ]
    return any(f"| `{name}` |" in text for text in texts) or name == "auto"


def _is_command(words):
    """Whether there is such a command, and whether it has these options."""
    command = cli.get_command(click.Context(cli), words[0]) if words[0] in COMMANDS else None
    if isinstance(command, click.Group) and words[1:] and not words[1].startswith("-"):
        command = command.get_command(click.Context(command), words[1])
    options = {option for each in getattr(command, "params", ()) for option in each.opts}
    return command is not None and {word for word in words if word[0] == "-"} <= options


@cache
def _anchors(page):
    """Of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.+)$", (PAGE.parent / page).read_text(), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def test_each_code_is_one_and_leads_to_its_own_place():
    known = dict.fromkeys(RULES, "../check.md#{}")
    known |= {each.code: "../doctor.md#what-it-knows" for each in FAULTS.values()}
    for code, target in CODE.findall(PAGE.read_text()):
        assert target == known[code].format(code.lower()), code
    for row in EVERY:
        bare = set(re.findall(r"(?<!ignore )\bHT\d{3}\b", row.place))
        assert bare <= {code for code, _ in CODE.findall(row.place)}, row


@pytest.mark.parametrize("kind", ["rules", "faults"])
def test_what_can_be_found_is_all_here(kind):
    wanted = set(RULES) if kind == "rules" else {each.code for each in FAULTS.values()}
    named = {code for row in EVERY for code, _ in CODE.findall(row.place)}

    assert not wanted - named

"""The pages stay few, short and plain: their words are bounded, and retired words do not return."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import click
import pytest

from hpctrain.cli.main import COMMANDS, cli

TOP = Path(__file__).parents[2]
DOCS = TOP / "docs"
PROGRAM = runpy.run_path(str(DOCS / "measure_house.py"))
MOST_WORDS = 59_900
"""Of README and docs/, without the presets' pages."""
MOST_UNRELEASED = 2_500
ADMIN = {"preflight", "security", "site-presets", "sites"}
RETIRED = (
    *("last will", "heir", "keeper", "buddy", "stock", "knock", "seat", "pulse", "lifeline"),
    *("mishap", "unrun", "set aside", "stranger", "unkind", "dear", "sealed", "mend", "mended"),
    *("told", "tells", "goes on", "went on", "gone on"),
)
CODE = re.compile(
    r"^```.*?^```|`[^`\n]*`|\]\([^)\s]*\)|--[\w-]+|\b\w+\.\w+", re.MULTILINE | re.DOTALL
)
USER_PAGES = sorted([TOP / "README.md", *DOCS.glob("*.md")])


def prose(page):
    """What stands in a page beside code, names and addresses."""
    return CODE.sub(" ", page.read_text())


def retired(text):
    """Which retired words are in a text."""
    return {word for word in RETIRED if re.search(rf"\b{word}s?\b", text, re.IGNORECASE)}


def test_the_documents_have_a_bounded_number_of_words():
    """Whoever needs more says so here, and why in the commit."""
    assert PROGRAM["words_of_docs"](TOP) <= MOST_WORDS


def test_the_changes_since_the_last_release_can_be_read_at_once():
    unreleased = (TOP / "CHANGELOG.md").read_text().split("\n## [")[1]

    assert unreleased.startswith("Unreleased]")
    assert len(unreleased.split()) <= MOST_UNRELEASED


def test_users_have_14_pages_and_administrators_4():
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index"}

    assert pages >= ADMIN
    assert len(pages - ADMIN) == 14
    assert [page.name for page in DOCS.glob("*/*.md")] == [
        page.name for page in DOCS.glob("*/*.md") if page.parent.name in {"development", "sites"}
    ]


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.stem)
def test_retired_words_do_not_come_back(page):
    """docs/development/contributing.md has the words that took their place."""
    assert retired(prose(page)) == set()


def help_texts(command, name):
    """What `--help` prints of a command and of those below it, by their names."""
    context = click.Context(command, info_name=name)
    yield name, command.get_help(context)
    for below in command.list_commands(context) if isinstance(command, click.Group) else ():
        yield from help_texts(command.get_command(context, below), f"{name} {below}")


@pytest.mark.parametrize("name", COMMANDS)
def test_retired_words_do_not_come_back_in_help(name):
    command = cli.get_command(click.Context(cli), name)
    texts = dict(help_texts(command, name))

    assert texts
    assert {place for place, text in texts.items() if retired(CODE.sub(" ", text))} == set()


def test_words_of_code_and_of_addresses_do_not_count(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("`alive.memory_buddy`\n\n```\nbuddy\n```\n\n[peer](buddy.md)\n")

    assert "buddy" not in prose(page)
    page.write_text("its buddy")
    assert "buddy" in prose(page)


def test_presets_pages_and_other_folders_are_not_counted(tmp_path):
    for name in ("README.md", "docs/a.md", "docs/development/b.md", "docs/sites/c.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("two words\n")

    assert PROGRAM["words_of_docs"](tmp_path) == 6

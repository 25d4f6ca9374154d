"""The pages stay few, short and plain: their words are bounded, and retired words do not return."""

from __future__ import annotations

import ast
import io
import re
import runpy
import tokenize
from pathlib import Path

import click
import pytest

from hpctrain.cli.main import COMMANDS, cli

TOP = Path(__file__).parents[2]
DOCS = TOP / "docs"
PROGRAM = runpy.run_path(str(DOCS / "measure_house.py"))
MOST_WORDS = 60_000
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
NOT_IN_NAMES = frozenset(
    {
        *("buddy", "buddies", "conviction", "convictions", "convicted", "dear", "door", "doors"),
        *("heir", "keeper", "knock", "knocks", "lifeline", "mend", "mended", "mending", "mishap"),
        *("mishaps", "pulse", "seat", "seats", "stock", "stranger", "strangers", "succession"),
        *("told", "unkind", "unrun", "untold"),
    }
)
"""Parts of names, as `_` and capitals divide them."""
NOT_IN_DOCSTRINGS = (
    *("last will", "heir", "keeper", "buddy", "buddie", "stock", "knock", "door", "seat", "pulse"),
    *("lifeline", "mishap", "unrun", "set aside", "stranger", "unkind", "dear", "mend", "mended"),
    *("goes on", "go on", "went on", "gone on", "whoever"),
)
MOST_TOLD = 188
"""Places where docstrings and comments still say "told" or "tells"; the number only falls."""
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


def parts_of_names(tree):
    """Every name that a syntax tree has, with the lower-case words that it is made of."""
    for node in ast.walk(tree):
        for name in (getattr(node, field, None) for field in ("id", "attr", "arg", "name")):
            if isinstance(name, str):
                words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
                yield name, {word.lower() for word in words}


def bad_names(tree):
    """Names that have a retired word in them, or are a verb of telling with an object."""
    return {
        name
        for name, words in parts_of_names(tree)
        if words & NOT_IN_NAMES or name.lstrip("_").startswith("tell_")
    }


def docstrings_and_comments(text):
    """What a module says in prose, on one line, without what is code in it."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    bodies = [getattr(node, "body", None) for node in ast.walk(ast.parse(text))]
    strings = [
        line.value.value
        for body in bodies
        if isinstance(body, list)
        for line in body
        if isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    ]
    return " ".join(CODE.sub(" ", "\n".join([*comments, *strings])).split())


@pytest.fixture(scope="module")
def modules():
    """Texts of the package's modules, by their paths in it."""
    top = TOP / "hpctrain"
    return {str(path.relative_to(top)): path.read_text() for path in top.rglob("*.py")}


@pytest.mark.check
def test_retired_words_do_not_come_back_in_names(modules):
    found = {(path, name) for path, text in modules.items() for name in bad_names(ast.parse(text))}
    files = {path for path in modules if set(re.split(r"[/_.]", path)) & NOT_IN_NAMES}

    assert found == set()
    assert files == set()


@pytest.mark.check
def test_retired_words_do_not_come_back_in_docstrings_and_comments(modules):
    prose = {path: docstrings_and_comments(text) for path, text in modules.items()}
    pattern = re.compile(rf"\b({'|'.join(NOT_IN_DOCSTRINGS)})s?\b", re.IGNORECASE)
    found = {path: words for path, text in prose.items() if (words := pattern.findall(text))}

    assert found == {}
    told = sum(len(re.findall(r"\b(told|tells)\b", text, re.IGNORECASE)) for text in prose.values())
    assert told <= MOST_TOLD


def test_names_and_docstrings_are_looked_at_in_all_their_forms():
    text = (
        'class CopyDoor:\n    """A knock at\n    the `door`."""\n'
        "    def tell_all(self, seats): ...  # Told."
    )

    assert bad_names(ast.parse(text)) == {"CopyDoor", "tell_all", "seats"}
    assert docstrings_and_comments(text) == "# Told. A knock at the ."
    assert bad_names(ast.parse("file.tell(); indoor = 1; willing = 2")) == set()


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

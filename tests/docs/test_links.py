"""Links and file names in the documents and in the code lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.rooms import find

TOP = Path(__file__).parents[2]
DOCS = TOP / "docs"
PAGES = sorted([*TOP.glob("*.md"), *(TOP / "docs").glob("**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)\s]*)?\)")
NAMED = re.compile(r"`((?:hpctrain|tests|docs|sbatch|site-configs|examples|demo)/[\w./-]+)`")
CODE = [*(TOP / "hpctrain").rglob("*.py"), *(TOP / "benchmarks").rglob("*.py")]
TEST_FILE = re.compile(r"tests/[\w./-]+?\.py\b")
ROOM_FILE = re.compile(r"`((?:[a-z]+/)+[a-z_]+\.(?:py|sh))`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page):
    text = page.read_text()
    targets = [link for link, _ in LINK.findall(text) if "://" not in link]
    dead = [link for link in targets if not (page.parent / link).exists()]

    assert not dead, f"{page.name} links to {dead}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_is_named_is_there(page):
    text = page.read_text()
    gone = [name for name in NAMED.findall(text) if not (TOP / name).exists()]
    gone += [
        name for name in ROOM_FILE.findall(text) if not (TOP / name).exists() and find(name) is None
    ]

    assert not gone, f"{page.name} names {gone}"


def test_every_page_can_be_reached_from_the_readme():
    """By a link of its own, or by the list of all pages, to which it links."""
    reached = {link for link, _ in LINK.findall((TOP / "README.md").read_text())}
    listed = re.findall(
        r"^(?:[^\n<]*<)?([\w/-]+)>?$", (DOCS / "index.md").read_text(), re.MULTILINE
    )
    reached |= {f"docs/{name}.md" for name in listed}

    assert "docs/index.md" in reached
    assert {
        f"docs/{page.relative_to(DOCS)}"
        for page in DOCS.glob("**/*.md")
        if page.parent.name != "sites"
    } <= reached


QUESTIONS = {
    "account": "`-A`",
    "constraint": "--sbatch=--switches=1",
    "type of GPU": "a100:4",
    "whole nodes": "--exclusive",
    "sweep": "{output}",
    "conda": "module load",
    "learning rate": "the-learning-rate-at-a-resume",
    "last three checkpoints": "keep_last=3",
    "Slack": "webhook",
    "interactive": "--cluster local",
    "logs": "rank-00000.log",
    "NCCL": "sites show",
    "requeueing is not allowed": "hpctrain resume",
    "wandb": "track.loggers",
    "Remove": "pip uninstall",
    "from Python": "hpctrain.submit(",
    "Evaluate": "evaluate.script",
    "shared file system": "Not possible",
}
"""What people asked who had only the documents, and what the answer has in it."""


@pytest.mark.parametrize(("question", "answer"), QUESTIONS.items())
def test_an_everyday_question_is_answered_one_click_from_the_readme(question, answer):
    assert "(docs/how-do-i.md)" in (TOP / "README.md").read_text()
    _, *sections = (DOCS / "how-do-i.md").read_text().split("\n## ")
    (section,) = [one for one in sections if question in one.partition("\n")[0]]

    assert answer in section


def test_the_readme_can_be_read_at_once():
    assert len((TOP / "README.md").read_text().splitlines()) <= 70


def test_every_test_that_code_refers_to_is_there():
    """Nine modules said that a file holds their promises which there was not."""
    named = {(path, name) for path in CODE for name in TEST_FILE.findall(path.read_text())}

    assert len(named) > 300
    assert sorted(f"{path}: {name}" for path, name in named if not (TOP / name).exists()) == []

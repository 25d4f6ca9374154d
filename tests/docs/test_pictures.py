"""Pictures of the documents are what is drawn from a checked-in run, and say what they show."""

from __future__ import annotations

import re
import time
import tomllib
from pathlib import Path

import pytest

from docs import generate_pictures as pictures
from tests.support.rooms import find

TOP = Path(__file__).parents[2]
PAGES = sorted([TOP / "README.md", *(TOP / "docs").glob("**/*.md")])
DRAWN = sorted(path for kind in ("svg", "png") for path in pictures.PICTURES.glob(f"*.{kind}"))
SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
MOST_BYTES = 200_000
LEAST_WORDS = 8
ANEW = "run: make pictures"


def test_every_svg_is_what_its_text_gives_on_any_machine(monkeypatch):
    for name, value in {
        "TZ": "Asia/Tokyo",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "COLUMNS": "60",
    }.items():
        monkeypatch.setenv(name, value)
    time.tzset()

    drawn = pictures.svgs()

    monkeypatch.undo()
    time.tzset()
    there = {path.name: path.read_text() for path in DRAWN if path.suffix == ".svg"}
    assert sorted(there) == sorted(drawn)
    assert [name for name in drawn if drawn[name] != there[name]] == [], ANEW


def test_the_reports_picture_is_of_the_page_that_would_be_written_now():
    html = pictures.report_html()

    assert (pictures.PICTURES / pictures.DIGEST).read_text() == pictures.digest(html), ANEW
    assert pictures.digest(html.replace("46.7 %", "46.8 %")) != pictures.digest(html)
    other = re.sub(r"<script>.{100000,}?</script>", "<script>1</script>", html, flags=re.DOTALL)
    assert pictures.digest(other.replace("<script>1</script>", "")) == pictures.digest(html)


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.name)
def test_a_picture_is_small_and_shown_with_words_for_who_cannot_see_it(path):
    shown = [
        words
        for page in PAGES
        for words, target in SHOWN.findall(page.read_text())
        if (page.parent / target).resolve() == path
    ]

    assert path.stat().st_size < MOST_BYTES
    assert shown
    assert all(len(words.split()) >= LEAST_WORDS for words in shown), shown


@pytest.mark.parametrize("path", [path for path in DRAWN if path.suffix == ".svg"], ids=str)
def test_a_picture_asks_the_network_for_nothing(path):
    text = re.sub(r"xmlns=['\"][^'\"]+['\"]", "", path.read_text())

    assert re.findall(r"url\((?!#)|href=|https?://(?!www\.textualize)", text) == []


def test_who_begins_sees_what_it_looks_like():
    shown = {
        page: [Path(target).name for _, target in SHOWN.findall((TOP / page).read_text())]
        for page in ("README.md", "docs/getting-started.md")
    }

    assert shown["README.md"][0] == "status.svg"
    assert {"attempts.svg", "report.png"} <= set(shown["docs/getting-started.md"])


def test_a_run_that_was_taken_over_is_taken_over_as_it_is(tmp_path):
    """Times and names are fixed: nothing of the machine that made it is in the pictures."""
    pictures.freeze(pictures.FROZEN, tmp_path)

    frozen = {path: path.read_text() for path in pictures.FROZEN.rglob("*.json*")}
    assert frozen
    for path, text in frozen.items():
        assert (tmp_path / path.relative_to(pictures.FROZEN)).read_text() == text


def test_rooms_in_the_picture_of_the_architecture_are_there():
    drawing = tomllib.loads((pictures.PICTURES / "architecture.toml").read_text())
    rooms = [room for box in drawing["box"].values() for room in box.get("rooms", [])]

    assert rooms
    assert [room for room in rooms if find(room) is None] == []

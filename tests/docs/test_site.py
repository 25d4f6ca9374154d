"""The pages as a site: every page has its place, every name that programs import its entry.

`make docs` builds it, where a warning is an error.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import hpctrain
from hpctrain import errors

TOP = Path(__file__).parents[2]
DOCS = TOP / "docs"
TREE = re.compile(r"^```{toctree}\n:caption: (.+)\n\n([^`]*)```$", re.MULTILINE)
DOCUMENTED = re.compile(r"^\.\. auto\w+:: ([\w.]+)", re.MULTILINE)
RELEASE = re.compile(r"^## \[(?:(Unreleased)\]|(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d))$")
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_the_index_has_every_page_once_under_one_of_three():
    groups = {
        name: [line.rpartition("<")[2].rstrip(">") for line in pages.splitlines()]
        for name, pages in TREE.findall((DOCS / "index.md").read_text())
    }
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index"}
    pages |= {f"development/{page.stem}" for page in DOCS.glob("development/*.md")}

    assert list(groups) == ["For users", "For administrators", "Development"]
    listed = [page for group in groups.values() for page in group]
    assert sorted(listed) == sorted(pages | {"sites/README"})


def test_what_programs_import_has_its_entry_and_nothing_else_has():
    entries = DOCUMENTED.findall((DOCS / "api.md").read_text())
    shown = {name.split(".")[1] for name in entries if name.startswith("hpctrain.")}
    exported = {name for name in hpctrain.__all__ if not name.startswith("__")}
    elsewhere = {name for name in exported if hasattr(errors, name)}
    elsewhere |= {"frameworks"}  # shown on a page of its own, for who has the library

    assert shown == exported - elsewhere


def test_the_site_is_built_before_the_tests_and_its_warnings_are_errors():
    makefile = (TOP / "Makefile").read_text()
    recipe = re.search(r"^docs: [^\n]*\n((?:\t[^\n]*\n)+)", makefile, re.MULTILINE)

    assert recipe is not None
    assert re.search(r"-m sphinx .*-E -W .* docs build/docs$", recipe[1], re.MULTILINE)
    assert re.search(r"^lint-and-docs: lint docs$", makefile, re.MULTILINE)
    check = re.search(r"^check: [^\n]*\n((?:\t[^\n]*\n)+)", makefile, re.MULTILINE)
    assert re.match(
        r"\t@\$\(MAKE\) -j3 lint-and-docs surroundings\n\t.*check_tests", check[1], re.DOTALL
    )
    assert "nitpicky = True" in (DOCS / "conf.py").read_text()


def test_what_checks_and_builds_it_is_installed_for_development_and_pinned():
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["test"], *extras["docs"], *extras["dev"][1:]]
    names = [re.split(r"[<>=]", line)[0] for line in asked]
    pinned = {line.partition("==")[0] for line in (TOP / "constraints.txt").read_text().split()}

    assert extras["dev"][0] == "hpctrain[test,docs]"
    assert "sphinx" in names
    assert set(names) <= pinned  # a release of today must not turn a check red


def test_the_changelog_has_the_form_that_it_names():
    """https://keepachangelog.com: newest first, each release with its day, changes by kind."""
    lines = (TOP / "CHANGELOG.md").read_text().splitlines()
    releases = [(line, RELEASE.match(line)) for line in lines if line.startswith("## ")]

    assert [line for line, match in releases if match is None] == []
    assert [match[1] for _, match in releases] == ["Unreleased"] + [None] * (len(releases) - 1)
    versions = [tuple(map(int, match.group(2, 3, 4))) for _, match in releases[1:]]
    assert versions == sorted(set(versions), reverse=True)
    days = [match[5] for _, match in releases[1:]]
    assert days == sorted(days, reverse=True)
    assert versions[0] <= tuple(map(int, hpctrain.__version__.split(".")[:3]))


def test_the_changelogs_kinds_are_those_of_its_form_each_once_in_a_release():
    for release in (TOP / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        kinds = re.findall(r"^### (.+)$", release, re.MULTILINE)
        assert kinds == [kind for kind in KINDS if kind in kinds], release.splitlines()[0]


def test_the_package_says_which_version_it_is_and_no_address_that_is_made_up():
    """It has no public address so far; after a release the next version is on its way."""
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    lines = (TOP / "CHANGELOG.md").read_text().splitlines()
    released = [
        match.group(2, 3, 4) for line in lines if (match := RELEASE.match(line)) and match[2]
    ]
    last = tuple(map(int, released[0]))
    own = tuple(map(int, project["version"].split(".")[:3]))

    assert project["version"] == hpctrain.__version__
    assert own > last if project["version"].endswith(".dev0") else own == last
    assert "urls" not in project

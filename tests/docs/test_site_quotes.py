"""Values of presets stand in quoted lines of their pages, and what does not hold is found."""

from __future__ import annotations

import copy
import runpy
import tomllib
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
CHECK = runpy.run_path(str(TOP / "docs" / "check_site_quotes.py"))
PRESETS, SOURCES = CHECK["PRESETS"], CHECK["SOURCES"]
QUOTED = sorted(path.stem for path in SOURCES.glob("*.toml"))


def read(name):
    preset = tomllib.loads((PRESETS / f"{name}.toml").read_text())
    return preset, tomllib.loads((SOURCES / f"{name}.toml").read_text())


def test_every_reference_preset_and_every_base_has_its_quotes():
    promised = {
        path.stem
        for path in PRESETS.glob("*.toml")
        if tomllib.loads(path.read_text())["stability"] in {"reference", "base"}
    }

    assert set(QUOTED) == promised


@pytest.mark.parametrize("name", QUOTED)
def test_every_value_stands_in_a_quoted_line_of_its_source(name):
    assert CHECK["problems"](*read(name)) == []


@pytest.mark.parametrize("name", QUOTED)
def test_every_value_that_is_changed_is_found(name):
    preset, pages = read(name)
    values = [(key, value) for key, value, _ in CHECK["_values"](preset)]

    assert len(values) > 5 or preset["stability"] == "base"
    for key, value in values:
        for other in others(key, value):
            found = CHECK["problems"](changed(preset, key, other), pages)
            assert found
            assert all(key in one for one in found)


def others(key, value):
    yield ["0"] if key.startswith("cpus.") else "another"
    if isinstance(value, list) and len(value) > 1:
        yield value[1:]


def changed(preset, key, other):
    copied = copy.deepcopy(preset)
    *path, last = key.split(".")
    table = copied
    for part in path:
        table = table[part]
    if isinstance(table[last], dict) and "value" in table[last]:
        table, last = table[last], "value"
    table[last] = other
    return copied


def problems(preset, **quote):
    page = {"url": "https://x", "read": "2026-11-22", "quotes": [quote]}
    sourced = {name: {"source": "page", **table} for name, table in preset.items()}
    return CHECK["problems"]({"sources": {"page": ""}, **sourced}, {"page": page})


@pytest.mark.parametrize(
    ("preset", "quote", "says"),
    [
        ({"slurm": {"mem": "0"}}, {"text": "--mem=0", "proves": []}, "slurm.mem has no line"),
        ({"n": {"rate": 8}}, {"text": "128 of them", "proves": ["n.rate"]}, "is ['8'], which the"),
        ({"n": {"a": True}}, {"text": "must", "means": {"n.a": ["may", True]}}, "is said"),
        ({"n": {"a": True}}, {"text": "may", "means": {"n.a": ["may", False]}}, "lines say"),
        ({"n": {"l": ["a", "b"]}}, {"text": "A", "means": {"n.l": ["A", ["a"]]}}, "lines say"),
        ({}, {"text": "x", "proves": ["n.gone"]}, "n.gone is no value of the preset"),
        ({"c": {"of": ["0-1"]}}, {"text": "mask_cpu:f0", "masks": ["c.of"]}, "not what the masks"),
        (
            {"n": {"rate": {"value": 8, "source": "other"}}},
            {"text": "8", "proves": ["n.rate"]},
            "n.rate has the source other, and this is another page",
        ),
        (
            {"n": {"x": {"source": "other", "rate": 8}}},
            {"text": "8", "proves": ["n.x.rate"]},
            "n.x.rate has the source other, and this is another page",
        ),
    ],
)  # fmt: skip
def test_what_does_not_hold_is_said(preset, quote, says):
    (found,) = problems(preset, **quote)

    assert says in found


@pytest.mark.parametrize(
    ("line", "cpus", "holds"),
    [
        ("A100\n63\n7244801/4", 72, True),
        ("A100\n63\n7244801/4", 63724, False),
        ("96448", 72, False),
    ],
)
def test_cells_that_ran_together_prove_each_its_value(line, cpus, holds):
    row = {"text": line, "cells": ["A100", "63", "72", "4", "480"], "proves": ["n.cpus"]}

    assert (problems({"n": {"cpus": cpus}}, **row) == []) == holds


@pytest.mark.parametrize(
    ("value", "words", "line", "holds"),
    [
        ("7-00:00:00", "7 days", "| 7 days |", True),
        ("48:00:00", "48 hrs", "| 48 hrs |", True),
        ("2-00:00:00", "2d", "1h      2d", True),
        ("0:30:00", "30 minutes", "30 minutes", True),
        (120, "120sec", "**120sec**", True),
        ("6-00:00:00", "7 days", "| 7 days |", False),
        (90, "120sec", "**120sec**", False),
        ("7-00:00:00", "168 hours", "| 7 days |", False),
        ("2-00:00:00", "2 days", "| 12 days |", False),
        ("UNLIMITED", "for ever", "for ever", False),
    ],
)
def test_a_time_is_that_of_its_words_and_they_stand_in_the_line(value, words, line, holds):
    found = problems({"n": {"t": value}}, text=line, lasts={"n.t": words})

    assert (found == []) == holds


def test_a_page_that_the_preset_does_not_name_or_without_its_day_is_said():
    page = {"url": "https://x", "quotes": []}

    assert CHECK["problems"]({"sources": {}}, {"page": page}) == [
        "page is no source of the preset",
        "page lacks its url or the day on which it was read",
    ]

"""No text keeps a regular expression busy: time grows with a text's length, not with its square."""

from __future__ import annotations

import dataclasses
import importlib
import re

import pytest

from hpctrain.ledger.history import run_state
from tests.support.hostile_patterns import (
    Found,
    TooSlow,
    modules,
    patterns_of,
    patterns_of_data,
    probes,
    tried,
)

ANY = frozenset({"search", "fullmatch"})
OPEN: dict[tuple[str, str], tuple[str, ...]] = {
    ("hpctrain.checkpoint.sealed.patterns", "re.fullmatch(_groups(part), name)"): (
        # the user's own wildcards, on names of files, which have 255 characters at most
    ),
    ("hpctrain.cli.logs", "re.compile(text)"): (),  # the user's own, on the user's own terminal
    (
        "hpctrain.advise.doctor.signature",
        "re.compile(self.pattern)",
    ): (),  # the TOML files' patterns
    ("hpctrain.train.engines.pretrained", "re.search(one, name)"): (  # and those of a model's class
        r"rotary_emb\.inv_freq$",
        r"(^|\.)position_ids$",
    ),
    (
        "hpctrain.ledger.history.progress",
        "re.fullmatch(known, name)",
    ): (),  # see the test of peaks.toml
    ("hpctrain.ledger.history.run_state", "re.search(known, line)"): tuple(
        pattern for _, _, pattern in run_state._PATTERNS
    ),
    ("hpctrain.advise.lint.check", "re.match(re.escape(path) + ':(\\\\d+): ', str(error))"): (
        r"/a/config\.toml:(\d+): ",
    ),
    **{  # the rules' own, in rules/*.toml: see the test of the rules
        ("hpctrain.advise.lint.patterns", call): ()
        for call in (
            "re.search(self.names_not, '\\n'.join(facts.words).lower())",
            "re.search(self.texts_not, '\\n'.join(facts.texts).lower())",
            "re.search(rest, literal)",
            "re.match(pattern.value, str(literal))",
            "re.compile('|'.join((re.escape(name).replace('\\\\*', '.*') for name in self.call)))",
        )
    },
    (
        "hpctrain.core.settings.fields",
        "re.compile(text)",
    ): (),  # only compiled, not held against a text
    ("hpctrain.core.settings.fields", "re.fullmatch(key.pattern, text)"): (),  # the rules of keys
    ("hpctrain.core.settings.spec", "re.sub(whole, HIDDEN, value)"): (r"(?<!\w)s3cret(?!\w)",),
    (
        "hpctrain.cluster.site.detect",
        "re.fullmatch(pattern, value)",
    ): (),  # the TOML files' patterns
    ("hpctrain.cluster.site.detect", "re.fullmatch(pattern, line)"): (),
    ("hpctrain.cluster.site.detect", "re.fullmatch(pattern, text)"): (),
    # variables.toml's: see the test of NCCL's rules
    ("hpctrain.cluster.nccl.rules", "re.fullmatch(wanted, value, re.DOTALL)"): (),
    ("hpctrain.cluster.nccl.rules", "re.fullmatch(row['name'], name)"): (),
    ("hpctrain.core.settings.check", "re.fullmatch(f'{number}(?:-{number})?', text.strip())"): (
        "([0-9]{1,6})(?:-([0-9]{1,6}))?",
    ),
    ("hpctrain.core.testing.faults", "re.fullmatch(pattern, text)"): (),  # of HPCTRAIN_FAULTS alone
    ("hpctrain.cluster.site.environment", "re.fullmatch(when.gpu, versions.gpu)"): (),
    ("hpctrain.cluster.site.sheet", "re.fullmatch(key.keys or '.+', name)"): (
        ".+",
    ),  # and rules of keys
    ("hpctrain.launch.prepare", "re.compile(re.escape(stem) + '-(\\\\d+)')"): (r"a\-run-(\d+)",),
}
"""Calls whose pattern is made as the program runs, each with such patterns as it makes."""


def slow(found: list[Found]) -> list[str]:
    """Those that some text keeps busy."""
    faults = []
    for pattern in dict.fromkeys(found):
        for text in probes(pattern):
            # The same work takes three times the CPU time where other programs share the core.
            if all(is_slow(pattern, text) for _ in range(3)):
                faults.append(f"{pattern.place}: {pattern.pattern!r} at {text[:80]!r}...")
                break
    return faults


def is_slow(pattern: Found, text: str) -> bool:
    try:
        tried(pattern, text)
    except TooSlow:
        return True
    return False


@pytest.mark.parametrize("module", modules())
def test_no_text_keeps_a_pattern_busy(module):
    found, open_calls = patterns_of(module)

    assert {(module, call) for call in open_calls} == {at for at in OPEN if at[0] == module}
    made = [
        Found(pattern, 0, ANY, f"{module}: {call}")
        for (name, call), examples in OPEN.items()
        if name == module
        for pattern in examples
    ]
    # What another module made is held against texts there.
    own = [one for one in found if one.place.startswith(module)]
    assert slow([*own, *made]) == []


def test_no_text_keeps_a_pattern_of_the_presets_busy():
    from hpctrain.cluster.site import schema

    names = {
        field.name
        for thing in vars(schema).values()
        if dataclasses.is_dataclass(thing)
        for field in dataclasses.fields(thing)
        if getattr(field.metadata.get("key"), "regex", False)
    }
    found = patterns_of_data(names)

    assert names >= {"hostname", "gpu"}
    assert len(found) > 10
    assert slow(found) == []


def test_no_text_keeps_a_pattern_of_the_signatures_busy():
    from hpctrain.advise.doctor.signature import packaged

    table = packaged()
    found = [
        Found(one.pattern, 0, frozenset({"match" if one.where == "start" else "search"}), one.name)
        for one in (*table.faults, *table.harmless)
    ]

    assert len(found) > 170
    assert slow(found) == []


def test_no_text_keeps_a_pattern_of_the_rules_of_lint_busy():
    from hpctrain.advise.lint.patterns import packaged_patterns

    rules = packaged_patterns()
    texts = [(one.code, text) for one in rules for text in (one.names_not, one.texts_not) if text]
    texts += [
        (one.code, word.removeprefix("like "))
        for one in rules
        for test in one.args
        for word in test.any_of
        if word.startswith("like ")
    ]
    found = [Found(text, 0, frozenset({"search"}), code) for code, text in texts]
    found += [Found(one.value, 0, frozenset({"match"}), one.code) for one in rules if one.value]
    found += [
        Found(one.finds_calls.pattern, 0, frozenset({"fullmatch"}), one.code) for one in rules
    ]

    assert len(found) > 50
    assert slow(found) == []


def test_no_name_of_a_gpu_keeps_the_table_of_peaks_busy():
    from hpctrain.ledger.history import progress

    table = [Found(name, 0, frozenset({"fullmatch"}), name) for name in progress.peaks()]

    assert slow(table) == []


def test_no_text_keeps_a_pattern_of_nccls_rows_busy():
    from hpctrain.cluster.nccl.names import TABLE

    rows = [*TABLE["alone"], *TABLE["together"]]
    texts = [row[key] for row in rows for key in ("name", "value", "kind") if key in row]
    texts += [
        text for row in rows for key in ("beside", "unless") for text in row.get(key, {}).values()
    ]
    found = {
        Found(text, re.DOTALL, frozenset({"fullmatch"}), text)
        for text in texts
        if isinstance(text, str)
    }

    assert len(found) > 60
    assert slow(list(found)) == []


@pytest.mark.parametrize(
    ("pattern", "methods"),
    [
        (r"(\w+)*!", {"match"}),  # ways grow by powers of two
        (r"^\s*(\w+): (?=\[?\w+[\w.-]*:?\d*:?\d* ?\[)", {"match"}),  # doctor's, once
        (r"\d+ GiB", {"search"}),  # from each digit to the end
        (r"x\d+.*y$", {"match"}),
        (rb"[\w./-]*[lL]$", {"search"}),
    ],
)
def test_a_pattern_that_can_be_kept_busy_is_found(pattern, methods):
    assert slow([Found(pattern, 0, frozenset(methods), "here")])


def test_patterns_are_found_wherever_they_stand(tmp_path, monkeypatch):
    (tmp_path / "sample_of_patterns.py").write_text(
        "import re\n"
        "from dataclasses import dataclass\n"
        "_PLAIN = re.compile('plain')\n"
        "_LIST = [(1, re.compile(text)) for text in ('one', 'two')]\n"
        "@dataclass\n"
        "class SampleSign:\n"
        "    compiled: re.Pattern\n"
        "SIGNS = {'x': SampleSign(re.compile('inside'))}\n"
        "def f(text, made):\n"
        "    if re.fullmatch('inline', text, re.IGNORECASE):\n"
        "        return re.sub(made, '', _PLAIN.search(text)[0])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()

    found, open_calls = patterns_of("sample_of_patterns")

    texts = {one.pattern for one in found}
    assert texts == {"plain", "one", "two", "inside", "inline"}
    assert open_calls == ["re.sub(made, '', _PLAIN.search(text)[0])"]
    assert {one.flags & 2 for one in found if one.pattern == "inline"} == {2}

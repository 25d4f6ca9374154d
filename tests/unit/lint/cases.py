"""Programs that each rule must find, and must not: of cases.txt, and of the rules' own rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from hpctrain.advise.lint.rule import PRELUDE, ROWS

NAMES = {"": "program.py", "cpus": "program.py", "json": "ds_config.json", "toml": "hpctrain.toml"}
CPUS = {"cpus": 4}
"""Of a rank, in cases that say so."""
_HEAD = re.compile(r"^=== (HT\d{3}) (bad|good|near) ?(\w*)$", re.MULTILINE)


class Case(NamedTuple):
    """A text, and the rule that it is about."""

    code: str
    kind: str
    path: str
    text: str
    number: int
    cpus: int | None

    @property
    def label(self) -> str:
        return f"{self.code}-{self.kind}-{self.number}"


def read_cases() -> list[Case]:
    """All of them, in the order of the file."""
    parts = _HEAD.split(Path(__file__).with_name("cases.txt").read_text())
    rows = zip(*(iter(parts[1:]),) * 4, strict=True)
    cases = []
    for number, (code, kind, form, body) in enumerate(rows):
        text = body.lstrip("\n")
        cases.append(
            Case(
                code,
                kind,
                NAMES[form],
                text if form in {"json", "toml"} else PRELUDE + text,
                number,
                CPUS.get(form),
            )
        )
    for row in ROWS:
        for kind, programs in row.programs.items():
            for text in programs:
                number = len(cases)
                cases.append(Case(row.rule.code, kind, NAMES[""], PRELUDE + text, number, None))
    return cases


CASES = read_cases()

"""Writes the events of development/ledger.md from event_types.py; `make settings` calls it.

tests/docs/test_pages.py fails where the page is not what this gives.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from hpctrain.base.records import EndReason, Next, StopCause
from hpctrain.run import event_fields as check
from hpctrain.run import event_types  # noqa: F401 - they enter KINDS
from hpctrain.run.event_fields import KINDS, NEEDED, LedgerFact

PAGE = Path(__file__).parent / "development" / "ledger.md"
PART = re.compile(r"(<!-- events: [^\n]*\n).*?(<!-- end of events -->)", re.DOTALL)
HEAD = """
## Events

Of a kind, the fields in **bold** are always there: without them the event says nothing.
"""
TYPES = {
    check.count: "whole number",
    check.counts: "list of whole numbers",
    check.seconds: "seconds",
    check.moment: "seconds since the epoch",
    check.number: "number",
    check.words: "text",
    check.texts: "list of texts",
    check.identifier: "id",
    check.path: "path",
    check.flag: "true or false",
    check.mapping: "values by name",
    check.metrics: "numbers by name",
    check.mappings: "list of values by name",
    check.skipped_checkpoints: "list of checkpoints",
}
WORDS: dict[str, Any] = {"EndReason": EndReason, "Next": Next, "StopCause": StopCause}


def page() -> str:
    """The whole page."""
    events = "\n".join([HEAD, *map(_kind, KINDS.values())])
    return PART.sub(lambda match: match[1] + events + match[2], PAGE.read_text())


def _kind(cls: type[LedgerFact]) -> str:
    what = " ".join((cls.__doc__ or "").split())
    rows = [_row(field) for field in fields(cls)]  # type: ignore[arg-type]
    table = "\n".join(["| field | | |\n|---|---|---|", *rows])
    return f"### `{cls.kind}`\n\n{what} Written by {cls.writer}.\n\n{table}\n"


def _row(field: Any) -> str:
    name = f"**`{field.name}`**" if field.metadata["default"] is NEEDED else f"`{field.name}`"
    words = WORDS.get(str(field.type).partition(" ")[0])
    kind = " ".join(f"`{word}`" for word in words) if words else TYPES[field.metadata["check"]]
    return f"| {name} | {kind} | {field.metadata['doc']} |"


if __name__ == "__main__":
    PAGE.write_text(page())

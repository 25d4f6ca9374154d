"""Writes the events of development/ledger.md from event_types.py; `make settings` calls it.

tests/docs/test_pages.py fails where the page is not what this gives.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from hpctrain.core.base.records import EndReason, Next, StopCause
from hpctrain.ledger.run import event_fields as check
from hpctrain.ledger.run import event_types  # noqa: F401 - they enter KINDS
from hpctrain.ledger.run.event_fields import KINDS, NEEDED, LedgerFact

PAGE = Path(__file__).parent / "development" / "ledger.md"
PART = re.compile(r"(<!-- events: [^\n]*\n).*?(<!-- end of events -->)", re.DOTALL)
HEAD = """
## Events

Fields in **bold** are always there. `time` is seconds since the epoch, `list` a list of texts.
"""
TYPES = {
    check.count: "int",
    check.counts: "list of int",
    check.seconds: "seconds",
    check.moment: "time",
    check.number: "number",
    check.words: "text",
    check.copy_source: "text",
    check.texts: "list",
    check.identifier: "id",
    check.path: "path",
    check.flag: "bool",
    check.mapping: "mapping",
    check.metrics: "mapping",
    check.mappings: "list of mappings",
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
    return f"### `{cls.kind}`\n\n{what} Written by {cls.writer}.\n\n" + "\n".join([*rows, ""])


def _row(field: Any) -> str:
    name = f"**`{field.name}`**" if field.metadata["default"] is NEEDED else f"`{field.name}`"
    words = WORDS.get(str(field.type).partition(" ")[0])
    kind = " ".join(f"`{word}`" for word in words) if words else TYPES[field.metadata["check"]]
    return f"- {name} ({kind}): {field.metadata['doc']}"


if __name__ == "__main__":
    PAGE.write_text(page())

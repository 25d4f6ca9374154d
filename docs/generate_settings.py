"""Writes docs/settings.md from hpctrain/settings/schema.py; `make settings` calls it.

tests/docs/test_pages.py fails where the page is not what this gives.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from hpctrain.settings.schema import Settings, sections

PAGE = Path(__file__).with_name("settings.md")
HEAD = """\
# Settings

<!-- Written by `make settings` from hpctrain/settings/schema.py; change it there. -->

Values come from these places, and the later one wins: the defaults below, `[settings.*]` of the
site's preset, the SBATCH_* variables of your shell that the preset keeps, `hpctrain.toml` in the
directory of the submit (or `--config FILE`), and flags.
Any setting has a flag: `--set section.key=value`; those that are used most have one of their own
(`--nodes`, `--time`, ...: see `hpctrain submit --help`).
A key that hpctrain does not know is refused, with the nearest one that it knows.

```toml
# hpctrain.toml
[slurm]
nodes = "2-4"
time = "12:00:00"

[train]
steps = 2000
```

`spec.json` in the run's directory has every value with the place it came from, and
`hpctrain submit --dry-run --json` shows the same before anything is submitted.
The ranks' environment comes from `[env.*]` of the site's preset, the `[env]` table of
`hpctrain.toml`, `--env NAME=VALUE`, and what the job's own shell has set; the later one wins, and
`attempts/N/environment.json` in the run's directory says who won. Secrets do not belong into the
first three: the run's files are readable for whoever reads the run.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, cls in sections().items():
        title = (cls.__doc__ or "").splitlines()[0].partition(": ")[2]
        parts.append(f"## [{name}]\n\n{title[:1].upper()}{title[1:]}\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        section = getattr(Settings(), name)
        parts += [
            f"| `{f.name}` | {f.type} | `{_value(getattr(section, f.name))}` | {_meaning(f)} |"
            for f in fields(cls)
        ]
        parts.append("")
    return "\n".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _meaning(field: Any) -> str:
    doc, choices = field.metadata["doc"], field.metadata["choices"]
    named = all(choice in doc for choice in choices)
    return doc if named else f"{doc} (one of {', '.join(choices)})"


if __name__ == "__main__":
    PAGE.write_text(page())

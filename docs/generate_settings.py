"""Writes docs/settings.md from hpctrain/settings/schema.py; `make settings` calls it.

tests/docs/test_pages.py fails where the page is not what this gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.settings.fields import Key, keys_of, title_of
from hpctrain.settings.schema import sections

PAGE = Path(__file__).with_name("settings.md")
_TYPES = {
    "text": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "texts": "list[str]",
}
HEAD = """\
# Settings

<!-- Written by `make settings` from hpctrain/settings/schema.py; change it there. -->

Values come from these places, and the later one wins: the defaults below, `[settings.*]` of the
site's preset, the SBATCH_* variables of your shell that the preset keeps (without a preset
SBATCH_ACCOUNT, SBATCH_PARTITION and SBATCH_QOS), `~/.config/hpctrain/hpctrain.toml` for all of your
runs, `hpctrain.toml` in the directory of the submit (or `--config FILE`), and flags.
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
        title = title_of(cls)
        parts.append(f"## [{name}]\n\n{title[:1].upper()}{title[1:]}\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        parts += [
            f"| `{name}` | {_TYPES[key.form]} | `{_value(key.default)}` | {_meaning(key)} |"
            for name, key in keys_of(cls).items()
        ]
        parts.append("")
    return "\n".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _meaning(key: Key) -> str:
    named = all(choice in key.doc for choice in key.choices)
    return key.doc if named else f"{key.doc} (one of {', '.join(key.choices)})"


if __name__ == "__main__":
    PAGE.write_text(page())

"""Writes docs/settings.md from hpctrain/core/settings/schema.py; `make settings` calls it.

tests/docs/test_pages.py fails where the page is not what this gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.core.settings.fields import Key, keys_of, title_of
from hpctrain.core.settings.schema import sections

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

<!-- Written by `make settings` from hpctrain/core/settings/schema.py; change it there. -->

Later places win: the defaults below, `[settings.*]` of the site's preset, the SBATCH_* variables
that the preset keeps (without a preset SBATCH_ACCOUNT, SBATCH_PARTITION and SBATCH_QOS),
`~/.config/hpctrain/hpctrain.toml`, `hpctrain.toml` in the directory of the submit (or
`--config FILE`), and flags. Any setting has the flag `--set section.key=value`; common ones have
their own (`hpctrain submit --help`). An unknown key is refused, with the nearest known one.

```toml
# hpctrain.toml
[slurm]
nodes = "2-4"
time = "12:00:00"

[train]
steps = 2000
```

`spec.json` in the run's directory and `hpctrain submit --dry-run --json` show every value with its
origin. The ranks' environment comes from `[env.*]` of the preset, the `[env]` table of
`hpctrain.toml`, `--env NAME=VALUE`, and the job's own shell; later ones win, and
`attempts/N/environment.json` has the origins. Put no secrets into the first three: anyone who can
read the run can read them.
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

"""Writes docs/site-presets.md and docs/site.schema.json from hpctrain/cluster/site/schema.py.

`make settings` calls it; tests/unit/site/test_schema.py fails where they are not what this gives.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpctrain.cluster.site import schema
from hpctrain.core.settings.fields import OPTION, VARIABLE, Key, in_words, keys_of, title_of
from hpctrain.core.settings.schema import sections

DOCS = Path(__file__).parent
PAGE = DOCS / "site-presets.md"
SCHEMA = DOCS / "site.schema.json"

HEAD = """\
# Site presets: every key

<!-- Written by `make settings` from hpctrain/cluster/site/schema.py; change it there. -->

[A preset for your cluster](sites.md) shows how to write one. Every table and key is optional; a
missing value is unknown. An unknown key is refused, with the nearest known one and the line.
[site.schema.json](site.schema.json) has the same rules for editors.

```toml
name = "juniper"
description = "Juniper: 4 A100 a node, InfiniBand"
contact = "hpc-help@juniper.example"
extends = "ib"

[sources]
guide = "https://juniper.example/docs/gpu"

[partitions.gpu]
source = "guide"
gpus_per_node = 4
max_time = "24:00:00"

[network]
socket_ifnames = { value = ["ib0"], source = "guide", why = "the management network is slow" }

[settings.checkpoint]
interval_s = 600.0
```

## Layers

Later layers win, key by key: packaged presets (`packaged`); `/etc/hpctrain/sites` and the folders
of `HPCTRAIN_SITE_PATH`, of which the first wins (`system`); `~/.config/hpctrain/sites` (`user`).
`hpctrain.toml`, the environment and flags win over all. A file named by its path (`--site
./juniper.toml`, or `site = "./juniper.toml"` in a project's `hpctrain.toml`) is used without files
of that name.
`hpctrain sites show NAME --origin` prints layer, file and line of each value.

## Rules for every table

- A value may be plain, or `{ value = ..., source = "guide", why = "..." }`.
- `source = "guide"` in a table holds for its values and for the tables below; the nearest wins. It
  names a key of `[sources]`.
- A list replaces the one of a lower layer; `NAME_add` appends to it.
- `extends = "ib"` takes everything from another preset except `[detect]` and the keys outside
  tables; `[sources]` are taken too.
- In `[env.*]` and other tables of variables the names are yours.

## Detection and locks

The site comes from `--site`, `HPCTRAIN_SITE`, `site` in `hpctrain.toml`, then `[detect]`. A pattern
must match the full text. The highest `priority` wins, then a variable over a marker file over
SLURM's ClusterName over the host's name; if that does not decide, `submit` refuses with both
reasons. A job keeps its site. `--site none` uses none.

`[lock]` in a packaged or system file names values or tables that users may not change. A change is
refused with both places; `--allow-locked` permits and records it.
"""
SETTINGS_TEXT = """\
Defaults of hpctrain's own settings, for everybody at the site: any section and key of
[settings](settings.md). A user's `hpctrain.toml` and flags win over them.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, "## Outside any table\n", *_table(schema.About)]
    for name, cls in schema.TABLES.items():
        parts += _section(name, cls)
        if name == "slurm":
            parts += _section(f"{schema.PARTITIONS}.X", schema.Partition)
    parts += [
        f"## [{schema.SETTINGS}.SECTION]\n",
        SETTINGS_TEXT,
    ]
    return "\n".join(parts)


def _section(name: str, cls: type) -> list[str]:
    title = title_of(cls)
    parts = [f"## [{name}]\n", f"{title[:1].upper()}{title[1:]}\n", *_table(cls)]
    for key in keys_of(cls).values():
        if key.inner is not None:
            parts += _section(f"{name}.{key.name}{'' if key.form == 'table' else '.X'}", key.inner)
    return parts


def _table(cls: type) -> list[str]:
    rows = [
        f"| `{key.name}` | {key.form} | {_default(key)} | {_meaning(key)} |"
        for key in keys_of(cls).values()
        if key.inner is None
    ]
    head = "| key | type | default | meaning |\n|---|---|---|---|"
    return [head, *rows, ""]


def _default(key: Key) -> str:
    return "-" if key.default in (None, "", [], {}) else f"`{json.dumps(key.default)}`"


def _meaning(key: Key) -> str:
    more = []
    if key.choices and not all(choice in key.doc for choice in key.choices):
        more.append(f"one of {', '.join(filter(None, key.choices))}")
    if key.regex:
        more.append("a regular expression for the whole text")
    return f"{key.doc} ({'; '.join(more)})" if more else key.doc


def json_schema() -> dict[str, Any]:
    """The rules as a JSON Schema."""
    top = {key.name: _key(key) for key in keys_of(schema.About).values()}
    top |= {name: _ref(cls) for name, cls in schema.TABLES.items()}
    top[schema.PARTITIONS] = _named(schema.Partition, "limits of each partition, by SLURM's name")
    top[schema.SETTINGS] = _settings()
    classes = [*schema.TABLES.values(), schema.Partition, schema.Preemption, schema.When]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hpctrain site preset",
        "description": "Written by docs/generate_site_reference.py from cluster/site/schema.py.",
        **_object(top),
        "$defs": {
            "source": {"type": "string", "description": "a name of [sources]"},
            **{cls.__name__: _of_class(cls) for cls in classes},
            **{name: _written_out(one) for name, one in _SHARED.items()},
        },
    }


def _of_class(cls: type) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for key in keys_of(cls).values():
        properties[key.name] = _key(key)
        if key.form == "texts":
            properties[f"{key.name}_add"] = _key(key) | {
                "description": f"appended to the {key.name} of the layers below"
            }
    return {"description": title_of(cls), **_object(properties)}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    """A table with these keys and a source, and no others."""
    return {
        "type": "object",
        "properties": {**properties, "source": {"$ref": "#/$defs/source"}},
        "additionalProperties": False,
    }


def _named(cls: type, doc: str) -> dict[str, Any]:
    return {
        "description": doc,
        "type": "object",
        "properties": {"source": {"anyOf": [{"$ref": "#/$defs/source"}, _ref(cls)]}},
        "additionalProperties": _ref(cls),
    }


def _ref(cls: type) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{cls.__name__}"}


def _key(key: Key) -> dict[str, Any]:
    if key.inner is not None:
        return _ref(key.inner) if key.form == "table" else _named(key.inner, key.doc)
    form, is_table, _ = key.form.partition(" table")
    value: dict[str, Any] = {
        "text": _text(key, empty=not is_table),
        "integer": {"type": "integer"},
        "number": {"type": "number"},
        "boolean": {"type": "boolean"},
        "texts": {"type": "array", "items": _text(key, empty=False)},
    }[form]
    if form in {"integer", "number"} and key.least is not None:
        value |= {"minimum": key.least}
    if not is_table:
        return {"description": key.doc, **_valued(value)}
    if key.keys == VARIABLE and not key.regex:  # numbers become text in an environment
        value = {"type": ["string", "number"]}
    if not key.keys:
        return {"description": key.doc, "type": "object", "additionalProperties": _valued(value)}
    return {
        "description": f"{key.doc}; names: {in_words(key.keys)}",
        "type": "object",
        "properties": {"source": {"$ref": "#/$defs/source"}},
        "patternProperties": {f"^(?:{key.keys})$": _valued(value)},
        "additionalProperties": False,
    }


def _text(key: Key, *, empty: bool) -> dict[str, Any]:
    if key.choices:
        return {"type": "string", "enum": list(key.choices)}
    if key.pattern:
        return {"type": "string", "pattern": f"^(?:{key.pattern}){'?' if empty else ''}$"}
    return {"type": "string"} if empty else {"type": "string", "minLength": 1}


def _valued(value: dict[str, Any]) -> dict[str, Any]:
    """A plain value, or a table of it with its source and reason."""
    shared = next((name for name, one in _SHARED.items() if one == value), None)
    return {"$ref": f"#/$defs/{shared}"} if shared else _written_out(value)


def _written_out(value: dict[str, Any]) -> dict[str, Any]:
    table = {
        "type": "object",
        "properties": {
            "value": value,
            "source": {"$ref": "#/$defs/source"},
            "why": {"type": "string"},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"anyOf": [value, table]}


_SETTING_TYPES: dict[str, dict[str, Any]] = {
    "text": {"type": ["string", "integer"]},  # `nodes = 4` passes as text
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "texts": {"type": "array", "items": {"type": "string"}},
}
_SHARED: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "textOrNumber": {"type": ["string", "number"]},
    "count": {"type": "integer", "minimum": 0},
    "amount": {"type": "number", "minimum": 0},
    "textOrInteger": _SETTING_TYPES["text"],
    "integer": _SETTING_TYPES["integer"],
    "number": _SETTING_TYPES["number"],
    "boolean": _SETTING_TYPES["boolean"],
    "texts": _SETTING_TYPES["texts"],
    "filledTexts": {"type": "array", "items": {"type": "string", "minLength": 1}},
    "variables": {
        "type": "array",
        "items": {"type": "string", "pattern": f"^(?:{VARIABLE})$"},
    },
    "options": {"type": "array", "items": {"type": "string", "pattern": f"^(?:{OPTION})$"}},
}
"""Values that many keys take, written once: it keeps the file small and quick to check."""


def _settings() -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for name, cls in sections().items():
        properties: dict[str, Any] = {}
        for key in keys_of(cls).values():
            enum = {"enum": list(key.choices)}
            kind = _valued(enum if key.choices else _SETTING_TYPES[key.form])
            properties[key.name] = {"description": key.doc, **kind}
            if key.form == "texts":
                properties[f"{key.name}_add"] = kind
        tables[name] = _object(properties)
    return {"description": "defaults of hpctrain's own settings", **_object(tables)}


if __name__ == "__main__":
    PAGE.write_text(page())
    SCHEMA.write_text(json.dumps(json_schema(), indent=1) + "\n")

"""Sheets of several files to one preset: bases, layers, `_add`, sources, locks. Pure.

tests/unit/test_site_load.py holds the promises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpctrain.errors import UsageError
from hpctrain.settings.layers import nearest
from hpctrain.settings.schema import Settings
from hpctrain.site import schema
from hpctrain.site.keys import keys_of, make
from hpctrain.site.lock import holds
from hpctrain.site.preset import Leaf, Path, Site, SiteFile, dotted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.site.sheet import Sheet

_LOCK = ("lock", "keys")
OF_ITS_OWN = {"detect", *(set(keys_of(schema.About)) - {schema.SOURCES})}
"""Not taken from what a preset extends: who it is, who answers for it, how it is known."""


def build(name: str, sheets: Sequence[Sheet]) -> Site:
    """The preset that the sheets give together.

    Args:
        name: The site's name.
        sheets: Lowest first; those of another name are what it extends.

    Raises:
        UsageError: a value names a source that no sheet has.
    """
    leaves: dict[Path, Leaf] = {}
    tables: dict[Path, None] = {}
    overridden: dict[Path, str] = {}
    for sheet in sheets:
        leaves = _with_sources(leaves, sheet)
        for path, leaf in _own(sheet, name):
            if path == _LOCK and not sheet.locks:
                continue
            _check_source(leaf, path, sheet, leaves)
            new = _appended(leaves, path, leaf) if path in sheet.added else leaf
            if not sheet.locks and _is_locked(leaves, path, new):
                overridden[path] = f"{sheet.layer} ({leaf.place})"
            leaves[path] = new
        tables |= dict.fromkeys(sheet.tables)
    files = tuple(SiteFile(sheet.layer, sheet.file, sheet.name) for sheet in sheets)
    leaves = dict(sorted(leaves.items(), key=lambda item: _order(item[0])))
    return _site(name, leaves, tables, overridden=overridden, files=files)


def _own(sheet: Sheet, name: str) -> list[tuple[Path, Leaf]]:
    """What a sheet gives to the preset of that name: its values, then what it appends."""
    both = [*sheet.leaves.items(), *sheet.added.items()]
    return [
        (path, leaf)
        for path, leaf in both
        if path[0] != schema.SOURCES and (sheet.name == name or path[0] not in OF_ITS_OWN)
    ]


def _with_sources(leaves: dict[Path, Leaf], sheet: Sheet) -> dict[Path, Leaf]:
    """The leaves with a sheet's [sources] among them.

    Files are written apart and each may call its first source "a": where two mean different
    things, the lower one's is renamed, so that no value is ascribed to the wrong page.
    """
    for path, leaf in sheet.leaves.items():
        if path[0] != schema.SOURCES:
            continue
        held = leaves.get(path)
        if held is not None and held.value != leaf.value:
            leaves = _renamed(leaves, path[1])
        leaves[path] = leaf
    return leaves


def _renamed(leaves: dict[Path, Leaf], key: str) -> dict[Path, Leaf]:
    """The leaves with one source under a free name."""
    number = 2
    while (schema.SOURCES, f"{key}.{number}") in leaves:
        number += 1
    new = f"{key}.{number}"
    return {
        (schema.SOURCES, new) if path == (schema.SOURCES, key) else path: (
            replace(leaf, source=new) if leaf.source == key else leaf
        )
        for path, leaf in leaves.items()
    }


def _check_source(leaf: Leaf, path: Path, sheet: Sheet, leaves: dict[Path, Leaf]) -> None:
    if not leaf.source or (schema.SOURCES, leaf.source) in leaves:
        return
    known = [path[1] for path in leaves if path[0] == schema.SOURCES]
    near = nearest(leaf.source, known)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known) or 'none'}"
    raise UsageError(
        f'{sheet.where(leaf)}: the source of {dotted(path)} is "{leaf.source}", which [sources] '
        f"does not have; {hint}"
    )


def _appended(leaves: dict[Path, Leaf], path: Path, leaf: Leaf) -> Leaf:
    """The list below with the leaf's items behind it, each once; the place is the addition's."""
    held = leaves.get(path)
    below = held.value if held else _default(path)
    value = [*below, *(item for item in leaf.value if item not in below)]
    return replace(
        leaf,
        value=value,
        source=leaf.source or (held.source if held else ""),
        why=leaf.why or (held.why if held else ""),
    )


def _default(path: Path) -> list[str]:
    """What a list is that no file has."""
    if path[0] == schema.SETTINGS:
        value: list[str] = getattr(getattr(Settings(), path[1]), path[2])
        return value
    cls = schema.Partition if path[0] == schema.PARTITIONS else schema.TABLES[path[0]]
    for name in path[1:-1]:
        key = keys_of(cls).get(name)
        cls = key.inner if key is not None and key.inner is not None else cls
    default: list[str] = keys_of(cls)[path[-1]].default
    return default


def _is_locked(leaves: dict[Path, Leaf], path: Path, new: Leaf) -> bool:
    """Whether a value may not change here, and does."""
    locks = leaves.get(_LOCK)
    if locks is None or not any(holds(lock, path) for lock in locks.value):
        return False
    held = leaves.get(path)
    return held is None or held.value != new.value


def _site(
    name: str,
    leaves: dict[Path, Leaf],
    tables: dict[Path, None],
    *,
    overridden: dict[Path, str],
    files: tuple[SiteFile, ...],
) -> Site:
    nested: dict[str, Any] = {}
    for path in tables:
        _at(nested, path)
    for path, leaf in leaves.items():
        _at(nested, path[:-1])[path[-1]] = leaf.value
    about = {key: nested[key] for key in keys_of(schema.About) if key in nested}
    once: dict[str, Any] = {
        key: make(cls, nested.get(key, {})) for key, cls in schema.TABLES.items()
    }
    return Site(
        about=make(schema.About, about | {"name": name}),
        partitions={
            key: make(schema.Partition, table)
            for key, table in nested.get(schema.PARTITIONS, {}).items()
        },
        settings=nested.get(schema.SETTINGS, {}),
        leaves=leaves,
        overridden=overridden,
        files=files,
        **once,
    )


_TOP = [*keys_of(schema.About), *schema.TABLES]
_TOP.insert(_TOP.index("slurm") + 1, schema.PARTITIONS)


def _order(path: Path) -> tuple[int, int]:
    """Sorts values as the schema has their tables, so that those of several files mix well."""
    top = _TOP.index(path[0]) if path[0] in _TOP else len(_TOP)
    inner = list(keys_of(schema.TABLES[path[0]])) if path[0] in schema.TABLES else []
    return top, inner.index(path[1]) if inner else 0


def _at(nested: dict[str, Any], path: Path) -> dict[str, Any]:
    """The table at that path, made where it is missing."""
    for name in path:
        nested = nested.setdefault(name, {})
    return nested

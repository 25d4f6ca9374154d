"""From site files to one preset: each file's checked values, put together over bases and layers.

`take_apart` checks one file that was read, and each of its values keeps its line. `build` makes the
preset of several of them: bases, layers, `_add`, sources. [lock] names values that a user changes
only with --allow-locked: `check_locked` holds changes against it. Reads no files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.site import schema
from hpctrain.cluster.site.schema import (
    ADMINS,
    KEYS,
    KeyPath,
    PresetValue,
    Site,
    SiteFile,
    dotted,
    key_at,
    unknown,
    wrong_lock,
)
from hpctrain.core.base.text import count
from hpctrain.core.settings.fields import TAKES, Key, convert, in_words, keys_of, make, shown
from hpctrain.core.settings.layers import TomlFile, did_you_mean, from_table
from hpctrain.core.settings.schema import current_name
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ADD = "_add"
SOURCE = "source"
_ENV = "env"
_PARTITION = r"[^\s,]+"
DERIVED = {
    "NCCL_SOCKET_IFNAME": ("network", "socket_ifnames"),
    "GLOO_SOCKET_IFNAME": ("network", "socket_ifnames"),
    "NCCL_IB_HCA": ("network", "hcas"),
}
"""Variables that come from a fact: to set one by hand is to change that fact."""
_LOCK = ("lock", "keys")
OF_ITS_OWN = {"detect", *(set(keys_of(schema.About)) - {schema.SOURCES})}
"""Not taken from what a preset extends: who it is, who answers for it, how it is known."""
_TOP = list(KEYS)


@dataclass(frozen=True)
class SiteFileValues:
    """What one file says."""

    name: str
    """Of the preset in it."""
    layer: str
    file: str
    leaves: dict[KeyPath, PresetValue] = field(default_factory=dict)
    added: dict[KeyPath, PresetValue] = field(default_factory=dict)
    """Items of `X_add`, by the path of `X`."""
    tables: dict[KeyPath, int] = field(default_factory=dict)
    """Named tables such as [partitions.gpu], which may be empty, with their lines."""
    by_root: bool = True
    """Nobody else can have written it: else its locks hold nobody, and higher ones hold it."""

    @property
    def locks(self) -> bool:
        """Whether it is the admins', so that its [lock] counts and no lock holds it."""
        return self.layer in ADMINS and self.by_root

    def text(self, key: str) -> str:
        """A text outside any table; "" where the file has none."""
        leaf = self.leaves.get((key,))
        return leaf.value if leaf else ""

    def where(self, leaf: PresetValue) -> str:
        """`site juniper (/etc/hpctrain/sites/juniper.toml:7)`."""
        return f"site {self.name} ({leaf.place})"


def take_apart(file: TomlFile, *, name: str, layer: str) -> SiteFileValues:
    """Check a site file's keys and values one by one.

    Raises:
        UsageError: a key is unknown, a value is of another type or form than its key takes, or the
            file calls itself otherwise. The message has the first such faults, in one line.
    """
    reader = _Reader(file, SiteFileValues(name, layer, file.shown))
    reader.root()
    if not reader.faults:
        return reader.result
    faults = [
        (f"{file.shown}:{line}" if line else file.shown, text)
        for line, text in sorted(reader.faults)
    ]
    (place, first), *others = faults
    more = f"; {count(len(others), 'other fault')}: `hpctrain sites validate {file.shown}`"
    raise WrongPreset(f"site {name} ({place}): {first}{more if others else ''}", faults)


class WrongPreset(UsageError):
    """A preset has wrong keys or values."""

    def __init__(self, message: str, faults: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.faults = faults


class _Fault(Exception):
    """One value is wrong; reading continues with the next. The message is without its place."""


class _Reader:
    """Walks a file's tables along the schema's classes."""

    def __init__(self, file: TomlFile, result: SiteFileValues) -> None:
        self.file = file
        self.result = result
        self.faults: list[tuple[int, str]] = []
        """Line and what is wrong there."""

    def root(self) -> None:
        self._table(KEYS, self.file.values, (), "")
        written = self.result.leaves.get(("schema",))
        if written is not None and written.value > schema.SCHEMA:
            self._fault(
                ("schema",),
                f"schema is {written.value}, this hpctrain knows up to {schema.SCHEMA}; "
                "use a newer hpctrain",
            )
        given = self.result.text("name") or self.result.name
        if given != self.result.name:
            self._fault(
                ("name",),
                f'name is "{given}" in a file that is called {self.result.name}; '
                "give both the same name",
            )

    def _table(self, keys: Mapping[str, Key], raw: Any, path: KeyPath, source: str) -> None:
        if not self._is_table(raw, path, "table"):
            return
        values = dict(raw)
        source = self._source(values, path) or source
        for name, value in values.items():
            if path[:1] == (schema.SETTINGS,) and name != (new := current_name(path[-1], name)):
                self.file.lines[*path, new] = self._line((*path, name))
                name = new  # noqa: PLW2901
            base = keys.get(name.removesuffix(ADD))
            if name in keys:
                self._value(keys[name], value, (*path, name), source)
            elif name.endswith(ADD) and base is not None and base.form == "texts":
                self._leaf(base, value, (*path, name), source)
            else:
                self._fault((*path, name), unknown((*path, name), keys))
        if path == _LOCK[:1]:
            self._check_lock()

    def _check_lock(self) -> None:
        if self.result.layer not in ADMINS:
            self._fault(
                _LOCK[:1],
                f"[lock] has no effect in the {self.result.layer} layer; it belongs into a file of "
                "the admins', e.g. in /etc/hpctrain/sites",
            )
        for held in (self.result.leaves, self.result.added):
            leaf = held.get(_LOCK)
            for wrong in filter(None, map(wrong_lock, leaf.value if leaf else ())):
                self._fault(_LOCK, wrong)

    def _value(self, key: Key, raw: Any, path: KeyPath, source: str) -> None:
        if key.inner is not None and key.form == "table":
            self._table(keys_of(key.inner), raw, path, source)
        elif key.inner is not None:
            self._tables(keys_of(key.inner), raw, path, source)
        elif key.form.endswith(" table"):
            self._map(key, raw, path, source)
        else:
            self._leaf(key, raw, path, source)

    def _tables(self, keys: Mapping[str, Key], raw: Any, path: KeyPath, source: str) -> None:
        """Tables of one class under names of the site's own, e.g. its partitions."""
        if not self._is_table(raw, path, "tables"):
            return
        values = dict(raw)
        source = self._source(values, path) or source
        for name, value in values.items():
            at = (*path, name)
            if not re.fullmatch(_PARTITION, name):
                self._fault(at, f"{name!r} cannot name a table here; it takes no blanks and commas")
            elif self._is_table(value, at, "table"):
                self.result.tables[at] = self._line(at)
                self._table(keys, value, at, source)

    def _map(self, key: Key, raw: Any, path: KeyPath, source: str) -> None:
        """A table whose names are the site's own, e.g. variables."""
        if not self._is_table(raw, path, key.form):
            return
        values = dict(raw)
        if path != (schema.SOURCES,):
            source = self._source(values, path) or source
        for name, value in values.items():
            at = (*path, name)
            if not re.fullmatch(key.keys or ".+", name):
                self._fault(
                    at, f"{name!r} cannot be a name in [{dotted(path)}]; {in_words(key.keys)}"
                )
            else:
                self._leaf(key, value, at, source)

    def _leaf(self, key: Key, raw: Any, path: KeyPath, source: str) -> None:
        try:
            value, given, why = self._unwrap(raw, path, source)
            value = self._checked(key, value, path)
        except _Fault as error:
            self._fault(path, str(error))
            return
        self._keep(path, value, given, why, adds=path[-1] != key.name and key.form == "texts")

    def _keep(self, path: KeyPath, value: Any, source: str, why: str, *, adds: bool) -> None:
        leaf = PresetValue(value, self.result.layer, self.file.shown, self._line(path), source, why)
        if adds:
            self.result.added[(*path[:-1], path[-1].removesuffix(ADD))] = leaf
        else:
            self.result.leaves[path] = leaf

    def _unwrap(self, raw: Any, path: KeyPath, source: str) -> tuple[Any, str, str]:
        """Value, source and why, of a plain value or of {value = ..., source = ..., why = ...}."""
        if not isinstance(raw, dict):
            return raw, source, ""
        parts = ("value", SOURCE, "why")
        for name, inner in raw.items():
            if name not in parts:
                hint = did_you_mean(name, parts, "it takes value, source and why")
                raise _Fault(f"{dotted((*path, name))} is not known there; {hint}")
            if name != "value" and not isinstance(inner, str):
                raise _Fault(f"{dotted((*path, name))} is {shown(inner)}; it takes text")
        if "value" not in raw:
            raise _Fault(f"{dotted(path)} is a table without `value`; add it")
        return raw["value"], raw.get(SOURCE, source), raw.get("why", "")

    def _checked(self, key: Key, value: Any, path: KeyPath) -> Any:
        """The value as its key takes it."""
        if path[0] != _ENV or key.form != "text table":
            at = path[1:] if path[0] == schema.SETTINGS else path
            try:
                return convert(key, value, dotted(at))
            except ValueError as error:
                raise _Fault(str(error)) from None
        try:
            return from_table({path[-1]: value}, lambda _: "")[path[-1]]
        except UsageError as error:
            raise _Fault(str(error).removeprefix(": ")) from None

    def _source(self, values: dict[str, Any], path: KeyPath) -> str:
        """Take a table's own `source` out of it, which holds for all its values."""
        given = values.get(SOURCE)
        if given is None or isinstance(given, dict):  # a partition may be called so
            return ""
        del values[SOURCE]
        if isinstance(given, str):
            return given
        self._fault((*path, SOURCE), f"{SOURCE} is {shown(given)}; it takes a name of [sources]")
        return ""

    def _is_table(self, raw: Any, path: KeyPath, form: str) -> bool:
        if isinstance(raw, dict):
            return True
        self._fault(path, f"{dotted(path)} is {shown(raw)}; it takes {TAKES[form]}")
        return False

    def _line(self, path: KeyPath) -> int:
        """A key's line; where it has none of its own, that of what it stands in."""
        lines = self.file.lines
        return next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), 0)

    def _fault(self, path: KeyPath, text: str) -> None:
        self.faults.append((self._line(path), text))


def holds(lock: str, path: KeyPath) -> bool:
    """Whether a path of [lock] covers a value: its own path, or that of a table it stands in."""
    text = dotted(path)
    return text == lock or text.startswith(f"{lock}.")


def check_locked(site: Site, overridden: Mapping[str, str], *, allow: bool) -> list[str]:
    """Refuse changes to locked values, or tell of each where they are allowed.

    Args:
        site: The site; what its own user and project layers have changed counts too.
        overridden: What else was changed, with its place: "env.NCCL_NET" for a variable of the
            ranks whatever its group, "settings.slurm.partition" for a setting. Only changes: a
            setting or variable to which the user gives the preset's own value is none.
        allow: Whether --allow-locked was given.

    Returns:
        A line for each, to be shown and recorded.

    Raises:
        UsageError: there is one and `allow` is False.
    """
    notes = [
        f"{path} is locked by {site.where('lock', 'keys')} and changed by {place}"
        for path, place in locked_changes(site, overridden).items()
    ]
    if notes and not allow:
        contact = f", or ask {site.about.contact}" if site.about.contact else ""
        raise UsageError(f"{'; '.join(notes)}; leave it out{contact}, or say --allow-locked")
    return [f"{line} (--allow-locked)" for line in notes]


def locked_changes(site: Site, overridden: Mapping[str, str]) -> dict[str, str]:
    """Those of the changes that a lock covers, with their places; arguments as `check_locked`'s."""
    changes = {dotted(path): place for path, place in site.overridden.items()} | dict(overridden)
    locks = site.lock.keys
    return {
        path: place
        for path, place in changes.items()
        if any(_covers(site, lock, path) for lock in locks)
    }


def _covers(site: Site, lock: str, path: str) -> bool:
    head, _, name = path.partition(".")
    if head != _ENV or "." in name:
        return holds(lock, tuple(path.split(".")))
    if lock.startswith(f"{_ENV}.") and lock.endswith(f".{name}"):
        return True
    same = (at for at in site.leaves if at[0] == _ENV and at[-1] == name)
    return any(holds(lock, at) for at in same) or (name in DERIVED and holds(lock, DERIVED[name]))


def build(name: str, site_files: Sequence[SiteFileValues]) -> Site:
    """The preset that the files give together.

    Files come lowest first; those of another name are what it extends.

    Raises:
        UsageError: a value names a source that no file has.
    """
    leaves: dict[KeyPath, PresetValue] = {}
    tables: dict[KeyPath, None] = {}
    overridden: dict[KeyPath, str] = {}
    for site_file in site_files:
        leaves = _with_sources(leaves, site_file)
        for path, leaf in _own(site_file, name):
            if path == _LOCK and not site_file.locks:
                continue
            _check_source(leaf, path, site_file, leaves)
            new = _appended(leaves, path, leaf) if path in site_file.added else leaf
            if not site_file.locks and _is_locked(leaves, path, new):
                overridden[path] = f"{site_file.layer} ({leaf.place})"
            leaves[path] = new
        tables |= dict.fromkeys(site_file.tables)
    files = tuple(
        SiteFile(site_file.layer, site_file.file, site_file.name) for site_file in site_files
    )
    leaves = dict(sorted(leaves.items(), key=lambda item: _order(item[0])))
    return _site(name, leaves, tables, overridden=overridden, files=files)


def _own(site_file: SiteFileValues, name: str) -> list[tuple[KeyPath, PresetValue]]:
    """What a file gives to the preset of that name: its values, then what it appends."""
    both = [*site_file.leaves.items(), *site_file.added.items()]
    return [
        (path, leaf)
        for path, leaf in both
        if path[0] != schema.SOURCES and (site_file.name == name or path[0] not in OF_ITS_OWN)
    ]


def _with_sources(
    leaves: dict[KeyPath, PresetValue], site_file: SiteFileValues
) -> dict[KeyPath, PresetValue]:
    """The leaves with a file's [sources] among them.

    Files are written apart and each may call its first source "a": where two mean different
    things, the lower one's is renamed, so that no value is ascribed to the wrong page.
    """
    for path, leaf in site_file.leaves.items():
        if path[0] != schema.SOURCES:
            continue
        held = leaves.get(path)
        if held is not None and held.value != leaf.value:
            leaves = _renamed(leaves, path[1])
        leaves[path] = leaf
    return leaves


def _renamed(leaves: dict[KeyPath, PresetValue], key: str) -> dict[KeyPath, PresetValue]:
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


def _check_source(
    leaf: PresetValue, path: KeyPath, site_file: SiteFileValues, leaves: dict[KeyPath, PresetValue]
) -> None:
    if not leaf.source or (schema.SOURCES, leaf.source) in leaves:
        return
    source_names = [path[1] for path in leaves if path[0] == schema.SOURCES]
    there = f"there are: {', '.join(source_names) or 'none'}"
    hint = did_you_mean(leaf.source, source_names, there)
    raise UsageError(
        f'{site_file.where(leaf)}: the source of {dotted(path)} is "{leaf.source}", which '
        f"[sources] does not have; {hint}"
    )


def _appended(leaves: dict[KeyPath, PresetValue], path: KeyPath, leaf: PresetValue) -> PresetValue:
    """The list below with the leaf's items behind it, each once; the place is the addition's."""
    held = leaves.get(path)
    key = key_at(path)
    below = held.value if held else key.default if key else ()
    value = [*below, *(item for item in leaf.value if item not in below)]
    return replace(
        leaf,
        value=value,
        source=leaf.source or (held.source if held else ""),
        why=leaf.why or (held.why if held else ""),
    )


def _is_locked(leaves: dict[KeyPath, PresetValue], path: KeyPath, new: PresetValue) -> bool:
    """Whether a value may not change here, and does."""
    locks = leaves.get(_LOCK)
    if locks is None or not any(holds(lock, path) for lock in locks.value):
        return False
    held = leaves.get(path)
    return held is None or held.value != new.value


def _site(
    name: str,
    leaves: dict[KeyPath, PresetValue],
    tables: dict[KeyPath, None],
    *,
    overridden: dict[KeyPath, str],
    files: tuple[SiteFile, ...],
) -> Site:
    nested: dict[str, Any] = {}
    for path in tables:
        _at(nested, path)
    for path, leaf in leaves.items():
        _at(nested, path[:-1])[path[-1]] = leaf.value
    about = {key: nested[key] for key in keys_of(schema.About) if key in nested}
    parts = {key: nested[key] for key in keys_of(schema.Preset) if key in nested}
    return replace(
        make(Site, parts | {"about": about | {"name": name}}),
        settings=nested.get(schema.SETTINGS, {}),
        leaves=leaves,
        overridden=overridden,
        files=files,
    )


def _order(path: KeyPath) -> tuple[int, int]:
    """Sorts values as the schema has their tables, so that those of several files mix well."""
    top = _TOP.index(path[0])
    inner = list(keys_of(schema.TABLES[path[0]])) if path[0] in schema.TABLES else []
    return top, inner.index(path[1]) if inner else 0


def _at(nested: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    """The table at that path, made where it is missing."""
    for name in path:
        nested = nested.setdefault(name, {})
    return nested

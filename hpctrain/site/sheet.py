"""One site file taken apart into checked values, each with its line. Reads no files.

What several files give together is `build.py`'s. tests/unit/test_site_schema.py has the promises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from hpctrain.errors import UsageError
from hpctrain.settings.environ import from_table
from hpctrain.settings.layers import Layer, nearest, resolve
from hpctrain.settings.schema import sections
from hpctrain.site import schema
from hpctrain.site.keys import Key, keys_of
from hpctrain.site.names import unknown, wrong_lock
from hpctrain.site.paths import ADMINS
from hpctrain.site.preset import Leaf, Path, dotted
from hpctrain.site.values import TAKES, checked, in_words, shown

if TYPE_CHECKING:
    from hpctrain.settings.toml_lines import TomlFile

ADD = "_add"
SOURCE = "source"
_TOLD = 5
_ENV = "env"
_PARTITION = r"[^\s,]+"


@dataclass(frozen=True)
class Sheet:
    """What one file says."""

    name: str
    """Of the preset in it."""
    layer: str
    file: str
    leaves: dict[Path, Leaf] = field(default_factory=dict)
    added: dict[Path, Leaf] = field(default_factory=dict)
    """Items of `X_add`, by the path of `X`."""
    tables: dict[Path, int] = field(default_factory=dict)
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

    def where(self, leaf: Leaf) -> str:
        """`site juniper (/etc/hpctrain/sites/juniper.toml:7)`."""
        return f"site {self.name} ({leaf.place})"


def take_apart(file: TomlFile, *, name: str, layer: str) -> Sheet:
    """Check a site file's keys and values one by one.

    Args:
        file: The file.
        name: What the preset must be called: the file's own name.
        layer: Where it was found.

    Raises:
        UsageError: a key is unknown, a value is of another type or form than its key takes, or the
            file calls itself otherwise. The message has the first such faults, in one line.
    """
    reader = _Reader(file, Sheet(name, layer, file.shown))
    reader.root()
    if not reader.faults:
        return reader.sheet
    (line, first), *others = sorted(reader.faults)
    more = [f"line {line}: {text}" for line, text in others[: _TOLD - 1]]
    if len(others) >= _TOLD:
        more.append(f"and {len(others) - _TOLD + 1} more")
    place = f"{file.shown}:{line}" if line else file.shown
    raise UsageError("; ".join([f"site {name} ({place}): {first}", *more]))


class _Fault(Exception):
    """One value is wrong; reading goes on with the next. The message is without its place."""


class _Reader:
    """Walks a file's tables along the schema's classes."""

    def __init__(self, file: TomlFile, sheet: Sheet) -> None:
        self.file = file
        self.sheet = sheet
        self.faults: list[tuple[int, str]] = []
        """Line and what is wrong there."""

    def root(self) -> None:
        values = dict(self.file.values)
        source = self._source(values, ())
        for name, value in values.items():
            path = (name,)
            if name in schema.TABLES:
                self._table(schema.TABLES[name], value, path, source)
            elif name == schema.PARTITIONS:
                self._tables(schema.Partition, value, path, source)
            elif name == schema.SETTINGS:
                self._settings(value, path, source)
            elif name in (known := keys_of(schema.About)):
                self._value(known[name], value, path, source)
            else:
                self._fault(path, unknown(path, schema.About))
        written = self.sheet.leaves.get(("schema",))
        if written is not None and written.value > schema.SCHEMA:
            self._fault(
                ("schema",),
                f"schema is {written.value}, this hpctrain knows up to {schema.SCHEMA}; "
                "use a newer hpctrain",
            )
        given = self.sheet.text("name") or self.sheet.name
        if given != self.sheet.name:
            self._fault(
                ("name",),
                f'name is "{given}" in a file that is called {self.sheet.name}; '
                "give both the same name",
            )

    def _table(self, cls: type, raw: Any, path: Path, source: str) -> None:
        if not self._is_table(raw, path, "table"):
            return
        values = dict(raw)
        source = self._source(values, path) or source
        known = keys_of(cls)
        for name, value in values.items():
            base = known.get(name.removesuffix(ADD))
            if name in known:
                self._value(known[name], value, (*path, name), source)
            elif name.endswith(ADD) and base is not None and base.form == "texts":
                self._leaf(base, value, (*path, name), source)
            else:
                self._fault((*path, name), unknown((*path, name), cls))
        self._check_admins(cls, path)

    def _check_admins(self, cls: type, path: Path) -> None:
        if cls is not schema.Lock:
            return
        if self.sheet.layer not in ADMINS:
            self._fault(
                path,
                f"[lock] has no effect in the {self.sheet.layer} layer; it belongs into a file of "
                "the admins', e.g. in /etc/hpctrain/sites",
            )
        for held in (self.sheet.leaves, self.sheet.added):
            leaf = held.get((*path, "keys"))
            for wrong in filter(None, map(wrong_lock, leaf.value if leaf else ())):
                self._fault((*path, "keys"), wrong)

    def _value(self, key: Key, raw: Any, path: Path, source: str) -> None:
        if key.inner is not None and key.form == "table":
            self._table(key.inner, raw, path, source)
        elif key.inner is not None:
            self._tables(key.inner, raw, path, source)
        elif key.form.endswith(" table"):
            self._map(key, raw, path, source)
        else:
            self._leaf(key, raw, path, source)

    def _tables(self, cls: type, raw: Any, path: Path, source: str) -> None:
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
                self.sheet.tables[at] = self._line(at)
                self._table(cls, value, at, source)

    def _map(self, key: Key, raw: Any, path: Path, source: str) -> None:
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

    def _settings(self, raw: Any, path: Path, source: str) -> None:
        if not self._is_table(raw, path, "tables"):
            return
        values = dict(raw)
        source = self._source(values, path) or source
        for section, keys in values.items():
            at = (*path, section)
            if section not in sections():
                self._fault(at, unknown(at, None))
            elif self._is_table(keys, at, "table"):
                self._section(section, dict(keys), at, source)

    def _section(self, section: str, values: dict[str, Any], path: Path, source: str) -> None:
        source = self._source(values, path) or source
        kinds = {one.name: one.type for one in fields(sections()[section])}
        for name, raw in values.items():
            adds = name not in kinds and kinds.get(name.removesuffix(ADD)) == "list[str]"
            key = name.removesuffix(ADD) if adds else name
            at = (*path, name)
            try:
                value, given, why = self._unwrap(raw, at, source)
                settings, _ = resolve([Layer("", {section: {key: value}}, lambda *_: "")])
            except (UsageError, _Fault) as error:
                self._fault(at, str(error).removeprefix(": "))
                continue
            self._keep(at, getattr(getattr(settings, section), key), given, why, adds=adds)

    def _leaf(self, key: Key, raw: Any, path: Path, source: str) -> None:
        try:
            value, given, why = self._unwrap(raw, path, source)
            value = self._checked(key, value, path)
        except _Fault as error:
            self._fault(path, str(error))
            return
        self._keep(path, value, given, why, adds=path[-1] != key.name and key.form == "texts")

    def _keep(self, path: Path, value: Any, source: str, why: str, *, adds: bool) -> None:
        leaf = Leaf(value, self.sheet.layer, self.file.shown, self._line(path), source, why)
        if adds:
            self.sheet.added[(*path[:-1], path[-1].removesuffix(ADD))] = leaf
        else:
            self.sheet.leaves[path] = leaf

    def _unwrap(self, raw: Any, path: Path, source: str) -> tuple[Any, str, str]:
        """Value, source and why: of a plain value, or of { value = ..., source = ..., why = ... }.

        Raises:
            _Fault: it is a table of another kind.
        """
        if not isinstance(raw, dict):
            return raw, source, ""
        known = ("value", SOURCE, "why")
        for name, inner in raw.items():
            if name not in known:
                near = nearest(name, known)
                hint = f"did you mean {near[0]}?" if near else "it takes value, source and why"
                raise _Fault(f"{dotted((*path, name))} is not known there; {hint}")
            if name != "value" and not isinstance(inner, str):
                raise _Fault(f"{dotted((*path, name))} is {shown(inner)}; it takes text")
        if "value" not in raw:
            raise _Fault(f"{dotted(path)} is a table without `value`; add it")
        return raw["value"], raw.get(SOURCE, source), raw.get("why", "")

    def _checked(self, key: Key, value: Any, path: Path) -> Any:
        """The value as its key takes it.

        Raises:
            _Fault: it is of another type, or not of its form.
        """
        if path[0] != _ENV or key.form != "text table":
            try:
                return checked(key, value, dotted(path))
            except ValueError as error:
                raise _Fault(str(error)) from None
        try:
            return from_table({path[-1]: value}, lambda _: "")[path[-1]]
        except UsageError as error:
            raise _Fault(str(error).removeprefix(": ")) from None

    def _source(self, values: dict[str, Any], path: Path) -> str:
        """Take a table's own `source` out of it, which holds for all its values."""
        given = values.get(SOURCE)
        if given is None or isinstance(given, dict):  # a partition may be called so
            return ""
        del values[SOURCE]
        if isinstance(given, str):
            return given
        self._fault((*path, SOURCE), f"{SOURCE} is {shown(given)}; it takes a name of [sources]")
        return ""

    def _is_table(self, raw: Any, path: Path, form: str) -> bool:
        if isinstance(raw, dict):
            return True
        self._fault(path, f"{dotted(path)} is {shown(raw)}; it takes {TAKES[form]}")
        return False

    def _line(self, path: Path) -> int:
        """A key's line; where it has none of its own, that of what it stands in."""
        known = self.file.lines
        return next((known[path[:n]] for n in range(len(path), 0, -1) if path[:n] in known), 0)

    def _fault(self, path: Path, text: str) -> None:
        self.faults.append((self._line(path), text))

"""Settings from layers: defaults < site < hpctrain.toml < flags < chosen, each with its origin.

Layers come in as data, and unknown or ill-typed values are refused with the place they came from:
`read_toml` gives a TOML file whose keys know their line, so that every message can say
`hpctrain.toml:14`. The environment that the site and the user give to the ranks is read here too
(`from_table`, `from_flag`); the submitting shell's own never comes in: tokens live there, and what
this module returns is written into spec.json.

Pure, but for `read_toml`. tests/unit/settings/test_layers.py and test_toml_lines.py hold the
promises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.files import read_plain
from hpctrain.core.settings import fields
from hpctrain.core.settings.fields import BITS, keys_of
from hpctrain.core.settings.schema import REMOVED, Settings, current_name, replaced, sections
from hpctrain.errors import NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from hpctrain.core.settings.fields import Key

_TOKEN = re.compile(
    r'(?P<string>"""(?:\\.|[^\\])*?""""{0,2}'
    r"|'''.*?''''{0,2}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*')"
    r"|(?P<comment>\#[^\n]*)"
    r"|(?P<bare>[A-Za-z0-9_-]+)"
    r"|(?P<other>.)",
    re.DOTALL,
)

MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class TomlFile:
    """One parsed file."""

    path: Path
    shown: str
    """The file as messages name it."""
    values: dict[str, Any]
    lines: dict[tuple[str, ...], int]

    def where(self, *key: str) -> str:
        """`hpctrain.toml:14` for a key; its table's line where the key has none of its own."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.lines:
                return f"{self.shown}:{self.lines[key[:length]]}"
        return self.shown


def read_toml(path: Path, *, shown: str | None = None) -> TomlFile:
    """Read a TOML file with the line of each key.

    Raises:
        NotFound: there is no such file.
        UsageError: it cannot be read, or is not TOML.
    """
    shown = shown or str(path)
    try:
        return toml_of(read_plain(path, MOST_BYTES).decode("utf-8-sig"), path, shown)
    except FileNotFoundError:
        raise NotFound(f"{shown} is not there; check the path") from None
    except OSError as error:
        raise UsageError(f"{shown} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{shown} is not UTF-8 text: {error.reason}; save it as UTF-8") from None
    except ValueError as error:
        raise UsageError(f"{shown} is not valid TOML: {error}") from None


def toml_of(text: str, path: Path, shown: str) -> TomlFile:
    """The same of a text; ValueError where it is not TOML."""
    return TomlFile(path, shown, parse_toml(text.replace("\r\n", "\n")), key_lines(text))


def parse_toml(text: str) -> dict[str, Any]:
    """The values of a TOML text.

    Raises:
        ValueError: it is not TOML, or no program could hold what it says.
    """
    import tomllib

    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise ValueError("lists or tables lie too deep in each other") from None
    _refuse_huge(values)
    return values


def _refuse_huge(value: object) -> None:
    """TOML's integers have 64 bits; the parser takes any, which floats and C cannot."""
    if isinstance(value, int) and value.bit_length() > BITS:
        raise ValueError(f"an integer of {value.bit_length()} bits; there are 64 with its sign")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inner:
        _refuse_huge(item)


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Line of every table and key in a text that is valid TOML, counted from 1.

    Keys inside inline tables and arrays are not listed; a key in two places has its first line.
    """
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    key: list[str] = []
    line, depth = 1, 0
    in_value = in_header = False
    for token in _TOKEN.finditer(text + "\n"):
        word = token.group()
        if in_value:
            depth += (word in "[{") - (word in "]}")
            in_value = depth > 0 or word != "\n"
        elif token.lastgroup in {"bare", "string"}:
            key.append(word.strip("\"'"))
        elif word == "[":
            in_header = True
        elif word == "=":
            lines.setdefault((*table, *key), line)
            key, in_value, depth = [], True, 0
        elif word == "\n" and in_header:
            table, key, in_header = tuple(key), [], False
            lines.setdefault(table, line)
        line += word.count("\n")
    return lines


DEFAULT = "default"
AUTO = "auto"
"""Of slurm.nodes and slurm.time: hpctrain chooses; see `submit.shape.settle_auto`."""
ENV_SECTION = "env"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Each rank gets its own; a value from outside would be overwritten, or break the rendezvous.
_OURS = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)


@dataclass(frozen=True)
class Layer:
    """Values of one source."""

    name: str
    values: Mapping[str, Any]
    """Section name to its keys and values, as the source has them: not checked yet."""
    where: Callable[[str, str], str]
    """(section, key) to the origin that messages and spec.json show; key "" for the section."""


@dataclass(frozen=True)
class SettingsFile:
    """A settings file taken apart."""

    layer: Layer
    env: dict[str, Any]
    """Its [env] table, not checked yet."""
    top: dict[str, str]
    """Its keys outside any table, among those that were allowed."""


def from_toml(file: TomlFile, *, name: str, top: Sequence[str]) -> SettingsFile:
    """Take a settings file apart.

    `top` are text keys that it may have outside any table.

    Raises:
        UsageError: a key outside any table is unknown, or is not text; [env] is not a table.
    """

    def where(section: str, key: str) -> str:
        return file.where(section, key) if key else file.where(section)

    values = dict(file.values)
    env = values.pop(ENV_SECTION, {})
    if not isinstance(env, dict):
        raise UsageError(f"{where(ENV_SECTION, '')}: env must be a table of NAME = value")
    taken: dict[str, str] = {}
    for key in [key for key, value in values.items() if not isinstance(value, dict)]:
        value = values.pop(key)
        if key in sections():
            raise UsageError(f"{where(key, '')}: {key} must be one table, begun by [{key}]")
        if key not in top:
            raise UsageError(f"{where(key, '')}: {_unknown_section(key, top)}")
        if not isinstance(value, str):
            raise UsageError(f"{where(key, '')}: {key} is {value!r}; it takes text in quotes")
        taken[key] = value
    return SettingsFile(Layer(name, values, where), env, taken)


def resolve(
    layers: Iterable[Layer],
    *,
    base: Settings | None = None,
    origins: Mapping[str, str] | None = None,
) -> tuple[Settings, dict[str, str]]:
    """Settings and the origin of each value; later layers win.

    Layers come lowest first, upon `base`, which is not changed.

    Raises:
        UsageError: an unknown section or key (with the nearest one), or a value of the wrong type.
    """
    values_at: dict[str, Any] = {}
    keys_in = {name: keys_of(cls) for name, cls in sections().items()}
    merged = dict.fromkeys(setting_names(), DEFAULT) | dict(origins or {})
    for layer in layers:
        for section, values in layer.values.items():
            if section not in keys_in:
                raise UsageError(f"{layer.where(section, '')}: {_unknown_section(section)}")
            for given, value in values.items():
                where = layer.where(section, given)
                key = current_name(section, given)
                if key not in keys_in[section]:
                    raise UsageError(f"{where}: {unknown_setting(key, section)}")
                path = f"{section}.{key}"
                values_at[path] = convert(keys_in[section][key], value, section, where)
                merged[path] = where
    return replaced(base or Settings(), values_at), merged


@dataclass(frozen=True)
class Chosen:
    """What nobody has given and a check has chosen: the topmost layer, which a resume drops."""

    changes: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """"slurm.partition" to its value, and to the origin that is shown of it."""
    notes: list[str] = field(default_factory=list)
    """For the user to read."""

    def __add__(self, later: Chosen) -> Chosen:
        return Chosen({**self.changes, **later.changes}, self.notes + later.notes)

    def upon(
        self, settings: Settings, origins: Mapping[str, str]
    ) -> tuple[Settings, dict[str, str]]:
        """Settings and origins with this layer on top."""
        values: dict[str, dict[str, Any]] = {}
        for path, (value, _) in self.changes.items():
            section, _, key = path.partition(".")
            values.setdefault(section, {})[key] = value
        layer = Layer("chosen", values, lambda section, key: self.changes[f"{section}.{key}"][1])
        return resolve([layer], base=settings, origins=origins)


def flag_layer(
    flags: Mapping[str, tuple[str, object]], sets: Sequence[str] = (), *, name: str = "flags"
) -> Layer:
    """The command line as a layer.

    `flags` has "slurm.nodes" to (the flag's name, its value; None was not given), `sets` what stood
    behind each `--set`: "section.key=value". Lists add up.

    Raises:
        UsageError: a `--set` is not of that form, names no setting, or says the same thing twice.
    """
    values: dict[str, dict[str, Any]] = {}
    places: dict[str, str] = {}
    for path, (flag, value) in flags.items():
        if value is not None:
            section, _, key = path.partition(".")
            values.setdefault(section, {})[key] = value
            places[path] = f"flag {flag}"
    for text in sets:
        section, key, value = parse_set(text)
        path, place = f"{section}.{key}", f"flag --set {section}.{key}"
        before = values.setdefault(section, {}).get(key)
        if isinstance(before, list) and isinstance(value, list):
            value = before + value
        elif path in places:
            raise UsageError(
                f"{path} is given twice: {places[path]} and flag --set {text}; keep one"
            )
        values[section][key] = value
        places[path] = place
    return Layer(name, values, lambda section, key: places[f"{section}.{key}"])


def parse_set(text: str) -> tuple[str, str, Any]:
    """Section, key and typed value of one `--set section.key=value`.

    Text needs no quotes; a list is a TOML array, or one bare text for a list of one.

    Raises:
        UsageError: not of that form, no such setting, or a value of the wrong type.
    """
    path, equals, value = text.partition("=")
    section, dot, key = path.strip().partition(".")
    where = f"flag --set {path.strip()}"
    if not equals or not dot or not key:
        raise UsageError(
            f"flag --set {text}: not of the form section.key=value, e.g. --set train.steps=500"
        )
    key = current_name(section, key)
    keys = keys_of(sections()[section]) if section in sections() else None
    if keys is None or key not in keys:
        unknown = _unknown_section(section) if keys is None else unknown_setting(key, section)
        raise UsageError(f"{where}: {unknown}")
    return section, key, convert(keys[key], _parse(value.strip(), keys[key]), section, where)


def _parse(text: str, setting: Key) -> Any:
    """The value that a `--set` text stands for, left as text where it is no literal of its type."""
    if text[:1] in {'"', "'", "["}:
        try:
            return parse_toml(f"value = {text}")["value"]
        except ValueError:
            return text
    if setting.form == "texts":
        return [text]
    if setting.form == "boolean":
        return {"true": True, "false": False}.get(text.lower(), text)
    if setting.form in {"integer", "number"}:
        for number in (int, float):
            try:
                return number(text)
            except ValueError:
                continue
    return text


def convert(setting: Key, value: Any, section: str, where: str) -> Any:
    """The value as its setting takes it.

    Raises:
        UsageError: the value is of another type, or not among the choices.
    """
    try:
        return fields.convert(setting, value, f"{section}.{setting.name}")
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


def setting_names() -> list[str]:
    """Every setting as section.key."""
    return [f"{section}.{key}" for section, cls in sections().items() for key in keys_of(cls)]


def unknown_setting(name: str, section: str) -> str:
    """What to say of a key that its section does not have."""
    if since := REMOVED.get(f"{section}.{name}"):
        return f"{section}.{name} is not a setting any more: {since}; take it out"
    keys = keys_of(sections()[section])
    near = _elsewhere(name) or [f"{section}.{key}" for key in nearest(name, keys)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"[{section}] has {', '.join(keys)}"
    return f"{section}.{name} is not a setting; {hint}"


def _unknown_section(name: str, top: Sequence[str] = ()) -> str:
    """What to say of a section that there is not, or of such a key outside any table."""
    if elsewhere := _elsewhere(name):
        tables = " or ".join(f"[{path.partition('.')[0]}]" for path in elsewhere)
        return f"{name} stands outside its table; put it under {tables}"
    sections_known = [*sections(), ENV_SECTION, *top]
    hint = did_you_mean(name, sections_known, f"there are {', '.join(sections())}")
    return f"{name} is not a section; {hint}"


def _elsewhere(name: str) -> list[str]:
    return [path for path in setting_names() if path.endswith(f".{name}")]


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The known name that a mistyped one most resembles, or nothing; a list of at most one."""
    from difflib import get_close_matches

    return get_close_matches(name, list(candidates), n=1, cutoff=cutoff)


def did_you_mean(name: str, candidates: Iterable[str], otherwise: str) -> str:
    """A hint: the nearest known name; else what is given for none."""
    near = nearest(name, candidates)
    return f"did you mean {near[0]}?" if near else otherwise


def from_table(table: Mapping[str, Any], where: Callable[[str], str]) -> dict[str, str]:
    """A file's [env] table as environment variables; numbers become text.

    Raises:
        UsageError: an impossible name, one that hpctrain sets, or a value that is no text.
    """
    env: dict[str, str] = {}
    for name, value in table.items():
        check_name(name, where(name))
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise UsageError(
                f"{where(name)}: env.{name} is {str(value).lower()}; it takes text or a number, "
                'so write what the program shall see, e.g. "1"'
            )
        env[name] = check_value(name, str(value), where(name))
    return env


def from_flag(text: str) -> tuple[str, str]:
    """Name and value of one `--env NAME=VALUE`.

    Raises:
        UsageError: not of that form, an impossible name, or one that hpctrain sets.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"flag --env {text}: not of the form NAME=VALUE; write --env {text}=...")
    check_name(name, f"flag --env {name}")
    return name, check_value(name, value, f"flag --env {name}")


def check_name(name: str, where: str) -> None:
    """Refuse a name that no environment can have, or that hpctrain sets for each rank.

    Raises:
        UsageError: it is such a name.
    """
    if _NAME.fullmatch(name) is None:
        raise UsageError(
            f"{where}: {name!r} cannot name an environment variable; "
            "letters, digits and _ can, not beginning with a digit"
        )
    if name in _OURS:
        raise UsageError(f"{where}: {name} is set by hpctrain for each rank; leave it out")


def check_value(name: str, value: str, where: str) -> str:
    """The value, if an environment can hold it.

    Raises:
        UsageError: it has a NUL character.
    """
    if "\0" in value:
        raise UsageError(f"{where}: the value of {name} has a NUL character; leave it out")
    return value

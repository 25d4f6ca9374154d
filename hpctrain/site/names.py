"""The paths that a preset can have, with a word on what is none, and conditions on versions.

A condition is `>=2.21,<2.24`. Pure. tests/unit/site/test_schema.py and test_site_environment.py
hold the promises.
"""

from __future__ import annotations

import operator
import re
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING

from hpctrain.settings.layers import nearest
from hpctrain.settings.schema import sections
from hpctrain.site import schema
from hpctrain.site.schema import keys_of

if TYPE_CHECKING:
    from hpctrain.site.preset import KeyPath

_ENV_GROUPS = "[env.common], [env.single_node] or [env.multi_node]"
_CONDITION = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)*)")
_NUMBERS = re.compile(r"v?(\d+(?:\.\d+)*)")
_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def unknown(path: KeyPath, cls: type | None) -> str:
    """What to say of a key that its table does not have.

    Args:
        path: The key's path.
        cls: The class of the table that it stands in: `About` outside any table, None for a
            section of [settings].
    """
    if cls is None:
        near = nearest(path[-1], sections())
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sections())}"
        return f"{'.'.join(path)} is no section of hpctrain's settings; {hint}"
    hint = _hint_at_top(path[-1]) if cls is schema.About else _hint(path, cls)
    return f"{'.'.join(path)} is not a key of a site preset; {hint}"


def _hint(path: KeyPath, cls: type) -> str:
    table, name = ".".join(path[:-1]), path[-1]
    keys = keys_of(cls)
    if cls is schema.EnvGroups and name.isupper():
        return f"put it under {_ENV_GROUPS}"
    if path[0] in sections() and name in _setting_names(path[0]):
        return f"as a default of hpctrain's setting it belongs under [settings.{path[0]}]"
    if near := nearest(name, keys):
        return f"did you mean {table}.{near[0]}?"
    if elsewhere := [place for place in _paths() if place.endswith(f".{name}")]:
        return f"did you mean {' or '.join(elsewhere)}?"
    return f"[{table}] has {', '.join(keys)}"


def _hint_at_top(name: str) -> str:
    if name in sections():
        return f"as defaults of hpctrain's settings put it under [settings.{name}]"
    at_top = [*keys_of(schema.About), *schema.TABLES, schema.PARTITIONS, schema.SETTINGS]
    if near := nearest(name, at_top):
        return f"did you mean {near[0]}?"
    if elsewhere := [place for place in _paths() if place.endswith(f".{name}")]:
        table = elsewhere[0].rpartition(".")[0]
        return f"it stands outside its table; put it under [{table}]"
    return f"there are {', '.join(at_top)}"


def wrong_lock(text: str) -> str | None:
    """What is wrong with a path in [lock]; None where it names something that a preset can have."""
    if _can_be(tuple(text.split("."))):
        return None
    near = nearest(text, _paths())
    hint = f"did you mean {near[0]}?" if near else "it takes paths such as env.common.NCCL_NET"
    return f"lock.keys has {text}, which no preset can have; {hint}"


def _can_be(path: KeyPath) -> bool:
    head, *rest = path
    if not all(path):
        return False
    if head == schema.SETTINGS:
        section = rest[0] if rest else ""
        tail = rest[1:]
        return (
            not rest
            or (section in sections() and not tail)
            or (len(tail) == 1 and section in sections() and tail[0] in _setting_names(section))
        )
    if head == schema.PARTITIONS:
        return len(rest) < 2 or _in_table(schema.Partition, rest[1:])  # noqa: PLR2004 - X and a key
    return head in schema.TABLES and _in_table(schema.TABLES[head], rest)


def _in_table(cls: type, path: list[str]) -> bool:
    """Whether a table of the class can have that path below it; the table itself counts."""
    if not path:
        return True
    head, *rest = path
    key = keys_of(cls).get(head)
    if key is None:
        return False
    if key.inner is not None:
        below = rest if key.form == "table" else rest[1:]
        return _in_table(key.inner, below)
    return not rest or (key.form.endswith(" table") and len(rest) == 1)


@cache
def _paths() -> list[str]:
    """Every path that has no free name in it, and one for each table that has: `partitions.X`."""
    found: list[str] = []
    for name, cls in schema.TABLES.items():
        found += _below(cls, name)
    found += _below(schema.Partition, f"{schema.PARTITIONS}.X")
    for section, cls in sections().items():
        found += [f"{schema.SETTINGS}.{section}.{one.name}" for one in fields(cls)]
    return found


def _below(cls: type, at: str) -> list[str]:
    found: list[str] = []
    for name, key in keys_of(cls).items():
        if key.inner is None:
            found.append(f"{at}.{name}")
        else:
            free = "" if key.form == "table" else ".X"
            found += _below(key.inner, f"{at}.{name}{free}")
    return found


def _setting_names(section: str) -> list[str]:
    return [one.name for one in fields(sections()[section])]


def parse_condition(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """The parts of a condition, all of which must hold: `[(">=", (2, 21)), ("<", (2, 24))]`.

    Raises:
        ValueError: a part is not an operator with a version.
    """
    parts = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f'"{text}" is not a condition on a version; it takes parts such as >=2.27, '
                "joined by commas that mean `and`"
            )
        parts.append((match[1], _key(match[2])))
    return parts


def holds(condition: str, version: str) -> bool:
    """Whether a version meets the condition; 2.9 and 2.9.0 are the same, `+cu128` does not count.

    Raises:
        ValueError: the condition is not one, or the version does not begin with a number.
    """
    match = _NUMBERS.match(version.strip())
    if match is None:
        raise ValueError(f'"{version}" does not begin like a version')
    return all(_COMPARE[sign](_key(match[1]), bound) for sign, bound in parse_condition(condition))


def _key(digits: str) -> tuple[int, ...]:
    """The numbers without the zeros at the end, so that 2.9 equals 2.9.0."""
    numbers = [int(part) for part in digits.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)

"""The environment that the site and the user give to the ranks. Pure.

The submitting shell's own environment never comes in here: tokens live there, and what this module
returns is written into spec.json.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


def from_table(table: Mapping[str, Any], where: Callable[[str], str]) -> dict[str, str]:
    """A file's [env] table as environment variables; numbers become text.

    Args:
        table: Name to value.
        where: Name to its place, for messages.

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
        raise UsageError(f"--env {text}: not of the form NAME=VALUE; write --env {text}=...")
    check_name(name, f"--env {name}")
    return name, check_value(name, value, f"--env {name}")


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

"""[lock]: values of a preset that a user changes only with --allow-locked. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.errors import UsageError
from hpctrain.site.preset import dotted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.site.preset import Path, Site

_ENV = "env"
DERIVED = {
    "NCCL_SOCKET_IFNAME": ("network", "socket_ifnames"),
    "GLOO_SOCKET_IFNAME": ("network", "socket_ifnames"),
    "NCCL_IB_HCA": ("network", "hcas"),
}
"""Variables that come from a fact: to set one by hand is to change that fact."""


def holds(lock: str, path: Path) -> bool:
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
    changes = {dotted(path): place for path, place in site.overridden.items()} | dict(overridden)
    told = [
        f"{path} is locked by {site.where('lock', 'keys')} and changed by {place}"
        for path, place in changes.items()
        if any(_covers(site, lock, path) for lock in site.lock.keys)
    ]
    if told and not allow:
        contact = f", or ask {site.about.contact}" if site.about.contact else ""
        raise UsageError(f"{'; '.join(told)}; leave it out{contact}, or say --allow-locked")
    return [f"{line} (--allow-locked)" for line in told]


def _covers(site: Site, lock: str, path: str) -> bool:
    head, _, name = path.partition(".")
    if head != _ENV or "." in name:
        return holds(lock, tuple(path.split(".")))
    if lock.startswith(f"{_ENV}.") and lock.endswith(f".{name}"):
        return True
    same = (at for at in site.leaves if at[0] == _ENV and at[-1] == name)
    return any(holds(lock, at) for at in same) or (name in DERIVED and holds(lock, DERIVED[name]))

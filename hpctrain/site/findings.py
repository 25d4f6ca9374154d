"""What is found in a preset: how bad, of which value, where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.site.preset import dotted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpctrain.site.preset import Leaf, Path, Site


@dataclass(frozen=True)
class Finding:
    """One thing that is to be said of a preset."""

    level: str
    """error, warning, or debug: a value that should not stay without a reason."""
    path: str
    """Of the value: env.multi_node.NCCL_NET."""
    value: Any
    """None where it is missing."""
    where: str
    """`/etc/hpctrain/sites/juniper.toml:7`; without a value its table's line, or the file."""
    message: str
    """What is wrong and what to write, on one line; the path is not always repeated in it."""

    def __str__(self) -> str:
        return f"{self.where}: {self.path}: {self.message}"


def at(site: Site, level: str, path: Path, message: str) -> Finding:
    """A finding about the value at a path, which may be missing."""
    leaf = site.leaves.get(path)
    return Finding(level, dotted(path), leaf.value if leaf else None, place(site, path), message)


def error(site: Site, path: Path, message: str) -> Finding:
    """Something that is wrong."""
    return at(site, "error", path, message)


def warning(site: Site, path: Path, message: str) -> Finding:
    """Something that may well be wrong."""
    return at(site, "warning", path, message)


def place(site: Site, path: Path) -> str:
    """File and line of a value; of the first one in its table; else the site's own file."""
    leaf = _leaf(site, path)
    if leaf is not None:
        return leaf.place
    return site.files[-1].path if site.files else f"site {site.name}"


def _leaf(site: Site, path: Path) -> Leaf | None:
    for length in range(len(path), 0, -1):
        head = path[:length]
        leaf = site.leaves.get(head) or next(
            (other for other_path, other in site.leaves.items() if other_path[:length] == head),
            None,
        )
        if leaf is not None:
            return leaf
    return None


def sorted_findings(site: Site, found: Iterable[Finding]) -> list[Finding]:
    """Each finding once, in the order of files and lines, errors first on a line."""
    files = {one.path: number for number, one in enumerate(site.files)}
    levels = {"error": 0, "warning": 1, "debug": 2}

    def key(finding: Finding) -> tuple[int, str, int, int]:
        file, _, line = finding.where.rpartition(":")
        number = int(line) if file and line.isdigit() else 0
        name = file if number else finding.where
        return files.get(name, -1), name, number, levels[finding.level]

    return sorted(dict.fromkeys(_hashable(found)), key=key)


def _hashable(found: Iterable[Finding]) -> list[Finding]:
    """Values as text where they are lists, so that equal findings are known as such."""
    return [
        Finding(one.level, one.path, _plain(one.value), one.where, one.message) for one in found
    ]


def _plain(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value

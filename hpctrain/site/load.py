"""Find and read a site's file. tests/unit/test_site.py holds the promises."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import NotFound
from hpctrain.settings.environ import from_table
from hpctrain.settings.merge import ENV_SECTION, Layer, from_toml, nearest
from hpctrain.settings.toml_lines import read_toml
from hpctrain.site.paths import site_search

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Site:
    """A cluster's settings, as its file has them."""

    name: str
    path: Path
    description: str
    values: dict[str, Any]
    """Sections of settings, not checked yet: `settings.merge.resolve` does."""
    env: dict[str, str]
    """Environment of the ranks."""
    where: Callable[[str, str], str]
    """(section, key) to `site juniper (/etc/hpctrain/sites/juniper.toml:7)`."""

    @property
    def layer(self) -> Layer:
        """The site as a layer of settings."""
        return Layer(f"site {self.name}", self.values, self.where)


def load_site(name: str, *, search: Sequence[Path] | None = None) -> Site:
    """Read a site's file.

    Args:
        name: A site's name, or the path of a .toml file.
        search: Folders to look in, first match wins; by default those of `site_search`.

    Raises:
        NotFound: no folder has such a site.
        UsageError: its file is wrong.
    """
    if name.endswith(".toml"):
        return read_site(Path(name).absolute())
    search = site_search() if search is None else search
    found = find_sites(search)
    if name not in found:
        near = nearest(name, found)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(found) or 'none'}"
        folders = ", ".join(str(folder) for folder in search)
        raise NotFound(f'there is no site "{name}"; {hint} (looked in {folders})')
    return read_site(found[name])


def find_sites(search: Sequence[Path] | None = None) -> dict[str, Path]:
    """Every site's name and the file that wins for it, by name."""
    found: dict[str, Path] = {}
    for folder in site_search() if search is None else search:
        for path in sorted(folder.glob("*.toml")) if folder.is_dir() else ():
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def read_site(path: Path) -> Site:
    """Read one site file.

    Raises:
        NotFound: there is no such file.
        UsageError: it is not a site file.
    """
    name = path.stem
    file = read_toml(path)
    source = from_toml(
        file, name=f"site {name}", top=("description",), origin=f"site {name} ({{}})"
    )
    where = source.layer.where
    env = from_table(source.env, lambda key: where(ENV_SECTION, key))
    return Site(
        name, path, source.top.get("description", ""), dict(source.layer.values), env, where
    )

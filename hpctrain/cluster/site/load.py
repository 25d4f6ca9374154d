"""A site's files, found in their layers and read."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.cluster.site.schema import GIVEN, PACKAGED, SYSTEM, USER, Site
from hpctrain.cluster.site.sheet import OF_ITS_OWN, SiteFileValues, build, take_apart
from hpctrain.core.base.env import HPCTRAIN_SITE_PATH
from hpctrain.core.base.files import data_dir
from hpctrain.core.settings.fields import IN_WORDS, NAME
from hpctrain.core.settings.layers import did_you_mean, read_toml
from hpctrain.errors import NotFound, UsageError
from hpctrain.ledger.run.ownership import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

SYSTEM_SITES = Path("/etc/hpctrain/sites")


def layers(environ: Mapping[str, str]) -> list[tuple[str, Path]]:
    """Name and folder of each layer of site files, lowest first. A folder need not be there.

    HPCTRAIN_SITE_PATH is read like PATH (for module trees): its first folder wins over the next,
    and all of them over /etc.
    """
    text = environ.get(HPCTRAIN_SITE_PATH, "")
    named = [Path(entry) for entry in text.split(os.pathsep) if entry]
    system = [SYSTEM_SITES, *reversed(named)]
    folders = [(PACKAGED, data_dir("site-configs")), *((SYSTEM, path) for path in system)]
    own = user_folder(environ)
    if own is not None:
        folders.append((USER, own / "sites"))
    return folders


def user_folder(environ: Mapping[str, str]) -> Path | None:
    """Where a user's own hpctrain.toml and sites lie; None where no home is known."""
    home = environ.get("HOME")
    config = environ.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else "")
    return Path(config, "hpctrain") if config.startswith("/") else None


def load_site(name: str, *, environ: Mapping[str, str] | None = None) -> Site:
    """Read a site from every layer that has a say.

    A path of a .toml file is taken without the layers' files of the same name; what it extends is
    looked for there and, on top, beside it.

    Raises:
        NotFound: no layer has such a site.
        UsageError: a file is wrong; it extends something that is not there, or itself.
    """
    finder = _PresetFinder(os.environ if environ is None else environ)
    own = finder.given(Path(name)) if name.endswith(".toml") else finder.files_of(name)
    if not own:
        raise finder.missing(name)
    stem = own[0].name
    return build(stem, [*finder.bases(own, [stem]), *own])


def site_names(environ: Mapping[str, str] | None = None) -> list[str]:
    """The name of every site file in the layers, bases and wrong ones included, sorted."""
    return sorted(site_files(environ))


def site_files(environ: Mapping[str, str] | None = None) -> dict[str, list[tuple[str, Path]]]:
    """Layer and path of every site file by the site's name, the lowest layer first."""
    by_name: dict[str, list[tuple[str, Path]]] = {}
    for layer, folder in layers(os.environ if environ is None else environ):
        try:
            paths = sorted(folder.iterdir())
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UsageError(f"{folder} cannot be read: {error.strerror}") from None
        for path in (entry for entry in paths if entry.suffix == ".toml"):
            by_name.setdefault(path.stem, []).append((layer, path))
    return by_name


def identities(environ: Mapping[str, str]) -> list[Site]:
    """Every site that has a [detect] of its own, with what it is and how it is known, no more.

    Bases are not read: these two are nothing that a preset takes from what it extends.

    Raises:
        UsageError: a site's file is wrong: it may be this very site's, so it is not passed over.
    """
    finder = _PresetFinder(environ)
    names = [
        name
        for name, files in site_files(environ).items()
        if any(_mentions_detect(path) for _, path in files)
    ]
    return [build(name, [_identity(one) for one in finder.files_of(name)]) for name in names]


def _mentions_detect(path: Path) -> bool:
    try:
        return b"detect" in path.read_bytes()
    except OSError:  # the reading proper says what is wrong
        return True


def _identity(site_file: SiteFileValues) -> SiteFileValues:
    leaves, added = (
        {path: replace(leaf, source="") for path, leaf in held.items() if path[0] in OF_ITS_OWN}
        for held in (site_file.leaves, site_file.added)
    )
    return replace(site_file, leaves=leaves, added=added, tables={})


def require_usable(site: Site) -> None:
    """Refuse a preset that is not meant for jobs as it stands.

    Raises:
        UsageError: it is unverified, or a base for others.
    """
    stability = site.about.stability
    where = site.where("stability")
    if stability == "unverified":
        raise UsageError(
            f"{where} is unverified: nobody has held its values against the cluster; an admin "
            f"completes them in /etc/hpctrain/sites/{site.name}.toml, with stability = "
            f'"local" (`hpctrain sites show {site.name} --origin` has what is there)'
        )
    if stability == "base":
        raise UsageError(
            f"{where} is a base for other presets, not a cluster; write a preset that has "
            f'extends = "{site.name}", or see `hpctrain sites list`'
        )


class _PresetFinder:
    """Reads sites' files by name from the layers."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.folders = layers(environ)

    def files_of(self, name: str) -> list[SiteFileValues]:
        """The layers' files of that name, lowest first."""
        if Path(name).name != name or not name:
            return []
        values: list[SiteFileValues] = []
        for layer, folder in self.folders:
            site_file = _read(folder / f"{name}.toml", layer, name)
            values += [site_file] if site_file else []
        return values

    def given(self, path: Path) -> list[SiteFileValues]:
        """A file that was named by its path; its folder is a layer of bases."""
        path = path.absolute()
        if path.parent not in [folder for _, folder in self.folders]:
            self.folders.append((GIVEN, path.parent))
        site_file = _read(path, GIVEN, None)
        if site_file is None:
            raise NotFound(f"{path} is not there; check the path")
        return [site_file]

    def bases(self, own: list[SiteFileValues], chain: list[str]) -> list[SiteFileValues]:
        """The files of what the highest of some files of one preset extends, lowest first."""
        leaf = next((s.leaves["extends",] for s in reversed(own) if s.text("extends")), None)
        if leaf is None:
            return []
        where = f"site {own[0].name} ({leaf.place})"
        if leaf.value in chain:
            circle = " -> ".join([*chain, leaf.value])
            hint = "" if len(chain) > 1 else "; a file is laid on lower ones of its name by itself"
            raise UsageError(f"{where}: extends goes in a circle: {circle}{hint}; take one out")
        preset_files = self.files_of(leaf.value)
        if not preset_files:
            raise UsageError(f"{where}: extends: {self.missing(leaf.value)}")
        return [*self.bases(preset_files, [*chain, leaf.value]), *preset_files]

    def missing(self, name: str) -> NotFound:
        """The error for a name that no layer has."""
        names = site_names(self.environ)
        hint = did_you_mean(name, names, f"there are: {', '.join(names) or 'none'}")
        folders = ", ".join(str(folder) for _, folder in reversed(self.folders))
        return NotFound(f'there is no site "{name}"; {hint} (looked in {folders})')


def _read(path: Path, layer: str, name: str | None) -> SiteFileValues | None:
    """One file's values; None where there is no such file.

    `name` is what it must call itself; one that was named by its path (None) may have any.
    """
    try:
        file = read_toml(path)
    except NotFound:
        return None
    given = file.values.get("name")
    name = name or (given if isinstance(given, str) and given else path.stem)
    if not re.fullmatch(NAME, name):
        raise UsageError(f'{path}: "{name}" cannot be a site\'s name; it takes {IN_WORDS[NAME]}')
    site_file = take_apart(file, name=name, layer=layer)
    return replace(site_file, by_root=layer == PACKAGED or _is_roots(path))


def _is_roots(path: Path) -> bool:
    """Whether root has written a file: HPCTRAIN_SITE_PATH and --site can name anybody's."""
    status = path.stat()
    return status.st_uid == ROOT and not status.st_mode & stat.S_IWOTH

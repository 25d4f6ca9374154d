"""A site preset as the rest of hpctrain sees it: typed tables, and where each value stands.

Knows no files: `load.py` reads them. A `PresetFinding` says how bad something is, of which value,
and where that stands. tests/unit/site/test_site.py holds the promises.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpctrain.errors import UsageError
from hpctrain.settings.fields import keys_of, make
from hpctrain.settings.layers import Layer
from hpctrain.site import schema
from hpctrain.site.schema import Preset

if TYPE_CHECKING:
    from hpctrain.settings.spec import Spec

FORMAT = 1
"""Of what `as_plain` gives."""

PACKAGED, SYSTEM, USER, PROJECT = "packaged", "system", "user", "project"
GIVEN = "file"
"""The layer of a site that was named by its file."""
ADMINS = (PACKAGED, SYSTEM, GIVEN)
"""Layers whose [lock] counts where the file is root's. One given by its path may be a draft."""

YOUNGER = frozenset({"doctor"})
"""Tables that the presets in older runs lack."""

KeyPath = tuple[str, ...]
"""A value's place in a preset: ("env", "multi_node", "NCCL_NET"), ("description",)."""


def dotted(path: KeyPath) -> str:
    """The path as messages and [lock] have it: env.multi_node.NCCL_NET."""
    return ".".join(path)


@dataclass(frozen=True)
class PresetValue:
    """One value that stands in a file."""

    value: Any
    layer: str
    """packaged, system, user, project; "file" where the site was named by its file."""
    file: str
    line: int
    """Counted from 1; 0 where it is not known."""
    source: str = ""
    """A name of [sources], "" for none."""
    why: str = ""

    @property
    def place(self) -> str:
        """`/etc/hpctrain/sites/juniper.toml:7`."""
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class SiteFile:
    """A file that a site was read from."""

    layer: str
    path: str
    name: str
    """Of the preset in it: the site's own, or that of a base."""


class Site(Preset):
    """A cluster's settings, merged from every file that has a say."""

    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Defaults of hpctrain's own settings, section to keys, each of its setting's type."""
    leaves: dict[KeyPath, PresetValue] = field(default_factory=dict)
    """Every value that some file has, with its place; the winning file's where several have it."""
    overridden: dict[KeyPath, str] = field(default_factory=dict)
    """Locked values that a layer of the user's has changed, with the place of the change."""
    files: tuple[SiteFile, ...] = ()
    """What was read, lowest first."""

    @property
    def name(self) -> str:
        """The site's name."""
        return self.about.name

    def where(self, *path: str) -> str:
        """`site juniper (/etc/hpctrain/sites/juniper.toml:7)`.

        A table has the place of its first value; what stands in no file has the site's name only.
        """
        leaf = self.leaves.get(path)
        if leaf is None:
            below = (other for at, other in self.leaves.items() if at[: len(path)] == path)
            leaf = next(below, None) if path else None
        return f"site {self.name} ({leaf.place})" if leaf else f"site {self.name}"

    @property
    def layer(self) -> Layer:
        """The preset's [settings.*] as a layer of settings."""

        def where(section: str, key: str) -> str:
            return self.where(schema.SETTINGS, section, *([key] if key else []))

        return Layer(f"site {self.name}", self.settings, where)

    def as_plain(self) -> dict[str, Any]:
        """The whole preset as JSON values, for spec.json."""
        plain = asdict(replace(self, leaves={}, overridden={})) | {"format": FORMAT}
        plain["leaves"] = [
            {"path": list(path)} | asdict(leaf) for path, leaf in self.leaves.items()
        ]
        plain["overridden"] = [[list(path), place] for path, place in self.overridden.items()]
        plain["files"] = list(plain["files"])
        return plain

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> Site:
        """The preset that `as_plain` gave.

        Raises:
            UsageError: another version of hpctrain wrote it, with keys that this one does not know.
        """
        if plain.get("format") != FORMAT:
            raise UsageError(
                f"the preset in the run's spec.json has format {plain.get('format')}, this "
                f"hpctrain reads {FORMAT}; use the version that wrote it"
            )
        absent = YOUNGER - plain.keys()
        try:
            return replace(
                make(Site, {name: plain[name] for name in keys_of(Preset) if name not in absent}),
                settings=plain[schema.SETTINGS],
                leaves={
                    tuple(leaf.pop("path")): PresetValue(**leaf)
                    for leaf in map(dict, plain["leaves"])
                },
                overridden={tuple(path): place for path, place in plain["overridden"]},
                files=tuple(SiteFile(**file) for file in plain["files"]),
            )
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"the preset in the run's spec.json is of another version of hpctrain ({error}); "
                "submit the run anew, or use the version that wrote it"
            ) from None


@dataclass(frozen=True)
class PresetFinding:
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


def site_of(spec: Spec) -> Site | None:
    """The preset that the run was submitted with.

    Raises:
        UsageError: another version of hpctrain wrote it.
    """
    return None if spec.preset is None else Site.from_plain(spec.preset)

"""Where hpctrain's rooms lie: texts leave out the top room, so `agent.ending` is
hpctrain/node/agent/ending.py.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "hpctrain"
FLAT = frozenset({"checkpoint", "cli", "entry", "frameworks", "launch", "recipes", "submitit"})
"""Top rooms whose own name stands in a text: they hold modules, or folders of one thing."""


def top_rooms():
    """Folders and modules at the top of the package."""
    modules = (path for path in PACKAGE.glob("*.py") if not path.stem.startswith("_"))
    return sorted([*(path.parent for path in PACKAGE.glob("*/__init__.py")), *modules])


def homes():
    """Folders below which a text's names begin."""
    return [PACKAGE, *(path for path in top_rooms() if path.is_dir() and path.name not in FLAT)]


def inner_rooms():
    """Folders and modules inside the top rooms that are not flat."""
    return sorted(
        path
        for top in homes()[1:]
        for path in top.iterdir()
        if (path / "__init__.py").exists() or (path.suffix == ".py" and path.stem != "__init__")
    )


def dotted(path):
    """A module's or folder's name for `import`."""
    return ".".join(["hpctrain", *path.relative_to(PACKAGE).with_suffix("").parts])


def short(path):
    """A path below the package as texts name it."""
    parts = path.relative_to(PACKAGE).parts
    return Path(*(parts if parts[0] in FLAT or len(parts) == 1 else parts[1:]))


def find(name):
    """The file or folder of a name such as `agent.ending` or `agent/ending.py`; None for none."""
    parts = name.rstrip("/").split("/") if "/" in name else name.split(".")
    for home in homes():
        base = home.joinpath(*parts)
        for path in (base, base.with_name(base.name + ".py")):
            if path.exists():
                return path
    return None

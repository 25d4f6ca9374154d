"""`--engine` and `--mesh`: shorthands for the [engine] settings that are used most. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.errors import UsageError
from hpctrain.settings.check_engine import BOUNDED, axis_range
from hpctrain.settings.layers import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

EXAMPLE = "--mesh tp=4,pp=2"


def parse_mesh(text: str) -> dict[str, str]:
    """Axis to its bounds, from "AXIS=N[,AXIS=N...]".

    Raises:
        UsageError: not of that form, no such axis, one that is named twice, or no number of ranks.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        axis, equals, value = (piece.strip() for piece in part.partition("="))
        where = f"--mesh {text}"
        if axis in {"dp", "dp_shard"}:
            raise UsageError(
                f"{where}: data-parallel ranks take what the other axes leave; name only "
                f"{', '.join(BOUNDED)}"
            )
        if axis not in BOUNDED:
            near = nearest(axis, BOUNDED)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(BOUNDED)}"
            raise UsageError(f'{where}: "{axis}" is no axis; {hint}')
        if not equals:
            raise UsageError(f"{where}: not of the form AXIS=N[,AXIS=N...], e.g. {EXAMPLE}")
        if axis in found:
            raise UsageError(f"{where}: {axis} is given twice; keep one")
        axis_range(value, where=f"{where}: {axis}")
        found[axis] = value
    return found


def engine_flags(
    engine: str | None, mesh: Mapping[str, str] | None
) -> dict[str, tuple[str, object]]:
    """Both flags as `merge.flag_layer` takes them.

    Args:
        engine: What stood behind `--engine`; None where it was not given.
        mesh: What `parse_mesh` made of `--mesh`; None where it was not given.
    """
    flags: dict[str, tuple[str, object]] = {"engine.kind": ("--engine", engine)}
    flags |= {f"engine.{axis}": ("--mesh", value) for axis, value in (mesh or {}).items()}
    return flags

"""What the [engine] settings must be together, and their shorthands `--engine` and `--mesh`.

Before a world size is known: what depends on the number of ranks or on the model is
`plan/mesh.py`'s. Pure. tests/unit/plan/test_mesh.py holds the promises.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError
from hpctrain.settings.layers import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.settings.schema import EngineSettings, Settings

BOUNDED = ("tp", "pp", "ep", "dp_replicate")
"""Axes of the mesh that a user may bound; data-parallel sharding takes the ranks that are left."""

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
EXAMPLE = "--mesh tp=4,pp=2"


def axis_range(text: str, *, where: str) -> tuple[int, int]:
    """Fewest and most ranks of an axis, from "N" or "MIN-MAX".

    Raises:
        UsageError: another form, fewer than 1, or MAX below MIN.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f'{where} is "{text}", not a number of ranks; it takes N or MIN-MAX')
    least = int(match[1])
    most = int(match[2] or least)
    if least < 1:
        raise UsageError(f"{where} is {text}; it takes at least 1, which is not to use it")
    if most < least:
        raise UsageError(
            f"{where} is {text}, its maximum below its minimum; did you mean {most}-{least}?"
        )
    return least, most


def bounds(engine: EngineSettings, origins: Mapping[str, str] | None = None) -> dict[str, range]:
    """What each of `BOUNDED` may be.

    Raises:
        UsageError: one is no range, or it is used with an engine that has no such axis.
    """
    where = _Told(origins or {})
    ranges: dict[str, range] = {}
    for axis in BOUNDED:
        text: str = getattr(engine, axis)
        least, most = axis_range(text, where=where.of(axis))
        if least > 1 and engine.kind != "fsdp2":
            raise UsageError(
                f"{where.of(axis)} is {text}, which needs engine.kind fsdp2; it is {engine.kind}"
                f"{where.origin('kind')}: choose --engine fsdp2, or engine.{axis} 1"
            )
        ranges[axis] = range(least, most + 1)
    if ranges["ep"].start > 1 and ranges["tp"].start > 1:
        raise UsageError(
            f"{where.of('ep')} is {engine.ep} and engine.tp is {engine.tp}{where.origin('tp')}: "
            "experts cannot be spread and cut at once; set one of the two to 1"
        )
    return ranges


def check_engine(settings: Settings, origins: Mapping[str, str]) -> list[str]:
    """Refuse combinations that no world size can make work; returns what has no effect.

    Raises:
        UsageError: settings that do not go together.
    """
    engine, where = settings.engine, _Told(origins)
    bounds(engine, origins)
    if engine.exact:
        _check_exact(engine, where)
    _check_precision(settings, where)
    _check_offload(engine, where)
    if engine.offload == "nvme":
        _check_nvme(settings, where)
    _check_compile(engine, where)
    return _unused(engine, where)


def _unused(engine: EngineSettings, told: _Told) -> list[str]:
    """Settings without effect; a file that is named for nothing is refused.

    Its text, which a run keeps in the place of its path, may wait for the engine that reads it.
    """
    notes = []
    if engine.ds_config.lstrip().startswith("{") and not engine.kind.startswith("zero"):
        notes.append(f"engine.ds_config has no effect with engine.kind {engine.kind}")
    elif engine.ds_config and not engine.kind.startswith("zero"):
        raise UsageError(
            f'{told.of("ds_config")} is "{engine.ds_config}", which only zero0 to zero3 read; '
            f"engine.kind is {engine.kind}{told.origin('kind')}: leave it out, or choose "
            "--engine zero1"
        )
    if engine.nvme_path and engine.offload != "nvme":
        notes.append(f"engine.nvme_path has no effect with engine.offload {engine.offload}")
    return notes


def _check_exact(engine: EngineSettings, told: _Told) -> None:
    if engine.kind not in {"ddp", "fsdp2"}:
        raise UsageError(
            f"{told.of('exact')} is true, which needs engine.kind ddp or fsdp2; it is "
            f"{engine.kind}{told.origin('kind')}, which adds gradients in an order of its own"
        )
    for axis in ("pp", "ep", "dp_replicate"):
        text: str = getattr(engine, axis)
        if text != "1" and axis_range(text, where=told.of(axis))[1] > 1:
            raise UsageError(
                f"{told.of('exact')} is true, which needs engine.{axis} 1; it is {text}"
                f"{told.origin(axis)}: sums would be taken in another order"
            )
    least, most = axis_range(engine.tp, where=told.of("tp"))
    if least != most:
        raise UsageError(
            f"{told.of('exact')} is true, which needs one number for engine.tp; it is {engine.tp}"
            f"{told.origin('tp')}: another number would give other bits"
        )


def _check_compile(engine: EngineSettings, told: _Told) -> None:
    if engine.exact and engine.compile == "inductor":
        raise UsageError(
            f"{told.of('exact')} is true, which needs engine.compile no, eager or aot_eager; it is "
            f"inductor{told.origin('compile')}, which chooses kernels by timing them"
        )


def _check_precision(settings: Settings, told: _Told) -> None:
    """DeepSpeed 0.19.8 takes a real step when it begins: Adam's count is off by one ever after."""
    engine = settings.engine
    if engine.kind != "zero0" or engine.precision == "fp32":
        return
    if engine.precision == "auto" and settings.slurm.gpus_per_node == 0:
        return
    means = ", which means bf16 on a GPU" if engine.precision == "auto" else ""
    raise UsageError(
        f"{told.of('precision')} is {engine.precision}{means}, which trains wrong with engine.kind "
        f"zero0{told.origin('kind')} and without a word, a fault of DeepSpeed's; choose "
        "--engine zero1, or engine.precision fp32"
    )


def _check_offload(engine: EngineSettings, told: _Told) -> None:
    where = f"{told.of('offload')} is {engine.offload}"
    if engine.offload == "cpu" and engine.kind in {"ddp", "zero0"}:
        raise UsageError(
            f"{where}, which fsdp2 and zero1 to zero3 can do; engine.kind is {engine.kind}"
            f"{told.origin('kind')}"
        )


def _check_nvme(settings: Settings, told: _Told) -> None:
    """At stages 1 and 2 DeepSpeed takes host memory instead, without a word."""
    engine = settings.engine
    if engine.kind != "zero3":
        raise UsageError(
            f"{told.of('offload')} is nvme, which zero3 alone can do; engine.kind is {engine.kind}"
            f"{told.origin('kind')}: choose --engine zero3, or engine.offload cpu"
        )
    if not engine.nvme_path:
        raise UsageError(
            f"{told.of('offload')} is nvme, and engine.nvme_path is empty: set it to a folder on "
            "each node's own disk"
        )
    if engine.nvme_path[0] not in "/$":
        raise UsageError(
            f"{told.of('nvme_path')} is {engine.nvme_path}, which is no absolute path: the nodes "
            "would look for it where the job happens to start"
        )
    if settings.checkpoint.mode != "sync":
        raise UsageError(
            f"{told.of('offload')} is nvme, and checkpoint.mode is {settings.checkpoint.mode}, "
            "which copies that state into host memory: set checkpoint.mode sync"
        )


class _Told:
    """How engine settings and where they came from are told."""

    def __init__(self, origins: Mapping[str, str]) -> None:
        self._origins = origins

    def origin(self, key: str) -> str:
        """Where its value came from, in brackets."""
        return f" ({self._origin(key)})" if self._origins else ""

    def of(self, key: str) -> str:
        """Its name, behind where its value came from."""
        return f"{self._origin(key)}: engine.{key}" if self._origins else f"engine.{key}"

    def _origin(self, key: str) -> str:
        return self._origins.get(f"engine.{key}", "default")


def parse_mesh(text: str) -> dict[str, str]:
    """Axis to its bounds, from "AXIS=N[,AXIS=N...]".

    Raises:
        UsageError: not of that form, no such axis, one that is named twice, or no number of ranks.
    """
    axes: dict[str, str] = {}
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
        if axis in axes:
            raise UsageError(f"{where}: {axis} is given twice; keep one")
        axis_range(value, where=f"{where}: {axis}")
        axes[axis] = value
    return axes


def engine_flags(
    engine: str | None, mesh: Mapping[str, str] | None
) -> dict[str, tuple[str, object]]:
    """Both flags as `layers.flag_layer` takes them.

    Args:
        engine: What stood behind `--engine`; None where it was not given.
        mesh: What `parse_mesh` made of `--mesh`; None where it was not given.
    """
    flags: dict[str, tuple[str, object]] = {"engine.kind": ("--engine", engine)}
    flags |= {f"engine.{axis}": ("--mesh", value) for axis, value in (mesh or {}).items()}
    return flags

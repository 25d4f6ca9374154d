"""What a mesh asks of the way a step is cut, before there is an engine to say so. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.data.batches import ANY_PASSES, Passes

if TYPE_CHECKING:
    from hpctrain.base.mesh import Mesh
    from hpctrain.settings.schema import EngineSettings


def passes_of(engine: EngineSettings, mesh: Mesh) -> Passes:
    """The same as `Engine.passes` will be.

    Args:
        engine: Kind and schedule.
        mesh: The ranks.
    """
    if mesh.pp > 1:
        if engine.pp_schedule == "interleaved":
            return Passes(equal=True, at_least=mesh.pp, multiple_of=mesh.pp)
        return Passes(equal=True, at_least=mesh.pp if engine.pp_schedule == "1f1b" else 1)
    return Passes(leaves=True, equal=True) if engine.exact else ANY_PASSES

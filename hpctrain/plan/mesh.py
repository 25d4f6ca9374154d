"""Which mesh so many ranks make, within what the user allows. Pure.

tests/unit/test_mesh.py holds the promises.
"""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING

from hpctrain.base.mesh import Mesh
from hpctrain.base.text import count, in_nodes, one_of
from hpctrain.errors import UsageError
from hpctrain.plan.shape import divisors, misfit
from hpctrain.settings.check_engine import bounds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hpctrain.plan.shape import ModelShape
    from hpctrain.settings.schema import EngineSettings

NEAREST_WITHIN = 4096
"""Other numbers of nodes that are tried, to name the nearest ones that have a mesh."""


def plan_mesh(
    engine: EngineSettings,
    world_size: int,
    ranks_per_node: int,
    *,
    shape: ModelShape | None = None,
    origins: Mapping[str, str] | None = None,
) -> Mesh:
    """The mesh of so many ranks, within the settings' bounds; the same wherever it is asked for.

    Of several it is the one with the smallest pp, then the smallest tp, dp_replicate and ep: what
    the user allowed at least, since each of these costs more than plain sharding, which takes the
    ranks that are left. The ranks of a tp group lie in one node.

    Args:
        engine: Kind and bounds.
        world_size: All ranks.
        ranks_per_node: How many of them are on each node.
        shape: Of the model, where it is known: then its numbers are divided without a rest.
        origins: Where settings came from, for messages.

    Raises:
        UsageError: the bounds leave no mesh; with the nearest numbers of nodes that have one.
    """
    planner = Planner(engine, ranks_per_node, shape, origins or {})
    planner.check()
    mesh = planner.find(world_size)
    if mesh is None:
        raise UsageError(planner.refusal(world_size))
    return mesh


class Planner:
    """Finds meshes for one set of bounds.

    Attributes:
        limits: What each bounded axis may be.

    Raises:
        UsageError: a bound is no range, or goes with another engine.
    """

    def __init__(
        self,
        engine: EngineSettings,
        ranks_per_node: int,
        shape: ModelShape | None = None,
        origins: Mapping[str, str] | None = None,
    ) -> None:
        self.engine = engine
        self.ranks_per_node = ranks_per_node
        self.shape = shape
        self.origins = origins or {}
        self.limits = bounds(engine, origins)

    def check(self) -> None:
        """Refuse what no number of nodes can mend.

        Raises:
            UsageError: the model cannot be cut so, or a tp group does not fit into a node.
        """
        if self.engine.kind != "fsdp2":
            return
        for axis, limit in self.limits.items():
            if not any(self._fits(axis, ranks) for ranks in limit[: self._most_parts]):
                assert self.shape is not None  # noqa: S101 - without one everything fits
                why = misfit(axis, limit.start, self.engine, self.shape)
                raise UsageError(f"{self._told(axis)} {why}")
        ranks = self.ranks_per_node
        inside = [n for n in divisors(ranks) if self._cuts("tp", n)]
        if not any(n in self.limits["tp"] for n in inside):
            multiple = self.limits["tp"].start
            raise UsageError(
                f"{self._told('tp')} does not divide the {count(ranks, 'rank')} of a node, in "
                f"which its ranks must lie; use {one_of(inside)}, or a multiple of {multiple} "
                "ranks per node"
            )

    def find(self, world_size: int) -> Mesh | None:
        """The mesh of so many ranks; None without one."""
        if self.engine.kind == "ddp":
            return Mesh(dp_replicate=world_size)
        if self.engine.kind != "fsdp2":
            return Mesh(dp_shard=world_size)
        return next(self._meshes(world_size), None)

    def _meshes(self, world_size: int) -> Iterator[Mesh]:
        """All meshes, in the order of preference."""
        for pp in self._sizes("pp", world_size):
            for tp in self._sizes("tp", world_size // pp):
                if world_size > self.ranks_per_node and self.ranks_per_node % tp:
                    continue
                for copies in self._sizes("dp_replicate", world_size // pp // tp):
                    shard = world_size // pp // tp // copies
                    for ep in self._sizes("ep", shard):
                        mesh = Mesh(pp, copies, shard, tp, ep)
                        if not (ep > 1 and tp > 1) and self._spreads(mesh):
                            yield mesh

    def _sizes(self, axis: str, ranks: int) -> list[int]:
        return [n for n in divisors(ranks) if self._fits(axis, n)]

    def _fits(self, axis: str, ranks: int) -> bool:
        return ranks in self.limits[axis] and self._cuts(axis, ranks)

    def _cuts(self, axis: str, ranks: int) -> bool:
        return self.shape is None or not misfit(axis, ranks, self.engine, self.shape)

    def _spreads(self, mesh: Mesh) -> bool:
        """Whether the ranks that have the same experts can cut each of them evenly."""
        parts = mesh.dp_shard // mesh.ep
        if self.shape is None or mesh.ep == 1:
            return True
        return self.shape.dim % parts == 0 or self.shape.hidden % parts == 0

    @property
    def _most_parts(self) -> int:
        """More than this a model cannot be cut into along any axis."""
        shape = self.shape
        return 1 if shape is None else max(1, shape.heads, shape.layers, shape.experts)

    # ---- what to say where there is none

    def refusal(self, world_size: int) -> str:
        """Why there is no mesh of so many ranks, and what to do."""
        nodes, rest = divmod(world_size, self.ranks_per_node)
        if rest:
            return self.why_not(world_size, count(world_size, "rank"))
        near = self.nearest(nodes)
        instead = f"use {in_nodes(near)}" if near else "set other bounds"
        told = f"{in_nodes([nodes])} x {count(self.ranks_per_node, 'rank')}"
        return f"{self.why_not(world_size, told)}: {instead}"

    def why_not(self, world_size: int, told: str) -> str:
        """Why there is no mesh of so many ranks.

        Args:
            world_size: All ranks.
            told: The same as a user knows them, e.g. "3 nodes x 4 ranks".
        """
        names = self.names()
        multiple = prod(limit.start for limit in self.limits.values())
        is_fixed = all(len(limit) == 1 for limit in self.limits.values())
        if is_fixed and world_size % multiple:
            verb = "is" if world_size == 1 else "are"
            needed = count(multiple, "rank")
            return f"{names} needs a multiple of {needed}; {told} {verb} {world_size}"
        why = f"{names} leaves no mesh of {count(world_size, 'rank')} ({told})"
        if self.shape is not None and self.limits["ep"].start > 1 and not world_size % multiple:
            why += f", since the ranks with the same experts must divide train.dim {self.shape.dim}"
        return why

    def names(self) -> str:
        """The bounds that are in use, and where they came from."""
        used = [axis for axis, limit in self.limits.items() if limit != range(1, 2)]
        names = " x ".join(f"engine.{axis} {getattr(self.engine, axis)}" for axis in used)
        origins = dict.fromkeys(self.origins.get(f"engine.{axis}", "default") for axis in used)
        places = [origin for origin in origins if origin != "default"]
        return f"{names} ({', '.join(places)})" if places else names

    def wider(self) -> str:
        """A flag with more room for the axis that asks for most."""
        axis, limit = max(self.limits.items(), key=lambda item: item[1].start)
        return f"--mesh {axis}=1-{limit.stop - 1}"

    def nearest(self, nodes: int) -> list[int]:
        """The next lower and the next higher number of nodes with a mesh, as far as there are."""
        step = self._step()
        # Experts must be cut evenly besides, which some multiples of the smallest mesh do not do.
        has_gaps = self.shape is not None and self.limits["ep"].stop > 2  # noqa: PLR2004 - ep above 1
        reach = NEAREST_WITHIN if has_gaps else min(step, NEAREST_WITHIN)
        below = next((n for n in range(nodes - 1, max(0, nodes - 1 - reach), -1) if self.at(n)), 0)
        above = next((n for n in range(nodes + 1, nodes + 1 + reach) if self.at(n)), 0)
        if step > reach:  # so far apart that the nearest are multiples of the smallest mesh
            below, above = below or nodes // step * step, above or -(-nodes // step) * step
        return [n for n in (below, above) if n and self.at(n)]

    def at(self, nodes: int) -> Mesh | None:
        """The mesh on so many nodes; None without one."""
        return self.find(nodes * self.ranks_per_node)

    def _step(self) -> int:
        """Every multiple of so many nodes has room for the smallest mesh."""
        smallest = 1
        for axis, limit in self.limits.items():
            sizes = divisors(self.ranks_per_node) if axis == "tp" else limit[: self._most_parts]
            smallest *= next((n for n in sizes if self._fits(axis, n)), limit.start)
        return smallest // gcd(smallest, self.ranks_per_node)

    def _told(self, axis: str) -> str:
        origin = self.origins.get(f"engine.{axis}", "default")
        where = "" if origin == "default" else f" ({origin})"
        return f"engine.{axis} {getattr(self.engine, axis)}{where}"

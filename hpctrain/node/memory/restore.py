"""Going on from the copies in the nodes' memory: which step, and where its bytes are.

Collective on the ranks' own exchange, before any weight is touched: each node's first rank asks its
replica server, rank 0 chooses, and puts together what a checkpoint's manifest and chunk table would
say. tests/engines/test_memory.py holds the promises.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.format import index
from hpctrain.checkpoint.format.manifest import step_name
from hpctrain.checkpoint.format.reader import CheckpointSource
from hpctrain.checkpoint.format.shard import rank_of
from hpctrain.checkpoint.store.find import FoundCheckpoint
from hpctrain.core.testing import points
from hpctrain.core.world import broadcast, gather, gather_on_0, one_line
from hpctrain.errors import HpctrainError, TornCheckpoint
from hpctrain.node.memory.copy_plan import joined
from hpctrain.node.memory.replica_client import ReplicaServerLost
from hpctrain.node.memory.slots import Inventory, choose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.checkpoint.format.index import ChunkIndex
    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.core.world import World
    from hpctrain.node.memory.replica_client import ReplicaClient
    from hpctrain.node.memory.slots import Mark, PeerAddress

log = logging.getLogger("hpctrain.checkpoint")

PLACE = Path("memory")
"""In messages: where a copy lies, as a checkpoint's folder."""


class NodesCopies:
    """The copies of all nodes, as `checkpoint.tensors.restore` reads them.

    Attributes:
        mark: Of the copy that was looked at last; None before.
        kept_by: Where that lies, as `slots.CopyChoice` says it.
    """

    def __init__(self, world: World, line: ReplicaClient | None) -> None:
        """Look at nothing yet; `line` is None if this node's replica server is lost."""
        self.mark: Mark | None = None
        self.kept_by = ""
        self._world, self._line = world, line
        self._table = b""
        self._addresses: dict[int, list[PeerAddress]] = {}

    def find(self, least_step: int) -> Iterator[FoundCheckpoint]:
        """See `checkpoint.tensors.restore.CopiesInMemory`. Collective."""
        inventories = gather(self._world, self._inventory())
        for choice in choose(inventories, least_step):
            self.mark, self.kept_by = choice.mark, choice.kept_by
            self._addresses = choice.addresses
            candidate = self._look(choice.mark, choice.world_size)
            if candidate is not None:
                yield candidate
        self.mark = None

    def source(self, candidate: FoundCheckpoint) -> CheckpointSource:
        """See `checkpoint.tensors.restore.CopiesInMemory`."""
        manifest = candidate.manifest
        if manifest is None:
            raise TornCheckpoint(candidate.problem or "manifest is missing")
        chunks = self.chunks(manifest)
        return CheckpointSource(candidate.path, manifest, chunks, descriptor=self.open_file)

    def chunks(self, manifest: Manifest) -> ChunkIndex:
        """The chunk table of the copy that was looked at last.

        Raises:
            TornCheckpoint: it is another's.
        """
        return index.parse(self._table, manifest)

    def _inventory(self) -> Inventory:
        if self._line is None or not self._line.is_first:
            return Inventory()
        try:
            return self._line.held()
        except ReplicaServerLost:
            return Inventory()

    def _look(self, mark: Mark, world_size: int) -> FoundCheckpoint | None:
        """What a checkpoint of this step would say; None where its facts are not whole."""
        answers = gather_on_0(self._world, self._facts(mark, world_size))
        said: tuple[Manifest, bytes] | None = None
        if self._world.rank == 0:
            facts: dict[int, list[Any]] = {}
            for answer in answers:
                facts |= answer
            said = _joined_or_none(facts, world_size)
        said = broadcast(self._world, said)
        if said is None:
            return None
        manifest, self._table = said
        return FoundCheckpoint(mark.step, PLACE / step_name(mark.step), manifest, None)

    def _facts(self, mark: Mark, world_size: int) -> dict[int, list[Any]]:
        if self._line is None or not self._line.is_first:
            return {}
        try:
            return self._line.facts(mark, range(world_size))
        except ReplicaServerLost:
            return {}

    def open_file(self, path: Path) -> int:
        """A copy's memory as a file, which the caller closes. Not collective.

        Raises:
            TornCheckpoint: it cannot be had here.
        """
        if self._line is None or self.mark is None:
            raise TornCheckpoint(f"{path.name} is not in the memory of this node")
        points.reach("memory.open", step=self.mark.step)
        rank = rank_of(path.name)
        try:
            handle = self._line.open(self.mark, rank, self._addresses.get(rank, []))
        except ReplicaServerLost as error:
            raise TornCheckpoint(f"{path.name} cannot be had: {error}") from error
        if handle is None:
            raise TornCheckpoint(f"{path.name} cannot be had whole from any node's memory")
        return handle


def _joined_or_none(facts: dict[int, list[Any]], world_size: int) -> tuple[Manifest, bytes] | None:
    """What all copies say together; nothing where one has gone, or they do not fit together."""
    if set(facts) != set(range(world_size)):
        return None
    try:
        return joined(facts)
    except (HpctrainError, KeyError, TypeError, ValueError) as error:
        log.warning("copies in memory: %s", one_line(error))
        return None

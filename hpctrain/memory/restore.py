"""Going on from the copies in the nodes' memory: which step, and where its bytes are.

Collective on the ranks' own exchange, before any weight is touched: each node's first rank asks its
keeper, rank 0 chooses, and puts together what a checkpoint's manifest and chunk table would say.
Bytes are read and proved by `checkpoint.format.reader`, as those of files are.
tests/engines/test_memory.py holds the promises.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.format.manifest import step_name
from hpctrain.checkpoint.format.reader import CheckpointSource
from hpctrain.checkpoint.format.shard import rank_of
from hpctrain.checkpoint.store.find import FoundCheckpoint
from hpctrain.errors import HpctrainError, TornCheckpoint
from hpctrain.memory.facts import index_of, joined
from hpctrain.memory.protocol import KeeperLost
from hpctrain.memory.slots import HeldCopy, Mark, candidates
from hpctrain.testing import points
from hpctrain.world import broadcast, gather, gather_on_0, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.memory.rank_line import KeeperLine
    from hpctrain.world import World

log = logging.getLogger("hpctrain.checkpoint")

PLACE = Path("memory")
"""In messages: where a copy lies, as a checkpoint's folder."""


class NodesCopies:
    """The copies of all nodes, as `checkpoint.tensors.restore` reads them.

    Attributes:
        mark: Of the copy that was looked at last; None before.
    """

    def __init__(self, world: World, line: KeeperLine | None) -> None:
        """Nothing is looked at.

        Args:
            world: The ranks.
            line: To this node's keeper; None where it is lost.
        """
        self.mark: Mark | None = None
        self._world, self._line = world, line
        self._table = b""

    def find(self, least_step: int) -> Iterator[FoundCheckpoint]:
        """See `checkpoint.tensors.restore.CopiesInMemory`. Collective."""
        answers = gather(self._world, self._held())
        held = [[HeldCopy(*copy) for copy in copies] for copies in answers]
        worlds = {copy.mark: copy.world_size for copies in held for copy in copies}
        for mark in candidates(held, least_step):
            self.mark = mark
            candidate = self._look(mark, worlds[mark])
            if candidate is not None:
                yield candidate
        self.mark = None

    def source(self, candidate: FoundCheckpoint) -> CheckpointSource:
        """See `checkpoint.tensors.restore.CopiesInMemory`."""
        if candidate.manifest is None:
            raise TornCheckpoint(candidate.problem or "manifest is missing")
        chunks = index_of(candidate.manifest, self._table)
        return CheckpointSource(candidate.path, candidate.manifest, chunks, descriptor=self._open)

    def _held(self) -> list[HeldCopy]:
        if self._line is None or not self._line.is_first:
            return []
        try:
            return self._line.held()[0]
        except KeeperLost:
            return []

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
        except KeeperLost:
            return {}

    def _open(self, path: Path) -> int:
        """A copy's memory as a file.

        Raises:
            TornCheckpoint: it cannot be had here.
        """
        if self._line is None or self.mark is None:
            raise TornCheckpoint(f"{path.name} is not in the memory of this node")
        points.reach("memory.open", step=self.mark.step)
        try:
            handle = self._line.open(self.mark, rank_of(path.name))
        except KeeperLost as error:
            raise TornCheckpoint(f"{path.name} cannot be had: {error}") from error
        if handle is None:
            raise TornCheckpoint(f"{path.name} is not in the memory of this node")
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

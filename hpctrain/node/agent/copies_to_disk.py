"""Copies in memory written to disk, where their job is to end by a node's loss.

A requeued job has new agents, whose memory is empty: without this it would begin at the newest
checkpoint, though the nodes that are left hold a newer step whole.
tests/unit/agent/test_copies_to_disk.py holds the promises.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.format.shard import file_name
from hpctrain.checkpoint.store import commit, find
from hpctrain.core.base import clock
from hpctrain.errors import HpctrainError
from hpctrain.ledger.run.event_types import CheckpointSaved
from hpctrain.node.memory.copy_plan import parts_of
from hpctrain.node.memory.slots import HeldCopy, Inventory, Mark, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.node.agent.rendezvous import SignedStore
    from hpctrain.node.memory.replica_client import ReplicaClient

log = logging.getLogger("hpctrain.agent")

HELD_S = 10.0
"""So long may the agents take to say what they have."""
ORDER_S = 60.0
"""And node 0 to say who writes what."""
POLL_S = 0.1
PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class CopySaver:
    """One node's part in writing copies to disk.

    Attributes:
        attempt: Whose copies they are; only the newest one's are committed.
        place: This node's place in the round.
        living: The places of the nodes that are left.
        line: To this node's replica server; None if it is lost.
        why_not: Node 0: why to give up, or ""; called repeatedly.
    """

    run: RunDir
    attempt: Attempt
    place: int
    living: Sequence[int]
    line: ReplicaClient | None
    store: SignedStore
    key: Callable[[str], str]
    why_not: Callable[[], str] = lambda: ""

    def save(self) -> CheckpointSaved | None:
        """Take part, on all agents left; on node 0, return what was committed, if anything."""
        try:
            return self._save()
        except (HpctrainError, OSError, TimeoutError) as error:
            log.warning("copies in memory were not written to disk: %s", error)
        return None

    def _save(self) -> CheckpointSaved | None:
        began = clock.monotonic()
        self.store.set(self.key(f"copies/held/{self.place}"), self._held())
        if self.place == 0:
            self.store.set(self.key("copies/order"), self._order_or_none())
        order = self.store.wait(self.key("copies/order"), ORDER_S)
        if not order:
            return None
        self.store.set(self.key(f"copies/written/{self.place}"), self._write(order))
        return self._commit(order, began) if self.place == 0 else None

    def _held(self) -> list[Any]:
        if self.line is None:
            return [[], []]
        held = self.line.held()
        return [held.own, held.guests]

    # ---- node 0

    def _order_or_none(self) -> dict[str, Any]:
        """The others must not wait for an order that never comes."""
        try:
            return self._order()
        except (HpctrainError, OSError) as error:
            log.warning("copies in memory were not written to disk: %s", error)
            return {}

    def _order(self) -> dict[str, Any]:
        """Who writes what, and where; nothing where the disk has as much."""
        held = self._heard("held", HELD_S)
        on_disk = find.steps(self.run)
        inventories = [Inventory(*held.get(place, ())) for place in range(max(held) + 1)]
        choices = choose(inventories, 1 + on_disk[0] if on_disk else 1)
        if not choices:
            return {}
        mark = choices[0].mark
        staged = commit.stage(self.run, mark.step, self.attempt)
        shares = writers(inventories, mark, choices[0].world_size)
        return {"mark": mark, "folder": str(staged), "shares": shares}

    def _commit(self, order: dict[str, Any], began: float) -> CheckpointSaved:
        staged = Path(order["folder"])
        try:
            manifest, parts = parts_of(self._written(order))
            commit.write_table(staged, manifest, parts)
            path = commit.publish(self.run, staged, manifest, self.attempt)
        except (HpctrainError, OSError):
            commit.discard(staged)
            raise
        seconds = round(clock.monotonic() - began, 3)
        log.warning("step %d was written to disk from memory", manifest.step)
        return CheckpointSaved(
            step=manifest.step,
            bytes=manifest.size,
            seconds=seconds,
            stall_s=0.0,
            mode="memory",
            checkpoint=path.name,
        )

    def _written(self, order: dict[str, Any]) -> dict[int, list[Any]]:
        """Return all replica servers' reports of written parts, by rank; raise if one failed."""
        written = self._heard("written", float("inf"), places=list(map(int, order["shares"])))
        if bad := [
            f"node {place} of the round: {s['why']}" for place, s in written.items() if s["why"]
        ]:
            raise HpctrainError(bad[0])
        return {int(rank): fact for s in written.values() for rank, fact in s["facts"].items()}

    def _heard(self, what: str, wait_s: float, places: Sequence[int] = ()) -> dict[int, Any]:
        """Return agents' reports by place, without silent ones; raise HpctrainError to give up."""
        deadline = clock.monotonic() + wait_s
        awaited = set(places or self.living)
        heard: dict[int, Any] = {}
        while awaited and clock.monotonic() < deadline:
            if why := self.why_not():
                raise HpctrainError(why)
            for place in sorted(awaited):
                said = self.store.get(self.key(f"copies/{what}/{place}"))
                if said is not None:
                    heard[place] = said
            awaited -= set(heard)
            if awaited:
                clock.sleep(POLL_S)
        return heard

    # ---- all

    def _write(self, order: dict[str, Any]) -> dict[str, Any]:
        """Write this node's share; what the replica server says of it, or why it could not be."""
        ranks, mark = order["shares"].get(str(self.place), []), Mark(*order["mark"])
        if not ranks or self.line is None:
            return {"why": "", "facts": {}}
        try:
            facts = self.line.facts(mark, ranks)
            for rank in ranks:
                self._write_one(Path(order["folder"]) / file_name(rank), mark, rank, facts[rank][0])
        except (HpctrainError, OSError, KeyError) as error:
            return {"why": f"{type(error).__name__}: {error}", "facts": {}}
        return {"why": "", "facts": facts}

    def _write_one(self, path: Path, mark: Mark, rank: int, size: int) -> None:
        handle = self.line.open(mark, rank) if self.line is not None else None
        if handle is None:
            raise HpctrainError(f"the copy of rank {rank} is gone")
        try:
            with path.open("xb") as file:
                done = 0
                while done < size:
                    done += os.sendfile(file.fileno(), handle, done, min(PIECE_BYTES, size - done))
                os.fsync(file.fileno())
        finally:
            os.close(handle)


def writers(inventories: Sequence[Inventory], mark: Mark, world_size: int) -> dict[str, list[int]]:
    """Return which place writes which ranks' parts: their maker, else one with a copy."""
    places: dict[int, int] = {}
    for of in ("guests", "own"):  # the latter count
        for place, node in enumerate(inventories):
            for copy in map(HeldCopy._make, getattr(node, of)):
                if copy.mark == mark and copy.world_size == world_size:
                    places[copy.rank] = place
    shares: dict[str, list[int]] = {}
    for rank in range(world_size):
        shares.setdefault(str(places[rank]), []).append(rank)
    return shares

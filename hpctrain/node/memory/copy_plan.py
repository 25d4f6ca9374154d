"""How a copy in memory lies in its slot.

tests/unit/memory/test_stock.py holds the promises.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hpctrain.checkpoint.format import shard


@dataclass(frozen=True)
class CopyPlan:
    """How a copy lies in its slot, as the rank says it.

    Attributes:
        world_size: Ranks that make copies of this step.
        rank: Whose.
        head: Bytes of the header.
        sizes: Bytes of each part, one behind the other behind the header.
        block_bytes: That one digest covers.
        facts: What the readers need beside the bytes: JSON.
    """

    world_size: int
    rank: int
    head: int
    sizes: tuple[int, ...]
    block_bytes: int
    facts: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of the whole."""
        blocks = sum(shard.blocks_of(size, self.block_bytes) for size in self.sizes)
        return self.head + sum(self.sizes) + shard.proof_bytes(blocks)

    def dump(self) -> bytes:
        """As JSON."""
        return json.dumps(vars(self), separators=(",", ":")).encode()

    @classmethod
    def parse(cls, content: bytes) -> CopyPlan:
        """What `dump` gave.

        Raises:
            ValueError: it is anything else.
        """
        raw = json.loads(content)
        try:
            plan = cls(**raw | {"sizes": tuple(raw["sizes"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"no plan of a copy: {error}") from error
        numbers = (plan.world_size, plan.rank, plan.head, plan.block_bytes, *plan.sizes)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("a plan of a copy with odd numbers")
        if not plan.block_bytes or not isinstance(plan.facts, dict):
            raise ValueError("a plan of a copy without blocks or facts")
        return plan

"""Memory in which a rank keeps what it alone has of each step, so that it outlives the rank.

A page for each rank of a node, in memory that the keeper owns. A survivor's weights are those of
all ranks where each holds the whole state; a rank's random generators are nobody else's. They are
kept here twice, in turns: the step that was done last, and the one before. What is half written
does not have the digest that is written beside it. tests/unit/memory/test_will_pages.py holds the
promises.
"""

from __future__ import annotations

import mmap
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import xxhash

if TYPE_CHECKING:
    from hpctrain.memory.copy_plan import CopyPlan

HEAD_BYTES = 4096
CELL_BYTES = 16 * 1024
CELLS = 2
PAGE_BYTES = HEAD_BYTES + CELLS * CELL_BYTES
CHANGING, STEP = range(2)
"""Words of a page: whether its rank is between an update and the end of its step; and the step that
it has come to, one higher, since fresh memory is zero."""
_FIRST_CELL, _CELL_WORDS = 8, 4
_TAG, _STATE, _DIGEST = range(3)
_MASK = 2**63 - 1


class CellState(IntEnum):
    """What a cell holds of its step.

    A rank that is killed between an update and the end of its step has not come to the latter; what
    it had ahead of the update is the same, if its program draws no random numbers in between.
    """

    AHEAD = 1
    SAME = 2
    OTHER = 3


class Cell(NamedTuple):
    """What a rank has kept of one step."""

    step: int
    state: CellState
    content: bytes


def pages_bytes(ranks: int) -> int:
    """Of the pages of so many ranks."""
    return -(-ranks * PAGE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


class WillPage:
    """A rank's page, as the rank writes it and the keeper reads it."""

    def __init__(self, memory: memoryview, local: int) -> None:
        """Nothing is read or written.

        Args:
            memory: Of all pages of the node.
            local: The rank's number on its node.
        """
        page = memory[local * PAGE_BYTES : (local + 1) * PAGE_BYTES]
        self._words = page[:HEAD_BYTES].cast("q")
        self.cells = [
            page[HEAD_BYTES + cell * CELL_BYTES : HEAD_BYTES + (cell + 1) * CELL_BYTES]
            for cell in range(CELLS)
        ]

    @property
    def is_changing(self) -> bool:
        """Whether the rank changes its weights, or has, and has not come to the end of the step."""
        return bool(self._words[CHANGING])

    @property
    def step(self) -> int:
        """The step that the rank has come to last; -1 before the first."""
        return int(self._words[STEP]) - 1

    def change(self) -> None:
        """The rank is about to change its weights."""
        self._words[CHANGING] = 1

    def come_to(self, step: int) -> None:
        """The rank has come to the end of a step."""
        self._words[STEP] = step + 1
        self._words[CHANGING] = 0

    def open_cell(self, step: int) -> memoryview:
        """The cell of a step: what is written counts from `close_cell` on, which has its digest."""
        return self.cells[step % CELLS]

    def close_cell(self, step: int, nbytes: int, state: CellState) -> None:
        """So many bytes of a step's cell are written."""
        self._words[_at(step, _DIGEST)] = _digest(self.cells[step % CELLS][:nbytes], step)
        self._words[_at(step, _STATE)] = state
        self._words[_at(step, _TAG)] = step + 1

    def state_of(self, step: int) -> CellState | None:
        """What the cell of a step holds; None where it is another's."""
        if self._words[_at(step, _TAG)] != step + 1:
            return None
        return CellState(self._words[_at(step, _STATE)])

    def settle(self, step: int) -> None:
        """What was written ahead of the update is so at the end of the step, too."""
        self._words[_at(step, _STATE)] = CellState.SAME

    def kept(self, nbytes: int) -> list[Cell]:
        """All cells that are whole, of so many bytes each."""
        kept = []
        for number, cell in enumerate(self.cells):
            step = int(self._words[_FIRST_CELL + number * _CELL_WORDS]) - 1
            if step < 0 or step % CELLS != number:
                continue
            content = bytes(cell[:nbytes])
            if _digest(content, step) == self._words[_at(step, _DIGEST)]:
                kept.append(Cell(step, CellState(self._words[_at(step, _STATE)]), content))
        return kept


def fits(plan: CopyPlan) -> bool:
    """Whether what a rank alone has goes into a cell."""
    return plan.size <= CELL_BYTES


def _digest(content: memoryview | bytes, step: int) -> int:
    """Of a step's cell: its rank may be killed between writing it and saying whose it is."""
    value: int = xxhash.xxh3_64_intdigest(content, step)
    return value & _MASK


def _at(step: int, word: int) -> int:
    return _FIRST_CELL + step % CELLS * _CELL_WORDS + word

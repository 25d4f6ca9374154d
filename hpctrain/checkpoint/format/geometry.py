"""The arithmetic of resharding: which bytes of which chunks fill a box, and who writes a replica.

`overlap` answers what a load asks: for each piece that is wanted, a region (a box of a tensor, or a
range of its row-major elements), where its bytes lie in the chunks that the table names. A
checkpoint of a thousand ranks has half a million chunks, so this is done for all of them at once,
in numpy columns.

A tensor of 4 x 6 elements, its bytes counted in elements. Two ranks stored it by rows, chunk 0 has
rows 0 and 1, chunk 1 rows 2 and 3. Wanted now is the box that begins at (1, 2), of extent (2, 3):

          chunk 0                      wanted box           where its elements lie
         0  1  2  3  4  5
         6  7 [8  9 10] 11              0  1  2             chunk 0, 8 to 10   -> 0 to 2
          chunk 1                       3  4  5             chunk 1, 2 to 4    -> 3 to 5
         0  1 [2  3  4] 5
         6  7  8  9 10 11

    per dimension:   low   = max(chunk.begin, region.begin)
                     count = min(chunk.begin + chunk.extent, region.begin + region.extent) - low
    in the chunk:    sum over dimensions of (low - chunk.begin) * strides of a box of chunk.extent
    in the region:   sum over dimensions of (low - region.begin) * strides of a box of region.extent

Here each chunk gives one row, a run. Were the tensor one chunk, the box would be one grid: counts
(2, 3), strides (6, 1) in the chunk and (3, 1) in the box, from 8 to 0.

`my_part` answers what a save asks: which part of what several ranks hold alike does this one write?
All replicas compute the same cuts from the same boxes, so nothing is exchanged.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.checkpoint.format.table import boxes_meet, place_in, row_ranges

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from hpctrain.checkpoint.format.shard import ShardPiece
    from hpctrain.checkpoint.format.table import ChunkTable

TWICE = "has elements that are in two chunks"


@dataclass(frozen=True)
class Grid:
    """Bytes as nested loops, outermost first, laid out in a chunk and in a destination.

    The innermost loop runs over neighbouring bytes on both sides. Along the loops, positions in the
    chunk ascend.

    Attributes:
        counts: Steps of each loop; of the innermost one, bytes.
        source_strides: Bytes from one step to the next in the chunk, for each loop; innermost 1.
        target_strides: The same in the destination.
        source: The first byte's position in the chunk.
        target: The first byte's position in the destination.
    """

    counts: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    source: int
    target: int

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return math.prod(self.counts)

    def before(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of its bytes lie before each of these positions of the chunk.

        `positions` and the result are in bytes, int64 of shape [positions].
        """
        left = np.maximum(positions - self.source, 0)
        passed = np.zeros(len(positions), np.int64)
        inner = self.nbytes
        inside = np.ones(len(positions), bool)
        for count, stride in zip(self.counts, self.source_strides, strict=True):
            inner //= count
            steps = np.minimum(left // stride, count)
            passed += np.where(inside, steps * inner, 0)
            inside &= steps < count  # behind the last step of a loop, all of it was counted
            left -= steps * stride
        return passed

    def part(self, low: int, high: int) -> Iterator[Grid]:
        """Its bytes [low, high), counted along the loops, as few grids."""
        for begin, counts in _lexicographic(low, high, self.counts):
            yield Grid(
                counts,
                self.source_strides,
                self.target_strides,
                self.source + dot(begin, self.source_strides),
                self.target + dot(begin, self.target_strides),
            )

    def turned(self) -> Grid:
        """The same with chunk and destination exchanged."""
        return Grid(self.counts, self.target_strides, self.source_strides, self.target, self.source)


def _grid_of(
    counts: Sequence[int],
    source_strides: Sequence[int],
    target_strides: Sequence[int],
    at: tuple[int, int],
    itemsize: int,
) -> Grid:
    """Turn loops over elements into loops over bytes; join those that continue the inner one.

    `counts` are elements, the strides bytes from one index to the next, in each dimension. `at` is
    where the box begins in the chunk and in the destination, in bytes.
    """
    loops = [(itemsize, 1, 1)]
    for count, source, target in zip(
        reversed(counts), reversed(source_strides), reversed(target_strides), strict=True
    ):
        inner = loops[-1]
        if (source, target) == (inner[0] * inner[1], inner[0] * inner[2]):
            loops[-1] = (inner[0] * count, inner[1], inner[2])
        elif count > 1:
            loops.append((count, source, target))
    sizes, sources, targets = zip(*reversed(loops), strict=True)
    return Grid(sizes, sources, targets, *at)


def _strides_of(sizes: Sequence[int], itemsize: int) -> list[int]:
    """Bytes from one index to the next in each dimension of a row-major box."""
    strides = []
    for size in reversed(sizes):
        strides.append(itemsize)
        itemsize *= size
    return strides[::-1]


def dot(index: Sequence[int], strides: Sequence[int]) -> int:
    """Where an index lies, in bytes."""
    return sum(at * stride for at, stride in zip(index, strides, strict=True))


def _lexicographic(
    low: int, high: int, counts: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Steps [low, high) of nested loops as boxes of their indices: begin, counts."""
    if low >= high:
        return
    if not counts:
        yield (), ()
        return
    inner, deeper = math.prod(counts[1:]), counts[1:]
    (first, head), (last, tail) = divmod(low, inner), divmod(high, inner)
    if first == last:
        for begin, size in _lexicographic(head, tail, deeper):
            yield (first, *begin), (1, *size)
        return
    if head:
        for begin, size in _lexicographic(head, inner, deeper):
            yield (first, *begin), (1, *size)
        first += 1
    if first < last:
        yield (first, *(0 for _ in deeper)), (last - first, *deeper)
    for begin, size in _lexicographic(0, tail, deeper):
        yield (last, *begin), (1, *size)


@dataclass(frozen=True)
class Overlap:
    """What fills the regions: runs of bytes as columns, and grids.

    Attributes:
        runs: int64 of shape [5, runs]. For each run: number of the region, the chunk table's row of
            the chunk, where the run starts in its chunk and where in the destination, and its
            length; the last three in bytes.
        grids: What is no run: region, row, and the bytes.
        problems: Why a region cannot be filled.
    """

    runs: NDArray[np.int64]
    grids: list[tuple[int, int, Grid]]
    problems: dict[int, str]


@dataclass
class _Pairs:
    """Chunks and the regions of the same tensor, all at once: numpy takes its time per call.

    `row` (in the table), `region` (its number) and `item` (bytes of an element) are [pairs].
    """

    table: ChunkTable
    regions: Sequence[ShardPiece]
    row: NDArray[np.int64]
    region: NDArray[np.int64]
    item: NDArray[np.int64]

    def of(self, chosen: NDArray[np.bool_]) -> _Pairs:
        return _Pairs(
            self.table, self.regions, self.row[chosen], self.region[chosen], self.item[chosen]
        )

    def by_region(self, attribute: str) -> NDArray[np.int64]:
        """An attribute of each pair's region, of the same length in all: [pairs, length]."""
        numbers, where = np.unique(self.region, return_inverse=True)
        values = [getattr(self.regions[number], attribute) for number in numbers.tolist()]
        return np.array(values, np.int64).reshape(len(numbers), -1)[where]


def overlap(
    table: ChunkTable, regions: Sequence[ShardPiece], tensors: NDArray[np.int64]
) -> Overlap:
    """Find what of the chunks fills each region, each of its bytes exactly once.

    No region may be empty or reach beyond its tensor. `tensors` has the number of each region's
    tensor: int64 of shape [regions].
    """
    row, region = table.rows_of_all(tensors)
    linear = np.array([wanted.flat for wanted in regions], bool)
    if table.flat.any():
        linear |= np.bincount(region, table.flat[row], len(regions)) > 0
    filled = table.nbytes[row] > 0
    row, region = row[filled], region[filled]
    pairs = _Pairs(table, regions, row, region, table.itemsize[row])
    shared = Overlap(np.zeros((5, 0), np.int64), [], {})
    dims = np.array([len(wanted.shape) for wanted in regions], np.int64)
    for count in np.unique(dims[region]).tolist():
        of_count = (dims == count)[region]
        for chosen, fill in ((~linear, _in_boxes), (linear, _in_ranges)):
            some = pairs.of(of_count & chosen[region])
            if len(some.row):
                shared = _joined(shared, fill(some))
    _require_once(shared, regions)
    return shared


def _in_boxes(pairs: _Pairs) -> Overlap:
    """Boxes for boxes; all of them have the same number of dimensions."""
    chunk_begin, sizes = pairs.table.boxes(pairs.row)
    begin, extent = pairs.by_region("begin"), pairs.by_region("extent")
    low = np.maximum(chunk_begin, begin)
    count = np.minimum(chunk_begin + sizes, begin + extent) - low
    hit = (count > 0).all(axis=1)
    pairs, low, count, sizes, extent = pairs.of(hit), low[hit], count[hit], sizes[hit], extent[hit]
    source, source_run = place_in(low - chunk_begin[hit], count, sizes)
    target, target_run = place_in(low - begin[hit], count, extent)
    run = source_run & target_run
    source, target, nbytes = (
        column * pairs.item for column in (source, target, count.prod(axis=1))
    )
    grids, problems = [], {}
    for i in np.flatnonzero(~run).tolist():
        item = int(pairs.item[i])
        strides = _strides_of(sizes[i].tolist(), item), _strides_of(extent[i].tolist(), item)
        grid = _grid_of(count[i].tolist(), *strides, (int(source[i]), int(target[i])), item)
        grids.append((int(pairs.region[i]), int(pairs.row[i]), grid))
    for number in np.unique(pairs.region[~run]).tolist():
        its_own = pairs.region == number
        if boxes_meet(low[its_own], (low + count)[its_own]):
            problems[number] = TWICE
    runs = np.stack([pairs.region, pairs.row, source, target, nbytes])
    return Overlap(runs[:, run], grids, problems)


def _in_ranges(pairs: _Pairs) -> Overlap:
    """Where chunks or regions are ranges of elements, or both."""
    first, count, is_range = row_ranges(pairs.table, pairs.row, pairs.by_region("shape"))
    numbers, where = np.unique(pairs.region, return_inverse=True)
    spans = [_span(pairs.regions[number]) for number in numbers.tolist()]
    slow = np.array([span is None for span in spans], bool)
    slow[where[~is_range]] = True
    grids: list[tuple[int, int, Grid]] = []
    problems: dict[int, str] = {}
    for number in numbers[slow].tolist():
        its_own = pairs.region == number
        region, rows = pairs.regions[number], pairs.row[its_own]
        if is_range[its_own].all():
            some, meet = _ranges_in_box(rows, first[its_own], count[its_own], region)
        elif pairs.table.flat[rows].any():
            problems[number] = "is stored as flat ranges and as boxes that are none"
            continue
        else:
            some, meet = _boxes_in_range(pairs.table, rows, region)
        grids += [(number, row, grid) for row, grid in some]
        if meet:
            problems[number] = TWICE
    ends = np.array([span or (0, 0) for span in spans], np.int64).reshape(-1, 2)[where]
    low = np.maximum(first, ends[:, 0])
    size = np.minimum(first + count, ends.sum(axis=1)) - low
    hit = (size > 0) & ~slow[where]
    item = pairs.item
    runs = np.stack(
        [pairs.region, pairs.row, (low - first) * item, (low - ends[:, 0]) * item, size * item]
    )
    return Overlap(runs[:, hit], grids, problems)


def _ranges_in_box(
    rows: NDArray[np.int64], first: NDArray[np.int64], count: NDArray[np.int64], region: ShardPiece
) -> tuple[list[tuple[int, Grid]], bool]:
    """Ranges of the tensor's elements for a box that is none, and whether two of them meet."""
    item = region.itemsize
    strides = _strides_of(region.shape, item)
    into = _strides_of(region.extent, item)
    whole = _grid_of(region.extent, strides, into, (dot(region.begin, strides), 0), item)
    low, high = whole.before(first * item), whole.before((first + count) * item)
    hit = low < high
    grids = [
        (int(rows[i]), replace(grid, source=grid.source - int(first[i]) * item))
        for i in np.flatnonzero(hit).tolist()
        for grid in whole.part(int(low[i]), int(high[i]))
    ]
    return grids, boxes_meet(low[hit][:, None], high[hit][:, None])


def _boxes_in_range(
    table: ChunkTable, rows: NDArray[np.int64], region: ShardPiece
) -> tuple[list[tuple[int, Grid]], bool]:
    """Boxes that are no ranges for a range of the tensor's elements, and whether two meet."""
    item = region.itemsize
    strides = _strides_of(region.shape, item)
    begin, extent = table.boxes(rows)
    start, end = region.begin[0] * item, (region.begin[0] + region.extent[0]) * item
    grids: list[tuple[int, Grid]] = []
    hit = []
    for i, row in enumerate(rows.tolist()):
        box = extent[i].tolist()
        at = dot(begin[i].tolist(), strides)
        whole = _grid_of(box, strides, _strides_of(box, item), (at, 0), item)
        low, high = whole.before(np.array([start, end])).tolist()
        if low < high:
            hit.append(i)
        grids += [
            (row, replace(grid.turned(), target=grid.source - start))
            for grid in whole.part(low, high)
        ]
    return grids, boxes_meet(begin[hit], (begin + extent)[hit])


def _span(region: ShardPiece) -> tuple[int, int] | None:
    """A region as a range of row-major elements; None if it is not one."""
    if region.flat:
        return region.begin[0], region.extent[0]
    box = (np.array([sizes], np.int64) for sizes in (region.begin, region.extent, region.shape))
    first, is_run = place_in(*box)
    return (int(first[0]), math.prod(region.extent)) if is_run[0] else None


def _joined(first: Overlap, other: Overlap) -> Overlap:
    return Overlap(
        np.concatenate([first.runs, other.runs], axis=1),
        first.grids + other.grids,
        first.problems | other.problems,
    )


def _require_once(shared: Overlap, regions: Sequence[ShardPiece]) -> None:
    """Note the regions of which some bytes come from two chunks, or from none.

    What no chunk covers would silently stay as it was.
    """
    order = np.lexsort((shared.runs[3], shared.runs[0]))
    region, _, _, target, nbytes = shared.runs[:, order]
    meet = (region[:-1] == region[1:]) & ((target + nbytes)[:-1] > target[1:])
    shared.problems.update(dict.fromkeys(region[:-1][meet].tolist(), TWICE))
    got = np.bincount(region, nbytes, len(regions)).astype(np.int64)
    for number, _, grid in shared.grids:
        got[number] += grid.nbytes
    sizes = [math.prod(region.extent) * region.itemsize for region in regions]
    wanted = np.array(sizes, np.int64)
    for number in np.flatnonzero(got != wanted).tolist():
        lacking = int(wanted[number] - got[number]) // regions[number].itemsize
        text = f"lacks {lacking:,} of the elements that are wanted: no chunk has them"
        shared.problems.setdefault(number, text if lacking > 0 else TWICE)


def my_part(
    pieces: Sequence[ShardPiece], replica: int, replicas: int
) -> list[tuple[int, ShardPiece]]:
    """Return the part of the pieces that one replica writes, each with its number in `pieces`.

    `pieces` are the same boxes on every replica, in the same order. The parts of all replicas make
    up the pieces.
    """
    if replicas == 1:
        return list(enumerate(pieces))
    starts = [0, *accumulate(piece.nbytes for piece in pieces)]
    low = _cut(pieces, starts, replica, replicas)
    high = _cut(pieces, starts, replica + 1, replicas)
    parts = []
    for number, piece in enumerate(pieces):
        begin, end = max(low, starts[number]), min(high, starts[number + 1])
        if begin < end:
            parts.append((number, _rows(piece, begin - starts[number], end - starts[number])))
        # An empty tensor has a name and a shape all the same.
        elif not piece.nbytes and replica == 0:
            parts.append((number, piece))
    return parts


def _cut(pieces: Sequence[ShardPiece], starts: Sequence[int], number: int, replicas: int) -> int:
    """The byte of the line at which part `number` starts, moved to the nearest row."""
    position = starts[-1] * number // replicas
    if position in {0, starts[-1]}:
        return position
    at = bisect.bisect_right(starts, position) - 1
    row = _row_bytes(pieces[at])
    return starts[at] + (position - starts[at] + row // 2) // row * row


def _row_bytes(piece: ShardPiece) -> int:
    dimension = _cut_dimension(piece)
    return piece.nbytes if dimension is None else piece.nbytes // piece.extent[dimension]


def _cut_dimension(piece: ShardPiece) -> int | None:
    """The first dimension that can be cut; those before it have extent 1."""
    return next((d for d, count in enumerate(piece.extent) if count > 1), None)


def _rows(piece: ShardPiece, low: int, high: int) -> ShardPiece:
    """The box of bytes [low, high) of a piece, which begin and end at rows."""
    dimension = _cut_dimension(piece)
    if dimension is None or (low == 0 and high == piece.nbytes):
        return piece
    row = _row_bytes(piece)
    begin, extent = list(piece.begin), list(piece.extent)
    begin[dimension] += low // row
    extent[dimension] = (high - low) // row
    return replace(piece, begin=tuple(begin), extent=tuple(extent))

"""The index of chunks: a few of thousands of files are found by where their chunks begin."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.checkpoint.format import index as indices
from hpctrain.checkpoint.format.shard import ShardPiece
from tests.support.parts import made

WAYS = 16
"""Ranks in each of two dimensions."""
SHAPE = (64, 32)


@pytest.fixture(scope="module")
def grid():
    """Index and manifest of 256 ranks: a tensor cut in both dimensions, one in the second alone."""
    ranks = []
    for rank in range(WAYS * WAYS):
        row, column = divmod(rank, WAYS)
        ranks.append(
            [
                ShardPiece("a", "F32", SHAPE, (4 * row, 2 * column), (4, 2)),
                ShardPiece("b", "F32", (2, 512), (0, 2 * rank), (2, 2)),
                ShardPiece("c", "U8", (1024,), (4 * rank,), (4,), flat=True),
                ShardPiece(f"rng.rank-{rank:05d}.torch", "U8", (3,), (0,), (3,)),
            ]
        )
    return made(ranks)


def selected(grid, name, region):
    index, manifest = grid
    number = [entry.name for entry in manifest.tensors].index(name)
    rows = index.select([region], np.array([number]))
    assert set(rows.tensor.tolist()) == {number}
    return rows.file.tolist()


def test_what_is_written_comes_back(grid):
    index, manifest = grid
    back = indices.parse(index.dump(), manifest)

    for name in indices.COLUMNS:
        assert getattr(back, name).tolist() == getattr(index, name).tolist()


def test_ranks_that_differ_in_where_they_begin_share_few_layouts(grid):
    index, manifest = grid

    assert len(index.pieces) < 12
    assert len(index.dump()) < 8_000
    assert len(manifest.files) == 257


def test_a_box_is_looked_for_in_the_dimension_that_rules_out_most(grid):
    files = selected(grid, "a", ShardPiece("", "F32", SHAPE, (8, 6), (4, 2), flat=False))

    assert 2 * WAYS + 3 in files
    assert len(files) < 5 * WAYS
    files = selected(grid, "b", ShardPiece("", "F32", (2, 512), (0, 200), (2, 2), flat=False))
    assert 100 in files
    assert len(files) < 4 * WAYS


def test_a_flat_range_is_found_by_its_elements(grid):
    files = selected(grid, "c", ShardPiece("", "U8", (1024,), (400,), (8,), flat=True))

    assert {100, 101} <= set(files)
    assert len(files) < 4 * WAYS


def test_a_ranks_own_tensors_are_found_in_its_file_alone(grid):
    region = ShardPiece("", "U8", (3,), (0,), (3,), flat=False)

    assert selected(grid, "rng.rank-00077.torch", region) == [77]

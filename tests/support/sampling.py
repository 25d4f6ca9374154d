"""A seeded sample of places, for tests of "any byte" that take long on all of them.

The seed is the commit, so each landing tries other places and a failure comes back with it;
HPCTRAIN_SEED sets another one. `make soak` tries all places (`LIMITS`).
"""

from __future__ import annotations

import os
import random
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")
SAMPLE_SIZE = 200
LIMITS = [
    pytest.param(SAMPLE_SIZE, id="sample"),
    pytest.param(None, id="all", marks=pytest.mark.soak),
]
"""For a parameter `limit`, which `sample` takes."""


def sample(places: Sequence[T], limit: int | None) -> list[T]:
    """Return `limit` of the places in their order, first and last among them; None: all."""
    if limit is None or len(places) <= limit:
        return list(places)
    inner = random.Random(seed()).sample(range(1, len(places) - 1), limit - 2)
    return [places[index] for index in sorted([0, *inner, len(places) - 1])]


def some(values: Sequence[Any], count: int) -> list[Any]:
    """Return parameters of a test: `count` of the values, by the seed; the rest in `make soak`."""
    chosen = set(random.Random(seed()).sample(range(len(values)), min(count, len(values))))
    rest = pytest.mark.soak
    return [
        pytest.param(*value, marks=() if index in chosen else rest)
        if isinstance(value, tuple)
        else pytest.param(value, marks=() if index in chosen else rest)
        for index, value in enumerate(values)
    ]


@cache
def seed() -> str:
    """Return HPCTRAIN_SEED, else the commit; "0" where there is no repository."""
    if said := os.environ.get("HPCTRAIN_SEED"):
        return said
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "0"

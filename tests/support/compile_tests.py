"""Rewrites the asserts of all tests as pytest does, into pytest's own caches, before workers start.

Each of `make check`'s workers collects all tests at once with the others, on a clean checkout: each
would rewrite all of them, 13 s of CPU. `make compiled` runs this; where pytest has changed its
caches, workers rewrite for themselves, and tests/unit/support/test_compile_tests.py fails.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from _pytest.assertion import rewrite
from _pytest.config import get_config

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

TESTS = Path(__file__).parents[1]
CHUNK = 16
"""Files that a process takes at a time."""


def cache_of(path: Path) -> Path:
    """Where pytest looks for a file that is rewritten."""
    return rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"


def compile_all(paths: Iterable[Path]) -> None:
    """Rewrite files that no cache has as they are, on all CPUs."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(_compile, sorted(paths), chunksize=CHUNK))


def _compile(path: Path) -> None:
    target = cache_of(path)
    if rewrite._read_pyc(path, target) is None:
        source_hash, code = rewrite._rewrite_test(path, _config())
        target.parent.mkdir(exist_ok=True)
        rewrite._write_pyc(SimpleNamespace(trace=print), code, source_hash, target)


@cache
def _config() -> pytest.Config:
    """The settings of this project that rewriting asks for."""
    config = get_config([str(TESTS)])
    config.parse([str(TESTS), "-p", "no:cacheprovider"])
    return config


if __name__ == "__main__":
    compile_all([*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")])

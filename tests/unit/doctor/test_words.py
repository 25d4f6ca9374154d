"""The allocator's words are taken apart: fragmentation is told from capacity."""

from __future__ import annotations

import pytest

from hpctrain.doctor.words import GpuMemory

NEW = (
    "CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 40.00 GiB of "
    "which 0 bytes is free. Process 7 has {} GiB memory in use. Of the allocated memory {} GiB is "
    "allocated by PyTorch, and {} GiB is reserved by PyTorch but unallocated."
)
OLD = (
    "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 40.00 GiB total capacity; 20.00 GiB "
    "already allocated; 0 bytes free; 39.00 GiB reserved in total by PyTorch)"
)


@pytest.mark.parametrize(
    ("asked", "others", "allocated", "unallocated", "advice"),
    [
        (2, 0, 20, 18, "expandable_segments"),
        (2, 0, 38, 1, None),
        (2, 20, 18, 1, "other processes"),
        (15, 0, 24, 1, "one block"),
    ],
)
def test_what_the_numbers_call_for_comes_first(asked, others, allocated, unallocated, advice):
    memory = GpuMemory.read(NEW.format(asked, others, allocated, unallocated))

    assert memory is not None
    assert memory.is_fragmented is (advice == "expandable_segments")
    assert ("fragmentation" in memory.words()) is memory.is_fragmented
    if advice is None:
        assert memory.advice() == ()
    else:
        assert advice in memory.advice()[0]


def test_older_wordings_tell_what_is_reserved_in_all():
    memory = GpuMemory.read(OLD)

    assert memory is not None
    assert memory.unallocated == 19 << 30
    assert memory.is_fragmented


def test_a_line_without_sizes_says_nothing():
    assert GpuMemory.read("CUDA out of memory.") is None

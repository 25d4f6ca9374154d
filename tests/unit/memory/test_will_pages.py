"""What a rank keeps of its last steps is read whole, or not at all."""

from __future__ import annotations

import pytest

from hpctrain.memory.will_pages import CELLS, CellState, WillPage, pages_bytes


@pytest.fixture
def memory():
    return memoryview(bytearray(pages_bytes(3)))


def keep(page, step, content, state=CellState.SAME):
    page.open_cell(step)[: len(content)] = content
    page.close_cell(step, len(content), state)


def test_the_last_two_steps_are_there_for_whoever_maps_the_memory(memory):
    page = WillPage(memory, 1)
    for step in (5, 6, 7):
        keep(page, step, b"rank 1, step %d" % step)
        page.come_to(step)

    kept = WillPage(memory, 1).kept(len(b"rank 1, step 7"))

    assert sorted((cell.step, cell.content) for cell in kept) == [
        (6, b"rank 1, step 6"),
        (7, b"rank 1, step 7"),
    ]
    assert WillPage(memory, 1).step == 7
    assert WillPage(memory, 0).kept(14) == WillPage(memory, 2).kept(14) == []
    assert WillPage(memory, 2).step == -1


def test_what_is_half_written_is_not_there(memory):
    page = WillPage(memory, 0)
    keep(page, 6, b"whole")
    keep(page, 7, b"whole")
    page.open_cell(8)[:4] = b"half"  # its rank is killed here

    assert [cell.step for cell in page.kept(5)] == [7]


def test_who_is_killed_before_it_says_of_which_step_a_cell_is_has_kept_neither(memory):
    page = WillPage(memory, 0)
    keep(page, 6, b"step 6")
    keep(page, 7, b"step 7")
    with pytest.raises(TypeError):
        keep(page, 8, b"step 8", "killed here")

    assert [(cell.step, cell.content) for cell in page.kept(6)] == [(7, b"step 7")]


def test_a_byte_that_has_changed_is_found(memory):
    page = WillPage(memory, 0)
    keep(page, 7, b"whole")
    page.cells[7 % CELLS][2:3] = b"O"

    assert page.kept(5) == []


def test_a_rank_is_changing_from_its_update_to_the_end_of_its_step(memory):
    page = WillPage(memory, 0)
    page.come_to(3)
    assert not page.is_changing

    page.change()
    keep(page, 4, b"ahead", CellState.AHEAD)
    assert (page.is_changing, page.step) == (True, 3)
    assert page.state_of(4) == CellState.AHEAD
    assert page.state_of(3) is None

    page.settle(4)
    page.come_to(4)
    assert (page.is_changing, page.step) == (False, 4)
    assert page.state_of(4) == CellState.SAME

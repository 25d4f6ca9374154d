from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.format import names

STEPS = st.integers(0, names.MAX_STEP)
COUNTED = st.integers(1, 10**6)
PARSERS = (names.parse_step, names.parse_staged, names.parse_set_aside, names.parse_deleting)


def test_names_are_spelled_as_the_design_says():
    assert names.step_name(1000) == "step-0000001000"
    assert names.staged_name(1000, 3) == "step-0000001000.staged-0003"
    assert names.set_aside_name(1000, 1) == "step-0000001000.set-aside-1"
    assert names.deleting_name(1000, 2) == "step-0000001000.deleting-2"


@given(STEPS, COUNTED)
def test_every_name_is_read_back_by_its_own_parser_and_by_no_other(step, number):
    written = {
        names.parse_step: (names.step_name(step), step),
        names.parse_staged: (names.staged_name(step, number), (step, number)),
        names.parse_set_aside: (names.set_aside_name(step, number), (step, number)),
        names.parse_deleting: (names.deleting_name(step, number), (step, number)),
    }

    for owner, (name, value) in written.items():
        for parse in PARSERS:
            assert parse(name) == (value if parse is owner else None)


@given(STEPS, STEPS)
def test_names_sort_as_their_steps_do(one, other):
    assert (names.step_name(one) < names.step_name(other)) == (one < other)


@pytest.mark.parametrize(
    "name",
    [
        "step-1000",
        "step-00000001000",
        "step-0000001000\n",
        "step-0000001000 ",
        " step-0000001000",
        "step-0000001000.bak",
        "step-0000001000.staged",
        "step-0000001000.staged-3",
        "step-0000001000.staged-00003",
        "step-0000001000.staged-0000",
        "step-0000001000.staged-0003\n",
        "step-0000001000.set-aside-0",
        "step-0000001000.set-aside-01",
        "step-0000001000.set-aside-",
        "step-0000001000.deleting-1.deleting-1",
        "step--000001000",
        "STEP-0000001000",
        "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0661\u0660\u0660\u0660",
        "latest",
        "",
    ],
)
def test_a_name_that_this_module_would_not_write_is_nobodys(name):
    assert [parse(name) for parse in PARSERS] == [None] * len(PARSERS)


@given(st.text(alphabet="step-0123456789.agdsil\n", max_size=40))
def test_whatever_parses_is_exactly_what_would_be_written(name):
    writers = {
        names.parse_staged: names.staged_name,
        names.parse_set_aside: names.set_aside_name,
        names.parse_deleting: names.deleting_name,
    }

    step = names.parse_step(name)
    assert step is None or names.step_name(step) == name
    for parse, write in writers.items():
        parsed = parse(name)
        assert parsed is None or write(*parsed) == name


@pytest.mark.parametrize("step", [-1, names.MAX_STEP + 1])
def test_a_step_that_has_no_name_is_refused(step):
    with pytest.raises(ValueError, match=str(step)):
        names.step_name(step)


@pytest.mark.parametrize("write", [names.staged_name, names.set_aside_name, names.deleting_name])
def test_numbers_are_counted_from_one(write):
    with pytest.raises(ValueError, match="counted from 1"):
        write(1000, 0)

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.format import manifest

STEPS = st.integers(0, manifest.MAX_STEP)
COUNTED = st.integers(1, 10**6)
PARSERS = (
    manifest.parse_step,
    manifest.parse_staged,
    manifest.parse_set_aside,
    manifest.parse_deleting,
)


def test_names_are_spelled_as_the_design_says():
    assert manifest.step_name(1000) == "step-0000001000"
    assert manifest.staged_name(1000, 3) == "step-0000001000.staged-0003"
    assert manifest.set_aside_name(1000, 1) == "step-0000001000.set-aside-1"
    assert manifest.deleting_name(1000, 2) == "step-0000001000.deleting-2"


@given(STEPS, COUNTED)
def test_every_name_is_read_back_by_its_own_parser_and_by_no_other(step, number):
    written = {
        manifest.parse_step: (manifest.step_name(step), step),
        manifest.parse_staged: (manifest.staged_name(step, number), (step, number)),
        manifest.parse_set_aside: (manifest.set_aside_name(step, number), (step, number)),
        manifest.parse_deleting: (manifest.deleting_name(step, number), (step, number)),
    }

    for owner, (name, value) in written.items():
        for parse in PARSERS:
            assert parse(name) == (value if parse is owner else None)


@given(STEPS, STEPS)
def test_names_sort_as_their_steps_do(one, other):
    assert (manifest.step_name(one) < manifest.step_name(other)) == (one < other)


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
        manifest.parse_staged: manifest.staged_name,
        manifest.parse_set_aside: manifest.set_aside_name,
        manifest.parse_deleting: manifest.deleting_name,
    }

    step = manifest.parse_step(name)
    assert step is None or manifest.step_name(step) == name
    for parse, write in writers.items():
        parsed = parse(name)
        assert parsed is None or write(*parsed) == name


@pytest.mark.parametrize("step", [-1, manifest.MAX_STEP + 1])
def test_a_step_that_has_no_name_is_refused(step):
    with pytest.raises(ValueError, match=str(step)):
        manifest.step_name(step)


@pytest.mark.parametrize(
    "write", [manifest.staged_name, manifest.set_aside_name, manifest.deleting_name]
)
def test_numbers_are_counted_from_one(write):
    with pytest.raises(ValueError, match="counted from 1"):
        write(1000, 0)

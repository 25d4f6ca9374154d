from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.format import manifest

STEPS = st.integers(0, manifest.MAX_STEP)
COUNTED = st.integers(1, 10**6)
KINDS = (manifest.STAGED, manifest.SET_ASIDE, manifest.DELETING)


def parse_all(name):
    """What each parser makes of a name."""
    return [manifest.parse_step(name), *(manifest.parse_aside(name, kind) for kind in KINDS)]


def test_names_are_spelled_as_the_design_says():
    assert manifest.step_name(1000) == "step-0000001000"
    assert manifest.aside_name(1000, manifest.STAGED, 3) == "step-0000001000.staged-0003"
    assert manifest.aside_name(1000, manifest.SET_ASIDE, 1) == "step-0000001000.set-aside-1"
    assert manifest.aside_name(1000, manifest.DELETING, 2) == "step-0000001000.deleting-2"


@given(STEPS, COUNTED)
def test_every_name_is_read_back_by_its_own_parser_and_by_no_other(step, number):
    assert parse_all(manifest.step_name(step)) == [step, None, None, None]
    for at, kind in enumerate(KINDS, start=1):
        wanted = [None] * 4
        wanted[at] = (step, number)
        assert parse_all(manifest.aside_name(step, kind, number)) == wanted


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
    assert parse_all(name) == [None] * 4


@given(st.text(alphabet="step-0123456789.agdsil\n", max_size=40))
def test_whatever_parses_is_exactly_what_would_be_written(name):
    step = manifest.parse_step(name)
    assert step is None or manifest.step_name(step) == name
    for kind in KINDS:
        parsed = manifest.parse_aside(name, kind)
        assert parsed is None or manifest.aside_name(parsed[0], kind, parsed[1]) == name


@pytest.mark.parametrize("step", [-1, manifest.MAX_STEP + 1])
def test_a_step_that_has_no_name_is_refused(step):
    with pytest.raises(ValueError, match=str(step)):
        manifest.step_name(step)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_counted_from_one(kind):
    with pytest.raises(ValueError, match="counted from 1"):
        manifest.aside_name(1000, kind, 0)

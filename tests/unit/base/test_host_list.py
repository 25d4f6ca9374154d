from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.base.host_list import expand_nodes


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1,3-4],gpu01", ["n1", "n3", "n4", "gpu01"]),
        ("cn[008-011]", ["cn008", "cn009", "cn010", "cn011"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a-b[1]-ib,c", ["a-b1-ib", "c"]),
        ("", []),
    ],
)
def test_node_lists_expand_in_order(nodelist, names):
    assert expand_nodes(nodelist) == names


@pytest.mark.parametrize("nodelist", ["n[1-3", "n1]", "n[[1]]"])
def test_node_list_with_open_brackets_is_refused(nodelist):
    with pytest.raises(ValueError, match="brackets"):
        expand_nodes(nodelist)


@given(st.lists(st.integers(0, 999), min_size=1, max_size=20, unique=True))
def test_every_listed_number_is_expanded_once(numbers):
    nodelist = f"n[{','.join(f'{n:03d}' for n in numbers)}]"

    assert expand_nodes(nodelist) == [f"n{n:03d}" for n in numbers]

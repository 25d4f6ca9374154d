"""Nodes that have reduced fast are not tried again at each requeue, and not trusted for ever."""

from __future__ import annotations

import pytest

from hpctrain.cluster.preflight import report as node_lists

NOW = 1_763_700_000.0


def test_only_nodes_that_were_all_proven_lately_are_spared(tmp_path):
    path = tmp_path / node_lists.KNOWN_GOOD_NAME
    node_lists.record_known_good(path, ["n1", "n2"], now=NOW)
    node_lists.record_known_good(path, ["n3"], now=NOW + 7200)

    half_a_day = NOW + 12 * 3600
    assert node_lists.are_known_good(path, ["n1", "n3"], now=half_a_day - 1)
    assert not node_lists.are_known_good(path, ["n1", "n4"], now=half_a_day - 1)
    assert not node_lists.are_known_good(path, ["n1", "n3"], now=half_a_day)
    assert node_lists.are_known_good(path, ["n3"], now=half_a_day)


@pytest.mark.parametrize("text", ["", '{"n1": 17', "[]", '{"n1": "soon"}'])
def test_a_list_that_is_torn_proves_nobody(tmp_path, text):
    path = tmp_path / node_lists.KNOWN_GOOD_NAME
    path.write_text(text)

    assert not node_lists.are_known_good(path, ["n1"], now=NOW)

    node_lists.record_known_good(path, ["n1"], now=NOW)
    assert node_lists.are_known_good(path, ["n1"], now=NOW)

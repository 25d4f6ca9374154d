from __future__ import annotations

from hpctrain.cluster.preflight.report import (
    bad_nodes_of_user,
    bad_nodes_path,
    excluded,
    read_bad,
    record_bad,
)
from hpctrain.ledger.run.layout import RunDir


def test_a_bad_node_is_kept_out_until_its_time_is_over(tmp_path):
    path = bad_nodes_path(RunDir(tmp_path))

    record_bad(path, {"n2": "slow"}, hours=1, now=1000.0)

    assert excluded(path, now=1000.0 + 3599) == ["n2"]
    assert excluded(path, now=1000.0 + 3600) == []
    assert read_bad(path, now=1000.0)["n2"].reason == "slow"


def test_nodes_are_added_to_those_that_are_there_and_taken_out_when_well(tmp_path):
    path = tmp_path / "list" / "bad.json"
    record_bad(path, {"n1": "a", "n2": "b"}, now=0.0)

    record_bad(path, {"n3": "c"}, well=["n1"], now=1.0)

    assert excluded(path, now=2.0) == ["n2", "n3"]


def test_lists_are_joined_and_a_torn_or_missing_one_counts_as_none(tmp_path):
    one, torn = tmp_path / "a", tmp_path / "b"
    record_bad(one, {"n1": "x"}, now=0.0)
    torn.write_text('{"nodes": {"n2"')

    assert excluded(one, torn, tmp_path / "none", now=1.0) == ["n1"]


def test_a_healthy_preflight_leaves_no_file_where_there_was_none(tmp_path):
    record_bad(tmp_path / "deep" / "list", {}, well=["n1"])

    assert list(tmp_path.iterdir()) == []


def test_the_users_list_is_the_clusters_own(tmp_path):
    env = {"HOME": "/home/u"}

    assert (
        str(bad_nodes_of_user(env, "mila")) == "/home/u/.local/state/hpctrain/mila-bad-nodes.json"
    )
    moved = bad_nodes_of_user({**env, "XDG_STATE_HOME": str(tmp_path)}, "mila")
    assert moved == tmp_path / "hpctrain" / "mila-bad-nodes.json"

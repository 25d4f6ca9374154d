"""Which nodes were found slow, in how many of the runs that they served in."""

from __future__ import annotations

from hpctrain.ledger.history.incidents import MARKERS, NodePast, node_pasts
from hpctrain.ledger.run.events import read, read_marked
from tests.support.ledger_runs import Story


def story(folder, name, *, cluster="alps"):
    return Story(folder / name).add(
        "submitted", token="t", job_id="1", cluster="local" if cluster == "local" else "slurm"
    )


def slow(told, attempt, *nodes, kind="node", by=0.2):
    return told.add("straggler", attempt, kind_of=kind, ranks=[0], nodes=list(nodes), by=by)


def pasts(*stories):
    return node_pasts((told.run.name, read(told.run)) for told in stories)


def test_a_node_is_counted_once_for_each_run_that_it_served_in_and_was_slow_in(tmp_path):
    one = story(tmp_path, "one").started(1, nodes=("n1", "n2"), slurm_cluster="alps")
    slow(one, 1, "n2", by=0.1)
    slow(one, 1, "n2", kind="rank", by=0.3)
    newest_t = one.t
    one.started(2, nodes=("n1", "n3"), slurm_cluster="alps")
    two = story(tmp_path, "two").started(1, nodes=("n2", "n3"), slurm_cluster="alps")
    slow(two, 1, "n2", by=0.2)
    three = story(tmp_path, "three").started(1, nodes=("n1", "n2"), slurm_cluster="alps")

    assert pasts(one, two, three) == [
        NodePast("alps", "n2", 3, ["one", "two"], 3, 0.3, newest_t),
        NodePast("alps", "n1", 2),
        NodePast("alps", "n3", 2),
    ]


def test_data_and_the_network_are_no_nodes_fault(tmp_path):
    told = story(tmp_path, "one").started(1, nodes=("n1", "n2"))
    slow(told, 1, "n2", kind="data")
    slow(told, 1, kind="network")
    slow(told, 1, "n1", kind="of a newer version")

    assert [(past.node, past.findings) for past in pasts(told)] == [("n1", 0), ("n2", 0)]


def test_nodes_of_two_clusters_are_two_though_they_have_one_name(tmp_path):
    one = story(tmp_path, "one").started(1, nodes=("n1",), slurm_cluster="alps")
    slow(one, 1, "n1")
    two = story(tmp_path, "two").started(1, nodes=("n1",), slurm_cluster="jura")

    found = [(past.cluster, past.node, past.slow) for past in pasts(one, two)]
    assert found == [("alps", "n1", ["one"]), ("jura", "n1", [])]


def test_a_run_that_went_on_elsewhere_counts_for_where_it_was(tmp_path):
    told = story(tmp_path, "one").started(1, nodes=("n1",), slurm_cluster="alps")
    told.started(2, nodes=("n1",), slurm_cluster="jura")
    slow(told, 1, "n1")

    found = [(past.cluster, past.served, past.findings) for past in pasts(told)]
    assert found == [("alps", 1, 1), ("jura", 1, 0)]


def test_nodes_that_are_processes_of_one_machine_are_left_out(tmp_path):
    told = story(tmp_path, "one", cluster="local").started(1, nodes=("n1", "n2"))
    slow(told, 1, "n2")

    assert pasts(told) == []


def test_who_has_not_served_was_not_slow(tmp_path):
    told = story(tmp_path, "one").started(1, nodes=("n1",))
    slow(told, 1, "n7", "n1")

    assert [(past.node, past.findings) for past in pasts(told)] == [("n1", 1)]


def test_how_much_may_not_be_told(tmp_path):
    told = story(tmp_path, "one").started(1, nodes=("n1",))
    slow(told, 1, "n1", by=None)

    (past,) = pasts(told)
    assert (past.findings, past.worst) == (1, None)


def test_the_lines_that_are_read_are_all_that_is_needed(tmp_path):
    told = story(tmp_path, "one").started(1, nodes=("n1", "n2"), slurm_cluster="alps")
    slow(told.steps(1, 1, 100), 1, "n2")
    told.add("straggler_gone", 1, ranks=[0])

    some = read_marked(told.run, *MARKERS)

    assert len(some) == 3
    assert node_pasts([("one", some)]) == pasts(told)

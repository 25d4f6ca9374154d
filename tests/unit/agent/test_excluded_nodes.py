"""A node that guards have named twice is left out from then on, and kept in the list."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hpctrain.cluster.preflight.report import bad_nodes_path, read_bad
from hpctrain.core.base.records import FailureReport, JobContext, JobFacts
from hpctrain.core.settings.schema import Settings, replaced
from hpctrain.core.settings.spec import load_spec
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.node.agent.ending import ExcludedNodes, nodes_to_exclude
from hpctrain.node.agent.loss_ending import LossEnding
from hpctrain.node.agent.rounds import RoundEnd
from tests.support.ledger_runs import all_fields

CONTEXT = JobContext("7", 1, 0, ["n1", "n2"], "n1", 20000, "")


def name(story, node="n2", kind="replicas_differ", **more):
    """A guard says that a rank of this node is the one that is wrong."""
    told = {
        "replicas_differ": {"nodes": [node], "certain": True},
        "nonfinite": {"node": node, "transient": True},
    }[kind]
    return story.add(kind, 1, step=5, **{**told, **more})


def kept_out(story, context=CONTEXT, **settings):
    history = RunHistory.read(story.run)
    return list(ExcludedNodes(story.run, replaced(Settings(), settings), context).keep_out(history))


@pytest.mark.parametrize("kind", ["replicas_differ", "nonfinite"])
def test_a_node_is_left_out_the_second_time(story, kind):
    name(story.started(1))
    assert kept_out(story) == []
    assert not bad_nodes_path(story.run).exists()
    name(story, kind=kind)
    assert kept_out(story) == ["n2"]
    (bad,) = read_bad(bad_nodes_path(story.run)).values()
    assert bad.reason.startswith("guards named it 2 times: weights unlike those of the others")
    before = bad_nodes_path(story.run).read_text()
    assert kept_out(story) == ["n2"]  # no start has left it out so far
    assert bad_nodes_path(story.run).read_text() == before
    story.add("excluded", 1, nodes=["n2"])
    assert kept_out(story) == []


@pytest.mark.parametrize(
    "doubt",
    [
        {"kind": "replicas_differ", "certain": False},
        {"kind": "nonfinite", "transient": False},
        {"kind": "nonfinite", "node": ""},
        {"node": "n1"},
    ],
)
def test_what_is_not_certain_or_another_nodes_does_not_count(story, doubt):
    name(story.started(1))
    name(story, **doubt)
    assert kept_out(story) == []


def test_a_node_that_was_left_out_begins_anew(story):
    name(name(story.started(1)))
    story.add("excluded", 1, nodes=["n2"])
    assert nodes_to_exclude(RunHistory.read(story.run), 2) == {}
    name(story)
    assert nodes_to_exclude(RunHistory.read(story.run), 2) == {}


def test_nothing_is_left_out_where_that_is_off_or_leaves_no_node(story):
    name(name(story.started(1)))
    assert kept_out(story, **{"guard.convict": 0}) == []
    assert kept_out(story, replace(CONTEXT, nodes=["n2"])) == []
    assert kept_out(story, replace(CONTEXT, on_this_machine=True)) == []
    assert kept_out(story, **{"guard.convict": 3}) == []
    assert kept_out(story) == ["n2"]


class Scheduler:
    """A job of two nodes that may run again."""

    def __init__(self):
        self.did = []

    def facts(self):
        return JobFacts("RUNNING", restarts=1)

    def requeue(self):
        self.did.append("requeue")

    def exclude(self, nodes):
        self.did.append(("without", *nodes))


AN_END = "attempt_ended"
FAILURE = FailureReport(rank=1, node="n2", kind="exception", summary="ReplicasDiverged: rank 1")


def crashed(story, times):
    """Attempt 1 has crashed after guards have named n2 so often; how it ends."""
    number = take_attempt(story.run, job_id="7", restarts=1).number
    story.run.attempt(number).mkdir(parents=True)
    story.started(number, "7").restored(number).steps(number, 1, 40).saved(number, 40)
    for _ in range(times):
        name(story)
    scheduler = Scheduler()
    return LossEnding(story.run, load_spec(story.run.spec), CONTEXT, scheduler), scheduler


NEVER_ASKED = SimpleNamespace(cause=None, is_stop_requested=lambda: False)


def excluded(story):
    return [all_fields(e)["nodes"] for e in ledger.read(story.run) if e.kind == "excluded"]


def test_the_end_of_an_attempt_has_the_job_go_on_without_it(story):
    end, scheduler = crashed(story, 2)

    assert not end.after_crash(1, FAILURE)  # its ranks would be there again
    end.conclude(1, RoundEnd("failed", failure=FAILURE), NEVER_ASKED)

    assert scheduler.did == ["requeue", ("without", "n2")]
    assert excluded(story) == [["n2"]]
    assert list(read_bad(bad_nodes_path(story.run))) == ["n2"]


def test_named_once_the_ranks_start_again_in_the_allocation(story):
    end, _ = crashed(story, 1)
    end.excluded_nodes.leave_out = lambda _bad: pytest.fail("there is none")
    assert end.after_crash(1, FAILURE)


@pytest.mark.parametrize("others_can", [True, False])
def test_the_ranks_start_again_here_where_others_can_go_on_without_it(story, others_can):
    end, scheduler = crashed(story, 2)
    asked = []
    end.excluded_nodes.leave_out = lambda bad: asked.append(dict(bad)) or others_can

    assert end.after_crash(1, FAILURE) is others_can

    assert asked == [{"n2": "guards named it 2 times: weights unlike those of the others"}]
    assert list(read_bad(bad_nodes_path(story.run))) == ["n2"]
    ends = [(e.fact.reason, e.fact.next) for e in ledger.read(story.run) if e.kind == AN_END]
    assert ends == ([("crashed", "restart")] if others_can else [])
    assert scheduler.did == []


def test_a_later_requeue_keeps_out_what_was_left_out_here(story):
    end, scheduler = crashed(story, 2)
    end.excluded_nodes.leave_out = lambda _bad: True
    assert end.after_crash(1, FAILURE)
    number = take_attempt(story.run, job_id="7", restarts=1).number
    story.started(number, "7", by="restart").restored(number).steps(number, 41, 60)

    end.conclude(number, RoundEnd("failed", failure=FAILURE), NEVER_ASKED)

    assert scheduler.did == ["requeue", ("without", "n2")]
    assert excluded(story) == [["n2"]]


def test_nodes_are_left_out_only_once_all_else_has_agreed_to_another_round(story):
    end, scheduler = crashed(story, 2)
    end.excluded_nodes.leave_out = lambda _bad: pytest.fail("none follows")
    scheduler.facts = lambda: JobFacts("RUNNING", restarts=2)  # SLURM runs the job again
    assert not end.after_crash(1, FAILURE)
    assert not end.after_loss(1, "n1 was lost")


@pytest.mark.parametrize("others_can", [True, False])
def test_a_round_that_ends_for_another_node_leaves_it_out_too_where_that_can_be(story, others_can):
    end, _ = crashed(story, 2)
    asked = []
    end.excluded_nodes.leave_out = lambda bad: asked.append(list(bad)) or others_can
    assert end.after_loss(1, "another node")
    assert asked == [["n2"]]


def test_a_node_of_an_earlier_start_keeps_no_ranks_from_starting_again_here(story):
    end, _ = crashed(story, 0)
    name(name(story, "n9"), "n9")
    assert end.after_crash(1, FAILURE)
    assert list(read_bad(bad_nodes_path(story.run))) == ["n9"]

"""A node that guards have named twice is left out of the next start, and kept in the list."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hpctrain.agent.convictions import convicted, keep_out
from hpctrain.agent.ending import AttemptEnding
from hpctrain.agent.rounds import RoundEnd
from hpctrain.base.records import FailureReport, JobContext, JobFacts
from hpctrain.history.run_history import RunHistory
from hpctrain.preflight.node_lists import bad_nodes_path, read_bad
from hpctrain.run import events as ledger
from hpctrain.run.fence import take_attempt
from hpctrain.settings.schema import Settings, replaced
from hpctrain.settings.spec import load_spec
from tests.support.ledger_runs import all_fields

CONTEXT = JobContext("7", 1, 0, ["n1", "n2"], "n1", 20000, "")


def name(story, node="n2", kind="audit_failed", **more):
    """A guard says that a rank of this node is the one that is wrong."""
    told = {
        "audit_failed": {"nodes": [node], "certain": True},
        "replicas_differ": {"nodes": [node], "certain": True},
        "nonfinite": {"node": node, "transient": True},
    }[kind]
    return story.add(kind, 1, step=5, **{**told, **more})


def kept_out(story, context=CONTEXT, **settings):
    history = RunHistory.read(story.run)
    return keep_out(story.run, history, replaced(Settings(), settings), context)


@pytest.mark.parametrize("kind", ["audit_failed", "replicas_differ", "nonfinite"])
def test_a_node_is_left_out_the_second_time(story, kind):
    name(story.started(1), kind="audit_failed")
    assert kept_out(story) == []
    assert not bad_nodes_path(story.run).exists()
    name(story, kind=kind)
    assert kept_out(story) == ["n2"]
    (bad,) = read_bad(bad_nodes_path(story.run)).values()
    assert bad.reason.startswith("guards named it 2 times: a wrong gradient")
    before = bad_nodes_path(story.run).read_text()
    assert kept_out(story) == ["n2"]  # no start has left it out so far
    assert bad_nodes_path(story.run).read_text() == before
    story.add("excluded", 1, nodes=["n2"])
    assert kept_out(story) == []


@pytest.mark.parametrize(
    "doubt",
    [
        {"kind": "audit_failed", "certain": False},
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
    assert convicted(RunHistory.read(story.run), 2) == {}
    name(story)
    assert convicted(RunHistory.read(story.run), 2) == {}


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


FAILURE = FailureReport(rank=1, node="n2", kind="exception", summary="ReplicasDiverged: rank 1")


def crashed(story, times):
    """Attempt 1 has crashed after guards have named n2 so often; how it ends."""
    number = take_attempt(story.run, job_id="7", restarts=1).number
    story.run.attempt(number).mkdir(parents=True)
    story.started(number, "7").restored(number).steps(number, 1, 40).saved(number, 40)
    for _ in range(times):
        name(story)
    scheduler = Scheduler()
    return AttemptEnding(story.run, load_spec(story.run.spec), CONTEXT, scheduler), scheduler


def test_the_end_of_an_attempt_has_the_job_go_on_without_it(story):
    end, scheduler = crashed(story, 2)
    never_asked = SimpleNamespace(cause=None, is_told_to_stop=lambda: False)

    assert not end.after_crash(1, FAILURE)  # its ranks would be there again
    end.conclude(1, RoundEnd("failed", failure=FAILURE), never_asked)

    assert scheduler.did == ["requeue", ("without", "n2")]
    (fact,) = [all_fields(e) for e in ledger.read(story.run) if e.kind == "excluded"]
    assert fact["nodes"] == ["n2"]
    assert list(read_bad(bad_nodes_path(story.run))) == ["n2"]


def test_named_once_the_ranks_start_again_in_the_allocation(story):
    end, _ = crashed(story, 1)
    assert end.after_crash(1, FAILURE)

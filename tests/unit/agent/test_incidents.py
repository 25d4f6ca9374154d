"""Who asks for it hears of what happens in the middle of an attempt, once, and of its end too."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from hpctrain.core.base.records import INCIDENT
from hpctrain.core.settings.schema import NotifySettings
from hpctrain.core.settings.spec import load_spec
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import event_types as kinds
from hpctrain.ledger.run.events import read
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.node.agent import notify, notify_child
from hpctrain.node.agent.notify import REASONS, Incidents, incident_of, wait_for
from hpctrain.node.agent.rendezvous import Loss
from tests.support.ledger_runs import Story, all_fields
from tests.unit.agent.test_loss_ending import Scheduler, ending

STANDS = "1 rank waits for rank 3"
HANG = {"kind_of": "behind", "ranks": [3], "summary": STANDS, "stood_s": 9.0, "limit_s": 8.0}
WRITE = "import sys; open('heard', 'a').write(sys.stdin.read() + chr(10))"


@pytest.fixture
def story(tmp_path):
    story = Story(tmp_path / "gpt").submitted().started(1).restored(1)
    return story.steps(1, 1, 40, loss=2.5).saved(1, 30)


@pytest.fixture
def asked(story, tmp_path, monkeypatch):
    """A function that has a command told what it is to hear; it writes `heard`."""
    monkeypatch.setattr("hpctrain.node.agent.signals.ignore_all", lambda: None)

    def ask(*on):
        path = tmp_path / "hear.py"
        path.write_text(WRITE)
        spec = load_spec(story.run.spec)
        spec.entry.cwd = str(tmp_path)
        settings = NotifySettings(command=f"{sys.executable} {path}", on=list(on), timeout_s=60)
        spec.settings = replace(spec.settings, notify=settings)
        spec.dump(story.run.spec)
        return spec.settings.notify

    return ask


def heard(tmp_path):
    path = tmp_path / "heard"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("fact", "reason", "why", "command"),
    [
        ({"hang": HANG}, "hang", f"it hangs: {STANDS}", "stacks"),
        (
            *({"hang": {**HANG, "ended": True}}, "hang"),
            *(f"it hangs: {STANDS}; its ranks were ended", "status"),
        ),
        (
            *({"ranks_awaited": {"returned": 3, "left": [1]}}, "hang_at_end"),
            *("3 ranks returned and rank 1 did not", "stacks"),
        ),
        (
            *({"desync": {"ranks": [2], "summary": "rank 2 is one call ahead"}}, "desync"),
            *("ranks are out of step: rank 2 is one call ahead", "stacks"),
        ),
        (
            *({"straggler": {"ranks": [5], "summary": "rank 5 is 21 % slower"}}, "straggler"),
            *("it is slow: rank 5 is 21 % slower", "status"),
        ),
        (
            *({"node_lost": {"node": "n5", "why": "no sign of life", "was_spare": True}},),
            *("node_lost", "spare node n5 was lost (no sign of life)", "status"),
        ),
    ],
)
def test_an_incident_is_told_in_one_line(story, fact, reason, why, command):
    for kind, fields in fact.items():
        story.add(kind, 1, **fields)

    news = incident_of(story.run, RunHistory.read(story.run), 1, reason, "n5")

    assert (news.what, news.reason, news.why) == (INCIDENT, reason, why)
    assert news.text == f"gpt: {why} (attempt 1, step 40)"
    assert news.next == f"hpctrain {command} {story.run.root}"
    assert (news.job_id, news.step, news.saved_step, news.loss) == ("17", 40, 30, 2.5)
    assert news.steps_lost is None


@pytest.mark.parametrize("reason", REASONS.values())
def test_what_is_over_before_it_could_be_told_is_no_news(story, reason):
    story.add("hang_suspected", 1, **HANG)  # half of them are a long compilation
    story.add("straggler", 1, ranks=[5], summary="slow").add("straggler_gone", 1, ranks=[5])

    assert incident_of(story.run, RunHistory.read(story.run), 1, reason, "n5") is None


def test_of_two_nodes_that_are_lost_at_once_each_is_told(story):
    story.add("node_lost", 1, node="n5", why="silent", was_spare=True)
    story.add("node_lost", 1, node="n6", why="its connection closed")

    history = RunHistory.read(story.run)
    told = [incident_of(story.run, history, 1, "node_lost", node).why for node in ("n5", "n6")]

    assert told == ["spare node n5 was lost (silent)", "node n6 was lost (its connection closed)"]


def test_one_who_asks_hears_of_an_incident_once_and_of_the_end_too(
    story, asked, tmp_path, monkeypatch
):
    settings = asked(INCIDENT, "failed")
    children = []
    start = notify.notify
    monkeypatch.setattr(
        notify, "notify", lambda *what, **more: children.append(start(*what, **more))
    )
    watch = Incidents(story.run, settings)
    story.add("hang", 1, **HANG)

    for _ in range(3):
        watch.notify(kinds.HangFound(**{**HANG, "ranks": (3,)}), 1)
    watch.notify(kinds.HangCleared(seconds=9.0), 1)
    (child,) = children
    wait_for(child, 60)

    (news,) = heard(tmp_path)
    assert (news["what"], news["reason"], news["attempt"]) == (INCIDENT, "hang", 1)
    story.ended(1, "crashed", "stop", step=40)
    notify_child.main([str(story.run.root), "1"])
    assert [news["what"] for news in heard(tmp_path)] == [INCIDENT, "failed"]
    told = [all_fields(event) for event in read(story.run) if event.kind == "notified"]
    assert told == [{"what": what, "ok": True, "why": ""} for what in (INCIDENT, "failed")]


def test_another_rank_or_another_attempt_is_told_again(story, asked, monkeypatch):
    settings, told = asked(INCIDENT), []
    monkeypatch.setattr(
        notify, "notify", lambda run, on, attempt, incident: told.append((attempt, incident))
    )
    watch = Incidents(story.run, settings)

    for attempt, rank in ((1, 5), (1, 5), (1, 6), (2, 5)):
        watch.notify(kinds.StragglerFound(ranks=(rank,)), attempt)
    for node in ("n2", "n2", "n3"):
        watch.notify(kinds.NodeLost(node=node), 2)

    slow, lost = ("straggler", ""), "node_lost"
    assert told == [(1, slow), (1, slow), (2, slow), (2, (lost, "n2")), (2, (lost, "n3"))]


def test_who_has_not_asked_for_incidents_costs_no_process(story, asked, monkeypatch):
    monkeypatch.setattr(notify, "notify", lambda *_, **__: pytest.fail("a process is started"))

    Incidents(story.run, asked("attempt", "failed")).notify(kinds.NodeLost(node="n2"), 1)


def test_a_lost_node_is_told_by_who_writes_it_down(story, asked, monkeypatch):
    asked(INCIDENT)
    told = []
    monkeypatch.setattr(notify, "notify", lambda *_, incident: told.append(incident))
    take_attempt(story.run, job_id="7", restarts=0)
    loss = Loss(2, "n3", "no sign of life", was_member=False)

    own = ending(story, Scheduler())
    own.record_loss(1, loss, ["n1", "n2"])
    own.record_loss(None, loss, ["n1", "n2"])  # before the first attempt: its end is news

    assert told == [("node_lost", "n3")]
    lost = [event.attempt for event in read(story.run) if event.kind == "node_lost"]
    assert lost == [1, None]

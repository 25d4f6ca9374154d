"""What another than an agent writes into the agents' store is not believed, and told once."""

from __future__ import annotations

import json

import pytest

from hpctrain.core.base.secret import sign
from hpctrain.node.agent.node_reports import NodeReports
from hpctrain.node.agent.rendezvous import SAY_AGAIN_S, SignedStore
from hpctrain.node.agent.rounds import AgentRound, NodeRanks


class Store(dict):
    """torch's store, as far as agents use it."""

    def set(self, key, value):
        self[key] = value.encode() if isinstance(value, str) else value

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        return self[key]

    def add(self, key, more):
        self[key] = self.get(key) + more if key in self else more
        return self[key]


@pytest.fixture
def stores():
    shared = Store()
    return shared, SignedStore(shared, "secret"), SignedStore(shared, "secret")


@pytest.mark.parametrize("value", [[], {"ending": "left", "step": None}, "here", 0, "\u20ac"])
def test_agents_hear_each_other(stores, value):
    _, one, other = stores

    one.set("round/0/news/0", value)

    assert other.get("round/0/news/0") == value
    assert other.wait("round/0/news/0", 1.0) == value
    assert other.get("round/0/news/1") is None


def test_counts_are_the_stores_own(stores):
    _, one, other = stores
    assert (one.count("reports", 1), other.count("reports", 1), one.count("reports")) == (1, 2, 2)


@pytest.mark.parametrize(
    "forged",
    [
        json.dumps({"ending": "left", "restart": False}),
        sign("another secret", "round/0/news/0", '{"ending": "left"}'),
        sign("secret", "round/1/news/0", '{"ending": "left"}'),
        "",
        b"\xff\xfe",
    ],
)
def test_a_strangers_word_counts_for_nothing_and_is_told_once(stores, capsys, forged):
    shared, one, other = stores
    shared.set("round/0/news/0", forged)

    assert [other.get("round/0/news/0") for _ in range(3)] == [None] * 3
    with pytest.raises(TimeoutError, match="no agent said round/0/news/0"):
        other.wait("round/0/news/0", 0.0)
    (told,) = capsys.readouterr().err.splitlines()
    assert "another than this run's agents has written round/0/news/0" in told

    one.set("round/0/news/0", {"ending": "killed"})
    assert other.get("round/0/news/0") == {"ending": "killed"}


@pytest.mark.parametrize("loss", ["deleted", "written over"])
def test_what_was_lost_is_said_again_and_what_stands_is_left_alone(stores, loss):
    shared, one, other = stores
    one.set("report/1", [])
    one.set("news/0", "here")
    kept = shared["news/0"]
    if loss == "deleted":
        del shared["report/1"]
    else:
        shared.set("report/1", "a stranger's")
    assert other.get("report/1") is None

    one.say_again()

    assert other.get("report/1") == []
    assert shared["news/0"] is kept


def test_who_waits_says_again_what_others_and_itself_wait_for(stores, hands):
    shared, _, other = stores
    heard = []

    def look():
        """As the agents wait: the other one for this one's word, this one for the other's."""
        if (value := other.get("attempt/0")) is not None and not heard:
            heard.append(value)
            other.set("control/1", "here")

    waits = SignedStore(shared, "secret", look)
    waits.set("attempt/0", {"number": 1})
    shared.set("attempt/0", "a stranger's, once more")

    assert waits.wait("control/1", 10.0) == "here"
    assert heard == [{"number": 1}]
    assert SAY_AGAIN_S < hands.passed_s < SAY_AGAIN_S + 1

    shared.set("attempt/0", "and again")
    assert waits.wait("attempt/0", 10.0) == {"number": 1}, "its own word"


def round_of(store, place):
    return AgentRound(0, f"n{place}", place, 2, SignedStore(store, "key"), NodeRanks([None]))


def test_a_report_that_was_written_over_is_looked_at_as_soon_as_it_is_said_again():
    store = Store()
    first, other = round_of(store, 0), round_of(store, 1)
    for one in (first, other):
        one.report([])
    store.set("round/0/report/1", b"forged")
    reports = NodeReports(first, None, 0.0)
    reports.gather()
    assert reports.nodes == {0}

    other.say_again()
    reports.gather()  # long before it would look by itself

    assert reports.nodes == {0, 1}
    before = store.add("round/0/reports", 0)
    other.say_again()
    assert store.add("round/0/reports", 0) == before, "nothing was lost, so nobody need look"

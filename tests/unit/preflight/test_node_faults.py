from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.cluster.preflight.facts import Interface, NodeFacts, changed, seconds
from hpctrain.core.testing.faults import NODE_ACTIONS, of_node, parse_node_faults
from hpctrain.errors import UsageError

PAGE = Path(__file__).parents[3] / "docs/preflight.md"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("skw:n1,seconds=1", "'skw' is no fault of a node; did you mean skew?"),
        ("skew", "the node is missing; write skew:NODE"),
        ("skew:n1", "skew needs seconds="),
        ("skew:n1,second=1", "'second' is no key of skew; did you mean seconds?"),
        ("skew:n1,seconds=x", "seconds=x is not a number"),
    ],
)
def test_a_misspelt_fault_is_one_line(text, says):
    with pytest.raises(UsageError, match="HPCTRAIN_NODE_FAULTS: ") as error:
        parse_node_faults(text)

    assert says in str(error.value)


def test_faults_are_those_of_their_node():
    text = "skew:n1,seconds=5; no-shared:n2; version:n1,of=torch,is=1.0"

    assert set(of_node(text, "n1")) == {"skew", "version"}
    assert set(of_node(text, "n3")) == set()
    assert seconds(of_node(text, "n1"), "skew") == 5.0
    assert seconds(of_node(text, "n2"), "skew") == 0.0


def test_facts_are_changed_as_the_words_say():
    facts = NodeFacts("n1", interfaces=[Interface("a", up=True), Interface("b", up=True)],
                      versions={"torch": "2.9"}, gpus=[])  # fmt: skip
    text = (
        "no-interface:n1,name=a;interface-down:n1,name=b;version:n1,of=torch,is=1;gpus:n1,count=2"
    )

    sick = changed(facts, of_node(text, "n1"))

    assert sick.interfaces == [Interface("b", up=False)]
    assert sick.versions == {"torch": "1"}
    assert len(sick.gpus) == 2
    assert changed(facts, {}) == facts


def test_the_page_has_every_word():
    text = PAGE.read_text()

    for action, (meaning, _) in NODE_ACTIONS.items():
        assert f"| `{action}` | {meaning} |" in text

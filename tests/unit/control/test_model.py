"""Leases in every order of messages, with late ranks and dead agents, explored whole."""

from __future__ import annotations

import pytest

from hpctrain.node.control.lease import Wishes
from tests.support.lease_model import Model, Setup

ONE_NODE = {"parents": (-1,), "nodes_of": (0, 0)}
TWO_NODES = {"parents": (-1, 0), "nodes_of": (0, 1)}
STOP, SAVE = (Wishes(stop=3),), (Wishes(save=1),)
WARNED = (Wishes(warned=1),)


def explored(**setup) -> int:
    model = Model(Setup(**setup))
    model.explore()
    return model.states


def test_two_ranks_of_a_node_with_two_saves_and_a_stop():
    wishes = (STOP, (Wishes(save=1), Wishes(save=2)))

    assert explored(**ONE_NODE, last=1, wishes=wishes) > 10_000


@pytest.mark.parametrize("wishes", [((), STOP), ((), SAVE)], ids=["stop", "save"])
def test_two_nodes(wishes):
    assert explored(**TWO_NODES, last=1, wishes=wishes) > 1_000


@pytest.mark.soak
@pytest.mark.parametrize("wishes", [(SAVE, STOP), (WARNED, WARNED)], ids=["both", "warned"])
@pytest.mark.parametrize("deaths", [0, 1])
def test_two_nodes_that_wish_or_die(wishes, deaths):
    assert explored(**TWO_NODES, last=1, wishes=wishes, deaths=deaths) > 100_000


@pytest.mark.soak
@pytest.mark.parametrize("wishes", [((), STOP), ((), SAVE)], ids=["stop", "save"])
def test_a_chain_of_three_nodes(wishes):
    setup = {"parents": (-1, 0, 1), "nodes_of": (0, 2), "in_flight": 1}

    assert explored(**setup, last=1, wishes=wishes) > 10_000

"""Spare nodes as `--nodes` says them, at a submit and at a resume."""

from __future__ import annotations

import pytest

from hpctrain.core.settings.check import split_spares, with_spares
from hpctrain.core.settings.schema import AliveSettings, Settings, SlurmSettings
from hpctrain.errors import UsageError
from hpctrain.launch.change import flags_of


@pytest.mark.parametrize(
    ("given", "nodes", "spares"),
    [("4+1", "4", 1), ("2-4+10", "2-4", 10), ("4+0", "4", 0), ("4", "4", None), (None, None, None)],
)
def test_what_stands_behind_the_plus_sign_are_spares(given, nodes, spares):
    assert split_spares(given) == (nodes, spares)
    flags = flags_of(nodes=given)
    assert flags.get("slurm.nodes", ("", None))[1] == nodes
    assert flags.get("alive.spares", ("", None))[1] == spares


@pytest.mark.parametrize("given", ["4+", "4+x", "4+-1", "4+1+1", "4+12345"])
def test_spares_that_are_no_number_are_refused(given):
    with pytest.raises(UsageError, match="no number of spare nodes"):
        split_spares(given)


@pytest.mark.parametrize(("spares", "said"), [(0, "2-4"), (1, "2-4+1")])
def test_the_ledger_names_nodes_as_the_flag_takes_them(spares, said):
    settings = Settings(slurm=SlurmSettings(nodes="2-4"), alive=AliveSettings(spares=spares))

    assert with_spares(settings) == said

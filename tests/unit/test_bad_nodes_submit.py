"""A submit leaves out the nodes that a preflight has found bad, and says why."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from hpctrain.preflight.node_lists import note, of_run, of_user
from hpctrain.settings.spec import load_spec
from hpctrain.submit.bad_nodes import kept_out
from tests.support.recipe import make_run


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def test_both_lists_count_on_slurm_for_as_long_as_they_say(run, tmp_path):
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    spec = replace(load_spec(run.spec), cluster="slurm", site="mila")
    note(of_user(environ, "mila"), {"n2": "slow"})
    note(of_user(environ, "other"), {"n3": "of another cluster"})
    note(of_run(run), {"n4": "no ib0"})
    note(of_run(run), {"n5": "long ago"}, hours=1, now=time.time() - 3601)

    found = kept_out(run, spec, environ)

    assert list(found) == ["n2", "n4"]
    assert found["n2"].startswith("slow (")
    assert str(of_run(run)) in found["n4"]
    assert kept_out(run, replace(spec, cluster="local"), environ) == {}

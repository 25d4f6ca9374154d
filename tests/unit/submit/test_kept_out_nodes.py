"""A submit leaves out the nodes that a preflight has found bad, and says why."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from hpctrain.cluster.preflight.report import bad_nodes_of_user, bad_nodes_path, record_bad
from hpctrain.core.settings.spec import load_spec
from hpctrain.launch.launch import kept_out
from tests.support.recipe import make_run


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def test_both_lists_count_on_slurm_for_as_long_as_they_say(run, tmp_path):
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    spec = replace(load_spec(run.spec), cluster="slurm", site="mila")
    record_bad(bad_nodes_of_user(environ, "mila"), {"n2": "slow"})
    record_bad(bad_nodes_of_user(environ, "other"), {"n3": "of another cluster"})
    record_bad(bad_nodes_path(run), {"n4": "no ib0"})
    record_bad(bad_nodes_path(run), {"n5": "long ago"}, hours=1, now=time.time() - 3601)

    found = kept_out(run, spec, environ)

    assert list(found) == ["n2", "n4"]
    assert found["n2"].startswith("slow (")
    assert str(bad_nodes_path(run)) in found["n4"]
    assert kept_out(run, replace(spec, cluster="local"), environ) == {}

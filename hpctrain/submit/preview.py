"""The environment that a run's ranks would get, as far as the login node can tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.scheduler.slurm.script import site_of
from hpctrain.settings.check import node_range
from hpctrain.site.environment import FLIGHT_RECORDER, Environment, Versions, derive, with_settings

if TYPE_CHECKING:
    from hpctrain.settings.spec import Spec


def expected_environment(spec: Spec) -> Environment:
    """What the preset and the run's settings give at the most nodes that the run may get.

    Versions are the nodes' to tell, so conditions on them do not hold here; the job's own
    environment, which wins over all of it, is not there yet either.
    """
    _, most = node_range(spec.settings.slurm.nodes)
    derived = derive(site_of(spec), nodes=most, versions=Versions(), run_dir="")
    values = {n: v for n, v in derived.values.items() if v.origin != FLIGHT_RECORDER}
    given = Environment(values, derived.unset, derived.notes)
    return with_settings(given, spec.env, spec.env_origins)

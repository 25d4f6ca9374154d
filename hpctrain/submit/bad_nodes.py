"""Nodes that a preflight has found bad: no job gets them until their time is up.

tests/unit/test_bad_nodes_submit.py and tests/slurm/test_fitness.py hold the promise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.preflight.bad_nodes import of_run, of_user, read

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.rundir.layout import RunDir
    from hpctrain.settings.spec import Spec


def kept_out(run: RunDir, spec: Spec, environ: Mapping[str, str]) -> dict[str, str]:
    """Node to why the run's next job must not get it; none but on SLURM.

    Both lists count: the user's, of `hpctrain preflight` on this cluster, and the run's own, of
    its attempts.
    """
    if spec.cluster != "slurm":
        return {}
    lists = (of_user(environ, spec.site or spec.cluster), of_run(run))
    return {name: f"{bad.reason} ({path})" for path in lists for name, bad in read(path).items()}

"""Nodes that a preflight has found bad: no job gets them until their time is up.

tests/unit/test_bad_nodes_submit.py and tests/slurm/test_fitness.py hold the promise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.preflight.node_lists import of_run, of_user, read

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hpctrain.run.layout import RunDir
    from hpctrain.settings.spec import Spec


def list_of_user(spec: Spec, environ: Mapping[str, str]) -> Path:
    """The user's list for the run's cluster: named by its site, else by SLURM's own name for it.

    Homes are shared between clusters, and n001 of one is not n001 of another.
    """
    folder = of_user(environ, "any").parent
    if spec.site or not folder.is_dir():
        return of_user(environ, spec.site or spec.cluster)
    return of_user(environ, name_here(spec))


def name_here(spec: Spec) -> str:
    """What the user's list for this cluster is named by."""
    if spec.site:
        return spec.site
    from hpctrain.scheduler.slurm.cluster_name import cluster_name

    return cluster_name() or spec.cluster


def kept_out(run: RunDir, spec: Spec, environ: Mapping[str, str]) -> dict[str, str]:
    """Node to why the run's next job must not get it; none but on SLURM.

    Both lists count: the user's, of `hpctrain preflight` on this cluster, and the run's own, of
    its attempts.
    """
    if spec.cluster != "slurm":
        return {}
    lists = (list_of_user(spec, environ), of_run(run))
    return {name: f"{bad.reason} ({path})" for path in lists for name, bad in read(path).items()}

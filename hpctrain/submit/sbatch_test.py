"""A preset tried out: the scripts that a submit would make, and what the scheduler says of them.

Nothing is submitted and nothing stays on disk. tests/unit/submit/test_sbatch_test.py holds the
promises.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import ChecksFailed, ClusterError, ClusterUnreachable, UsageError
from hpctrain.preflight.report import FAIL, UNKNOWN
from hpctrain.run.layout import RunDir
from hpctrain.settings.layers import nearest
from hpctrain.site.load import load_site
from hpctrain.submit.prepare import SubmitRequest, prepare

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.preflight.report import Result
    from hpctrain.scheduler.base import Cluster
    from hpctrain.site.preset import Site

TOKEN = "site-test"  # noqa: S105 - stands where a submission's own token stands
TIME = "0:10:00"


@dataclass(frozen=True)
class Asked:
    """What is to be tried."""

    site: str
    """Name or file."""
    partitions: Sequence[str] = ()
    """Empty for all that submit may choose."""
    nodes: Sequence[int] = (1, 2)
    account: str | None = None


@dataclass(frozen=True)
class SbatchTrial:
    """One script, and what became of it."""

    partition: str
    """"" for SLURM's default."""
    nodes: int
    gpus_per_node: int
    accepted: bool
    why: str
    """What refused it, in one line."""
    script: str
    """"" where hpctrain itself refuses the job."""


def try_site(
    asked: Asked, *, cwd: Path, environ: Mapping[str, str], cluster: Cluster
) -> list[SbatchTrial]:
    """Every partition at every number of nodes that it is meant for.

    Args:
        asked: What to try.
        cwd: Where the user stands; an hpctrain.toml there is left out of it.
        environ: The user's.
        cluster: Renders the scripts and says whether it would take them.

    Raises:
        NotFound: there is no such site.
        UsageError: its preset is wrong, or has no such partition.
        ChecksFailed: there is nothing to try.
        ClusterUnreachable: nobody answers.
    """
    site = load_site(asked.site, environ=environ, project=cwd)
    cases = [
        (name, nodes)
        for name in _partitions(site, asked.partitions)
        for nodes in dict.fromkeys(asked.nodes)
        if not name or asked.partitions or _fits(site, name, nodes)
    ]
    if not cases:
        raise ChecksFailed(
            f"{site.where('partitions')} has no partition that submit may choose for "
            f"{' or '.join(map(str, asked.nodes))} nodes; name one with --partition"
        )
    with tempfile.TemporaryDirectory(prefix="hpctrain-site-test-") as folder:
        requests = [_request(site, asked, case, Path(folder), environ) for case in cases]
        return [_try(replace(request, cluster=cluster.name), cluster) for request in requests]


def _partitions(site: Site, named: Sequence[str]) -> list[str]:
    for name in named:
        if name not in site.partitions:
            near = nearest(name, site.partitions)
            listed = ", ".join(site.partitions) or "none"
            hint = f"did you mean {near[0]}?" if near else f"there are: {listed}"
            raise UsageError(
                f"--partition {name}: {site.where('partitions')} has none such; {hint}"
            )
    if named:
        return list(named)
    return [name for name, partition in site.partitions.items() if partition.auto] or [""]


def _fits(site: Site, name: str, nodes: int) -> bool:
    partition = site.partitions[name]
    return (partition.min_nodes or 0) <= nodes <= (partition.max_nodes or nodes)


def _request(
    site: Site, asked: Asked, case: tuple[str, int], folder: Path, environ: Mapping[str, str]
) -> SubmitRequest:
    name, nodes = case
    partition = site.partitions.get(name)
    return SubmitRequest(
        cwd=folder,
        environ=environ,
        runs=folder,
        site=str(Path(asked.site).absolute()) if asked.site.endswith(".toml") else asked.site,
        nodes=str(nodes),
        gpus_per_node=(partition.gpus_per_node or 0) if partition else 0,
        time=TIME,
        partition=name or None,
        account=asked.account,
        name=f"{TOKEN}-{nodes}",
        allow_locked=True,
    )


def _try(request: SubmitRequest, cluster: Cluster) -> SbatchTrial:
    text, why = "", ""
    results: Sequence[Result] = ()
    try:
        spec = prepare(request).spec
        text = cluster.render(spec, RunDir(request.runs / spec.name), TOKEN)
        script = request.runs / f"{spec.name}.sh"
        script.write_text(text)
        results = cluster.check_script(script)
    except ClusterUnreachable:
        raise
    except (UsageError, ClusterError) as error:
        why = str(error)
    for result in results:
        if result.status == UNKNOWN:
            raise ClusterUnreachable(result.message)
        why = result.message if result.status == FAIL else why
    return SbatchTrial(
        partition=request.partition or "",
        nodes=int(request.nodes or 0),
        gpus_per_node=request.gpus_per_node or 0,
        accepted=not why,
        why=why,
        script=text,
    )

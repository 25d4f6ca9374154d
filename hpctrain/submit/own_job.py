"""Whether a job is this run's own: a copied folder has the ledger of the run that it is a copy of.

The copy's ledger names the original's job. Taken at its word, `cancel` of the copy would end the
original, and `resume` of the copy would wait for it. tests/unit/submit/test_copied_run.py holds the
promises.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.history.run_history import RunHistory

if TYPE_CHECKING:
    from hpctrain.base.records import JobInfo
    from hpctrain.run.layout import RunDir
    from hpctrain.scheduler.base import Cluster
    from hpctrain.settings.spec import Entry, Spec


def copied_from(run: RunDir, history: RunHistory) -> Path | None:
    """The directory of which this one is a copy; None for a run that is itself, or was moved.

    A run that was moved, or is seen under another path than by who submitted it, has left nothing
    at the old place or the very same folder there.
    """
    return _other_than(run, _written_in(history))


def _other_than(run: RunDir, written: Path | None) -> Path | None:
    """That directory, where it is there and is another than the run's."""
    if written is None or written == run.root:
        return None
    try:
        same = written.samefile(run.root)
    except FileNotFoundError:
        return None
    except OSError:  # there is something that we may not even look at: not what is ours here
        return written
    return None if same else written


def not_own(run: RunDir, history: RunHistory, token: str | None, job: JobInfo) -> str:
    """Why a job that the ledger names is not this run's, or "".

    Args:
        run: The run.
        history: Its own.
        token: Of its newest submission; None for a job of a hand-written batch script.
        job: What the scheduler knows under the ledger's job id.
    """
    original = copied_from(run, history)
    if original is not None:
        return f"this is a copy of {original}, whose job {job.job_id} is"
    if not token or not job.script:
        return ""
    script = Path(job.script)
    if script.name != f"{token}.sh":
        return f"job {job.job_id} is another's by now ({job.script})"
    # A ledger of version 0.1 says nowhere in which directory it was written; SLURM knows.
    other = _other_than(run, script.parent.parent) if script.is_absolute() else None
    return f"this is a copy of {other}, whose job {job.job_id} is" if other is not None else ""


def elsewhere(history: RunHistory, cluster: Cluster) -> str:
    """Why this cluster is not to be asked about the newest job, or "".

    A folder of runs may be seen from the login nodes of several clusters, each of which counts its
    jobs from 1. A ledger that names no cluster is taken at its word.
    """
    named, job_id = history.clusters, history.state.job_id
    here = cluster.here() if named else ""
    if not here or here in named:
        return ""
    job = f"job {job_id}" if job_id else "its job"
    return f"{job} is one of the cluster {', '.join(sorted(named))}, and this is {here}: ask there"


def jobs_here(history: RunHistory, cluster: Cluster) -> list[str]:
    """Every job that a run had, but those of which the ledger says that another cluster has them.

    Args:
        history: The run's.
        cluster: This one, which is asked for its name where the ledger has names.
    """
    here = cluster.here() if any(history.jobs.values()) else ""
    return [job for job, named in history.jobs.items() if not here or not named or here in named]


def as_own_run(run: RunDir, spec: Spec) -> tuple[Spec, list[str]]:
    """The spec with which a run goes on, and what its user should know.

    A copy gets an identity of its own, by which trackers tell it from the original; and what lies
    in the original's directory (the snapshot) is taken from the copy's.
    """
    original = copied_from(run, RunHistory.read(run))
    if original is None:
        return spec, []

    def here(path: str) -> str:
        inside = path and Path(path).is_relative_to(original)
        return str(run.root / Path(path).relative_to(original)) if inside else path

    def own_entry(entry: Entry) -> Entry:
        python_path = [here(path) for path in entry.python_path]
        return replace(entry, path=here(entry.path), python_path=python_path)

    own = replace(
        spec,
        name=run.name,
        run_id=os.urandom(8).hex(),
        entry=own_entry(spec.entry),
        beside={section: own_entry(entry) for section, entry in spec.beside.items()},
    )
    return own, [f"{run.name} is a copy of {original} and goes on as a run of its own"]


def _written_in(history: RunHistory) -> Path | None:
    """Where the run lay when its ledger was last written by a submission or a job of its own."""
    kind, written = history.written_in
    if kind == "script":
        return Path(written).parent.parent if Path(written).is_absolute() else None
    return Path(written) if written else None

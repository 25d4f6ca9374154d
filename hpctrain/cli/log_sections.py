"""Which log files a run has, in the order of its attempts or of its jobs."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hpctrain.ledger.events import Event
    from hpctrain.rundir.layout import RunDir

BATCH = "batch"
_RANK_LOG = re.compile(r"rank-(\d+)\.log")
_DOT = "\N{MIDDLE DOT}"


@dataclass
class Section:
    """The logs of one attempt, or of one submission's batch script.

    Attributes:
        key: Attempt number or submission token.
        title: Line that stands above it.
        end: Line that stands below it, once it is over.
        files: Looks for its log files: label and path.
    """

    key: int | str
    title: str
    end: str
    files: Callable[[], list[tuple[str, Path]]]


def sections(run: RunDir, events: Sequence[Event], wanted: frozenset[int] | str) -> list[Section]:
    """What there is to print, in order."""
    return _batch(run, events) if wanted == BATCH else _attempts(run, events, wanted)


def _attempts(run: RunDir, events: Sequence[Event], wanted: frozenset[int] | str) -> list[Section]:
    from hpctrain.ledger.derive import attempts

    found = []
    for view in attempts(events):
        names = ["attempt " + str(view.number), "job " + (view.job_id or "unknown")]
        names += [",".join(view.nodes)] if view.nodes else []
        end = ""
        if view.reason is not None:
            following = f", next: {view.next.value}" if view.next else ""
            end = f"attempt {view.number} ended: {view.reason.value}{following}"

        def files(number: int = view.number) -> list[tuple[str, Path]]:
            return _rank_logs(run, number, wanted)

        found.append(Section(view.number, f" {_DOT} ".join(names), end, files))
    return found


def _rank_logs(run: RunDir, attempt: int, wanted: frozenset[int] | str) -> list[tuple[str, Path]]:
    if not isinstance(wanted, str):
        return [(f"r{rank}", run.rank_log(attempt, rank)) for rank in sorted(wanted)]
    with contextlib.suppress(FileNotFoundError):
        paths = sorted(run.attempt(attempt).iterdir())
        return [(f"r{int(m[1])}", p) for p in paths if (m := _RANK_LOG.fullmatch(p.name))]
    return []


def _batch(run: RunDir, events: Sequence[Event]) -> list[Section]:
    """Each submission's output: the batch script's and, beside it, that of its agents."""
    jobs: dict[str, str] = {}
    for event in events:
        token = event.data.get("token")
        if event.kind in {"submitted", "submit_adopted"} and token:
            jobs[str(token)] = str(event.data.get("job_id"))
        elif event.kind == "attempt_started":
            job_id = str(event.data.get("job_id"))
            if job_id not in jobs.values():  # a batch script that was submitted by hand
                jobs[f"job-{job_id}"] = job_id
    found = []
    for token, job_id in jobs.items():

        def files(token: str = token) -> list[tuple[str, Path]]:
            return _outputs(run, token)

        found.append(Section(token, f"job {job_id} {_DOT} {token}", "", files))
    return found


def _outputs(run: RunDir, token: str) -> list[tuple[str, Path]]:
    """Output files of one submission: TOKEN.out of the script, TOKEN-0.out and so on of agents."""
    with contextlib.suppress(FileNotFoundError):
        paths = sorted(path for path in run.jobs.iterdir() if path.suffix == ".out")
        own = [p for p in paths if p.stem == token or p.stem.startswith(f"{token}-")]
        return [(path.stem.removeprefix(token).lstrip("-") or BATCH, path) for path in own]
    return []

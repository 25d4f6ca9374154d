"""Which run is meant: a name, a job id, the beginning of a name, a path, or `-` for the latest.

Asked by every command, so it is cheap: of a ledger only the lines about submissions are parsed.
tests/unit/test_find_run.py holds the promises.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import NotFound
from hpctrain.ledger.events import parse
from hpctrain.rundir.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.ledger.events import Event

LATEST = "-"
RUNS_VARIABLE = "HPCTRAIN_RUNS"
_SHOWN = 5


def runs_root(explicit: Path | str | None = None) -> Path:
    """The folder of all runs, absolute: what was given, else HPCTRAIN_RUNS, else ./runs."""
    return Path.cwd() / Path(explicit or os.environ.get(RUNS_VARIABLE) or "runs").expanduser()


def all_runs(runs: Path | str | None = None) -> list[RunDir]:
    """Every run in the folder, the newest submission first; none where there is no such folder."""
    root = runs_root(runs)
    if not root.is_dir():
        return []
    found = [RunDir(path) for path in root.iterdir() if _is_run(path)]
    return sorted(found, key=lambda run: (-_newest_submission_t(run), run.name))


def find_run(text: str, *, runs: Path | str | None = None) -> RunDir:
    """The one run that is meant.

    Tried in this order: `-`, a path with a slash in it, a name in the folder of all runs, a job id,
    the beginning of one name only, a run directory below the working directory.

    Args:
        text: What the user typed.
        runs: The folder of all runs, see `runs_root`.

    Raises:
        NotFound: no run, or more than one, is meant; with the names that are near.
    """
    root = runs_root(runs)
    if "/" in text or text in {".", ".."}:
        return _at_path(Path(text))
    if text and text != LATEST and _is_run(root / text):
        return RunDir(root / text)
    known = all_runs(root)
    if text == LATEST:
        if not known:
            raise NotFound(f"{_nothing_in(root)}; `hpctrain submit` starts one")
        return known[0]
    matching = _with_job(text, known) or [r for r in known if text and r.name.startswith(text)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise NotFound(
            f"{text!r} is not one run but {len(matching)}: {_names(matching)}; give more of it"
        )
    if text and _is_run(Path(text)):
        return RunDir(Path(text).absolute())
    raise NotFound(_nearest(text, root, known))


def _at_path(path: Path) -> RunDir:
    path = path.expanduser()
    # A symlink stays as it was typed: what it points to on this node may lie elsewhere on the next.
    path = path.resolve() if ".." in path.parts else path.absolute()
    if not _is_run(path):
        raise NotFound(
            f"{path} is not a run's directory: it has neither spec.json nor events.jsonl"
        )
    return RunDir(path)


def _is_run(path: Path) -> bool:
    run = RunDir(path)
    return run.spec.is_file() or run.events.is_file()


def _newest_submission_t(run: RunDir) -> float:
    """When the run was last submitted; one started without a job counts from its attempts."""
    # What the ledger says counts, not the age of the file: a copy or a touch makes no run newer.
    times = [e.t for e in _facts(run, b'"submit') if e.kind.startswith("submit")]
    times = times or [e.t for e in _facts(run, b'"attempt_started"')]
    return max(times, default=0.0)


def _with_job(job_id: str, runs: Sequence[RunDir]) -> list[RunDir]:
    """The runs that had a job of this id."""
    return [
        run
        for run in runs
        if any(str(event.data.get("job_id")) == job_id for event in _facts(run, b'"job_id"'))
    ]


def _facts(run: RunDir, marker: bytes) -> list[Event]:
    """The events whose lines hold this marker; the others are not parsed."""
    try:
        lines = run.events.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [event for line in lines if marker in line and (event := parse(line))]


def _nothing_in(root: Path) -> str:
    return f"there are no runs in {root} (--runs DIR or {RUNS_VARIABLE} names another folder)"


def _nearest(text: str, root: Path, known: Sequence[RunDir]) -> str:
    if not known:
        return f"no run {text!r}: {_nothing_in(root)}"
    near = difflib.get_close_matches(text, [run.name for run in known], n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"the newest are {_names(known)}"
    return f"no run or job {text!r} in {root}; {hint}"


def _names(runs: Sequence[RunDir]) -> str:
    names = [run.name for run in runs[:_SHOWN]]
    return ", ".join(names) + (", ..." if len(runs) > _SHOWN else "")

"""Search for the run that a user means by a name, a job id, the beginning of a name, a path or `-`.

`-` is the newest. Every command asks, so it is cheap: of a ledger only the lines about submissions
are parsed. tests/unit/run/test_find_run.py holds the promises.
"""

from __future__ import annotations

import difflib
import errno
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base import clock
from hpctrain.base.env import HPCTRAIN_RUNS
from hpctrain.base.files import is_plain
from hpctrain.base.text import count
from hpctrain.errors import NotFound
from hpctrain.run.events import read_marked
from hpctrain.run.layout import RunDir, runs_flag, runs_root
from hpctrain.run.ownership import is_mine
from hpctrain.run.run_index import indexed

if TYPE_CHECKING:
    from collections.abc import Sequence


LATEST = "-"
_SHOWN = 5


@dataclass(frozen=True)
class Folder:
    """A folder of runs, as one look showed it.

    Attributes:
        root: The folder.
        runs: Those that can be read, the newest submission first.
        unreadable: How many entries could not be looked into: others' private runs, for one.
        foreign: How many were left out because others own them.
    """

    root: Path
    runs: Sequence[RunDir] = ()
    unreadable: int = 0
    foreign: int = 0

    @property
    def left_out(self) -> str:
        """What is there besides, in words; "" where nothing is."""
        others = f"{count(self.foreign, 'run')} of other users" if self.foreign else ""
        closed = (
            f"{count(self.unreadable, 'folder')} that cannot be read" if self.unreadable else ""
        )
        return " and ".join(filter(None, [others, closed]))


def look_into(runs: Path | str | None = None, *, own: bool = False) -> Folder:
    """Look at the folder of all runs, which others may use too: what they put there harms nothing.

    Args:
        runs: The folder of all runs, see `runs_root`.
        own: Leave out what other users own.

    Raises:
        NotFound: the folder itself may not be read.
    """
    root = runs_root(runs)
    readable: list[tuple[float, str, RunDir]] = []
    unreadable = foreign = 0
    try:
        entries = list(root.iterdir()) if root.is_dir() else []
    except OSError as error:
        raise NotFound(f"{root} cannot be read: {error.strerror}") from None
    for path in entries:
        try:
            if own and not is_mine(path):
                foreign += _is_run(path)
            elif _is_run(path):
                run = RunDir(path)
                readable.append((-_newest_submission_t(run), run.name, run))
        except OSError:
            unreadable += 1
    readable.sort(key=lambda entry: entry[:2])
    return Folder(root, [run for *_, run in readable], unreadable, foreign)


def find_run(text: str, *, runs: Path | str | None = None) -> RunDir:
    """The one run that is meant.

    Tried in this order: `-`, a path with a slash in it, a name in the folder of all runs, a job id,
    the beginning of one name only, a run directory below the working directory. Only a path or a
    whole name means another user's run. Where no other folder was named, a whole name or a job id
    is looked for in the user's index of runs last.

    Args:
        text: What the user typed.
        runs: The folder of all runs, see `runs_root`.

    Raises:
        NotFound: no run, or more than one, is meant; with the names that are near.
    """
    root = runs_root(runs)
    if "/" in text or text in {".", ".."}:
        return _at_path(Path(text))
    if text and text != LATEST and _can_be_run(root / text):
        return RunDir(root / text)
    folder = look_into(root, own=True)
    own_runs = folder.runs
    if text == LATEST:
        if not own_runs:
            raise NotFound(f"{_nothing_in(folder)}; `hpctrain submit` starts one")
        return own_runs[0]
    matching = _with_job(text, own_runs) or [
        r for r in own_runs if text and r.name.startswith(text)
    ]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise NotFound(
            f"{text!r} is not one run but {len(matching)}: {_names(matching)}; give more of it"
        )
    if text and _can_be_run(Path(text)):
        return RunDir(Path(text).absolute())
    elsewhere = _elsewhere(text, root)
    if len(elsewhere) == 1:
        return elsewhere[0]
    if elsewhere:
        paths = ", ".join(str(run.root) for run in elsewhere[:_SHOWN])
        raise NotFound(f"{text!r} is not in {root}, and elsewhere one of several: {paths}")
    raise NotFound(_nearest(text, folder))


def _elsewhere(text: str, root: Path) -> list[RunDir]:
    """The runs of that name or job in the user's index, unless another folder was named."""
    if not text or runs_flag(root):
        return []
    return [one.run for one in indexed() if text == one.run.name or text in one.jobs]


def _at_path(path: Path) -> RunDir:
    path = path.expanduser()
    # A symlink stays as it was typed: what it points to on this node may lie elsewhere on the next.
    path = path.resolve() if ".." in path.parts else path.absolute()
    if not _can_be_run(path):
        raise NotFound(
            f"{path} is not a run's directory: it has neither spec.json nor events.jsonl"
        )
    return RunDir(path)


def _can_be_run(path: Path) -> bool:
    """Whether a run is there.

    Raises:
        NotFound: something is there that may not be looked into.
    """
    try:
        return _is_run(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise NotFound(f"{path} cannot be read: {error.strerror}") from None


def _is_run(path: Path) -> bool:
    run = RunDir(path)
    return is_plain(run.spec) or is_plain(run.events)


def _newest_submission_t(run: RunDir) -> float:
    """When the run was last submitted; one started without a job counts from its attempts."""
    # What the ledger says counts, not the age of the file: a copy or a touch makes no run newer.
    facts = read_marked(run, b'"submit', b'"attempt_started"')
    times = [e.t for e in facts if e.kind.startswith("submit")] or [e.t for e in facts]
    newest = max(times, default=0.0)
    now = clock.now()
    return newest if newest <= now else min(now, run.events.stat().st_mtime)


def _with_job(job_id: str, runs: Sequence[RunDir]) -> list[RunDir]:
    """The runs that had a job of this id."""
    return [
        run
        for run in runs
        if any(
            getattr(event.fact, "job_id", None) == job_id for event in read_marked(run, b'"job_id"')
        )
    ]


def _nothing_in(folder: Folder) -> str:
    besides = f", only {folder.left_out}" if folder.left_out else ""
    return (
        f"there are no runs in {folder.root}{besides} "
        f"(--runs DIR or {HPCTRAIN_RUNS} names another folder)"
    )


def _nearest(text: str, folder: Folder) -> str:
    runs, root = folder.runs, folder.root
    if not runs:
        return f"no run {text!r}: {_nothing_in(folder)}"
    near = difflib.get_close_matches(text, [run.name for run in runs], n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"the newest are {_names(runs)}"
    return f"no run or job {text!r} in {root}; {hint}"


def _names(runs: Sequence[RunDir]) -> str:
    names = [run.name for run in runs[:_SHOWN]]
    return ", ".join(names) + (", ..." if len(runs) > _SHOWN else "")

"""Find the run that a user means by name, job id, beginning of a name, path or `-` (the newest).

The user's index of runs finds runs of other folders. It is append-only and nothing depends on it:
what cannot be written or read is left out. tests/unit/run/test_find_run.py and test_run_index.py
hold the promises.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_RUNS
from hpctrain.core.base.files import is_plain, open_plain
from hpctrain.core.base.text import count
from hpctrain.errors import NotFound
from hpctrain.ledger.run.events import read_marked
from hpctrain.ledger.run.layout import RunDir, is_elsewhere, runs_root
from hpctrain.ledger.run.ownership import is_mine

if TYPE_CHECKING:
    from collections.abc import Sequence


LATEST = "-"
_SHOWN = 5


@dataclass(frozen=True)
class Folder:
    """A folder of runs, as one look showed it.

    Attributes:
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

    With `own`, what other users own is left out.

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
    if not text or is_elsewhere(root):
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


NAME = "runs.jsonl"
MOST_BYTES = 1 << 20
"""So much of its end is read: some 7,000 lines."""
MOST_RUNS = 500
"""The newest runs in it; each is looked for on the disk."""


@dataclass(frozen=True)
class IndexedRun:
    """What the index says of a run.

    Attributes:
        jobs: Its jobs, as far as they were written down.
        is_over: Somebody has seen its end, and no job was submitted since.
    """

    run: RunDir
    jobs: frozenset[str] = frozenset()
    is_over: bool = False


def index_path() -> Path:
    """Where the index of this user lies; in a relative path where nobody knows a home."""
    home = os.environ.get("HOME", "")
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if state.startswith("/") else Path(home) / ".local" / "state"
    return folder / "hpctrain" / NAME


def record(runs: Sequence[IndexedRun]) -> None:
    """Add a line for each of these runs, or none where that cannot be done."""
    path = index_path()
    lines = [_line(one) for one in runs if not _is_passing(one.run)]
    if not lines or not path.is_absolute() or not _is_own_place(path):
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o600)
        try:
            # A line that a full disk has cut off must not swallow this one: so it begins anew.
            os.write(descriptor, "".join(f"\n{line}" for line in lines).encode())
        finally:
            os.close(descriptor)


def indexed() -> list[IndexedRun]:
    """The runs in the index that are still there and belong to this user, the newest first."""
    path = index_path()
    by_root: dict[Path, IndexedRun] = {}
    try:
        with open_plain(path) as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return []
            file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
            lines = file.read(MOST_BYTES).splitlines()
    except OSError:
        return []
    for line in lines:
        said = _read(line)
        if said is not None:
            before = by_root.pop(said.run.root, said)
            by_root[said.run.root] = replace(said, jobs=before.jobs | said.jobs)
    there: dict[tuple[int, int], IndexedRun] = {}
    for entry in list(by_root.values())[: -MOST_RUNS - 1 : -1]:
        with contextlib.suppress(OSError):
            if is_mine(entry.run.root) and (is_plain(entry.run.spec) or is_plain(entry.run.events)):
                status = entry.run.root.stat()  # one run may have two paths, by a link
                there.setdefault((status.st_dev, status.st_ino), entry)
    return list(there.values())


def _line(entry: IndexedRun) -> str:
    said = {"t": round(clock.now(), 3), "dir": str(entry.run.root), "jobs": sorted(entry.jobs)}
    return json.dumps({**said, "over": True} if entry.is_over else said)


def _read(line: bytes) -> IndexedRun | None:
    try:
        said = json.loads(line)
        root, jobs = Path(said["dir"]), frozenset(map(str, said.get("jobs", ())))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return IndexedRun(RunDir(root), jobs, said.get("over") is True) if root.is_absolute() else None


def _is_passing(run: RunDir) -> bool:
    """Whether the run lies in a folder of another run's, or in one that is soon removed."""
    return run.root.parent.name.startswith(".") or is_plain(RunDir(run.root.parent.parent).spec)


def _is_own_place(path: Path) -> bool:
    """Whether what is made there is the user's: no file of root's comes to lie in a user's home."""
    try:
        return is_mine(next(place for place in (path, *path.parents) if place.exists()))
    except OSError:
        return False

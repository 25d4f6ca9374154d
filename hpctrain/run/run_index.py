"""The user's index of runs: a file in the state folder by which runs are found from every folder.

Lines are only added: one when a job of a run is submitted, one when somebody has seen that the run
is over. Nothing depends on it. What cannot be written is left out, a line that cannot be read is
passed over, and `hpctrain status` adds what it sees in a folder of runs and the index lacks.
tests/unit/run/test_run_index.py holds the promises.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base import clock
from hpctrain.base.files import is_plain, open_plain
from hpctrain.run.layout import RunDir
from hpctrain.run.ownership import is_mine

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "runs.jsonl"
MOST_BYTES = 1 << 20
"""So much of its end is read: some 7,000 lines."""
MOST_RUNS = 500
"""The newest runs in it; each is looked for on the disk."""


@dataclass(frozen=True)
class IndexedRun:
    """What the index says of a run.

    Attributes:
        run: Its directory.
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

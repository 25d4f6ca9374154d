"""The files of a profile, and the request for one: what ranks and login node share.

    profile/attempt-0002/rank-00007.steps-100-103.pt.trace.json.gz    Chrome trace
                         rank-00007.steps-100-103.memory.json         memory in numbers
                         rank-00007.steps-100-103.memory.pickle       what held it (CUDA)
                         rank-00007.steps-100-103.problem.txt         why there is no trace

A name that ends in `.pt.trace.json.gz` is what TensorBoard's profile plugin looks for.
tests/unit/cli/test_profile.py and tests/engines/test_profile_run.py hold the promises.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.core.base.files import replace_text
from hpctrain.ledger.run.fence import left_text

if TYPE_CHECKING:
    from pathlib import Path

TRACE, MEMORY, SNAPSHOT, PROBLEM = "pt.trace.json.gz", "memory.json", "memory.pickle", "problem.txt"
STEP_MARK = "ProfilerStep#"
"""Begins the name of a step's span in a trace; TensorBoard's plugin and HTA look for this one."""
OURS = "hpctrain."
"""Begins the names of hpctrain's own spans: `hpctrain.data`, `hpctrain.save`."""
REQUEST_HOLDS_S = 600.0
"""An older request was meant for training that is over."""

_FILE = re.compile(r"rank-(\d{5})\.steps-(\d+)-(\d+)\.(.+)")
_ATTEMPT = re.compile(r"attempt-(\d+)")


@dataclass(frozen=True, order=True)
class StepWindow:
    """Steps `first` to `last`, both inclusive, counted as the ledger does: step N is update N."""

    first: int
    last: int


@dataclass(frozen=True)
class ProfileRequest:
    """What `hpctrain profile --now` asks of a live run.

    Attributes:
        job_id: The job that is meant; another one takes no notice.
        token: Tells this request from others.
        steps: How many steps.
        ranks: Which ranks; None for all.
        memory: Also what holds the GPU's memory.
        t: When it was asked.
    """

    job_id: str
    token: str
    steps: int
    ranks: tuple[int, ...] | None
    memory: bool
    t: float

    def write(self, path: Path) -> None:
        """Leave the request, whole or not at all."""
        replace_text(path, json.dumps(asdict(self)) + "\n")


def read_request(path: Path, job_id: str) -> ProfileRequest | None:
    """The request that waits for this job; None where there is none that still holds."""
    try:
        raw = json.loads(left_text(path))
        request = ProfileRequest(
            str(raw["job_id"]),
            str(raw["token"]),
            int(raw["steps"]),
            None if raw["ranks"] is None else tuple(map(int, raw["ranks"])),
            bool(raw["memory"]),
            float(raw["t"]),
        )
    # Not there, or seen while NFS still shows half of it.
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    holds = request.job_id == job_id and abs(clock.now() - request.t) < REQUEST_HOLDS_S
    return request if holds else None


def folder_name(attempt: int) -> str:
    """The folder of an attempt's profiles, below the run's `profile/`."""
    return f"attempt-{attempt:04d}"


def file_name(rank: int, window: StepWindow, suffix: str) -> str:
    """Name of one file of a rank."""
    return f"rank-{rank:05d}.steps-{window.first}-{window.last}.{suffix}"


def nsys_reports(profile: Path) -> list[Path]:
    """What nsys has written below a run's `profile/`."""
    return sorted(profile.glob("attempt-*/*.nsys-rep"))


@dataclass(frozen=True)
class FoundProfile:
    """One profile: the same steps of an attempt on some ranks.

    Attributes:
        attempt: Of which attempt.
        window: Which steps.
        folder: Where its files lie.
        files: Rank to suffix to path.
    """

    attempt: int
    window: StepWindow
    folder: Path
    files: dict[int, dict[str, Path]]


def find(profile: Path) -> list[FoundProfile]:
    """The profiles below a run's `profile/`, oldest attempt and step first."""
    by_window: list[FoundProfile] = []
    folders = sorted(profile.iterdir()) if profile.is_dir() else []
    for folder in folders:
        attempt = _ATTEMPT.fullmatch(folder.name)
        if attempt is None or not folder.is_dir():
            continue
        windows: dict[StepWindow, dict[int, dict[str, Path]]] = {}
        for path in folder.iterdir():
            match = _FILE.fullmatch(path.name)
            if match is None or match[4] not in {TRACE, MEMORY, SNAPSHOT, PROBLEM}:
                continue
            ranks = windows.setdefault(StepWindow(int(match[2]), int(match[3])), {})
            ranks.setdefault(int(match[1]), {})[match[4]] = path
        by_window += [
            FoundProfile(int(attempt[1]), window, folder, dict(sorted(windows[window].items())))
            for window in sorted(windows)
        ]
    return by_window

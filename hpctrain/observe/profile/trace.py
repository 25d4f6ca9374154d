"""A profile's files, and one rank's Chrome trace (Kineto's JSON) divided into shares.

    profile/attempt-0002/rank-00007.steps-100-103.pt.trace.json.gz    Chrome trace
                         rank-00007.steps-100-103.memory.pickle       what held memory (CUDA)
                         rank-00007.steps-100-103.problem.txt         why there is no trace

A name that ends in `.pt.trace.json.gz` is what TensorBoard's profile plugin looks for.

Where the trace has GPU kernels, the GPU decides, in this order of precedence:

    save           inside a `hpctrain.save` span: training stands still for it
    compute        any kernel runs that is not communication
    communication  a NCCL kernel runs, and no other beside it (the part that is not hidden)
    memory         copies and fills by the copy engines, and calls that allocate or free
    data           inside a `hpctrain.data` or DataLoader span: the GPU has nothing to do meanwhile
    host           none of these: Python, launches, waiting

On a CPU the ranks' threads decide: compute is an operator that is not communication, communication
a gloo operation while nothing is computed. Spans of saves and data go first; memory is not known.

An interval is (begin, end) in microseconds; a list of them that `union`, `minus` and `both` return
is sorted and without overlaps. tests/unit/profile and tests/engines/test_profile_run.py hold the
promises.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock
from hpctrain.core.base.files import open_plain, replace_text
from hpctrain.errors import HpctrainError
from hpctrain.ledger.run.fence import left_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


TRACE, SNAPSHOT, PROBLEM = "pt.trace.json.gz", "memory.pickle", "problem.txt"
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


@dataclass(frozen=True)
class FoundProfile:
    """One profile: the same steps of an attempt on some ranks; `files`: rank to suffix to path."""

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
            if match is None or match[4] not in {TRACE, SNAPSHOT, PROBLEM}:
                continue
            ranks = windows.setdefault(StepWindow(int(match[2]), int(match[3])), {})
            ranks.setdefault(int(match[1]), {})[match[4]] = path
        by_window += [
            FoundProfile(int(attempt[1]), window, folder, dict(sorted(windows[window].items())))
            for window in sorted(windows)
        ]
    return by_window


# ---- one rank's trace

Interval = tuple[float, float]
# NCCL's kernels, gloo's operations, what c10d dispatches, and waiting for either.
_COMMUNICATION = re.compile(
    r"nccl|^gloo:|^c10d::|^_?c10d_functional::|^record_param_comms|^mpi:|^ucc:", re.IGNORECASE
)
# Kineto's categories; older versions wrote them with a capital.
_COPIES = frozenset({"gpu_memcpy", "gpu_memset", "memcpy", "memset"})
_RUNTIME = frozenset({"cuda_runtime", "cuda_driver", "runtime"})
_ALLOCATES = re.compile(r"(cuda|hip)(Host)?(Malloc|Free)|cuMem(Alloc|Free|Create|Map|Unmap)")
_DATA = (f"{OURS}data", "enumerate(DataLoader)")
_SAVE = (f"{OURS}save",)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that is covered by any of them."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def minus(these: Sequence[Interval], those: Sequence[Interval]) -> list[Interval]:
    """What of these is not covered by those; both as `union` gives them."""
    left: list[Interval] = []
    start = 0
    for begin, end in these:
        at = begin
        while start < len(those) and those[start][1] <= begin:
            start += 1
        for cut_begin, cut_end in those[start:]:
            if cut_begin >= end:
                break
            if cut_begin > at:
                left.append((at, cut_begin))
            at = max(at, cut_end)
        if at < end:
            left.append((at, end))
    return left


def both(these: Sequence[Interval], those: Sequence[Interval]) -> list[Interval]:
    """What is covered by these and by those; both as `union` gives them."""
    return minus(these, minus(these, those))


def length(intervals: Iterable[Interval]) -> float:
    """Their lengths added up."""
    return sum(end - begin for begin, end in intervals)


def divide(
    stretch: Interval, kinds: Mapping[str, Sequence[Interval]], rest: str
) -> dict[str, float]:
    """Shares of a stretch by kind, which add up to 1; `rest` is the kind of what none covers.

    `kinds` are in order of precedence: time that two of them cover counts for the earlier one.
    """
    left = [stretch]
    shares: dict[str, float] = {}
    whole = stretch[1] - stretch[0]
    for kind, intervals in kinds.items():
        shares[kind] = length(both(left, intervals)) / whole
        left = minus(left, intervals)
    return shares | {rest: length(left) / whole}


class Kind(StrEnum):
    """What a rank's time went to: a closed set."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    MEMORY = "memory"
    DATA = "data"
    SAVE = "save"
    HOST = "host"


@dataclass(frozen=True)
class RankShares:
    """One rank's time in a profile.

    Attributes:
        device: "gpu" or "cpu": whose time was divided.
        steps: Step to its seconds.
        seconds: The stretch that was divided, from the first step's begin to the last one's
            end.
        shares: Of that stretch; they add up to 1.
        hidden: Communication beside which something was computed, as a share of the stretch.
    """

    rank: int
    device: str
    steps: dict[int, float]
    seconds: float
    shares: dict[Kind, float]
    hidden: float


NO_TRACE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What comes of JSON that is no trace, and of a step that took no time."""


class TraceUnreadable(HpctrainError):
    """A trace that is cut, or is none."""


def read_trace(path: Path, rank: int) -> RankShares:
    """A rank's shares from its trace file.

    Raises:
        TraceUnreadable: the file is cut or damaged, or holds no profiled step.
    """
    try:
        with open_plain(path) as packed, gzip.open(packed) as file:
            raw = json.load(file)
        events = [e for e in raw["traceEvents"] if e.get("ph") == "X"]
        return _shares_of(events, rank, where=str(path))
    except (OSError, EOFError, zlib.error, *NO_TRACE) as error:
        raise TraceUnreadable(f"{path} cannot be read ({error}); was it cut off?") from None


def _shares_of(events: Sequence[dict[str, Any]], rank: int, *, where: str) -> RankShares:
    """A rank's shares from its trace's complete events."""
    host = [e for e in events if not _is_on_gpu(e)]
    steps = {
        int(e["name"].removeprefix(STEP_MARK)): _span(e)
        for e in host
        if e["name"].startswith(STEP_MARK) and e["name"].removeprefix(STEP_MARK).isdigit()
    }
    if not steps:
        raise TraceUnreadable(f"{where} holds no step; it was stopped before one began")
    stretch = (min(b for b, _ in steps.values()), max(e for _, e in steps.values()))
    kernels = [e for e in events if _cat(e) == "kernel"]
    kinds = _on_gpu(events, kernels) if kernels else _on_cpu(host)
    everything = kinds.pop("all communication")
    hidden = minus(both([stretch], everything), kinds[Kind.COMMUNICATION])
    kinds = _in_order(kinds, gpu=bool(kernels), host=host)
    shares = divide(stretch, kinds, Kind.HOST)
    return RankShares(
        rank=rank,
        device="gpu" if kernels else "cpu",
        steps={step: (end - begin) / 1e6 for step, (begin, end) in sorted(steps.items())},
        seconds=(stretch[1] - stretch[0]) / 1e6,
        shares={kind: shares[kind] for kind in Kind},
        hidden=length(hidden) / (stretch[1] - stretch[0]),
    )


def _on_gpu(
    events: Iterable[dict[str, Any]], kernels: Sequence[dict[str, Any]]
) -> dict[str, list[Interval]]:
    communication = union(_span(e) for e in kernels if _communicates(e))
    compute = union(_span(e) for e in kernels if not _communicates(e))
    memory = union(_span(e) for e in events if _moves_memory(e))
    return {
        Kind.COMPUTE: compute,
        Kind.COMMUNICATION: minus(communication, compute),
        Kind.MEMORY: memory,
        "all communication": communication,
    }


def _on_cpu(host: Sequence[dict[str, Any]]) -> dict[str, list[Interval]]:
    threads: dict[Any, list[list[Interval]]] = {}
    for event in host:
        communicates = _communicates(event)
        if communicates or _cat(event) in {"cpu_op", "operator"}:
            ours = threads.setdefault(event.get("tid"), [[], []])
            ours[communicates].append(_span(event))
    communication = union(span for _, waits in threads.values() for span in waits)
    # An operator around a wait of its own thread (a functional collective's) is that wait.
    parts = [minus(union(works), union(waits)) for works, waits in threads.values()]
    compute = union(span for part in parts for span in part)
    return {
        Kind.COMPUTE: compute,
        Kind.COMMUNICATION: minus(communication, compute),
        Kind.MEMORY: [],
        "all communication": communication,
    }


def _in_order(
    kinds: dict[str, list[Interval]], *, gpu: bool, host: Sequence[dict[str, Any]]
) -> dict[str, list[Interval]]:
    """The kinds with the host's spans, in the order of the module's table."""
    data = union(_span(e) for e in host if e["name"].startswith(_DATA))
    save = union(_span(e) for e in host if e["name"].startswith(_SAVE))
    if gpu:
        return {Kind.SAVE: save, **kinds, Kind.DATA: data}
    return {Kind.SAVE: save, Kind.DATA: data, **kinds}


def _cat(event: dict[str, Any]) -> str:
    return str(event.get("cat", "")).lower()


def _is_on_gpu(event: dict[str, Any]) -> bool:
    """Kernels, copies, and the shadows that the host's spans cast on the GPU's streams."""
    return _cat(event) in {"kernel", "gpu_user_annotation", *_COPIES}


def _communicates(event: dict[str, Any]) -> bool:
    return _COMMUNICATION.search(event["name"]) is not None


def _moves_memory(event: dict[str, Any]) -> bool:
    if _cat(event) in _COPIES:
        return True
    return _cat(event) in _RUNTIME and _ALLOCATES.match(event["name"]) is not None


def _span(event: dict[str, Any]) -> Interval:
    begin = float(event["ts"])
    return begin, begin + float(event.get("dur", 0.0))

"""What could go better, each with its evidence and what to do. Pure; no advice without numbers.

A rule looks at what was gathered and gives an advice or nothing. Its thresholds stand here, beside
their reasons. Errors are the doctor's, a slow rank is the status's.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.core.base.text import count, duration, size
from hpctrain.ledger.history.goodput import TimeClass
from hpctrain.ledger.history.progress import HOW_TO_REPORT
from hpctrain.ledger.history.run_state import EndCause
from hpctrain.observe.report import gather
from hpctrain.observe.report.summary import ended, percent, step_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpctrain.ledger.history.attempts import AttemptView
    from hpctrain.observe.report.gather import ReportData

SAVE_SHARE = 0.01
"""Goal of blocking saves: at most 1 % of the time."""
DATA_SHARE = 0.05
STARTUP_SHARE = 0.05
WARM_UP_SHARE = 0.05
REDONE_SHARE = 0.02
STALL_SHARE = 0.02
LEAST_ALLOCATED_S = 600.0
"""Shares of a shorter run say little: its start is most of it."""
NODE_ENDS = 2
"""Ends on one node: one may be chance."""
LOOSE_SHARE, LOOSE_BYTES = 0.25, 1 << 30
"""Of what is reserved: from here on memory in pieces is worth a line."""
NAMED = 8
"""Attempts that an evidence lists."""

_OF_NODES = frozenset(
    {
        EndCause.NODE_FAIL,
        EndCause.GPU_ERROR,
        EndCause.HANG,
        EndCause.NCCL_ERROR,
        EndCause.UNFIT_NODE,
        EndCause.CRASHED,
    }
)
"""Causes that may lie in a node; others lie in the program or in the cluster's rules."""
_WARNED = frozenset({EndCause.PREEMPTED, EndCause.WALLTIME, EndCause.REQUEUED, EndCause.STOPPED})


@dataclass(frozen=True)
class Advice:
    """Something that could go better.

    `weight` is the share of the run's time that is at stake; it puts the advice in order.
    """

    key: str
    title: str
    evidence: str
    do: str
    weight: float = 0.0


def advice(data: ReportData) -> list[Advice]:
    """Everything that the numbers call for, what costs most first; often nothing."""
    entries = [one for rule in RULES for one in rule(data)]
    return sorted(entries, key=lambda one: -one.weight)


def _share(data: ReportData, *kinds: TimeClass) -> float:
    """Share of the allocated time; 0 where too little was allocated to tell."""
    spent = data.status.goodput
    allocated = spent.submitted_s - spent.seconds[TimeClass.QUEUE]
    if allocated < LEAST_ALLOCATED_S or spent.allocated_s <= 0:
        return 0.0
    return sum(spent.node_seconds[kind] for kind in kinds) / spent.allocated_s


def _of_allocated(share: float) -> str:
    return f"{percent(share)} of the allocated time"


def blocking_saves(data: ReportData) -> Iterator[Advice]:
    """Training stands still for its saves."""
    share, saves = _share(data, TimeClass.SAVE), data.saves
    if share <= SAVE_SHARE or not saves:
        return
    stall = gather.median([save.cost_s for save in saves])
    waited = sum(save.waited_s for save in saves)
    stopped = sum((save.cost_s or 0.0) + save.waited_s for save in saves)
    evidence = (
        f"{_of_allocated(share)}; {count(len(saves), 'save')}, "
        f"each stopping training for {step_seconds(stall)} in the middle"
    )
    if saves[-1].mode == "sync":
        do = "write behind training: `--set checkpoint.mode=async` (the default)"
    elif stopped and waited > stopped / 2:
        evidence += f"; {duration(waited)} of it waiting for the save before"
        do = "saves come faster than the file system takes them: save less often"
    else:
        do = "save less often: `--set checkpoint.interval_s=0` lets hpctrain choose"
    yield Advice("blocking-saves", "Training stands still for saves", evidence, do, share)


def data_wait(data: ReportData) -> Iterator[Advice]:
    """Training waits for its data."""
    share, waits = _share(data, TimeClass.DATA), gather.waits(data.ranks)
    if share <= DATA_SHARE:
        return
    evidence = f"{_of_allocated(share)} on rank 0"
    if waits is not None:
        parts = [d / w if w else 0.0 for d, w in zip(waits.data_s, waits.wall_s, strict=True)]
        worst = max(range(len(parts)), key=parts.__getitem__)
        evidence += f"; rank {worst} waited most, {percent(parts[worst])} of its time"
    do = "more workers for the data loader, with the cores for them (`--set "
    do += "slurm.cpus_per_rank=N`), or the data nearer: on the node's own disk, in larger files"
    yield Advice("data-wait", "Training waits for data", evidence, do, share)


def bad_node(data: ReportData) -> Iterator[Advice]:
    """One node ended several attempts."""
    ends: dict[str, list[AttemptView]] = defaultdict(list)
    by_number = {one.number: one for one in data.status.attempts}
    excluded = {(number, node) for number, node in data.excluded}
    for number, node in sorted(excluded, key=lambda attempt: (attempt[0] or 0, attempt[1])):
        if number in by_number:
            ends[node].append(by_number[number])
    for attempt in data.status.attempts:
        node = attempt.failure.node if attempt.failure is not None else ""
        if node and attempt.cause in _OF_NODES and (attempt.number, node) not in excluded:
            ends[node].append(attempt)
    elsewhere = {node for one in data.status.attempts for node in one.nodes}
    for node, attempts in ends.items():
        if len(attempts) < NODE_ENDS or len(elsewhere) < NODE_ENDS or _one_error(data, attempts):
            continue
        lost = sum(one.steps_lost or 0 for one in attempts)
        listed = _some([f"{one.number} ({ended(one)})" for one in attempts])
        yield Advice(
            "bad-node",
            f"{node} ended {count(len(attempts), 'attempt')}",
            f"attempts {listed}; {count(lost, 'step')} lost by them",
            f"keep it out, `--set slurm.exclude={node}`, and look at it with `hpctrain preflight`",
            _share(data, TimeClass.REDONE, TimeClass.STALL, TimeClass.STARTUP) + 0.01,
        )


def _some(texts: list[str]) -> str:
    """The first of them, and whether there are more."""
    return ", ".join(texts[:NAMED]) + (", ..." if len(texts) > NAMED else "")


def _one_error(data: ReportData, attempts: list[AttemptView]) -> bool:
    """Whether the same error also came on other nodes: then it is the program's."""
    nodes: dict[str, set[str]] = defaultdict(set)
    for attempt in data.status.attempts:
        if attempt.failure is not None:
            nodes[attempt.failure.summary].add(attempt.failure.node)
    said = {one.failure.summary for one in attempts if one.failure is not None}
    return bool(said) and all(len(nodes[summary]) > 1 for summary in said)


def start_up(data: ReportData) -> Iterator[Advice]:
    """It takes long until the ranks read a checkpoint."""
    share = _share(data, TimeClass.STARTUP, TimeClass.RESTORE)
    if share <= STARTUP_SHARE:
        return
    spent, attempts = data.status.goodput, data.status.attempts
    each = (spent.seconds[TimeClass.STARTUP] + spent.seconds[TimeClass.RESTORE]) / max(
        1, len(attempts)
    )
    restore = _share(data, TimeClass.RESTORE)
    evidence = f"{_of_allocated(share)}, {duration(each)} for each of "
    evidence += count(len(attempts), "attempt")
    if restore > share / 2:
        do = (
            f"most of it ({percent(restore)}) reads checkpoints: see `hpctrain help checkpoints.md`"
        )
    else:
        do = "imports over a shared file system are the usual reason: an environment on the node's "
        do += "own disk or in one image file; longer jobs start less often"
    yield Advice("start-up", "Starting takes a large share", evidence, do, share)


def warm_up(data: ReportData) -> Iterator[Advice]:
    """The first step of each attempt takes long."""
    share = _share(data, TimeClass.WARM_UP)
    if share <= WARM_UP_SHARE:
        return
    each = data.status.goodput.seconds[TimeClass.WARM_UP] / max(1, len(data.status.attempts))
    yield Advice(
        "warm-up",
        "The first step of each attempt takes long",
        f"{_of_allocated(share)}, {duration(each)} for each of "
        f"{count(len(data.status.attempts), 'attempt')}",
        "compiling is the usual reason: keep its cache between attempts (TORCHINDUCTOR_CACHE_DIR "
        "on a shared disk), or `--set engine.compile=no` where jobs are short",
        share,
    )


def lost_steps(data: ReportData) -> Iterator[Advice]:
    """Attempts ended without a save, and what they had done was done again."""
    share = _share(data, TimeClass.REDONE)
    losers = [one for one in data.status.attempts if one.steps_lost]
    if share <= REDONE_SHARE or not losers:
        return
    warned = [one for one in losers if one.cause in _WARNED]
    worst = max(losers, key=lambda one: one.steps_lost or 0)
    evidence = (
        f"{_of_allocated(share)}: {count(data.steps_lost or 0, 'step')} in "
        f"{count(len(losers), 'attempt')}, the most in attempt {worst.number} "
        f"({ended(worst)}, {count(worst.steps_lost or 0, 'step')})"
    )
    if len(warned) > len(losers) / 2:
        do = "most were warned and had no time for a save: a longer warning, "
        do += "`--set slurm.signal_lead_s=N`, or smaller checkpoints"
    else:
        do = "they were killed without a warning: allow less to be lost, "
        do += "`--set checkpoint.max_loss_s=N`"
    yield Advice("lost-steps", "Steps were done again", evidence, do, share)


def stall(data: ReportData) -> Iterator[Advice]:
    """Nodes were held by attempts that no longer said a word."""
    share = _share(data, TimeClass.STALL)
    if share <= STALL_SHARE:
        return
    silent: dict[int, float] = defaultdict(float)
    for slice_ in data.status.goodput.slices:
        if slice_.kind is TimeClass.STALL and slice_.attempt is not None:
            silent[slice_.attempt] += slice_.end - slice_.start
    worst = max(silent, key=lambda number: silent[number], default=0)
    yield Advice(
        "stall",
        "Nodes were held by attempts that no longer said a word",
        f"{_of_allocated(share)}; attempt {worst} was silent for "
        f"{duration(silent.get(worst, 0.0))}",
        "see the end of its log: `hpctrain logs RUN --attempt N`",
        share,
    )


def stood_still(data: ReportData) -> Iterator[Advice]:
    """Ranks hung until somebody saw it."""
    share = _share(data, TimeClass.NO_PROGRESS)
    if share <= STALL_SHARE:
        return
    numbers = {
        slice_.attempt
        for slice_ in data.status.goodput.slices
        if slice_.kind is TimeClass.NO_PROGRESS
    }
    stood = [one for one in data.status.attempts if one.number in numbers]
    evidence = f"{_of_allocated(share)}, in {count(len(numbers), 'attempt')}"
    for attempt in reversed(stood):
        if attempt.hang is not None and attempt.hang.summary:
            evidence += f"; attempt {attempt.number}: {attempt.hang.summary}"
            break
    do = "the stacks of a hang lie in the run's attempts/N/hang.json"
    settings = data.spec.settings if data.spec is not None else None
    if settings is not None and settings.alive.hang != "restart":
        do += "; `--set alive.hang=restart` starts the ranks again once a hang is found"
    elif settings is not None and any(one.awaited is not None for one in stood):
        do += "; ranks that do not return at the end are waited for: `--set run.end_wait_s=N`"
    else:
        do += "; it is found sooner with a section for what takes long (`run.section`)"
    yield Advice("no-progress", "Ranks stood still", evidence, do, share)


def loose_memory(data: ReportData) -> Iterator[Advice]:
    """Memory is reserved and was never in use: it is in pieces.

    Between steps much is free in any run, so peaks and retried allocations tell.
    """
    held = gather.memory(data.ranks)
    if held is None or not held.reserved:
        return
    pairs = list(zip(held.reserved, held.peak, strict=True))
    loose = [max(0.0, reserved - peak) for reserved, peak in pairs]
    worst = max(range(len(loose)), key=loose.__getitem__)
    reserved = held.reserved[worst]
    large = loose[worst] >= LOOSE_SHARE * reserved and loose[worst] >= LOOSE_BYTES
    if not (large or (held.retries and loose[worst] > 0)):
        return
    again = f"; {held.retries:.0f} allocations were tried again" if held.retries else ""
    evidence = f"rank {worst} never used {size(round(loose[worst]))} of the "
    evidence += f"{size(round(reserved))} that it reserved{again}"
    do = "`--env PYTORCH_ALLOC_CONF=expandable_segments:True`"
    yield Advice("memory", "Memory is in pieces", evidence, do)


def reports_nothing(data: ReportData) -> Iterator[Advice]:
    """Nobody knows what was lost, nor what else could be advised."""
    words = data.status.reported
    if not words.is_silent:
        return
    ends = [one for one in data.status.attempts if one.ended is not None]
    back = len(data.status.attempts) - 1
    lost = f", and what was lost {count(back, 'time')}," if back else ""
    evidence = f"{count(len(words.silent), 'attempt')} ran and reported none: how far it came"
    evidence += f"{lost} is not known"
    do = f"have the program report its steps: {HOW_TO_REPORT}; one that saves and leaves when "
    do += "`run.should_stop()` says so loses nothing at a preemption or a time limit"
    yield Advice(
        "tells-nothing", "The program reports no steps", evidence, do, 0.5 if ends else 0.0
    )


RULES: tuple[Callable[[ReportData], Iterator[Advice]], ...] = (
    reports_nothing,
    bad_node,
    blocking_saves,
    data_wait,
    lost_steps,
    stall,
    stood_still,
    start_up,
    warm_up,
    loose_memory,
)

"""Run a drill: wait until the run trains, inject a fault, wait for its result, judge; and show it.

Faults of processes and of a node's memory are injected on that node, by `entry.drill_node`. At the
end, also after Ctrl-C, stopped processes continue and faults are disarmed. tests/e2e/test_drill.py,
tests/slurm/test_drill.py and tests/unit/cli/test_drill.py hold the promises.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpctrain.advise.drill import injectors
from hpctrain.advise.drill.promises import (
    FAULTS,
    FREEZE_S,
    DrillFault,
    DrillVerdict,
    Planted,
    is_settled,
    judge,
)
from hpctrain.cluster.scheduler.base import get_cluster
from hpctrain.core.base import clock
from hpctrain.core.base.process import own_program
from hpctrain.errors import HpctrainError
from hpctrain.launch.live_job import newest_submission
from hpctrain.ledger.history.lineage import lineage
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_state import OVER
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.fence import take_attempt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from hpctrain.ledger.history.run_records import AttemptRecord
    from hpctrain.ledger.run.layout import RunDir


LOOK_S = 0.1
TRIES = 3
_SAID = frozenset(injectors.Done._fields)
"""What `entry.drill_node` says, by name."""


@dataclass(frozen=True)
class DrillResult:
    """A fault, and what came of it."""

    fault: DrillFault
    verdict: DrillVerdict
    seconds: float


@dataclass
class Course:
    """A drill of one run."""

    run: RunDir  # the run
    cluster: str  # name of its scheduler
    armed: Path  # folder with a marker for each armed fault
    patience_s: float  # so long is waited for what comes of a fault

    def drill(self, faults: Iterable[DrillFault]) -> Iterator[DrillResult]:
        """Plant each fault in turn, and tell of each as it is over."""
        try:
            for fault in faults:
                began = clock.monotonic()
                verdict = self._one(fault)
                tries = 1
                while verdict.again and tries < TRIES:
                    verdict = self._one(fault)
                    tries += 1
                yield DrillResult(fault, verdict, clock.monotonic() - began)
        finally:  # disarm; what was stopped is continued by who stopped it
            for fault in FAULTS.values():
                if fault.armed:
                    (self.armed / fault.name).touch()

    def _one(self, fault: DrillFault) -> DrillVerdict:
        try:
            ready = self._until_ready()
            if isinstance(ready, DrillVerdict):
                return ready
            planted = self._plant(fault, *ready)
        except (HpctrainError, OSError) as error:
            return DrillVerdict("not tried", str(error))
        if isinstance(planted, DrillVerdict):
            return planted
        return self._await(fault, planted)

    def _until_ready(self) -> tuple[RunHistory, AttemptRecord] | DrillVerdict:
        """Wait for a save that the newest attempt has just committed, and for one before it."""
        deadline, seen = clock.monotonic() + self.patience_s, None
        while clock.monotonic() < deadline:
            history = RunHistory.read(self.run)
            if history.state.phase in OVER:
                return DrillVerdict("not tried", f"the run had ended ({history.state.phase})")
            now = history.newest
            if now is not None and not now.is_over and now.first_step is not None:
                done = now.number, len(now.saves)
                if seen is not None and seen[0] == done[0] and done[1] > max(1, seen[1]):
                    return history, now
                if seen is None or seen[0] != done[0]:
                    seen = done
            clock.sleep(LOOK_S)
        return DrillVerdict(
            "not tried", f"it committed no checkpoint in {self.patience_s:.0f} s (--patience)"
        )

    def _plant(
        self, fault: DrillFault, history: RunHistory, now: AttemptRecord
    ) -> Planted | DrillVerdict:
        planted = Planted(
            clock.now(),
            now.number,
            now.last_step or 0,
            saves=len(history.saves),
            problems=len(lineage(history).problems),
        )
        if fault.armed:
            (self.armed / fault.name).unlink(missing_ok=True)
            return replace(planted, fired=False)
        if fault.name == "preempt":
            get_cluster(self.cluster).rehearse(_job_of(history, now), time_limit=False)
            return planted
        if fault.name == "second_writer":
            take_attempt(self.run, job_id=now.job_id, restarts=now.restarts)
            return replace(planted, on_disk=injectors.committed(self.run))
        return self._in_rank(fault, planted, history, now)

    def _in_rank(
        self, fault: DrillFault, planted: Planted, history: RunHistory, now: AttemptRecord
    ) -> Planted | DrillVerdict:
        """Meet the last rank: where there are several nodes, it is not on the one that leads."""
        if not now.nodes or now.world_size < len(now.nodes):
            return DrillVerdict("not tried", "no rank reported where it is")
        rank = now.world_size - 1
        node = now.nodes[rank * len(now.nodes) // now.world_size]
        words = ("plant", fault.name, str(now.number), str(rank), str(FREEZE_S))
        said = self._on_nodes(_job_of(history, now), [node], words)
        if not said:
            return DrillVerdict("not tried", f"{node} gave no answer")
        done = injectors.Done(**said[0])
        if done.why:
            return DrillVerdict("not tried", f"{node}: {done.why}")
        if fault.name == "freeze_rank":
            step = RunHistory.read(self.run).newest
            return replace(planted, step=planted.step if step is None else step.last_step or 0)
        if done.step is not None:
            return replace(planted, damaged_step=done.step, damaged=done.name)
        return planted

    def _on_nodes(
        self, job_id: str, nodes: Sequence[str], words: Sequence[str]
    ) -> list[dict[str, Any]]:
        """What our program has said on nodes of the job; a site's own lines are no answers."""
        root = str(self.run.root.resolve())
        command = own_program("hpctrain.entry.drill_node", root, *words)
        text = get_cluster(self.cluster).on_nodes(job_id, nodes, command)
        return [said for line in text.splitlines() if (said := _answer(line)) is not None]

    def _await(self, fault: DrillFault, planted: Planted) -> DrillVerdict:
        deadline = clock.monotonic() + self.patience_s
        while True:
            history = RunHistory.read(self.run)
            if fault.armed:
                planted = replace(planted, fired=(self.armed / fault.name).exists())
            if fault.name == "second_writer":
                is_reported = any(
                    one.kind == "fenced" for one in ledger.read_marked(self.run, b"fenced")
                )
                planted = replace(planted, gave_way=is_reported)
            on_disk = injectors.committed(self.run)
            if is_settled(fault, planted, history, on_disk) or clock.monotonic() > deadline:
                return judge(fault, planted, history, on_disk)
            clock.sleep(LOOK_S)


def _answer(line: str) -> dict[str, Any] | None:
    """What our program has said; None for a line that a site's profile or greeting has."""
    if not line.startswith("{"):
        return None
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return said if said and said.keys() <= _SAID else None


def _job_of(history: RunHistory, now: AttemptRecord) -> str:
    return newest_submission(history)[1] or now.job_id


FORMAT = 1
_NAME = 17
_OUTCOME = 11


def row(result: DrillResult, width: int = 100) -> str:
    """A fault in the table."""
    indent = " " * (_NAME + _OUTCOME)
    return textwrap.fill(
        result.verdict.why,
        max(width, 60),
        initial_indent=f"{result.fault.name:<{_NAME}}{result.verdict.outcome:<{_OUTCOME}}",
        subsequent_indent=indent,
    )


def summary(results: Sequence[DrillResult]) -> str:
    """How many promises were kept, in a line."""
    counts = {
        outcome: sum(one.verdict.outcome == outcome for one in results)
        for outcome in ("kept", "broken", "not tried")
    }
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items())


def as_json(run: str, results: Sequence[DrillResult]) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "format": FORMAT,
        "run": run,
        "faults": [
            {
                "name": one.fault.name,
                "does": one.fault.does,
                "promise": one.fault.promise,
                "anchor": one.fault.anchor,
                "outcome": one.verdict.outcome,
                "why": one.verdict.why,
                "seconds": round(one.seconds, 1),
            }
            for one in results
        ],
    }

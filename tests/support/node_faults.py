"""Random faults of a local run's nodes: a process killed or stopped, a full disk, a torn file.

A seed decides what is done, to whom and at which step; `Course` does it, and knows what the run may
lose by it.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.core.base.locks import MEMORY
from tests.support import node_processes, processes
from tests.support.ledger_runs import all_fields

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.node_processes import NodeProcess
    from tests.support.scenario import RunHandle

HOW = ("killed", "stopped", "paused")
LOCAL = ("agent", "rank", "control", "replica server", "store", "writer")
"""The processes of a node of a local job; only SLURM's have a liveness process."""
KINDS = (
    *((who, how) for who in LOCAL for how in HOW),
    ("rank", "segfaults"),
    ("rank", "killed"),
    ("all ranks of a node", "killed"),
    ("disk", "full"),
    ("disk", "full"),
    ("checkpoint", "torn"),
    ("checkpoint", "torn"),
)
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "segfaults": signal.SIGSEGV}
BESIDE_A_FULL_DISK = ("rank", "writer", "agent", "control", "store", "")
PAUSE_S = 3.0


@dataclass
class Course:
    """What is done to one run.

    Attributes:
        run: The run.
        dice: Draws the faults.
        disk: The folder of the run's small disk.
        done: Each fault in words.
        torn: Steps of checkpoints that were damaged here.
        seen: Folders and files in memory that processes of the run had open.
    """

    run: RunHandle
    dice: random.Random
    disk: Path
    done: list[str] = field(default_factory=list)
    torn: set[int] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)

    def step(self) -> int:
        """The newest step that the ledger has."""
        marks = self.run.events("steps")
        return max((int(all_fields(event)["last"]) for event in marks), default=0)

    def is_over(self) -> bool:
        """Whether the run has come to its end."""
        return bool(self.run.events("done") or self.run.events("run_stopped"))

    def wait_until(self, step: int) -> bool:
        """Wait for a step; whether it came before the run's end."""
        self.run.wait(f"step {step}", lambda: self.step() >= step or self.is_over())
        return not self.is_over()

    def fault(self) -> None:
        """Do one thing, drawn now."""
        who, how = self.dice.choice(KINDS)
        self.look()
        told = self._do(who, how)
        self.done.append(f"step {self.step()}: {told}")

    def look(self) -> list[NodeProcess]:
        """The processes that live; notes what they have open in memory."""
        found = node_processes.of_job(self.run.job_id)
        for one in found:
            if one.kind == "agent":
                paths = processes.open_files(one.pid)
                self.seen |= {path for path in paths if path.startswith(f"{MEMORY}/hpctrain")}
        return found

    def _do(self, who: str, how: str) -> str:
        if who == "disk":
            return self._fill_disk()
        if who == "checkpoint":
            return f"{self._tear()}, {self._hit('rank', 'killed')}"
        if who.startswith("all ranks"):
            node = self.dice.randrange(2)
            ranks = [one for one in self.look() if (one.kind, one.node) == ("rank", node)]
            return f"{sum(one.signal(signal.SIGKILL) for one in ranks)} ranks of {node} killed"
        return self._hit(who, how)

    def _hit(self, who: str, how: str) -> str:
        found = [one for one in self.look() if one.kind == who]
        if not found:
            return f"no {who} is there"
        victim = self.dice.choice(found)
        if how == "paused":
            pause_s = self.dice.uniform(0.3, PAUSE_S)
            victim.freeze()
            time.sleep(pause_s)
            victim.signal(signal.SIGCONT)
            return f"{who} of node {victim.node} paused {pause_s:.1f} s"
        victim.signal(SIGNALS[how])
        return f"{who} of node {victim.node} {how}"

    def _fill_disk(self) -> str:
        what = "nothing else"

        def kill() -> None:
            nonlocal what
            who = self.dice.choice(BESIDE_A_FULL_DISK)
            what = self._hit(who, "killed") if who else what

        with_full_disk(self.disk, self.dice, kill)
        return f"disk full, {what}"

    def _tear(self) -> str:
        """Damage a file of the newest checkpoint; another one must be left."""
        found = sorted(self.run.dir.checkpoints.glob("step-??????????"))
        if len(found) < 2:
            return "no checkpoint to spare"
        files = sorted(path for path in found[-1].iterdir() if path.is_file())
        path = self.dice.choice(files)
        self.torn.add(int(found[-1].name.removeprefix("step-")))
        whole = path.read_bytes()
        if self.dice.random() < 0.5 or not whole:
            os.truncate(path, len(whole) // 2)
            return f"{found[-1].name}/{path.name} cut"
        flipped = bytearray(whole)
        flipped[self.dice.randrange(len(whole))] ^= 1 << self.dice.randrange(8)
        path.write_bytes(flipped)
        return f"{found[-1].name}/{path.name} flipped"


def with_full_disk(disk: Path, dice: random.Random, act: Callable[[], object]) -> None:
    """Fill a small disk, do something a moment later, and make room again after another one."""
    ballast = disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    try:
        time.sleep(dice.uniform(0.1, 2.0))
        act()
        time.sleep(dice.uniform(0.5, PAUSE_S))
    finally:
        ballast.unlink(missing_ok=True)


def lost_beyond(course: Course) -> list[str]:
    """What was done again though an intact checkpoint had it."""
    saved: list[int] = []
    wrong = []
    for event in course.run.events():
        if event.kind == "saved":
            saved.append(int(all_fields(event)["step"]))
        if event.kind == "restored":
            begun = int(all_fields(event)["step"])
            intact = [step for step in saved if step not in course.torn]
            if begun < max(intact, default=0):
                wrong.append(f"attempt {event.attempt} from {begun}, saved were {saved[-3:]}")
            saved = [step for step in saved if step <= begun]
    return wrong


def left_behind(course: Course, folder: Path, variable: str, value: str) -> list[str]:
    """Processes and files of a run that has ended.

    Args:
        course: What was done to it.
        folder: Its temporary folder.
        variable: Of the environment of each of its processes.
        value: The variable's.
    """
    own = [pid for pid in processes.all_pids() if processes.environment(pid).get(variable) == value]
    found = [f"process {pid}: {processes.command(pid)}" for pid in own]
    found += [f"file {path}" for path in folder.iterdir()]
    return found + [f"in memory {path}" for path in course.seen if os.path.exists(path)]  # noqa: PTH110

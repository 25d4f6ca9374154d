"""Programs that people have, on the real cluster, disturbed, and judged by their own words.

    campaign = Campaign(slurm, tmp_path, ONE_FILE)
    for kind in KINDS:
        print(campaign.disturb(kind))
    campaign.wait_end()

What hpctrain says of a run is no witness here: the steps of an attempt are those that the program
itself has printed into its rank 0's log.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.ledger_runs import all_fields
from tests.support.local_runs import SCRIPTS
from tests.support.scenario import submit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.slurm_cluster import SlurmCluster

KINDS = ("without grace", "grace", "dead node", "time limit")
"""What SLURM does to a run: takes its nodes at once or after a grace time, loses one, ends it."""
TOLD = frozenset({"without grace", "grace", "time limit"})
"""Of these the run hears before it has to go."""
LIMIT_MIN = 600


@dataclass(frozen=True)
class Program:
    """How a program is started, and what its own log looks like.

    Attributes:
        name: As in tables.
        words: Script and arguments, what stands behind `--`.
        step: A regular expression for each step that rank 0 says it has done; group 1 its number.
        flags: Of `hpctrain submit`, for this program.
        layout: Nodes and ranks, flags too.
        every: Steps from one checkpoint of its own to the next, and until that one is sealed; None
            where it keeps none, or does not go on from it.
        hears: It leaves when it is told to, having saved.
        result: A regular expression for the line of its result; group 1 is the same number in a
            run that was disturbed and in one that was not, but for the order in which DDP's first
            step of a start adds up. Empty where the program is not so.
        hurry: Arguments with which it does the same without waiting.
        folder: Where it is submitted, if not in the test's own folder.
    """

    name: str
    words: tuple[str, ...]
    step: str = r"^step (\d+)"
    flags: tuple[str, ...] = ()
    layout: tuple[str, ...] = ("--nodes=2", "--ranks-per-node=2")
    every: int | None = None
    hears: bool = False
    result: str = ""
    hurry: tuple[str, ...] = ()
    folder: Path | None = None

    def may_lose(self, kind: str) -> int | None:
        """How many steps it may lose in a disturbance of a kind; None where it may lose all."""
        return 0 if self.hears and kind in TOLD else self.every

    def flagged(self, name: str, *flags: str, words: Sequence[str] = ()) -> Program:
        """The same program, with more flags or arguments."""
        more = (*self.words, *words)
        return dataclasses.replace(self, name=name, words=more, flags=(*self.flags, *flags))


@dataclass(frozen=True)
class Disturbed:
    """One disturbance, by the program's own log.

    Attributes:
        kind: Which, of KINDS.
        last: The last step done before it.
        first: The first step done after it.
        reason: Why the attempt ended, as the ledger has it.
        away_s: From its end to the first step after it.
    """

    kind: str
    last: int
    first: int
    reason: str
    away_s: float

    @property
    def lost(self) -> int:
        """Steps that were done twice."""
        return max(0, self.last - self.first + 1)

    def __str__(self) -> str:
        """A line of a campaign's log."""
        return (
            f"{self.kind}: {self.lost} lost ({self.last} -> {self.first}), "
            f"{self.reason}, away {self.away_s:.0f} s"
        )


class Campaign:
    """A run of a program, and what is done to it."""

    def __init__(
        self, slurm: SlurmCluster, folder: Path, program: Program, partition: str = "work"
    ) -> None:
        """Submit the program.

        Raises:
            AssertionError: submit refused it.
        """
        self.slurm, self.program = slurm, program
        self.run = submit(
            slurm,
            program.folder or folder,
            *program.layout,
            *(f"--time={LIMIT_MIN}", f"--partition={partition}", "--no-snapshot"),
            *(f"--runs={folder / 'runs'}", "--env=PYTHONUNBUFFERED=1", *program.flags),
            script=program.words,
        )

    def steps(self, attempt: int) -> list[int]:
        """Steps that the program says it has done in an attempt, in the order of its log."""
        log = self.run.dir.rank_log(attempt, 0)
        text = log.read_text(errors="replace") if log.exists() else ""
        found = re.findall(self.program.step, text.replace("\r", "\n"), re.MULTILINE)
        return [int(step) for step in found]

    def attempt(self) -> int:
        """The newest attempt's number."""
        return len(self.run.events("attempt_started"))

    def wait_steps(self, count: int, attempt: int) -> None:
        """Wait until the program has done so many steps in an attempt or a later one."""

        def done() -> bool:
            ends = self.run.ends()
            assert not ends or ends[-1][1] != "stop", self.run.story()
            return len(self.steps(max(attempt, self.attempt()))) >= count

        self.run.wait(f"{count} steps of attempt {attempt}", done)

    def disturb(self, kind: str, after: int = 10, next_partition: str = "") -> Disturbed:
        """Disturb the run after so many steps of its attempt, and wait until it trains again.

        Args:
            kind: Of KINDS.
            after: Steps.
            next_partition: Where the run is to go on, if not where it is.

        Raises:
            AssertionError: it did not come back.
        """
        self.wait_steps(after, 1)
        before = self.attempt()
        self._do(kind, before, next_partition)
        self.wait_steps(1, before + 1)
        now = self.attempt()
        ended = self.run.wait_event("attempt_ended", attempt=before)
        return Disturbed(
            kind,
            last=self.steps(before)[-1],
            first=self.steps(now)[0],
            reason=ended.fact.reason,
            away_s=time.time() - ended.t,
        )

    def _do(self, kind: str, attempt: int, next_partition: str) -> None:
        job_id, slurm = self.run.job_id, self.slurm
        nodes = all_fields(self.run.events("attempt_started", attempt=attempt)[0])["nodes"]
        if kind == "dead node":
            slurm.kill_node(nodes[-1])
        elif kind == "time limit":
            slurm.end_in(job_id, 5)
        else:
            urgent = slurm.submit_urgent(nodes)
        slurm.wait_job(job_id, "PENDING")
        changes = [f"Partition={next_partition}"] if next_partition else []
        changes += [f"TimeLimit={LIMIT_MIN}"] if kind == "time limit" else []
        if changes:
            slurm.run("scontrol", "update", f"jobid={job_id}", *changes, check=True)
        slurm.start_now(job_id)
        if kind == "dead node":
            slurm.revive_node(nodes[-1])
        elif kind != "time limit":
            slurm.cancel(urgent)

    def wait_end(self) -> str:
        """Wait until the program has come to its end; its result, where it tells one."""
        self.slurm.wait_job(self.run.job_id, "COMPLETED")
        return result_of(self.program, self.run.dir.rank_log(self.attempt(), 0).read_text())


def result_of(program: Program, text: str) -> str:
    """The result that a program has printed; empty where it prints none."""
    found = re.findall(program.result, text, re.MULTILINE) if program.result else []
    return found[-1] if found else ""


def undisturbed(program: Program, folder: Path) -> str:
    """The result of a program that nobody disturbs, under torchrun, with as many ranks."""
    folder.mkdir()
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*words, *program.words, *program.hurry],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return result_of(program, done.stdout)


RESULT = r"^result (\S+)"
ONE_FILE = Program(
    "one file",
    (str(SCRIPTS / "one_file.py"), "--steps=1200", "--every=100"),
    result=RESULT,
    hurry=("--step-s=0",),
)
ONE_FILE_TOLD = Program(
    "one file, with hpctrain's lines",
    (str(SCRIPTS / "one_file_reported.py"), "--steps=1200", "--every=100"),
    every=100,
    hears=True,
    result=RESULT,
    hurry=("--step-s=0",),
)
ONE_FILE_SEALED = dataclasses.replace(
    ONE_FILE,
    name="one file, sealed",
    flags=("--set=checkpoint.sealed=out/ckpt.pt", "--resume-args=--init-from=resume"),
    every=140,
)


def _looped(name: str, script: str, *words: str) -> Program:
    """A program of many steps that says them, hears of stops and has a result."""
    return Program(
        name,
        (str(SCRIPTS / script), "--steps=1200", "--every=100", *words),
        every=100,
        hears=True,
        result=RESULT,
        hurry=("--step-s=0",),
    )


ACCELERATE = _looped("Accelerate's loop", "accelerate_loop.py")
DEEPSPEED = _looped("DeepSpeed's engine", "deepspeed_loop.py")
LIGHTNING = _looped("Lightning's Trainer, with the callback", "lightning_fit.py", "--told")
TRAINER = _looped("transformers' Trainer, with the callback", "hf_trainer.py", "--told")
TRAINER_SEALED = dataclasses.replace(
    _looped("transformers' Trainer, sealed", "hf_trainer.py"),
    flags=("--set=checkpoint.sealed=out/checkpoint-*", "--set=checkpoint.seal_settle_s=1"),
    every=140,
    hears=False,
)
PROGRAMS = {
    program.name: program
    for program in (
        ONE_FILE,
        ONE_FILE_SEALED,
        ONE_FILE_TOLD,
        ACCELERATE,
        DEEPSPEED,
        LIGHTNING,
        TRAINER,
        TRAINER_SEALED,
    )
}
"""By name."""

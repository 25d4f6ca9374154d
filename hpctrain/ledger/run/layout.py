"""The layout of a run's directory: the path of each file in it. Nothing here reads or writes."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from hpctrain.core.base.env import HPCTRAIN_RUNS


class _InRun:
    """A file or folder of every run, by its name in the run's directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, _owner: object = None) -> Path:
        return run.root / self._name


@dataclass(frozen=True)
class RunDir:
    """The directory of one run.

    Attributes:
        root: ``runs/<name>``; an absolute path, the same on every node.
    """

    root: Path

    @property
    def name(self) -> str:
        """The run's name is its directory's name."""
        return self.root.name

    @property
    def typed(self) -> str:
        """How one names it in a command: by name, or by path where it lies in another folder."""
        elsewhere = is_elsewhere(self.root.parent)
        return shlex.quote(str(self.root) if elsewhere else self.name)

    spec = _InRun("spec.json")
    """Resolved settings with their origins; written once by submit, and anew by resume."""
    events = _InRun("events.jsonl")
    """The ledger: append-only, one JSON object a line."""
    lock = _InRun("run.lock")
    """Held for moments only: to take an attempt number, to publish a checkpoint, to submit."""
    events_lock = _InRun("events.lock")
    """Held for the moment in which a fact is written; not the ledger, which others may read."""
    fence = _InRun("attempt.json")
    """Which attempt may write: see `run/fence.py`."""
    successor = _InRun("successor.json")
    """Who leads a job's agents after its first node was lost: see `agent/loss_ending.py`."""
    secret = _InRun("secret")
    """By which processes of its jobs know each other: see `run/ownership.py`."""
    stop_request = _InRun("stop-request.json")
    """Written by `hpctrain cancel --save`; rank 0 looks for it."""
    checkpoints = _InRun("checkpoints")
    """``step-<10 digits>`` directories, staged ones beside them."""
    sealed = _InRun("sealed")
    """What proves the program's own checkpoints whole: see `checkpoint/sealed`."""
    output = _InRun("output")
    """Where the program may write what is its own."""
    jobs = _InRun("jobs")
    """Batch scripts as submitted, one per submission token, and the batch side's output."""
    staging = _InRun("staging.json")
    """The packed environment that nodes start from: see `run/staging.py`."""
    snapshot = _InRun("snapshot")
    """The code that was submitted."""
    tensorboard = _InRun("tensorboard")
    """TensorBoard's event files."""
    evaluation_curves = _InRun("tensorboard/eval")
    """The same of its evaluations: another curve in TensorBoard, beside the attempts' own."""
    data = _InRun("data")
    """Token files that the recipe made from a folder of text."""

    def attempt(self, number: int) -> Path:
        """Logs, tracebacks, environment of one attempt."""
        return self.root / "attempts" / f"{number:04d}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        """Output of one rank in one attempt, stdout and stderr together."""
        return rank_log_path(self.attempt(attempt), rank)

    def outcome(self, attempt: int) -> Path:
        """How the program left, by rank 0: {"outcome", "step", "cause"}."""
        return self.attempt(attempt) / "outcome.json"

    def environment(self, attempt: int) -> Path:
        """What the ranks' environment was and where each variable came from, by node 0's agent."""
        return self.attempt(attempt) / "environment.json"

    def heartbeat(self, attempt: int) -> Path:
        """How far an attempt is, rewritten every few seconds by rank 0."""
        return self.attempt(attempt) / "heartbeat.json"

    def rank_times(self, attempt: int) -> Path:
        """What each rank's time and memory went to: one JSON object a line, by rank 0."""
        return self.attempt(attempt) / "ranks.jsonl"

    profile = _InRun("profile")
    """Traces and verdicts, a folder for each attempt."""
    profile_request = _InRun("profile-request.json")
    """Written by `hpctrain profile --now`; rank 0 looks for it."""
    stacks_request = _InRun("stacks-request.json")
    """Written by `hpctrain stacks`; the agent of node 0 looks for it."""
    evaluations = _InRun("evaluations")
    """Runs of their own, one for each checkpoint that is evaluated."""

    def evaluation(self, step: int) -> RunDir:
        """The run that evaluates the checkpoint of a step."""
        return RunDir(self.evaluations / f"{self.name}-eval-{step}")

    results = _InRun("results.json")
    """Metrics by name, as JSON: what an evaluation's program writes."""
    report = _InRun("report.html")
    """What `hpctrain report` writes."""

    def script(self, token: str) -> Path:
        """The batch script of one submission; its name is how the job is found again."""
        return self.jobs / f"{token}.sh"


def rank_log_path(attempt_dir: Path, rank: int) -> Path:
    """Output of one rank; ranks know the attempt's folder alone."""
    return attempt_dir / f"rank-{rank:05d}.log"


def failure_path(attempt_dir: Path, rank: int) -> Path:
    """Where a rank leaves the report of its own failure."""
    return attempt_dir / f"failure-{rank:05d}.json"


def hang_path(attempt_dir: Path) -> Path:
    """Where the newest verdict on ranks that stand still is written, with all that it rests on."""
    return attempt_dir / "hang.json"


def torch_error_path(attempt_dir: Path, rank: int) -> Path:
    """Where torch's `@record` leaves what a rank has raised.

    torch's agent must not read it: it dies of one that is not whole.
    """
    return attempt_dir / f"torch-error-{rank}.json"


def runs_root(explicit: Path | str | None = None) -> Path:
    """The folder of all runs, absolute: what was given, else HPCTRAIN_RUNS, else ./runs."""
    return Path.cwd() / Path(explicit or os.environ.get(HPCTRAIN_RUNS) or "runs").expanduser()


def is_elsewhere(runs: Path) -> bool:
    """Whether a later command finds the runs of this folder only by their paths."""
    return runs != runs_root()

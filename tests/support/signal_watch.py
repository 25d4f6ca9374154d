"""A job's process that writes down which signals it gets and what SLURM says of the job then.

    python signal_watch.py FOLDER NAME [--on SIGTERM=exit|requeue|stay] [-- CMD...]

One JSON line an event, in FOLDER/NAME.<node>.<attempt>.jsonl. It dies of SIGKILL alone, unless told
otherwise, or when CMD ends. Started by path on a node: standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WATCHED = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGCHLD}
TELLING = (signal.SIGTERM, signal.SIGUSR2)
"""At each of these, SLURM is asked what it says of the job."""
RECORDS = 4
"""SLURM repeats a SIGTERM; it is asked no more than so often."""


class Diary:
    """The event file of one process of one attempt."""

    def __init__(self, folder: Path, name: str) -> None:
        self.attempt = os.environ.get("SLURM_RESTART_COUNT", "unset")
        node = os.environ["SLURMD_NODENAME"]
        self._path = folder / f"{name}.{node}.{self.attempt}.jsonl"

    def write(self, event: str, **facts: object) -> None:
        line = json.dumps({"t": time.time(), "event": event, **facts}) + "\n"
        with self._path.open("a") as file:
            file.write(line)


def ask() -> str:
    """The job's record; scontrol inherits the blocked SIGTERM, for step signals hit it too."""
    argv = ["scontrol", "show", "job", "-o", os.environ["SLURM_JOB_ID"]]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr


def requeue() -> int:
    """Ask for a requeue; the exit status of scontrol."""
    return subprocess.run(
        ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False
    ).returncode


def unblock() -> None:
    """The command gets its signals as if nobody had watched."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--on", action="append", default=[], metavar="SIGNAL=exit|requeue|stay")
    parser.add_argument("argv", nargs="*")
    asked = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    diary = Diary(asked.folder, asked.name)
    child = None
    if asked.argv:
        child = subprocess.Popen(asked.argv, preexec_fn=unblock)  # noqa: PLW1509  one thread only
    diary.write("start", pid=os.getpid(), nodes=os.environ.get("SLURM_NNODES"))
    return watch(diary, dict(pair.split("=") for pair in asked.on), child)


def watch(diary: Diary, reactions: dict[str, str], child: subprocess.Popen[bytes] | None) -> int:
    """Write down every signal until one says leave, or the command ends."""
    told = 0
    while child is None or child.poll() is None:
        came = signal.sigtimedwait(WATCHED, 0.1)
        if came is None:
            diary.write("beat")
            continue
        if came.si_signo == signal.SIGCHLD:
            continue
        name = signal.Signals(came.si_signo).name
        diary.write(name)
        if came.si_signo in TELLING and told < RECORDS:
            told += 1
            diary.write("record", at=name, record=ask())
        reaction = reactions.get(name, "stay")
        if reaction == "requeue":
            diary.write("requeue", status=requeue())
        if reaction != "stay":
            return 0
    return child.returncode


if __name__ == "__main__":
    sys.exit(main())

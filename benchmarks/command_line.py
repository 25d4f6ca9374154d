"""The command line's start against `import click`: medians of alternating runs, as ratios."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

REPEATS = 15
GOALS = {"hpctrain --help": 2.0, "submit --dry-run": 4.0, "status": 5.0}
RUN = ["submit", "--cluster=local", "--no-submit", "--name=one"]


def main() -> None:
    """Time each command in turn, so that a busy moment hits all of them alike."""
    python = sys.executable
    commands = {
        "import click": [python, "-c", "import click"],
        "hpctrain --help": [python, "-m", "hpctrain", "--help"],
        "submit --dry-run": [python, "-m", "hpctrain", "submit", "--cluster=slurm", "--dry-run"],
        "status": [python, "-m", "hpctrain", "status"],
        "import submitit": [python, "-c", "import submitit"],
    }
    torchx = shutil.which("torchx")
    if torchx:
        commands["torchx --help"] = [torchx, "--help"]
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        # What pip has installed is compiled; a checkout may not be, and may not become so here.
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environ |= {"PYTHONPYCACHEPREFIX": f"{folder}/compiled", "XDG_STATE_HOME": folder}
        run = [python, "-m", "hpctrain", *RUN]
        subprocess.run(run, check=True, cwd=folder, env=environ, stdout=subprocess.DEVNULL)
        for _ in range(REPEATS + 1):
            for name, command in commands.items():
                started = time.perf_counter()
                subprocess.run(
                    command, check=True, cwd=folder, env=environ, stdout=subprocess.DEVNULL
                )
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    for name, median in medians.items():
        ratio = median / medians["import click"]
        goal = f"   (goal: at most {GOALS[name]:g})" if name in GOALS else ""
        print(f"{name:18} {median * 1e3:7.1f} ms   {ratio:5.2f} x import click{goal}")


if __name__ == "__main__":
    main()

"""The task that srun starts on every node: `python -m hpctrain.slurm.task FOLDER`.

FOLDER is ``jobs/<token>`` with the pickle that `submit` left there, or the run's directory itself
for a hand-written batch script. The signal handlers stand before anything that takes time is
imported.
"""

from __future__ import annotations

import sys

from hpctrain.agent import signals


def main(argv: list[str]) -> int:
    """Load what was submitted and run it; returns the exit code of the task."""
    signals.install()
    from pathlib import Path

    from hpctrain.errors import HpctrainError, UsageError

    folder = Path(argv[0])
    try:
        from hpctrain.slurm.executor import PICKLE, AgentTask, load_task

        if (folder / PICKLE).exists():
            function, args, kwargs = load_task(folder)
            return int(function(*args, **kwargs))
        if (folder / "spec.json").exists():
            return AgentTask(folder)()
        raise UsageError(
            f"{folder} holds neither {PICKLE} nor spec.json: HPCTRAIN_RUN_DIR must be a run's "
            "directory, seen under the same path on every node"
        )
    except HpctrainError as error:
        print(f"hpctrain: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

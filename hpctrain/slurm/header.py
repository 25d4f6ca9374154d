"""The #SBATCH lines of a run's batch script. Pure: settings in, lines out.

There is no task layout among them. `--ntasks-per-node` fixes the number of tasks at the first
start, so a `--nodes 2-4` job that lost a node would pend for ever, or a range would collapse to its
minimum (`slurm-facts.md`, `launch.md` table C). The layout stands on the srun line.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.rundir.layout import RunDir
    from hpctrain.settings.schema import SlurmSettings

_SAFE = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
_LAYOUT = re.compile(
    r"--(ntasks|tasks|ntasks-per-\w+|tasks-per-node|cpus-per-task|array)(=.*)?|-[nca]\d*(\s.*)?"
)


def header_lines(settings: SlurmSettings, name: str, run: RunDir, token: str) -> list[str]:
    """All #SBATCH lines, in a fixed order.

    Raises:
        UsageError: a value that a header cannot hold, or an option that would fix the task layout.
    """
    options = [
        ("job-name", name),
        ("nodes", settings.nodes),
        *_resources(settings),
        ("time", settings.time),
        ("partition", settings.partition),
        ("account", settings.account),
        ("qos", settings.qos),
        ("constraint", settings.constraint),
        ("reservation", settings.reservation),
        ("exclude", settings.exclude),
        ("network", settings.network),
        ("signal", f"USR2@{settings.signal_lead_s}" if settings.signal_lead_s else ""),
        ("open-mode", "append"),
        ("output", pattern(str(run.jobs / f"{token}.out"))),
    ]
    lines = [f"#SBATCH --{option}={quote(value)}" for option, value in options if value]
    lines.append("#SBATCH --requeue")
    if is_exclusive(settings):
        lines.append("#SBATCH --exclusive")
    return lines + [f"#SBATCH {quote(_checked(option))}" for option in settings.extra]


def is_exclusive(settings: SlurmSettings) -> bool:
    """Whether whole nodes are asked for; by default where no GPUs are."""
    if settings.exclusive == "auto":
        return settings.gpus_per_node == 0
    return settings.exclusive == "yes"


def quote(value: str) -> str:
    """The value as one word of a #SBATCH line.

    sbatch has a parser of its own: a backslash escapes even inside single quotes, and an escaped
    space still ends the word. So a shell's quoting is read differently; this form is read right.

    Raises:
        UsageError: the value has a line break, which would end the header's line.
    """
    if "\n" in value or "\r" in value:
        raise UsageError(f"{value!r} has a line break: a batch script's header cannot hold it")
    if _SAFE.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def pattern(path: str) -> str:
    """The path for --output, where SLURM would read `%j` in a directory's name as the job's id.

    Raises:
        UsageError: the path has a backslash, by which SLURM turns patterns off and which it drops.
    """
    if "\\" in path:
        raise UsageError(
            f"{path!r} has a backslash, which SLURM's file names cannot hold: choose another place"
        )
    return path.replace("%", "%%")


def _resources(settings: SlurmSettings) -> list[tuple[str, str]]:
    """What is asked of each node."""
    cpus = settings.cpus_per_rank * settings.ranks()
    return [
        ("gpus-per-node", str(settings.gpus_per_node) if settings.gpus_per_node else ""),
        ("mincpus", str(cpus) if cpus else ""),
        ("mem", settings.mem),
    ]


def _checked(option: str) -> str:
    """One of the user's own options, unless it keeps the job from coming back on fewer nodes."""
    if not option.startswith("-"):
        raise UsageError(
            f"slurm.extra: {option!r} is not an option: give each as one string, e.g. --switches=1"
        )
    if _LAYOUT.fullmatch(option):
        raise UsageError(
            f"slurm.extra: {option!r} fixes the job's task layout, so it could not come back on "
            "fewer nodes: use slurm.nodes, slurm.ranks_per_node and slurm.cpus_per_rank"
        )
    return option

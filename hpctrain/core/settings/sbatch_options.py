"""One reading of sbatch's options, however they are spelt: -pX, --partition=X, --partit X. Pure.

sbatch takes any unambiguous beginning of a long name, a value right behind a short one, and several
short ones in a word. What is locked, forbidden, required or hpctrain's own is compared by the names
that this module gives. tests/unit/settings/test_sbatch_options.py holds the promises.
"""

from __future__ import annotations

import shlex

from hpctrain.errors import UsageError

WITH_VALUE = {
    "A": "account",
    "B": "extra-node-info",
    "C": "constraint",
    "D": "chdir",
    "E": "preserve-env",
    "F": "nodefile",
    "G": "gpus",
    "J": "job-name",
    "L": "licenses",
    "M": "clusters",
    "N": "nodes",
    "P": "dependency",
    "S": "core-spec",
    "a": "array",
    "b": "begin",
    "c": "cpus-per-task",
    "d": "dependency",
    "e": "error",
    "i": "input",
    "m": "distribution",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "t": "time",
    "w": "nodelist",
    "x": "exclude",
}
"""Short options that take a value."""
WITHOUT = {
    "H": "hold",
    "I": "immediate",
    "O": "overcommit",
    "Q": "quiet",
    "V": "version",
    "W": "wait",
    "h": "help",
    "k": "no-kill",
    "s": "oversubscribe",
    "u": "usage",
    "v": "verbose",
}
"""Short options that take none, so that another may follow in the same word."""
SAME = {
    "cluster": "clusters",
    "share": "oversubscribe",
    "tasks": "ntasks",
    "tasks-per-node": "ntasks-per-node",
    "workdir": "chdir",
}
"""Other words for the same."""
_NOT_SBATCHS = """
acctg-freq batch bell consolidate-segments extra gpus-per-node immediate mem-bind mps no-bell
no-shell ntasks-per-gpu prefer segment stepmgr tres-per-job wait-all-nodes x11
"""
"""Of salloc, of srun, or of a version in between; known so that an abbreviation is read right."""

OURS = {
    "nodes": "slurm.nodes",
    "ntasks": "slurm.ranks_per_node",
    "ntasks-per-node": "slurm.ranks_per_node",
    "time": "slurm.time",
    "signal": "slurm.signal_lead_s",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "job-name": "--name",
    "requeue": "the [budget] settings",
    "no-requeue": "the [budget] settings",
    "output": "the run directory's jobs/",
    "error": "the run directory's jobs/",
    "open-mode": "nothing: it is always append",
    "array": "one run per submit",
    "wrap": "a script behind --",
    "parsable": "--json",
}
"""Options that hpctrain sets itself, and what to use in their place."""
REFUSED = {
    "chdir": "a run works in the folder in which submit is typed: go there",
    "export": "ranks would lack what they start with: use --env or [env] for variables; "
    "slurm.export in a preset says it for a whole site",
    "export-file": "ranks would lack what they start with: use --env or [env] for variables",
    "get-user-env": "the job has your shell's environment already: put more into slurm.setup",
    "gid": "log in with that group and submit there",
    "uid": "log in as that user and submit there",
    "help": "sbatch would print its help and submit nothing: type sbatch --help",
    "usage": "sbatch would print its usage and submit nothing: type sbatch --usage",
    "version": "sbatch would print its version and submit nothing: type sbatch --version",
    "test-only": "sbatch would submit nothing: use hpctrain check or hpctrain submit --dry-run",
    "wait": "submit would not return until the job's end: use hpctrain submit --wait, which shows "
    "why the job waits, or hpctrain status RUN --watch",
    "clusters": "nobody would find the job again: submit on a login node of that cluster",
    "cluster-constraint": "nobody would find the job again: submit on a login node of that cluster",
}
"""Options that would break a run or its submission, with what to do in their place."""
_PASSED = """
bb bbf begin comment constraint container container-id container-type contiguous core-spec
cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution
exclude exclusive extra-node-info gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket
gpus-per-task gres gres-flags hint hold ignore-pbs input kill-on-invalid-dep licenses mail-type
mail-user mcs-label mem mem-per-cpu mem-per-gpu mincpus network nice no-kill nodefile nodelist
ntasks-per-core ntasks-per-socket oom-kill-step overcommit oversubscribe power priority profile
propagate quiet reboot reservation resv-ports sockets-per-node spread-job spread-segments switches
thread-spec threads-per-core time-min tmp tres-bind tres-per-task use-min-nodes verbose wckey
"""
PASSED = frozenset(_PASSED.split())
"""Options that go through as they are; those of the task layout are looked at again by `script`."""
SRUN_REFUSED = {
    "export": REFUSED["export"],
    "export-file": REFUSED["export-file"],
    "help": "srun would print its help and start nothing",
    "usage": "srun would print its usage and start nothing",
    "version": "srun would print its version and start nothing",
    "test-only": "srun would start nothing",
    "array": "srun has none",
    "multi-prog": "each node runs one agent, which starts the ranks",
    "pty": "nobody is there to type",
    "output": "ranks write into the run directory's attempts/, agents into its jobs/",
    "error": "ranks write into the run directory's attempts/, agents into its jobs/",
    "open-mode": "it is always append",
}
"""The same of srun's."""
LONG = frozenset(
    {*WITH_VALUE.values(), *WITHOUT.values(), *SAME, *OURS, *REFUSED, *PASSED, "pty", "multi-prog"}
    | set(_NOT_SBATCHS.split())
)


def names_of(option: str) -> list[str]:
    """The long names of all options in a text of one line, without their values: "--partition".

    A name that sbatch does not have is left as it is: it may be a plugin's.

    Raises:
        UsageError: an abbreviation of several options, one of which sbatch might take it for.
    """
    return [name for word in _words(option) for name in _names_of_word(word)]


def name_of(option: str) -> str:
    """The long name of the first of them: `-G4` and `--gpus=4` are both --gpus.

    Raises:
        UsageError: see `names_of`.
    """
    names = names_of(option)
    return names[0] if names else option


def _names_of_word(word: str) -> list[str]:
    if word.startswith("--"):
        name = word[2:].partition("=")[0]
        return [f"--{_full(name)}"] if name else []
    return _of_letters(word[1:])


def _full(name: str) -> str:
    """The name that sbatch takes this one for."""
    if name in LONG:
        return SAME.get(name, name)
    longer = sorted(option for option in LONG if option.startswith(name))
    if len({SAME.get(option, option) for option in longer}) > 1:
        raise UsageError(
            f"--{name} is short for several of sbatch's options "
            f"({', '.join(f'--{option}' for option in longer[:4])}); write it out"
        )
    return SAME.get(longer[0], longer[0]) if longer else name


def _of_letters(letters: str) -> list[str]:
    options: list[str] = []
    for letter in letters:
        if letter in WITH_VALUE:
            return [*options, f"--{WITH_VALUE[letter]}"]  # the rest is its value
        if letter not in WITHOUT:
            return options or [f"-{letter}"]
        options.append(f"--{WITHOUT[letter]}")
    return options


def _words(option: str) -> list[str]:
    try:
        words = shlex.split(option)
    except ValueError:  # an open quote: sbatch will say so
        words = option.split()
    return [word for word in words if word.startswith("-") and word.strip("-")]

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
_OTHERS = """
acctg-freq batch bb bbf bell cluster-constraint comment consolidate-segments container
container-id contiguous cores-per-socket cpu-freq cpus-per-gpu deadline delay-boot exclusive
export export-file extra get-user-env gid gpu-bind gpu-freq gpus-per-node gpus-per-socket
gpus-per-task gres gres-flags hint ignore-pbs kill-on-invalid-dep mail-type mail-user mcs-label
mem mem-bind mem-per-cpu mem-per-gpu mincpus mps network nice no-bell no-requeue no-shell
ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode
parsable power prefer priority profile propagate reboot requeue reservation resv-ports segment
signal sockets-per-node spread-job spread-segments stepmgr switches test-only thread-spec
threads-per-core time-min tmp tres-bind tres-per-job tres-per-task uid use-min-nodes
wait-all-nodes wckey wrap x11
"""
LONG = frozenset({*WITH_VALUE.values(), *WITHOUT.values(), *SAME, *_OTHERS.split()})


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

"""Names that programs of others take: options of sbatch, however they are spelt, DeepSpeed's keys.

What is locked, forbidden, required or hpctrain's own is compared by the names that this module
gives. external.toml has the names. tests/unit/settings/test_sbatch_options.py,
tests/unit/lint/test_deepspeed_rules.py and tests/unit/plan/test_ds_config.py hold the promises,
against the DeepSpeed that is installed.
"""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

from hpctrain.errors import UsageError

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
"""external.toml, whose comments say what each part is."""
_SBATCH, _DEEPSPEED = _TABLE["sbatch"], _TABLE["deepspeed"]
WITH_VALUE: dict[str, str] = _SBATCH["with_value"]
WITHOUT: dict[str, str] = _SBATCH["without_value"]
SAME: dict[str, str] = _SBATCH["same"]
OURS: dict[str, str] = _SBATCH["ours"]
INSTEAD: dict[str, str] = _SBATCH["instead"]
REFUSED: dict[str, str] = _SBATCH["refused"]
PASSED = frozenset(_SBATCH["passed"].split())
SRUN_REFUSED: dict[str, str] = {
    **{name: REFUSED[name] for name in ("export", "export-file")},
    **_TABLE["srun"]["refused"],
}
LONG = frozenset(
    {*WITH_VALUE.values(), *WITHOUT.values(), *SAME, *OURS, *REFUSED, *PASSED, "pty", "multi-prog"}
    | set(_SBATCH["not_sbatchs"].split())
)
ZERO = "zero_optimization"
TOP_KEYS = frozenset(_DEEPSPEED["top"].split())
REMOVED_KEYS = frozenset(_DEEPSPEED["removed"].split())
REMOVED_ZERO_KEYS = frozenset(_DEEPSPEED["removed_zero"].split())
OTHERS_KEYS = frozenset(_DEEPSPEED["others"].split())
SECTIONS = {path: frozenset(keys.split()) for path, keys in _DEEPSPEED["sections"].items()}


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

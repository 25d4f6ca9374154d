"""[profile] and its flags: which steps of which ranks are looked at, and what cannot be. Pure.

tests/unit/test_profile_settings.py holds the promises.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.settings.schema import Settings

MOST_STEPS = 100
"""A trace of one step is some MB; of many, on many ranks, it fills a quota."""
EXAMPLE = "--profile steps=100:103,ranks=0,7"

_STEPS = re.compile(r"([0-9]{1,15})(?::([0-9]{1,15}))?")
_RANKS = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})*")


def step_range(text: str, *, where: str = "profile.steps") -> tuple[int, int] | None:
    """First and last step of "FIRST:LAST" or of one step; None for an empty text.

    Raises:
        UsageError: another form, a step below 1, none at all, or too many.
    """
    if not text.strip():
        return None
    match = _STEPS.fullmatch(text.strip())
    if match is None:
        raise UsageError(f'{where} is "{text}"; it takes FIRST:LAST, e.g. 100:103')
    first, last = int(match[1]), int(match[2] or match[1])
    if first < 1:
        raise UsageError(f'{where} is "{text}"; the first step of a run is 1')
    if last < first:
        raise UsageError(f'{where} is "{text}"; the last step is before the first')
    if last - first + 1 > MOST_STEPS:
        raise UsageError(
            f'{where} is "{text}", {last - first + 1} steps; traces of more than {MOST_STEPS} fill '
            "a disk: take some in the middle of the run"
        )
    return first, last


def rank_set(text: str, *, where: str = "profile.ranks") -> tuple[int, ...] | None:
    """The ranks of "R,R"; None for "all".

    Raises:
        UsageError: another form.
    """
    plain = text.replace(" ", "")
    if plain == "all":
        return None
    if not _RANKS.fullmatch(plain):
        raise UsageError(f'{where} is "{text}"; it takes ranks, e.g. 0,7, or all')
    return tuple(sorted({int(rank) for rank in plain.split(",")}))


def parse_profile(text: str) -> dict[str, object]:
    """Keys of [profile] with their values, from `steps=A:B,ranks=R,R,memory`.

    Raises:
        UsageError: a word that is none of these, or no steps.
    """
    where = f"--profile {text}"
    found: dict[str, object] = {}
    for part in re.split(r"[,\s]+", text.strip()):
        key, equals, value = part.partition("=")
        if part.isdigit() and "ranks" in found:  # the second rank of ranks=0,7
            found["ranks"] = f"{found['ranks']},{part}"
        elif key in {"steps", "ranks"} and equals:
            if key in found:
                raise UsageError(f"{where}: {key} is given twice; keep one")
            found[key] = value
        elif part == "memory":
            found["memory"] = True
        else:
            raise UsageError(f'{where}: "{part}" is not understood; e.g. {EXAMPLE}')
    if not found.get("steps"):
        raise UsageError(f"{where}: which steps? e.g. {EXAMPLE}")
    step_range(str(found["steps"]), where=f"{where}: steps")
    rank_set(str(found.get("ranks", "0")), where=f"{where}: ranks")
    return found


def profile_flags(
    profile: Mapping[str, object] | None, nsys: int | None
) -> dict[str, tuple[str, object]]:
    """`--profile` and `--nsys` as `merge.flag_layer` takes them; None where one was not given."""
    flags: dict[str, tuple[str, object]] = {"profile.nsys_rank": ("--nsys", nsys)}
    flags |= {f"profile.{key}": ("--profile", value) for key, value in (profile or {}).items()}
    return flags


def check_profile(settings: Settings, origins: Mapping[str, str], most_ranks: int) -> list[str]:
    """Refuse what cannot be profiled; returns what will have no effect, or more than is meant.

    Args:
        settings: All of them.
        origins: Where each value came from.
        most_ranks: World size at the most nodes; 0 where nobody knows.

    Raises:
        UsageError: steps or ranks of another form, or a rank that there will never be.
    """
    profile = settings.profile

    def told(key: str) -> str:
        return f"{origins.get(f'profile.{key}', 'default')}: profile.{key}"

    steps = step_range(profile.steps, where=told("steps"))
    ranks = rank_set(profile.ranks, where=told("ranks"))
    asked = {"ranks": ranks or (), "nsys_rank": (profile.nsys_rank,)}
    for key, wanted in asked.items():
        if most_ranks and max(wanted, default=-1) >= most_ranks:
            raise UsageError(
                f"{told(key)} names rank {max(wanted)}; there are {most_ranks} at most: "
                f"0 to {most_ranks - 1}"
            )
    notes = []
    if steps is None:
        idle = [
            k for k in ("ranks", "memory") if origins.get(f"profile.{k}", "default") != "default"
        ]
        notes += [f"profile.{key} has no effect without profile.steps" for key in idle]
    if profile.memory and not settings.slurm.gpus_per_node:
        notes.append(
            "profile.memory records what holds a GPU's memory, and slurm.gpus_per_node is 0: "
            "there is nothing to record on a CPU"
        )
    if profile.nsys_rank >= 0 and steps is None:
        notes.append(
            f"--nsys {profile.nsys_rank} without --profile steps=A:B records whole attempts; such "
            "files grow by about 1 GB an hour and more"
        )
    return notes

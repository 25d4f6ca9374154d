"""What a checkpoint and a program have in common, what each has alone, and what follows. Pure.

What would be lost, or begin anew, without a word is refused with the flag that allows it. The
promises are held by tests/engines/test_changed_programs.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.core.settings.schema import CHANGES
from hpctrain.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

NEW, DROPPED, OPTIMIZER = CHANGES
SHOWN = 3
"""Names in one line."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """What is loaded of a model's tensors.

    Attributes:
        fresh: Names of the model's that keep the values they have.
        dropped: Names of the checkpoint's that nothing is loaded from.
        notes: A line for each kind of difference.
    """

    fresh: frozenset[str]
    dropped: frozenset[str]
    notes: tuple[str, ...]


def fit(
    ours: Mapping[str, Shape],
    elsewhere: Iterable[str],
    saved: Mapping[str, Shape],
    allow: Iterable[str],
) -> Fit:
    """Compare a model's tensors (names and shapes) with those of a checkpoint.

    `ours` are this rank's, `elsewhere` names that only other ranks hold. `allow` are some of
    CHANGES.

    Raises:
        CheckpointError: they differ in a way that is not allowed.
    """
    allowed = frozenset(allow)
    other_shape = [name for name, shape in ours.items() if saved.get(name, shape) != shape]
    new = [name for name in ours if name not in saved]
    held = ours.keys() | frozenset(elsewhere)
    gone = [name for name in saved if name not in held]
    missing = [
        flag
        for flag, names in ((NEW, new + other_shape), (DROPPED, gone + other_shape))
        if names and flag not in allowed
    ]
    lines = []
    if other_shape:
        name = other_shape[0]
        lines.append(
            f"{_plain(name)}{_more(other_shape)} has shape {list(saved[name])} in the checkpoint "
            f"and {list(ours[name])} in the model"
        )
    if new:
        lines.append(f"{_plain(new[0])}{_more(new)} is in the model and not in the checkpoint")
    if gone:
        lines.append(f"{_plain(gone[0])}{_more(gone)} is in the checkpoint and not in the model")
    if missing:
        raise CheckpointError(f"{'; '.join(lines)}. {way_out(missing)}")
    notes = []
    if new or other_shape:
        notes.append(f"{counted(new + other_shape)} begin anew: not in the checkpoint")
    if gone or other_shape:
        notes.append(f"{counted(gone + other_shape)} of the checkpoint are dropped")
    return Fit(frozenset(new + other_shape), frozenset(gone + other_shape), tuple(notes))


def require_known(allow: Sequence[str]) -> None:
    """Refuse changes that nothing can allow.

    Raises:
        UsageError: one is not of CHANGES.
    """
    for change in allow:
        if change not in CHANGES:
            raise UsageError(f"allow has {change!r}; it takes {', '.join(CHANGES)}")


def way_out(missing: Iterable[str]) -> str:
    """Say what a person types to let changes pass."""
    flags = ",".join(missing)
    return f"If the program was changed on purpose, resume with --set resume.allow={flags}"


def counted(names: Sequence[str]) -> str:
    """Return how many parameters there are and the first names, such as `2 parameters (a, b)`."""
    shown = ", ".join(_plain(name) for name in names[:SHOWN])
    rest = ", ..." if len(names) > SHOWN else ""
    return f"{len(names)} parameter{'s' * (len(names) != 1)} ({shown}{rest})"


def _plain(name: str) -> str:
    return name.removeprefix("model.")


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""

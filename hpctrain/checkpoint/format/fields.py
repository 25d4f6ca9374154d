"""What each field of a manifest must be; looked at once, where it is read.

A manifest that proves itself was written as it is, by whatever program: its digest says nothing
about its values. What passes here is safe to count with, to show and to ask memory for.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.format.names import MAX_STEP

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_BLOCK_BYTES = 64 << 20
"""A reader has memory for one block at least, in each of its threads."""
MOST = 2**53
"""Larger whole numbers are not exact in every reader of JSON."""
MOST_ELEMENTS = 2**58
"""So that their bytes, and sums of those, are numbers of 64 bits."""
MOST_DIMENSIONS = 32
LAST_TIME = 250_000_000_000.0
"""A little before the year 9900: what comes later no calendar can show."""

_TENSOR = re.compile(r"([A-Z0-9_]{1,16})\[((?:[0-9]{1,19},?)*)\]")


def count(value: object, most: int = MOST) -> bool:
    """Whether it is a whole number from 0 on."""
    return type(value) is int and 0 <= value <= most


def _number(value: object) -> bool:
    """Whether it is a number; NaN and infinities are, which a loss may be."""
    return type(value) is float or (type(value) is int and -MOST <= value <= MOST)


def _text(value: object) -> bool:
    return type(value) is str


def _dictionary(value: object) -> bool:
    return type(value) is dict


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "run_id": _text,
    "name": _text,
    "step": lambda value: count(value, MAX_STEP),
    "attempt": count,
    "attempt_token": _text,
    "created": lambda value: _number(value) and 0 <= value <= LAST_TIME,
    "world_size": count,
    "mesh": lambda value: _dictionary(value) and all(map(count, value.values())),
    "engine": _text,
    "block_bytes": lambda value: count(value, MOST_BLOCK_BYTES) and value > 0,
    "data": _dictionary,
    "rng": lambda value: value is None or _dictionary(value),
    "versions": _dictionary,
    "extra": _dictionary,
    "files": lambda value: type(value) is list,
    "tensors": _dictionary,
    "metrics": lambda value: _dictionary(value) and all(map(_number, value.values())),
    "self_digest": _text,
}


def require(raw: dict[str, Any]) -> None:
    """Refuse a manifest with a field that is not what it must be.

    Raises:
        ValueError: which, and what it holds.
    """
    for name, fits in _CHECKS.items():
        if name in raw and not fits(raw[name]):
            raise ValueError(f"{name} is {shown(raw[name])}")


def file_of(raw: Any) -> tuple[str, int, str]:
    """Name, bytes and digest of one file.

    Raises:
        ValueError: they are not.
    """
    if type(raw) is not dict:
        raise ValueError(f"{shown(raw)} stands for a file")
    name, size, digest = raw.get("name"), raw.get("size"), raw.get("digest")
    # One condition for what is right: a manifest has a file for each rank.
    if type(name) is str and type(digest) is str and type(size) is int and 0 <= size <= MOST:
        return name, size, digest
    if not (isinstance(name, str) and isinstance(digest, str)):
        what = f"{shown(name)} for its name, {shown(digest)} for its digest"
        raise ValueError(f"a file has {what}")  # noqa: TRY004 - one kind for all of them
    raise ValueError(f"file {shown(name)} has {shown(size)} for its size")


def tensor_of(name: str, text: Any) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of one tensor; whether there is such a dtype its reader knows.

    Raises:
        ValueError: they are not.
    """
    match = _TENSOR.fullmatch(text) if isinstance(text, str) else None
    if not match or not name:
        raise ValueError(f"tensor {shown(name)} has {shown(text)} for its dtype and shape")
    shape = tuple(int(size) for size in match[2].split(",") if size)
    if len(shape) > MOST_DIMENSIONS or 0 in shape or math.prod(shape) > MOST_ELEMENTS:
        require_shape(shape)
    return match[1], shape


def require_shape(shape: tuple[Any, ...]) -> None:
    """Refuse sizes that no tensor has.

    Raises:
        ValueError: they are too many, too large, or no whole numbers.
    """
    if len(shape) > MOST_DIMENSIONS or not all(count(size, MOST_ELEMENTS) for size in shape):
        raise ValueError(f"{shown(shape)} is no tensor's shape")
    # Also where one of them is 0: those beside it are multiplied too.
    if math.prod(max(1, size) for size in shape) > MOST_ELEMENTS:
        raise ValueError(f"{shown(shape)} is too large for a tensor")


def shown(value: object) -> str:
    """A value for a message, in one line that no terminal obeys, and not without end."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."  # noqa: PLR2004

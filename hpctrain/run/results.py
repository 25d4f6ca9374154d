"""What an evaluation has measured, as a file: an object of metric names and numbers, in JSON.

A program may write it with or without hpctrain, so it is read as a stranger's: whatever lies there,
reading it ends, and says in words what is wrong. A number that is not finite has no place in it: a
loss that became NaN would compare as equal to anything, and could pass for the best. Standard
library only. tests/unit/run/test_results.py holds the promises.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpctrain.base.files import read_plain, replace_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MOST_BYTES = 256 << 10
MOST_METRICS = 256
LONGEST_NAME = 128
SHOWN = 3
"""Problems that are told one by one."""


@dataclass(frozen=True)
class Results:
    """What was read of an evaluation's results.

    Attributes:
        metrics: Names and finite numbers, in the file's order.
        why: What is wrong with the file, or with some of it; "" where all is well.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    why: str = ""


def is_name(name: object) -> bool:
    """Whether a metric can have this name: one line, that no terminal obeys, of some characters."""
    if not isinstance(name, str):
        return False
    return 0 < len(name) <= LONGEST_NAME and name.isprintable() and name == name.strip()


def write_results(path: Path, metrics: Mapping[str, float]) -> None:
    """Put the results there, whole or not at all; a number that is not finite as null.

    Raises:
        OSError: they could not be written; names the file.
    """
    rows = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    replace_text(path, json.dumps(rows, indent=1) + "\n")


def read_results(path: Path) -> Results:
    """What an evaluation has left there; never an error, whatever it is."""
    try:
        content = json.loads(read_plain(path, MOST_BYTES))
    except FileNotFoundError:
        return Results(why=f"{path.name} is not there: the program has reported nothing")
    except OSError as error:
        return Results(why=f"{path.name} cannot be read: {error.strerror or error}")
    except (ValueError, RecursionError) as error:
        words = " ".join(str(error).split())[:LONGEST_NAME]
        return Results(why=f"{path.name} is no JSON: {words}")
    if not isinstance(content, dict):
        return Results(why=f"{path.name} is no object of names and numbers")
    return _checked(path.name, content)


def _checked(file: str, content: dict[Any, Any]) -> Results:
    metrics: dict[str, float] = {}
    wrong: list[str] = []
    for name, value in content.items():
        if not is_name(name):
            wrong.append(f"{ascii(name)[:LONGEST_NAME]} is no name of a metric")
        elif (number := _number(value)) is None:
            wrong.append(f"{name} is no number")
        elif not math.isfinite(number):
            wrong.append(f"{name} is not finite")
        elif len(metrics) == MOST_METRICS:
            wrong.append(f"{name} is beyond {MOST_METRICS} metrics")
        else:
            metrics[name] = number
    if not content:
        wrong.append("it names no metric")
    more = f" (and {len(wrong) - SHOWN} more)" if len(wrong) > SHOWN else ""
    return Results(metrics, f"{file}: {'; '.join(wrong[:SHOWN])}{more}" if wrong else "")


def _number(value: object) -> float | None:
    """A JSON number, and null for one that is not finite; None of what is neither."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf

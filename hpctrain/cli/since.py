"""`--since`: how far back one looks, as people write it."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    _Function = TypeVar("_Function", bound=Callable[..., Any])

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?[smhdw])+")


def since_option(function: _Function) -> _Function:
    """`--since WHEN`: seconds since the epoch, or None."""
    return click.option(
        "--since",
        metavar="WHEN",
        callback=lambda _ctx, _param, value: None if value is None else parse_since(value),
        help="Not what is older: 10m, 2h, 1d12h, or a time like 2026-01-31T04:15 or 04:15.",
    )(function)


def parse_since(text: str, now: float | None = None) -> float:
    """The moment that is meant, seconds since the epoch; without a zone, of this machine's.

    Raises:
        UsageError: neither a span of time nor a time.
    """
    from hpctrain.errors import UsageError

    moment = time.time() if now is None else now
    if _SPAN.fullmatch(text):
        parts = re.findall(r"([\d.]+)([smhdw])", text)
        return moment - sum(float(number) * _UNITS[unit] for number, unit in parts)
    try:
        if re.fullmatch(r"\d{1,2}:\d\d(:\d\d)?", text):
            today = datetime.fromtimestamp(moment).astimezone().date().isoformat()
            then = datetime.fromisoformat(f"{today}T{text.zfill(5)}").timestamp()
            return then if then <= moment else then - _UNITS["d"]  # 23:50, asked after midnight
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UsageError(
            f"--since {text!r} is neither a span like 10m, 2h, 1d nor a time like 2026-01-31T04:15"
        ) from None

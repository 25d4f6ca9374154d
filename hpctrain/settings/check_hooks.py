"""What [notify] and [track] take: who hears of a run's end, and where its scalars go. Pure.

Whether a tracker can be imported is looked at where the run is submitted (`missing_tracker`).
tests/unit/test_trackers.py and tests/unit/test_notify.py hold the promises.
"""

from __future__ import annotations

import difflib
import re
import shlex
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.settings.schema import Settings

NEWS = ("done", "failed", "stopped", "attempt")
BUILT_IN = {"wandb": "hpctrain.runtime.track_wandb:start"}
"""Trackers that hpctrain knows by name: the package's name to our factory."""
_OWN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def check_hooks(settings: Settings, origins: Mapping[str, str]) -> None:
    """Refuse news and trackers that cannot be.

    Raises:
        UsageError: a value is of another form, or has nothing to act on.
    """
    _check_notify(settings, origins)
    for name in settings.track.loggers:
        if name not in BUILT_IN and _OWN.fullmatch(name) is None:
            known = [*BUILT_IN, "tensorboard"]
            near = difflib.get_close_matches(name, known, n=1)
            if near == ["tensorboard"]:
                hint = "TensorBoard's files are always written, it needs no entry"
            else:
                hint = f"did you mean {near[0]}?" if near else "e.g. mypackage.mymodule:make"
            told = _told("track.loggers", origins)
            raise UsageError(f'{told} has "{name}"; it takes wandb or module:name; {hint}')


def _check_notify(settings: Settings, origins: Mapping[str, str]) -> None:
    notify = settings.notify
    for name in notify.on:
        if name not in NEWS:
            near = difflib.get_close_matches(name, NEWS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(
                f'{_told("notify.on", origins)} has "{name}"; it takes {", ".join(NEWS)}{hint}'
            )
    try:
        shlex.split(notify.command)
    except ValueError as error:
        raise UsageError(
            f"{_told('notify.command', origins)} is {notify.command!r}, which is no command line: "
            f"{str(error).lower()}"
        ) from None
    if "://" in notify.webhook_file:
        raise UsageError(
            f"{_told('notify.webhook_file', origins)} is a URL, which is a secret that would stand "
            "in the run's directory; put it into a file that only you can read and name the file"
        )


def missing_tracker(loggers: Sequence[str]) -> str:
    """The first built-in tracker that this python cannot import, or "" for none."""
    from importlib.util import find_spec

    return next((name for name in loggers if name in BUILT_IN and find_spec(name) is None), "")


def _told(path: str, origins: Mapping[str, str]) -> str:
    return f"{origins.get(path, 'default')}: {path}"

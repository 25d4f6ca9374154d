"""Whether what [track] and [notify] name is there, as far as a login node can tell."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError
from hpctrain.settings.check_hooks import missing_tracker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.settings.schema import Settings


def check_hooks_here(
    settings: Settings, origins: Mapping[str, str], folder: Path, *, python: str = sys.executable
) -> list[str]:
    """Refuse a tracker that the run's python lacks and a webhook that is none; what may be wrong.

    Args:
        settings: The run's.
        origins: Where each was set.
        folder: The ranks' working directory, to which paths are relative.
        python: The run's interpreter; another one than ours cannot be asked, and is not.

    Raises:
        UsageError: with what to do.
    """
    missing = missing_tracker(settings.track.loggers) if python == sys.executable else ""
    if missing:
        raise UsageError(
            f"{origins.get('track.loggers', 'default')}: track.loggers has {missing}, which "
            f"{python} cannot import; pip install {missing} there, or leave it out"
        )
    return _check_webhook(settings, origins, folder) + _check_command(settings, origins, folder)


def _check_webhook(settings: Settings, origins: Mapping[str, str], folder: Path) -> list[str]:
    if not settings.notify.webhook_file:
        return []
    told = f"{origins.get('notify.webhook_file', 'default')}: notify.webhook_file"
    path = folder / Path(settings.notify.webhook_file).expanduser()
    try:
        url = path.read_text().strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise UsageError(f"{told} {path} cannot be read: {error.strerror}") from None
    if not url.startswith(("http://", "https://")) or len(url.split()) != 1:
        raise UsageError(f"{told} {path} holds no URL; it takes one line, https://...")
    if url.startswith("http://") and not settings.notify.plain_http:
        raise UsageError(
            f"{told} {path} holds an http:// URL, which is a secret that everybody on the way can "
            "read; use https://, or set notify.plain_http"
        )
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        return [f"others can read {path}, which holds a secret; chmod 600 it"]
    return []


def _check_command(settings: Settings, origins: Mapping[str, str], folder: Path) -> list[str]:
    words = shlex.split(settings.notify.command)
    if not words:
        return []
    program = words[0]
    there = os.access(folder / program, os.X_OK) if "/" in program else shutil.which(program)
    if there:
        return []
    told = f"{origins.get('notify.command', 'default')}: notify.command"
    return [f"{told} names {program}, which is not here; it must be on the job's first node"]

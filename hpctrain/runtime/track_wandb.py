"""Weights & Biases, as one run over all attempts. Imported only where `track.loggers` names wandb.

Where the node has no way to wandb's server it writes offline, below the run's directory;
`wandb sync` sends that later. docs/tracking.md has the details.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hpctrain.runtime.trackers import TrackedRun

CONNECT_S = 2.0
FINISH_S = 8.0
"""After so long wandb gives up on sending the rest, which then lies in its folder."""
LOGGED = "hpctrain-logged.json"


def start(run: TrackedRun) -> WandbTracker:
    """Begin or go on with the run's wandb run; offline where the server cannot be used.

    Raises:
        Exception: whatever wandb raises, where not even its offline mode works.
    """
    mode = os.environ.get("WANDB_MODE")
    if mode:
        return WandbTracker(run, mode)
    if not is_reachable(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"):
        return WandbTracker(run, "offline")
    try:
        return WandbTracker(run, "online")
    except Exception as error:  # noqa: BLE001 - no key, no permission: the data is kept all the same
        text = " ".join(str(error).split())
        print(f"hpctrain: wandb writes offline: {text}", file=sys.stderr, flush=True)
        return WandbTracker(run, "offline")


def is_reachable(url: str) -> bool:
    """Whether a TCP connection to the URL's host comes about in 2 s."""
    parts = urlsplit(url)
    try:
        address = (parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443))
        socket.create_connection(address, timeout=CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True


class WandbTracker:
    """Implements `trackers.Tracker`."""

    def __init__(self, run: TrackedRun, mode: str) -> None:
        """Begin, or go on with, the wandb run of this id.

        Args:
            run: The run.
            mode: wandb's own word: online, offline, disabled, shared.
        """
        import wandb

        # wandb makes its folder below the run's, and falls back to /tmp where that is missing.
        self._logged = run.dir / "wandb" / LOGGED
        self._logged.parent.mkdir(exist_ok=True)
        self._step = _read_logged(self._logged)
        self._told = self._step
        # Output is kept in the ranks' logs; wandb would put itself between them and the program.
        wanted = {"console": "off", "finish_timeout": FINISH_S, "silent": True}
        known = getattr(wandb.Settings, "model_fields", wanted)
        self._run: Any = wandb.init(
            id=run.run_id,
            name=run.name,
            project=run.project,
            dir=str(run.dir),
            mode=mode,  # type: ignore[arg-type]
            resume="allow",
            config=run.config,
            settings={k: v for k, v in wanted.items() if k in known},
        )

    def log(self, step: int, values: Mapping[str, float], t: float) -> None:
        """Tell wandb of a step, unless an earlier attempt has: it cannot take a step back."""
        if step <= self._told:
            return
        self._step = max(self._step, step)
        self._run.log({**values, "_timestamp": t}, step=step)

    def flush(self) -> None:
        """Note how far we are, for the next attempt."""
        if self._step > self._told or not self._logged.exists():
            staged = self._logged.with_suffix(".new")
            staged.write_text(json.dumps({"step": self._step}))
            staged.replace(self._logged)

    def close(self) -> None:
        """End this attempt's part; wandb marks the run as finished until the next one comes."""
        self.flush()
        self._run.finish()


def _read_logged(path: Path) -> int:
    """The last step that an earlier attempt has told wandb of."""
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        return int(json.loads(path.read_text())["step"])
    return 0

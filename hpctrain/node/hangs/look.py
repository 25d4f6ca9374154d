"""A look at the ranks of this node: harmless, and without any help of theirs. The agent's side.

tests/engines/test_look.py holds the promises, with ranks that hang in nine ways.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock
from hpctrain.core.base.files import read_plain
from hpctrain.core.base.process import signal_masks
from hpctrain.node.hangs.evidence import frames_of, process_state, recorded_of
from hpctrain.node.hangs.outliers import calls_of
from hpctrain.node.hangs.witness import LOOK_SIGNAL, groups_path, recorder_path, stacks_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.node.hangs.evidence import Collective, Frame, RankEvidence, Recorded

ANSWER_S = 1.0
"""So long is waited for a rank's answer; one that is stopped gives none."""
AT_ONCE = 16
"""Ranks of a node that are asked at the same time."""
MOST_STACKS_BYTES, KEPT_STACKS_BYTES = 4 << 20, 1 << 20
_STACKS_POLL_S, _STACKS_UNCHANGED = 0.005, 4
_PROC = Path("/proc")


def look(folder: Path, ranks: Sequence[tuple[int, RankEvidence]]) -> list[RankEvidence]:
    """Return what can be known of each rank in about `ANSWER_S`, without disturbing it.

    But a program's own `time.sleep` in C or `poll` may end early by the signal. `ranks` has of each
    its process and what is known of it beforehand. They have set up their witnesses in `folder`.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda one: _look_at(folder, *one), ranks))


def calls_of_all(
    folder: Path, ranks: Sequence[int], ranks_in_all: int
) -> list[list[Collective]] | None:
    """Return each rank's calls in a group of all ranks; None if one rank does not say."""

    def read(rank: int) -> list[Collective]:
        recorded = _recorded(recorder_path(folder, rank))
        groups = _groups(groups_path(folder, rank))
        whole = {name for name, members in groups.items() if len(members) == ranks_in_all}
        return calls_of(recorded.collectives, whole) if recorded is not None else []

    with ThreadPoolExecutor(AT_ONCE) as pool:
        calls = list(pool.map(read, ranks))
    return calls if all(calls) else None


def _look_at(folder: Path, pid: int, rank: RankEvidence) -> RankEvidence:
    state = "" if rank.has_returned else _state(pid)
    if state in {"", "Z"}:
        return replace(rank, process=state)
    return replace(
        rank,
        process=state,
        recorded=_recorded(recorder_path(folder, rank.rank)),
        groups=_groups(groups_path(folder, rank.rank)),
        frames=_frames(stacks_path(folder, rank.rank), pid),
    )


def _state(pid: int) -> str:
    try:
        return process_state((_PROC / str(pid) / "stat").read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _frames(path: Path, pid: int) -> tuple[Frame, ...] | None:
    """The rank's stack of now; None where it does not write one, or not in time."""
    if LOOK_SIGNAL not in signal_masks(pid)[1]:  # it would die of it
        return None
    with suppress(OSError):
        before = path.stat().st_size
        os.kill(pid, LOOK_SIGNAL)
        deadline_s, size, unchanged = clock.monotonic() + ANSWER_S, before, 0
        while clock.monotonic() < deadline_s and unchanged < _STACKS_UNCHANGED:
            clock.sleep(_STACKS_POLL_S)  # a signal handler tells nobody that it is done
            last, size = size, path.stat().st_size
            unchanged = unchanged + 1 if last == size > before else 0
        text = read_plain(path, MOST_STACKS_BYTES)[before:].decode(errors="replace")
        if size > KEPT_STACKS_BYTES:
            os.truncate(path, 0)  # it is written at its end, wherever that is
        return frames_of(text)
    return None


def _recorded(path: Path) -> Recorded | None:
    connection = _UnixConnection(path)
    try:
        connection.request("POST", "/handler/fr_trace_json")
        return recorded_of(connection.getresponse().read())
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _groups(path: Path) -> Mapping[str, tuple[int, ...]]:
    try:
        plain: Any = json.loads(read_plain(path))
        return {str(name): tuple(map(int, members)) for name, members in plain.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


class _UnixConnection(http.client.HTTPConnection):
    """HTTP on a Unix socket: how torch's worker server is asked."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(str(self._path))

"""Where all ranks of a run are, as a file says it, and how a user asks for it.

`hpctrain stacks` leaves a request beside the run's other files; the agent of node 0 has all nodes
look at their ranks, and writes what was found into the attempt's folder.
tests/unit/hangs/test_stacks.py holds the promises.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock
from hpctrain.core.base.files import read_plain, replace_text
from hpctrain.ledger.run.fence import left_text
from hpctrain.node.hangs.verdict import STATES, own_frame, verdict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hpctrain.node.hangs.evidence import Frame, RankEvidence
    from hpctrain.node.hangs.verdict import HangVerdict, JobLook

REQUEST_HOLDS_S = 120.0
"""An older request was meant for a job that is over."""
MOST_BYTES = 256 << 20


def ask(path: Path, job_id: str, token: str) -> None:
    """Leave a request for stacks of this job; the answer has the same token.

    Raises:
        OSError: it could not be written.
    """
    replace_text(path, json.dumps({"job_id": job_id, "token": token, "t": clock.now()}) + "\n")


def asked(path: Path, job_id: str) -> str:
    """The token of a request that holds; "" for none."""
    try:
        plain = json.loads(left_text(path))
        holds = plain["job_id"] == job_id and abs(clock.now() - plain["t"]) < REQUEST_HOLDS_S
        return str(plain["token"]) if holds else ""
    # Not there, or seen while NFS still shows half of it.
    except (ValueError, KeyError, TypeError):
        return ""


def document_of(
    job_look: JobLook, *, token: str, t: float, hang: HangVerdict | None
) -> dict[str, Any]:
    """Return what a look has found, for a file; `token` is of the request, "" for none.

    `t` is in seconds since the epoch; `hang` is given if the ranks are suspected to hang.
    """
    ruling = hang or verdict(job_look.evidence)
    stands = {stand.rank: stand for stand in job_look.stands}
    rows = []
    for evidence in sorted(job_look.evidence, key=lambda evidence: evidence.rank):
        stand, frames = stands.get(evidence.rank), evidence.frames
        is_watched = stand is not None and bool(stand.phase)
        rows.append(
            {
                "rank": evidence.rank,
                "node": evidence.node,
                "state": evidence.process,
                "has_returned": evidence.has_returned,
                "step": evidence.step,
                "phase": evidence.phase,
                "stood_s": round(stand.stood_s, 1) if stand is not None and is_watched else None,
                "limit_s": _finite(stand.limit_s) if stand is not None else None,
                "at": place_of(own_frame(frames)),
                "frames": None if frames is None else [place_of(frame) for frame in frames],
                "collectives": _fronts(evidence),
            }
        )
    return {
        "t": t,
        "token": token,
        "is_suspected": hang is not None,
        "verdict": {
            "kind": ruling.kind,
            "ranks": list(ruling.ranks),
            "summary": ruling.summary,
            "details": list(ruling.details),
            "is_certain": ruling.is_certain,
        },
        "silent": list(job_look.silent),
        "ranks": rows,
    }


def answer(path: Path, token: str) -> dict[str, Any] | None:
    """Return what was found for the request with this token; None if that has not come."""
    try:
        plain: dict[str, Any] = json.loads(read_plain(path, MOST_BYTES))
        return plain if plain["token"] == token else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def path_of(attempt_dir: Path) -> Path:
    """Where the answer lies."""
    return attempt_dir / "stacks.json"


def place_of(frame: Frame | None) -> str:
    """Such as "/home/me/train.py:23 fetch_rows"; "" for not known."""
    return "" if frame is None else f"{frame.path}:{frame.line} {frame.function}"


def state_in_words(row: Mapping[str, Any]) -> str:
    """What the kernel says of a rank of the file, where that is worth a word."""
    if row["has_returned"]:
        return "has returned"
    return STATES.get(row["state"], "")


def _fronts(evidence: RankEvidence) -> dict[str, list[int]] | None:
    recorded = evidence.recorded
    return None if recorded is None else {name: [*front] for name, front in recorded.fronts.items()}


def _finite(seconds: float) -> float | None:
    return round(seconds, 1) if math.isfinite(seconds) else None

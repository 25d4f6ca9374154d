"""Which failure came first? When one rank dies, the others fail in their collectives soon after."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING

from hpctrain.agent.ranks import failure_path
from hpctrain.base.files import read_plain
from hpctrain.base.records import FailureReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

ECHOES = (
    "Connection closed by peer",
    "connectFullMesh failed",
    "Connection reset by peer",
    "DistNetworkError",
    "DistBackendError",
    "Broken pipe",
    "Timed out waiting",
    "NCCL communicator was aborted",
)
"""What a rank says when a peer went away: never the cause while another failure is known."""


def collect(attempt_dir: Path, exit_codes: Mapping[int, int], node: str) -> list[FailureReport]:
    """Failures of this node's ranks: each rank's own report, or what its exit code says.

    Args:
        attempt_dir: Where the ranks leave their reports.
        exit_codes: Global rank to exit code, of the ranks that failed.
        node: This node's name.
    """
    reports = []
    for rank, code in exit_codes.items():
        path = failure_path(attempt_dir, rank)
        try:
            reports.append(FailureReport(**json.loads(read_plain(path))))
        except (OSError, ValueError, TypeError) as error:
            report = _from_exit_code(rank, code, node)
            whole = isinstance(error, FileNotFoundError)
            report.summary += "" if whole else f"; its own report {path.name} is not whole"
            reports.append(_with_torchs(report, torch_error_path(attempt_dir, rank)))
    return reports


def torch_error_path(attempt_dir: Path, rank: int) -> Path:
    """Where torch's `@record` leaves what a rank has raised.

    torch's agent must not read it: it dies of one that is not whole.
    """
    return attempt_dir / f"torch-error-{rank}.json"


def _with_torchs(report: FailureReport, path: Path) -> FailureReport:
    """A report with what `@record` has left, whole or told as not whole."""
    try:
        message = json.loads(read_plain(path))["message"]
        if isinstance(message, dict):
            report.traceback = str(message["extraInfo"]["py_callstack"])
            message = message["message"]
    except FileNotFoundError:
        return report
    except (OSError, ValueError, LookupError, TypeError):
        report.summary += f"; its error file {path.name} is not whole"
        return report
    report.summary += f"; {' '.join(str(message).split())}"
    return report


def first_causal(reports: Iterable[FailureReport]) -> FailureReport | None:
    """The failure that caused the rest: the earliest one that is not an echo of another's death.

    A rank killed by a signal leaves no time of its own (only when the agent noticed), so it goes
    before every echo, whatever their clocks say.
    """
    ordered = sorted(reports, key=lambda report: (is_echo(report), report.time, report.rank))
    if not ordered:
        return None
    first = ordered[0]
    first.others = sorted(report.rank for report in ordered[1:])
    return first


def is_echo(report: FailureReport) -> bool:
    """Whether this failure only tells that a peer went away."""
    return report.kind == "exception" and any(sign in report.summary for sign in ECHOES)


def _from_exit_code(rank: int, code: int, node: str) -> FailureReport:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        summary = f"killed by {name}"
        if name == "SIGKILL":
            summary += " (out of memory, or killed from outside)"
        kind = "signal"
    else:
        summary, kind = f"exit code {code}", "exit"
    return FailureReport(
        rank=rank, node=node, kind=kind, summary=summary, time=time.time(), exit_code=code
    )
